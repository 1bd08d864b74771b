"""Working folders of trainings, which are no generation: rings of streams, and the cache of shards from a remote.

A training that is killed leaves its ring: shards that it had captured ahead. Nobody needs them but the same training,
which goes on with them or captures them again. Whether one uses a ring is said by the kernel's lock, which the training and its
capturing process share and which ends with both; that a folder is a ring is said by its names and its shards' headers.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.canonical import from_plain
from eyas.console import human_bytes
from eyas.contracts import CaptureIdentity
from eyas.generations.trees import TreeFile, tree_file
from eyas.shards.handover import HOME, RING, RING_LOCK, SHARD_CACHE

IDENTITY = re.compile(r"[0-9a-f]{64}")
_SHARD = r"(states|pinned)/\d{3,}/shard-\d{5,}\.safetensors"
SHARD = re.compile(_SHARD)
MEMBER = re.compile(rf"{_SHARD}(\.part|\.json|\.json\.part|\.again\.\d+)?|ended\.json(\.part)?")
MAX_HEADER_BYTES = 16 << 20
PLAN_HEAD_CHARS = 1 << 16
CAPTURE_KEY = '"capture":'
CACHE_NOTE = (
    "shards fetched from a remote, bounded by EYAS_SHARD_CACHE_BYTES; gc leaves it alone, "
    f"`rm -r {SHARD_CACHE}` is safe while no training reads from a remote"
)


@dataclass(frozen=True, kw_only=True)
class LeftRing:
    """A ring that lies below ``.eyas/ring``."""

    folder: Path
    identity: str
    """Of the capture whose shards it holds."""
    files: dict[str, TreeFile]
    """Path relative to the folder → stat."""
    num_shards: int
    holder: str
    """Who holds the lock of the rings; empty when no process does."""
    problem: str
    """Why this cannot be told to be a ring and nothing else; empty when it can."""
    is_wanted: bool
    """Whether the training that ``data/plan.json`` is for would go on with it."""

    @property
    def is_idle(self) -> bool:
        """Whether it is a ring, and nobody's: what gc may take."""
        return not self.holder and not self.problem

    @property
    def disk_bytes(self) -> int:
        """Allocated blocks."""
        return sum(file.disk_bytes for file in self.files.values())

    @property
    def what(self) -> str:
        """What it is, with what proves it, in half a sentence."""
        if self.problem:
            return self.problem
        whose = f"headers name capture {self.identity[:10]}" if self.num_shards else "it holds no shard"
        held = f"held by {self.holder}" if self.holder else f"no process holds {HOME / RING_LOCK}"
        return f"{self.num_shards:,} shards of a streamed training: {whose}; {held}"


@dataclass(frozen=True, kw_only=True)
class WorkingFolders:
    """All of them."""

    rings: tuple[LeftRing, ...] = ()
    cache_bytes: int = 0
    """Allocated blocks of ``.eyas/shard_cache``."""
    num_cached: int = 0
    """Files there: shards, and what a killed training was fetching."""

    @property
    def idle(self) -> list[LeftRing]:
        """Rings that gc may take."""
        return [ring for ring in self.rings if ring.is_idle]


def read_working(root: Path) -> WorkingFolders:
    """Look at the working folders of a repository; shards are not read but for their headers."""
    base = root / HOME / RING
    folders = sorted(path for path in base.iterdir() if path.is_dir()) if base.is_dir() else []
    folders = [folder for folder in folders if any(fs.walk_files(folder))]  # the next training removes an empty one
    holder, wanted = (ring_holder(root), _wanted(root)) if folders else ("", "")
    cached = list(_files(root / SHARD_CACHE).values())
    return WorkingFolders(
        rings=tuple(_ring(folder, holder, wanted) for folder in folders),
        cache_bytes=sum(file.disk_bytes for file in cached),
        num_cached=sum(file.disk_bytes > 0 for file in cached),
    )


def ring_holder(root: Path) -> str:
    """Who holds the rings of a repository: a training, or a capturing process that outlived one; empty when nobody does."""
    return fs.lock_holder(root / HOME / RING_LOCK)


def ring_bytes(root: Path, identity: str) -> int:
    """Allocated blocks of one ring; 0 where there is none."""
    return sum(file.disk_bytes for file in _files(root / HOME / RING / identity).values())


def _ring(folder: Path, holder: str, wanted: str) -> LeftRing:
    files = _files(folder)
    shards = [path for path in files if SHARD.fullmatch(path)]
    return LeftRing(
        folder=folder,
        identity=folder.name,
        files=files,
        num_shards=len(shards),
        holder=holder,
        problem=_problem(folder, files, shards),
        is_wanted=folder.name == wanted,
    )


def _files(folder: Path) -> dict[str, TreeFile]:
    found: dict[str, TreeFile] = {}
    with contextlib.suppress(FileNotFoundError):  # a training removes its files meanwhile
        for path, entry in fs.walk_files(folder):
            with contextlib.suppress(FileNotFoundError):
                found[path] = tree_file(entry.stat(follow_symlinks=False))
    return found


def _problem(folder: Path, files: dict[str, TreeFile], shards: list[str]) -> str:
    if folder.is_symlink() or not IDENTITY.fullmatch(folder.name):
        return "no ring of eyas: its name is no capture identity"
    strange = next((path for path in files if not MEMBER.fullmatch(path) or (folder / path).is_symlink()), None)
    if strange is not None:
        return f"{strange} is no part of a ring: look at it, then move it away"
    foreign = next((path for path in shards if not _names(folder / path, folder.name)), None)
    return "" if foreign is None else f"{foreign} is no shard of capture {folder.name[:10]}: look at it"


def _names(path: Path, identity: str) -> bool:
    """Whether a file's header names this capture; quotes inside its values are escaped, so it stands there once."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return f'"identity":"{identity}"'.encode() in file.read(min(length, MAX_HEADER_BYTES))
    except FileNotFoundError:  # removed meanwhile by the training that holds it
        return True


def _wanted(root: Path) -> str:
    """Identity of the set that ``data/plan.json`` streams; empty where nothing is streamed. Only its head is parsed."""
    try:
        with (root / "data/plan.json").open(encoding="utf-8") as file:
            head = file.read(PLAN_HEAD_CHARS)
        at = head.index(CAPTURE_KEY) + len(CAPTURE_KEY)
        capture = from_plain(CaptureIdentity, json.JSONDecoder().raw_decode(head, at)[0])
    except (OSError, ValueError):
        return ""
    return "" if capture.stored == "all" else replace(capture, stored="all").digest


def working_values(found: WorkingFolders) -> list[dict[str, Any]]:
    """One flat mapping a folder."""
    values: list[dict[str, Any]] = [
        {
            "kind": "ring",
            "path": (HOME / RING / ring.identity).as_posix(),
            "hash": ring.identity,
            "state": "unclear" if ring.problem else "held" if ring.holder else "idle",
            "num_shards": ring.num_shards,
            "disk_bytes": ring.disk_bytes,
            "freed_now_bytes": ring.disk_bytes if ring.is_idle else 0,
            "is_wanted": ring.is_wanted,
            "note": ring.what,
        }
        for ring in found.rings
    ]
    if found.num_cached:
        cache = {"state": "cache", "num_shards": found.num_cached, "disk_bytes": found.cache_bytes}
        more = {"hash": "", "freed_now_bytes": 0, "is_wanted": False, "note": CACHE_NOTE}
        values.append({"kind": "shard_cache", "path": SHARD_CACHE.as_posix()} | cache | more)
    return values


def working_lines(found: WorkingFolders) -> list[str]:
    """One line a folder, with what becomes of it."""
    lines = []
    for one in working_values(found):
        line = f"{one['path']}: {human_bytes(one['disk_bytes'])}; {one['note']}"
        if one["state"] == "idle":
            line += "; gc takes it" + (
                ", the training of data/plan.json would go on with it" if one["is_wanted"] else ""
            )
        lines.append(line)
    return lines
