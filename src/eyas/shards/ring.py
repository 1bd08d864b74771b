"""The ring: a bounded folder of shards that come and go while a training reads them.

    .eyas/ring/<identity>/states/000/shard-00000.safetensors         a shard, byte for byte as a stored set has it
    .eyas/ring/<identity>/states/000/shard-00000.safetensors.json    RingRecord, written after it, removed before it
    .eyas/ring/<identity>/pinned/…                                   samples that are read again and again, by shard
    .eyas/ring/<identity>/ended.json                                 why nothing comes any more

A shard without its record does not exist. One process fills and empties the ring; any number read it, on this
machine or on others that share the folder. A reader that finds damage asks for the shard once more by a file beside
its record (``….again``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas import fs
from eyas.contracts import FailedSample, ShardEntry, ring_disk_bytes
from eyas.errors import StoreError
from eyas.shards.handover import RING
from eyas.shards.opening import read_header

Kind = Literal["states", "pinned"]
KINDS: tuple[Kind, ...] = ("states", "pinned")
RECORD_SUFFIX, AGAIN_SUFFIX, ENDED_NAME = ".json", ".again", "ended.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRecord:
    """A shard that lies in the ring."""

    path: str
    kind: Kind
    serial: int
    """Counts up with every shard written: a shard captured again has another one."""
    entry: ShardEntry | None
    """None when every sample failed."""
    failed: tuple[FailedSample, ...]

    @property
    def disk_bytes(self) -> int:
        """What it takes on the volume, its record included."""
        return ring_disk_bytes(0 if self.entry is None else self.entry.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """``ended.json``."""

    message: str
    hint: str


class Ring:
    """The ring of one capture.

    Args:
        home: The working folder, ``.eyas``.
        identity: Of the capture, as a stored set of it would have.
    """

    def __init__(self, home: Path, identity: str) -> None:
        self.root, self.identity = home / RING, identity
        self.folder = self.root / identity

    def shard(self, kind: Kind, path: str) -> Path:
        """Where a shard lies."""
        return self.folder / kind / path

    # ── for whoever fills it ──────────────────────────────────────────────────────────────────

    def prepare(self, wanted: Mapping[tuple[Kind, str], frozenset[str]]) -> dict[tuple[Kind, str], RingRecord]:
        """Make the folder; keep whole shards that an earlier run left, remove what is of no use.

        Args:
            wanted: Sample ids of every shard that may be needed.

        Raises:
            StoreError: The ring holds states of another capture, or something that is no part of it.
        """
        others = [path for path in self.root.glob("*") if path.is_dir() and path.name != self.identity]
        for path in [path for path in others if not any(fs.walk_files(path))]:  # ended before it held anything
            others.remove(path)
            shutil.rmtree(path, ignore_errors=True)
        if others:
            raise StoreError(
                f"{others[0]} is the ring of another capture, expected {self.identity}",
                f"finish that training with its own parameters, or give its states up: `make gc-plan` offers {others[0]}",
            )
        with fs.disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ENDED_NAME).unlink(missing_ok=True)
        kept: dict[tuple[Kind, str], RingRecord] = {}
        for kind in KINDS:
            for path in list(self._shards(kind)):
                samples = wanted.get((kind, path))
                record = None if samples is None else self._whole(kind, path, samples)
                if record is None:
                    self.drop(kind, path)
                else:
                    kept[kind, path] = record
        return kept

    def _shards(self, kind: Kind) -> Iterator[str]:
        """Paths of all shards and left-overs of shards, by the names of their files."""
        seen = set()
        for folder, _, names in os.walk(self.folder / kind):
            for name in names:
                path = (Path(folder) / name).relative_to(self.folder / kind).as_posix()
                base = f"{path.split('.safetensors')[0]}.safetensors"
                if path.endswith(fs.PART_SUFFIX):
                    (Path(folder) / name).unlink()
                elif ".safetensors" not in path:
                    raise StoreError(f"{Path(folder) / name} is no part of a ring", "look at it, then move it away")
                elif base not in seen:
                    seen.add(base)
                    yield base

    def _whole(self, kind: Kind, path: str, samples: frozenset[str]) -> RingRecord | None:
        """A shard's record when the shard fits it and holds or lists these samples; blocks are checked when read."""
        record = self.record(kind, path)
        if record is None:
            return None
        held = {sample.sample_id for sample in record.failed}
        if record.entry is not None:
            try:
                header, size_bytes = read_header(self.shard(kind, path), path)
            except StoreError:
                return None
            if header.facts.identity != self.identity or size_bytes != record.entry.size_bytes:
                return None
            held |= {sample.sample_id for sample in header.samples}
        return record if held == samples and not record.failed else None  # what failed is tried again

    def publish(self, record: RingRecord) -> None:
        """Let readers see a shard that was written."""
        fs.write_record(self._record(record.kind, record.path), record)

    def drop(self, kind: Kind, path: str) -> None:
        """Remove a shard; whoever has it open goes on reading it."""
        place = self.shard(kind, path)
        self._record(kind, path).unlink(missing_ok=True)
        for file in (place, place.with_name(place.name + fs.PART_SUFFIX)):
            file.unlink(missing_ok=True)
        for request in place.parent.glob(f"{place.name}{AGAIN_SUFFIX}*"):
            request.unlink(missing_ok=True)

    def asked_again(self, records: Mapping[tuple[Kind, str], RingRecord]) -> list[RingRecord]:
        """Shards that a reader found damaged; requests for what was written anew meanwhile are dropped."""
        found = []
        for kind in KINDS:
            for request in sorted((self.folder / kind).rglob(f"*{AGAIN_SUFFIX}.*")):
                name, _, serial = request.name.rpartition(f"{AGAIN_SUFFIX}.")
                path = (request.parent / name).relative_to(self.folder / kind).as_posix()
                record = records.get((kind, path))
                request.unlink(missing_ok=True)
                if record is not None and str(record.serial) == serial:
                    found.append(record)
        return found

    def end(self, message: str, hint: str) -> None:
        """Tell readers elsewhere that nothing comes any more."""
        fs.write_record(self.folder / ENDED_NAME, Ended(message=message, hint=hint))

    def remove(self) -> None:
        """Give the whole ring back."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # ── for readers ───────────────────────────────────────────────────────────────────────────

    def record(self, kind: Kind, path: str) -> RingRecord | None:
        """A shard's record, None while it is not there."""
        try:
            return fs.read_record(RingRecord, self._record(kind, path))
        except StoreError:
            return None

    def ask_again(self, record: RingRecord) -> None:
        """This shard is damaged: capture it once more."""
        place = self.shard(record.kind, record.path)
        with contextlib.suppress(FileNotFoundError), fs.disk_errors(place):
            place.with_name(f"{place.name}{AGAIN_SUFFIX}.{record.serial}").touch()

    def ended(self) -> Ended | None:
        """Why nothing comes any more; None while something does."""
        path = self.folder / ENDED_NAME
        return fs.read_record(Ended, path) if path.is_file() else None

    def _record(self, kind: Kind, path: str) -> Path:
        place = self.shard(kind, path)
        return place.with_name(place.name + RECORD_SUFFIX)
