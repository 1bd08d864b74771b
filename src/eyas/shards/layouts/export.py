"""A published set → a folder in a peer's layout: file by file, each whole or not there, the record last.

Files are journalled with size and XXH3-64 while they are written; a rerun verifies what the journal or the record
proves and writes the rest. Order: the training split first, then the held-out one, by sample id (which is a hash), so
that a peer's contiguous split gives eyas's own.

Letters: T tokens of a sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas import console, fs
from eyas.canonical import canonical_json, digest, from_plain, to_plain
from eyas.contracts import StoredSample
from eyas.errors import DiskError, StoreError
from eyas.shards.layouts.base import (
    JOURNAL_NAME,
    RECORD_NAME,
    ExportFacts,
    ExportRecord,
    HashingHandle,
    LayoutFile,
    LayoutSample,
    LayoutWriter,
    hash_layout_file,
)
from eyas.shards.reader import ShardReader, StoredStates

RECORD_BYTES_PER_SAMPLE = 768
"""Allowance for a sample in record and journal."""
Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What an export did."""

    record: ExportRecord
    num_bytes: int
    num_resumed: int
    """Sample files that an earlier run had written, verified now."""


def ordered(samples: Sequence[StoredSample]) -> list[StoredSample]:
    """Training split first, each split by sample id."""
    return sorted(samples, key=lambda sample: (sample.split != "train", sample.sample_id))


def needed_bytes(samples: Sequence[StoredSample], num_aux: int, hidden_size: int, writer: LayoutWriter) -> int:
    """Most bytes that an export takes on disk."""
    sizes = (writer.file_bytes(sample.num_tokens, num_aux, hidden_size) for sample in samples)
    return sum(sizes) + RECORD_BYTES_PER_SAMPLE * len(samples)


def export_layout(
    reader: ShardReader, writer: LayoutWriter, facts: ExportFacts, folder: Path, *, norm: Norm, reserve_bytes: int
) -> ExportResult:
    """Write every stored sample in a peer's layout.

    Args:
        reader: The published set.
        writer: The layout.
        facts: What the folder will be; an unfinished export of other facts is refused.
        folder: Absent, empty, or an unfinished or finished export of the same facts.
        norm: Brings ``last_TD`` from post-norm to the norm state of the layout.
        reserve_bytes: Must stay free on the volume.

    Raises:
        StoreError: The layout cannot hold the set, the folder holds something else, a sample is damaged, or the set
            lacks rows that the peer's loss reads.
        DiskError: It does not fit, or the volume is full; the same command goes on.
    """
    writer.check(facts.boundaries)
    samples = ordered(reader.samples)
    with fs.disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    journal = _Journal(folder, facts)
    planned = {writer.path(index): sample for index, sample in enumerate(samples)}
    _refuse_strangers(folder, set(planned), writer)
    done = _verified(folder, journal.read(), planned)
    _check_space(folder, samples, done, facts, writer, reserve_bytes)
    journal.start(done)
    progress = console.Progress(f"export {writer.name}", sum(sample.num_tokens for sample in samples))
    files: list[LayoutFile] = []
    for path, sample in planned.items():
        if path not in done:
            done[path] = _write_sample(reader, writer, folder, path, sample, norm)
            journal.append(done[path])
        files.append(done[path])
        progress.advance(sample.num_tokens, f"{console.human_bytes(fs.free_bytes(folder))} free")
    progress.close()
    tokens = (_tokens(reader, sample) for sample in samples)
    sides = [_file(folder, path) for path in writer.write_side_files(folder, facts, tokens)]
    record = ExportRecord(
        facts=facts,
        num_samples=len(samples),
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_train_samples=sum(sample.split == "train" for sample in samples),
        samples=tuple(samples),
        files=(*files, *sides),
    )
    fs.write_record(folder / RECORD_NAME, record)
    journal.remove()
    num_bytes = sum(file.size_bytes for file in record.files)
    return ExportResult(record=record, num_bytes=num_bytes, num_resumed=journal.num_verified)


def _tokens(reader: ShardReader, sample: StoredSample) -> tuple[torch.Tensor, torch.Tensor]:
    ids_T, mask_T = reader.read_tokens(sample.sample_id)
    return ids_T.long(), mask_T.long()


def _write_sample(
    reader: ShardReader, writer: LayoutWriter, folder: Path, path: str, sample: StoredSample, norm: Norm
) -> LayoutFile:
    states = reader.read(sample.sample_id)
    last_TD = norm(_rows_for_peer(states, writer))
    laid_out = LayoutSample(states.input_ids_T.long(), states.loss_mask_T.long(), states.aux_TAD, last_TD)
    with fs.atomic_writer(folder / path) as handle:
        hashing: Any = HashingHandle(handle)
        writer.write(hashing, laid_out)
    return LayoutFile(path=path, size_bytes=hashing.size_bytes, xxh3=hashing.xxh3, sample_id=sample.sample_id)


def _rows_for_peer(states: StoredStates, writer: LayoutWriter) -> torch.Tensor:
    """``last`` with zeros where nothing is stored, which the peer's loss must not read.

    Raises:
        StoreError: It does: what it reads and what is missing are named.
    """
    needed = writer.rows_read(states.loss_mask_T)
    missing = (needed.last_T & ~states.has_last_T).nonzero().flatten().tolist()
    num_short = max(needed.num_aux_rows - states.num_aux_rows, 0)
    if missing or num_short:
        first = f", the first is row {missing[0]}" if missing else ""
        raise StoreError(
            f"sample {states.sample.sample_id}: {writer.name} reads {int(needed.last_T.sum()):,} rows of last and "
            f"{needed.num_aux_rows:,} of each aux stream; {len(missing):,} and {num_short:,} of them are not stored"
            f"{first}: the set holds only what eyas trains on (extract.last_rows: trained), peers also train at the "
            "end of each assistant span",
            "extract with extract.last_rows: all to export to peers",
        )
    return torch.where(states.has_last_T[:, None], states.last_TD, torch.zeros((), dtype=torch.bfloat16))


def _refuse_strangers(folder: Path, planned: set[str], writer: LayoutWriter) -> None:
    """Refuse a folder with other files than this export's; then remove what a killed run left half."""

    def is_own(name: str) -> bool:
        return name in planned or name in (RECORD_NAME, JOURNAL_NAME) or writer.is_side_file(name)

    parts = []
    for name in sorted(_walk(folder)):
        if not is_own(name):
            if not (is_own(name.removesuffix(fs.PART_SUFFIX)) or writer.is_unfinished(name)):
                raise StoreError(
                    f"{folder / name} is no file of this export; peers would read it as a sample or mistake the set",
                    "export into an empty folder",
                )
            parts.append(name)
    for name in parts:
        (folder / name).unlink()


def _walk(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        for name in names:
            yield (Path(root) / name).relative_to(folder).as_posix()


def _verified(folder: Path, claimed: dict[str, LayoutFile], planned: dict[str, StoredSample]) -> dict[str, LayoutFile]:
    """Claimed files that are there as claimed; the rest is written again."""
    done = {}
    progress = console.Progress("export: verifying what is there", len(claimed), unit="files")
    for path, file in claimed.items():
        there = folder / path
        if path in planned and planned[path].sample_id == file.sample_id and there.is_file():
            if there.stat().st_size == file.size_bytes and hash_layout_file(there) == file.xxh3:
                done[path] = file
            else:
                console.log(f"export: {there} is not as it was written; it is written again")
        progress.advance(1)
    progress.close()
    return done


def _check_space(
    folder: Path,
    samples: Sequence[StoredSample],
    done: dict[str, LayoutFile],
    facts: ExportFacts,
    writer: LayoutWriter,
    reserve_bytes: int,
) -> None:
    ids = {file.sample_id for file in done.values()}
    left = [sample for sample in samples if sample.sample_id not in ids]
    needed, free = needed_bytes(left, len(facts.boundaries), facts.hidden_size, writer), fs.free_bytes(folder)
    summary = (
        f"{len(left):,} of {len(samples):,} samples need {console.human_bytes(needed)}; "
        f"{console.human_bytes(free)} free, {console.human_bytes(reserve_bytes)} in reserve"
    )
    if needed > free - reserve_bytes:
        raise DiskError(
            f"{writer.name}: {summary}: does not fit",
            "free space or export to another volume; the same command goes on from here",
        )
    console.log(f"export {writer.name}: {summary}")


def _file(folder: Path, path: str) -> LayoutFile:
    return LayoutFile(path=path, size_bytes=(folder / path).stat().st_size, xxh3=hash_layout_file(folder / path))


class _Journal:
    """What was written so far, one line a file; the first line says of which export."""

    def __init__(self, folder: Path, facts: ExportFacts) -> None:
        self._path, self._record, self._facts = folder / JOURNAL_NAME, folder / RECORD_NAME, facts
        self.num_verified = 0

    def read(self) -> dict[str, LayoutFile]:
        """Files by path that the journal or the record names.

        Raises:
            StoreError: They are of another export.
        """
        if self._record.is_file():
            record = fs.read_record(ExportRecord, self._record)
            self._check(digest(record.facts))
            return {file.path: file for file in record.files if file.sample_id}
        if not self._path.is_file():
            return {}
        lines = self._path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn
        files = {}
        for number, line in enumerate(lines):
            try:
                value = json.loads(line)
                if number == 0:
                    self._check(value["facts"])
                else:
                    file = from_plain(LayoutFile, value)
                    files[file.path] = file
            except (ValueError, KeyError, TypeError):
                continue  # a damaged line proves nothing: that file is written again
        return files

    def _check(self, found: object) -> None:
        if found != digest(self._facts):
            raise StoreError(
                f"{self._path.parent} holds another export (facts {str(found)[:16]}, expected "
                f"{digest(self._facts)[:16]}): another capture, layout or trainer version",
                "export into an empty folder; exports never mix",
            )

    def start(self, done: dict[str, LayoutFile]) -> None:
        """Begin with what was verified; the record goes, for the folder is not whole until it is written again."""
        self.num_verified = len(done)
        lines = [{"facts": digest(self._facts)}, *(to_plain(file) for file in done.values())]
        fs.write_text(self._path, "".join(canonical_json(line) + "\n" for line in lines))
        if self._record.exists():
            self._record.unlink()
            fs.fsync_dir(self._record.parent)

    def append(self, file: LayoutFile) -> None:
        """Add one file durably."""
        with fs.disk_errors(self._path), self._path.open("ab") as handle:
            handle.write((canonical_json(file) + "\n").encode())
            handle.flush()
            os.fsync(handle.fileno())

    def remove(self) -> None:
        """The record says it all now."""
        self._path.unlink()
        fs.fsync_dir(self._path.parent)
