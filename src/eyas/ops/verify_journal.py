"""What a verification has read so far, and what the last one found.

``.eyas/verify/<identity>.jsonl`` holds a line per finished shard while a run is under way;
``<identity>.findings.json`` the findings of a finished one, for ``eyas repair``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.canonical import canonical_json, from_plain, to_plain
from eyas.contracts import ShardEntry
from eyas.errors import StoreError
from eyas.shards.consistency import Score
from eyas.shards.format import checksum
from eyas.shards.verify import Finding

VERIFY = Path(".eyas/verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """A shard file as it was when it was read."""

    inode: int
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedShard:
    """One journal line: what reading a shard gave. ``basis`` is the digest of what it was compared with."""

    path: str
    md5: str
    stamp: FileStamp
    basis: str
    findings: tuple[Finding, ...]
    scores: dict[str, Score]


def stamp_of(path: Path) -> FileStamp | None:
    """Inode, size and mtime of a file; None when it is not there."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return FileStamp(inode=stat.st_ino, size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)


class Journal:
    """Finished shards of a verification that is under way, and the findings of the last one."""

    def __init__(self, root: Path, identity: str) -> None:
        self._lines = root / VERIFY / f"{identity}.jsonl"
        self._findings = root / VERIFY / f"{identity}.findings.json"

    def known(self, folder: Path, entries: Sequence[ShardEntry], basis: str) -> dict[str, CheckedShard]:
        """Shards read before on the same basis whose files did not change since."""
        if not self._lines.exists():
            return {}
        whole = self._lines.read_bytes()
        if not whole.endswith(b"\n"):
            os.truncate(self._lines, whole.rfind(b"\n") + 1)
        lines = (_parse_line(line) for line in self._whole_lines())
        read = {shard.path: shard for shard in lines if shard is not None and shard.basis == basis}
        return {
            entry.path: read[entry.path]
            for entry in entries
            if entry.path in read
            and read[entry.path].md5 == entry.md5
            and read[entry.path].stamp == stamp_of(folder / entry.path)
        }

    def append(self, shard: CheckedShard) -> None:
        """Record a finished shard durably.

        Raises:
            DiskError: The volume is full.
        """
        body = to_plain(shard)
        line = canonical_json({"shard": body, "xxh3": checksum(canonical_json(body).encode())}) + "\n"
        with fs.disk_errors(self._lines), self._lines.open("ab") as handle:
            handle.write(line.encode())
            handle.flush()
            os.fsync(handle.fileno())

    def finish(self, findings: Sequence[Finding], unread: Sequence[str] = ()) -> None:
        """Forget the run and keep its findings, if any; what was known of shards it did not read stays."""
        others = set(unread)
        kept = [finding for finding in self.findings() if finding.shard in others]
        self.keep(list(dict.fromkeys([*findings, *kept])))
        left = [line for line in self._whole_lines() if (shard := _parse_line(line)) and shard.path in others]
        if left:
            fs.write_bytes(self._lines, b"".join(line + b"\n" for line in left))
        else:
            self._lines.unlink(missing_ok=True)

    def keep(self, findings: Sequence[Finding]) -> None:
        """Replace the findings by those that are left after a repair."""
        if findings:
            fs.write_record(self._findings, list(findings))
        else:
            self._findings.unlink(missing_ok=True)

    def _whole_lines(self) -> list[bytes]:
        return self._lines.read_bytes().split(b"\n")[:-1] if self._lines.exists() else []

    def findings(self) -> tuple[Finding, ...]:
        """What the last finished verification found; empty when that was nothing, or there was none."""
        if not self._findings.exists():
            return ()
        try:
            return tuple(from_plain(Finding, value) for value in fs.read_json(self._findings))
        except (StoreError, ValueError, TypeError):
            console.log(f"{self._findings} holds no findings: it counts as not there")
            return ()


def _parse_line(line: bytes) -> CheckedShard | None:
    """A journal line; None when it is torn or damaged."""
    try:
        value: dict[str, Any] = json.loads(line)
        if checksum(canonical_json(value["shard"]).encode()) != value["xxh3"]:
            return None
        return from_plain(CheckedShard, value["shard"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
