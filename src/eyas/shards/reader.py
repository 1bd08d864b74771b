"""Reading shards: manifest → headers → blocks of one sample, every block against its checksum.

Nothing is mapped or cached but headers: a read takes the sample's bytes with ``pread`` into fresh
memory, so a reader is safe in threads, survives ``pickle`` and costs one sample of memory per read.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.contracts import ShardEntry, ShardManifest, StoredSample
from eyas.errors import StoreError
from eyas.shards.format import (
    DTYPES,
    LENGTH_BYTES,
    ShardHeader,
    block_name,
    checksum,
    damaged,
    header_length,
    parse_header,
)


@dataclass(frozen=True, slots=True)
class StoredStates:
    """One sample as stored: input_ids_T int32, loss_mask_T uint8, aux_TAD bf16, last_TD bf16 post-norm."""

    sample: StoredSample
    input_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    aux_TAD: torch.Tensor
    last_TD: torch.Tensor


class ShardReader:
    """Random access by sample to a published set of shards.

    Opening reads every header (kilobytes each) and checks sizes, identity and counts against the
    manifest. Folders are never listed: what the manifest does not name does not exist.

    Args:
        folder: The states folder.
        manifest: Its manifest.

    Raises:
        StoreError: A shard is missing, short, foreign, damaged or contradicts the manifest.
    """

    def __init__(self, folder: Path, manifest: ShardManifest) -> None:
        self.folder, self.manifest = Path(folder), manifest
        check_account(manifest)
        self._places: dict[str, tuple[ShardHeader, int]] = {}
        for entry in manifest.shards:
            header = open_entry(self.folder, entry, manifest)
            for index, sample in enumerate(header.samples):
                if sample.sample_id in self._places:
                    raise damaged(entry.path, f"sample {sample.sample_id} occurs twice in the set")
                self._places[sample.sample_id] = (header, index)

    @property
    def samples(self) -> tuple[StoredSample, ...]:
        """All stored samples in manifest order."""
        return tuple(header.samples[index] for header, index in self._places.values())

    def read(self, sample_id: str) -> StoredStates:
        """One sample with its states, every block checked.

        Raises:
            StoreError: The sample is not stored, or a block of it is damaged.
        """
        header, index, blocks = self._read_blocks(sample_id, ("input_ids", "aux", "last", "loss_mask"))
        return StoredStates(
            sample=header.samples[index],
            input_ids_T=blocks["input_ids"],
            loss_mask_T=blocks["loss_mask"],
            aux_TAD=blocks["aux"],
            last_TD=blocks["last"],
        )

    def read_tokens(self, sample_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Only ``input_ids_T`` int32 and ``loss_mask_T`` uint8 of a sample, checked; no states are read.

        Raises:
            StoreError: The sample is not stored, or a block of it is damaged.
        """
        _, _, blocks = self._read_blocks(sample_id, ("input_ids", "loss_mask"))
        return blocks["input_ids"], blocks["loss_mask"]

    def _read_blocks(self, sample_id: str, kinds: Sequence[str]) -> tuple[ShardHeader, int, Mapping[str, torch.Tensor]]:
        if sample_id not in self._places:
            raise StoreError(
                f"sample {sample_id} is not among the {len(self._places):,} stored samples",
                "`eyas verify` lists what is stored; failed samples are in data/hidden_states.json",
            )
        header, index = self._places[sample_id]
        path = self.folder / header.facts.shard
        with open_shard(path, header.facts.shard) as fd:
            blocks = {kind: read_block(fd.number, header, index, kind) for kind in kinds}
        return header, index, blocks


class open_shard:  # noqa: N801 - used like the built-in open
    """An open file descriptor of a shard as a context; a missing file is a ``StoreError``."""

    def __init__(self, path: Path, where: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY)
        except OSError as error:
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
        size_bytes = os.fstat(fd.number).st_size
        length = header_length(os.pread(fd.number, LENGTH_BYTES, 0), size_bytes, where)
        raw = bytes(_pread(fd.number, length, LENGTH_BYTES, where).numpy())
    header = parse_header(raw, where)
    if header.size_bytes != size_bytes:
        raise damaged(where, f"{size_bytes:,} bytes, its header describes {header.size_bytes:,}")
    return header, size_bytes


def open_entry(folder: Path, entry: ShardEntry, manifest: ShardManifest) -> ShardHeader:
    """Header of one published shard, checked against the manifest.

    Raises:
        StoreError: The shard is missing, short, foreign, in another's place, or its counts differ.
    """
    header, size_bytes = read_header(folder / entry.path, entry.path)
    check_identity(header, manifest.identity, entry.path)
    facts = header.facts
    counts = (size_bytes, len(header.samples), sum(sample.num_tokens for sample in header.samples))
    expected = (entry.size_bytes, entry.num_samples, entry.num_tokens)
    if counts != expected:
        raise damaged(entry.path, f"(bytes, samples, tokens) are {counts}, the manifest says {expected}")
    shape = (facts.boundaries, facts.final_hidden, facts.hidden_size)
    planned = (manifest.boundaries, manifest.capture.final_hidden, manifest.hidden_size)
    if shape != planned:
        raise damaged(entry.path, f"(boundaries, norm, hidden size) are {shape}, the manifest says {planned}")
    return header


def check_identity(header: ShardHeader, identity: str, path: str) -> None:
    """Refuse a shard of another capture and a shard in another's place.

    Raises:
        StoreError: Both identities or both paths are named.
    """
    if header.facts.identity != identity:
        raise StoreError(
            f"{path} belongs to another capture: identity {header.facts.identity}, expected {identity}",
            "move that file away; shards of two captures never mix",
        )
    if header.facts.shard != path:
        raise damaged(path, f"holds the shard {header.facts.shard}: files changed places")


def check_account(manifest: ShardManifest) -> None:
    """Check that planned = stored + failed, and that the sums of the shards agree.

    Raises:
        StoreError: The account does not close.
    """
    digest = manifest.capture.digest
    if manifest.identity != digest:
        raise StoreError(f"manifest identity {manifest.identity}, but its capture has {digest}", "run `make extract`")
    stored = (sum(e.num_samples for e in manifest.shards), sum(e.num_tokens for e in manifest.shards))
    failed = (len(manifest.failed), sum(f.num_tokens for f in manifest.failed))
    claims = {
        "stored (samples, tokens)": ((manifest.num_stored_samples, manifest.num_stored_tokens), stored),
        "planned (samples, tokens)": (
            (manifest.num_planned_samples, manifest.num_planned_tokens),
            (stored[0] + failed[0], stored[1] + failed[1]),
        ),
        "stored bytes": (manifest.stored_bytes, sum(e.size_bytes for e in manifest.shards)),
    }
    for name, (said, found) in claims.items():
        if said != found:
            raise StoreError(f"manifest: {name} {said}, its shards and failures give {found}", "run `make extract`")


def read_block(fd: int, header: ShardHeader, index: int, kind: str) -> torch.Tensor:
    """One tensor of one sample, checked against its checksum.

    Raises:
        StoreError: The file ends early or the bytes differ from what was written.
    """
    block, sample = header.blocks[block_name(index, kind)], header.samples[index]
    where = f"{header.facts.shard}: sample {sample.sample_id}: {kind}"
    data = _pread(fd, block.end - block.begin, header.data_start + block.begin, where)
    found, expected = checksum(data.numpy().data), header.checksums[block.name]
    if found != expected:
        raise damaged(where, f"checksum {found}, expected {expected}")
    return data.view(DTYPES[block.dtype]).view(block.shape)


def _pread(fd: int, num_bytes: int, offset: int, where: str) -> torch.Tensor:
    data = torch.empty(num_bytes, dtype=torch.uint8)
    rest, done = data.numpy().data, 0
    while done < num_bytes:
        count = os.preadv(fd, [rest[done:]], offset + done)
        if count == 0:
            raise damaged(where, f"the file ends {num_bytes - done:,} bytes early")
        done += count
    return data
