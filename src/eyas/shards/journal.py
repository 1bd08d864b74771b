"""The journal of a spool: a line for every finished shard, and the file by which it is known again without reading it.

A line holds the shard as the manifest will list it, under its own checksum. Beside it stands what the file was when
the line was written. The line of a shard whose file is still that one is enough; any other file is read through.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from eyas.canonical import from_plain, plain_json, to_plain
from eyas.contracts import CapturePlan, PlannedShard, ShardManifest
from eyas.shards.format import checksum
from eyas.shards.writer import FinishedShard


@dataclass(frozen=True, slots=True)
class FileNote:
    """A shard's file at the moment of its line; its size is the entry's.

    A program that writes into the file changes ``mtime_ns``. That can be set, as ``cp -p`` does, and a file that is
    deleted leaves its inode to the next one; nobody sets ``ctime_ns``, but links and ``chmod`` change it too: it counts
    until the set is published. A copied or restored folder shows in ``witness``.
    """

    inode: int
    mtime_ns: int
    ctime_ns: int
    samples: str
    """Checksum over ids and lengths of what it holds: a plan that wants other samples there does not know it."""
    witness: tuple[int, int]
    """Inode and time of change of the spool's own ``identity.json``, which no copy can have."""


@dataclass(frozen=True, slots=True)
class JournalLine:
    """A line of the journal."""

    shard: FinishedShard
    note: FileNote | None = None
    """None: written by an earlier eyas, or from a manifest; the file is read through."""

    def is_of(
        self, found: os.stat_result | None, planned: PlannedShard, witness: tuple[int, int] | None, *, linked: bool
    ) -> bool:
        """Whether a file is the very one that the line was written for, with the samples that are planned.

        Args:
            found: Of the file now.
            planned: The shard.
            witness: Of the spool now.
            linked: Whether the set was published, which changes a file's ``ctime_ns``.
        """
        if self.note is None or self.shard.entry is None or found is None or witness is None:
            return False
        if found.st_size != self.shard.entry.size_bytes:
            return False
        now = file_note(found, planned, self.shard, witness)
        return self.note == (replace(now, ctime_ns=self.note.ctime_ns) if linked else now)


def file_note(
    found: os.stat_result, planned: PlannedShard, finished: FinishedShard, witness: tuple[int, int]
) -> FileNote:
    """What is noted of a file that holds a planned shard less its failed samples."""
    listed = plain_json(stored_samples(planned, finished))
    return FileNote(found.st_ino, found.st_mtime_ns, found.st_ctime_ns, checksum(listed.encode()), witness)


def stored_samples(planned: PlannedShard, finished: FinishedShard) -> list[tuple[str, int]]:
    """(id, number of tokens) of what a finished shard holds, in stored order."""
    failed = {sample.sample_id for sample in finished.failed}
    return [(s.sample_id, s.num_tokens) for s in planned.samples if s.sample_id not in failed]


def journal_line(shard: FinishedShard, note: FileNote | None = None) -> bytes:
    """A finished shard as a line."""
    body = to_plain(shard)
    value = {"shard": body, "xxh3": checksum(plain_json(body).encode())}
    if note is not None:  # beside what is checked, as earlier readers know it; a damaged note fits no file
        value["file"] = [note.inode, note.mtime_ns, note.ctime_ns, note.samples, *note.witness]
    return (plain_json(value) + "\n").encode()


def read_lines(data: bytes) -> dict[str, JournalLine]:
    """Lines by path of the shard, as far as they are whole; of two the later counts."""
    lines = (_parse_line(line) for line in data.split(b"\n"))
    return {line.shard.path: line for line in lines if line is not None}


def _parse_line(line: bytes) -> JournalLine | None:
    """A line; None when it is torn or damaged."""
    try:
        value = json.loads(line)
        if checksum(plain_json(value["shard"]).encode()) != value["xxh3"]:
            return None
        return JournalLine(from_plain(FinishedShard, value["shard"]), _parse_note(value.get("file")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _parse_note(value: object) -> FileNote | None:
    match value:
        case [int(inode), int(mtime_ns), int(ctime_ns), str(samples), int(witness_inode), int(witness_ctime_ns)]:
            return FileNote(inode, mtime_ns, ctime_ns, samples, (witness_inode, witness_ctime_ns))
    return None


def lines_of(plan: CapturePlan, manifest: ShardManifest) -> Iterator[bytes]:
    """The journal that a manifest came from, without notes: nobody here wrote those files."""
    entries = {entry.path: entry for entry in manifest.shards}
    failures = {sample.sample_id: sample for sample in manifest.failed}
    for planned in plan.shards:
        failed = tuple(failures[s.sample_id] for s in planned.samples if s.sample_id in failures)
        if planned.path in entries or failed:
            yield journal_line(FinishedShard(path=planned.path, entry=entries.get(planned.path), failed=failed))
