"""Free space before and after, told by the file systems themselves, and who still holds what was deleted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from eyas.generations.extents import Key
from eyas.plan.volume import file_system

SETTLE_S = 5.0
"""XFS and btrfs free in the background: so long is waited for promised bytes that are not there yet."""
_PAUSE_S = 0.25


def volumes(folders: Iterable[Path]) -> list[str]:
    """One existing folder per volume; two subvolumes of one btrfs are one volume."""
    found: dict[tuple[object, ...], str] = {}
    for folder in folders:
        there = next(path for path in (folder, *folder.parents) if path.is_dir())
        kind, source = file_system(there)
        key = (kind, source) if kind == "btrfs" else (there.stat().st_dev,)
        found.setdefault(key, os.fspath(there))
    return sorted(found.values())


def sync(folder: str) -> None:
    """Let a file system finish what it put off."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            os.sync()
    finally:
        os.close(fd)


def free_bytes(folder: str) -> int:
    """Free bytes of a volume; what is reserved for root counts as free, so that a full disk shows a difference.

    On btrfs those that data can have: what its trees give back is no measure of what was deleted.
    """
    stat = os.statvfs(folder)
    return (stat.f_bavail if file_system(Path(folder))[0] == "btrfs" else stat.f_bfree) * stat.f_frsize


def freed_since(before: Mapping[str, int], expected_bytes: int, own_bytes: int) -> int:
    """Bytes that came free since, on all volumes together.

    Args:
        before: Folder → free bytes then.
        expected_bytes: Waited for, for a while.
        own_bytes: Blocks of our own notes that were not there then.
    """
    end_s = time.monotonic() + SETTLE_S
    while True:
        for folder in before:
            sync(folder)
        freed = sum(free_bytes(folder) - then for folder, then in before.items()) + own_bytes
        if freed >= expected_bytes or time.monotonic() > end_s:
            return freed
        time.sleep(_PAUSE_S)


def block_bytes(folder: str) -> int:
    """Size of a block."""
    return os.statvfs(folder).f_frsize


class OpenFile(NamedTuple):
    """A deleted file that a process has open: its blocks are not free before it is closed."""

    pid: int
    program: str
    num_bytes: int


def open_files(gone: Mapping[Key, int]) -> list[OpenFile]:
    """Processes that hold deleted inodes, as far as they may be looked at."""
    found: dict[tuple[int, Key], OpenFile] = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    stat = fd.stat()
                    key = (stat.st_dev, stat.st_ino)
                    if stat.st_nlink == 0 and key in gone:
                        program = (process / "comm").read_text().strip()
                        found[int(process.name), key] = OpenFile(int(process.name), program, gone[key])
    return list(found.values())
