"""Opening shards: the header of a file, and whether it is the one that the manifest lists."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from eyas.contracts import ShardEntry, ShardManifest, StoredSample
from eyas.errors import DiskError, StoreError
from eyas.shards.format import (
    LENGTH_BYTES,
    ShardFacts,
    ShardHeader,
    damaged,
    header_length,
    parse_header,
    parse_samples,
)

HEADER_GUESS_BYTES = 64 << 10
"""Read at once of a shard that is far away; most headers are shorter."""
OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
"""Why a whole file may not open: limits and rights."""
ReadBytes = Callable[[int, int], bytes]


class open_shard:  # noqa: N801 - used like the built-in open
    """An open file descriptor of a shard as a context.

    Raises:
        StoreError: The file is missing, or the disk cannot read it.
        DiskError: This process may not open it, or no more files: that is no damage of what lies there.
    """

    def __init__(self, path: Path, where: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno in OF_THIS_PROCESS:
                raise DiskError(
                    f"{path} cannot be opened: {error.strerror}",
                    f"`ulimit -n` and `ls -l {path}` show limits and rights",
                ) from None
            raise damaged(where, f"cannot be opened: {error.strerror}") from None

    def __enter__(self) -> open_shard:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)


def read_header(path: Path, where: str) -> tuple[ShardHeader, int]:
    """Parsed header and size in bytes of a shard file.

    Raises:
        StoreError: The file is missing, or is no whole shard.
    """
    with open_shard(path, where) as fd:
        return _read_header_from(fd.number, where)


def _read_header_from(fd: int, where: str) -> tuple[ShardHeader, int]:
    raw, size_bytes = _read_raw_from(fd, where)
    header = parse_header(raw, where)
    if header.size_bytes != size_bytes:
        raise damaged(where, f"{size_bytes:,} bytes, its header describes {header.size_bytes:,}")
    return header, size_bytes


def _read_raw_header(path: Path, where: str) -> tuple[bytes, int]:
    """The JSON header and the size of the file."""
    with open_shard(path, where) as fd:
        return _read_raw_from(fd.number, where)


def _read_raw_from(fd: int, where: str) -> tuple[bytes, int]:
    size_bytes = os.fstat(fd).st_size
    prefix = bytearray(min(LENGTH_BYTES, size_bytes))
    pread_into(fd, memoryview(prefix), 0, where)
    raw = bytearray(header_length(bytes(prefix), size_bytes, where))
    pread_into(fd, memoryview(raw), LENGTH_BYTES, where)
    return bytes(raw), size_bytes


def claims_identity(path: Path, identity: str) -> bool:
    """Whether a file's header, whole or not, names this capture as its own; nothing else of it is looked at.

    Raises:
        StoreError: The file cannot be read, or ends before its header does.
    """
    raw, _ = _read_raw_header(path, path.name)
    # Quotes inside values are escaped: only the header's own field is spelled like this.
    return f'"identity":"{identity}"'.encode() in raw


def open_entry(folder: Path, entry: ShardEntry, manifest: ShardManifest) -> ShardHeader:
    """Header of one published shard, checked against the manifest.

    Raises:
        StoreError: The shard is missing, short, foreign, in another's place, or its counts differ.
    """
    with open_shard(folder / entry.path, entry.path) as fd:
        return entry_header(fd.number, entry, manifest)


def entry_header(fd: int, entry: ShardEntry, manifest: ShardManifest) -> ShardHeader:
    """The same of an open file, wherever it lies.

    Raises:
        StoreError: The shard is short, foreign, in another's place, or its counts differ.
    """
    header, size_bytes = _read_header_from(fd, entry.path)
    _check_entry(header.facts, header.samples, size_bytes, entry, manifest)
    return header


def entry_samples(folder: Path, entry: ShardEntry, manifest: ShardManifest) -> tuple[StoredSample, ...]:
    """Samples of one published shard, whose header is checked against the manifest but for its layout.

    Raises:
        StoreError: The shard is missing, short, foreign, in another's place, or its counts differ.
    """
    raw, size_bytes = _read_raw_header(folder / entry.path, entry.path)
    return _samples_of(raw, size_bytes, entry, manifest)


def far_entry_samples(read: ReadBytes, entry: ShardEntry, manifest: ShardManifest) -> tuple[StoredSample, ...]:
    """The same of a shard of which ``read(begin, end)`` gives bytes; its size is believed to be the manifest's.

    Raises:
        StoreError: The shard is foreign, in another's place, or its counts differ.
    """
    known = read(0, min(HEADER_GUESS_BYTES, entry.size_bytes))
    end = LENGTH_BYTES + header_length(known[:LENGTH_BYTES], entry.size_bytes, entry.path)
    raw = known[LENGTH_BYTES:end] if end <= len(known) else known[LENGTH_BYTES:] + read(len(known), end)
    return _samples_of(raw, entry.size_bytes, entry, manifest)


def _samples_of(raw: bytes, size_bytes: int, entry: ShardEntry, manifest: ShardManifest) -> tuple[StoredSample, ...]:
    facts, samples = parse_samples(raw, entry.path)
    _check_entry(facts, samples, size_bytes, entry, manifest)
    return samples


def _check_entry(
    facts: ShardFacts, samples: Sequence[StoredSample], size_bytes: int, entry: ShardEntry, manifest: ShardManifest
) -> None:
    _check_place(facts, manifest.identity, entry.path)
    counts = (size_bytes, len(samples), sum(sample.num_tokens for sample in samples))
    expected = (entry.size_bytes, entry.num_samples, entry.num_tokens)
    if counts != expected:
        raise damaged(entry.path, f"(bytes, samples, tokens) are {counts}, the manifest says {expected}")
    capture = manifest.capture
    shape = (facts.boundaries, facts.final_hidden, facts.hidden_size, facts.codec, facts.last_rows)
    planned = (manifest.boundaries, capture.final_hidden, manifest.hidden_size, capture.codec, capture.last_rows)
    if shape != planned:
        names = "(boundaries, norm, hidden size, codec, rows)"
        raise damaged(entry.path, f"{names} are {shape}, the manifest says {planned}")


def check_identity(header: ShardHeader, identity: str, path: str) -> None:
    """Refuse a shard of another capture and a shard in another's place.

    Raises:
        StoreError: Both identities or both paths are named.
    """
    _check_place(header.facts, identity, path)


def _check_place(facts: ShardFacts, identity: str, path: str) -> None:
    if facts.identity != identity:
        raise StoreError(
            f"{path} belongs to another capture: identity {facts.identity}, expected {identity}",
            "move that file away; shards of two captures never mix",
        )
    if facts.shard != path:
        raise damaged(path, f"holds the shard {facts.shard}: files changed places")


def pread_into(fd: int, data: memoryview, offset: int, where: str) -> None:
    """Fill a buffer from a place of an open file.

    Raises:
        StoreError: The file ends early or cannot be read.
    """
    done = 0
    while done < len(data):
        try:
            count = os.preadv(fd, [data[done:]], offset + done)
        except OSError as error:  # a bad sector, or a folder under a shard's name
            raise damaged(where, f"cannot be read: {error.strerror}") from None
        if count == 0:
            raise damaged(where, f"the file ends {len(data) - done:,} bytes early")
        done += count
