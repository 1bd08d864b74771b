"""The names outside the cache that a gc takes away, one by one, each looked at again first."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.generations.listing import Situation
from eyas.generations.reclaim import kept_places
from eyas.generations.working import ring_holder
from eyas.ops.gc.going import RING_OWNER
from eyas.ops.gc.intent import Intent
from eyas.plan.cache import cache_dir
from eyas.shards.handover import HOME, RETIRED_MARK, SPOOL

DENIED = (errno.EPERM, errno.EACCES, errno.EROFS)
"""What unlink(2) says of a folder of somebody else's, of an immutable file, of a file system that is read-only."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What became of the names outside the cache."""

    num_gone: int = 0
    num_changed: int = 0
    """Hold something else now."""
    num_kept: int = 0
    """Belong to what is named or wanted again."""
    denied: tuple[str, ...] = ()
    """May not be removed, each with the reason."""


def remove_names(root: Path, intent: Intent, found: Situation) -> Removal:
    """Remove them, but what is in use again, changed, or not ours to remove.

    Args:
        root: The repository.
        intent: What was confirmed.
        found: What is in use now.
    """
    num_gone = num_changed = num_kept = 0
    denied: list[str] = []
    taken_up, stays = {*_taken_up(root, intent), *_held_rings(root, intent)}, kept_places(found)
    bases = {folder: os.path.realpath(root / folder) for folder in {name[2] for name in intent.names}}
    folders: dict[str, str] = {}
    for path, generation, folder, *recorded in intent.names:
        if generation in found.kept.names or folder in taken_up or f"{bases[folder]}{path[len(folder) :]}" in stays:
            num_kept += 1
            continue
        stat = lstat(root / path)
        if stat is not None and [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns] != recorded:
            num_changed += 1
            continue
        try:
            (root / path).unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in DENIED:
                raise
            denied.append(f"{path}: {error.strerror}")
            continue
        num_gone += 1
        if path.startswith(f"{folder}/"):
            folders[os.path.dirname(path)] = folder  # noqa: PTH120 - 80,000 times
    _remove_empty(root, folders)
    return Removal(num_gone=num_gone, num_changed=num_changed, num_kept=num_kept, denied=tuple(denied))


def _taken_up(root: Path, intent: Intent) -> Iterator[str]:
    """Spools that were retired and that an extraction has taken up again: it removes the mark."""
    for path, _, folder, *_ in intent.names:
        is_mark = path == f"{folder}/{RETIRED_MARK}" and folder.startswith(f"{HOME / SPOOL}/")
        if is_mark and not (root / path).exists() and any((root / folder).glob("*.json*")):
            yield folder


def _held_rings(root: Path, intent: Intent) -> set[str]:
    """Rings that a process holds by now. None is taken after this look: a training first takes the lock that gc has."""
    return {name[2] for name in intent.names if name[1].startswith(RING_OWNER)} if ring_holder(root) else set()


def _remove_empty(root: Path, folders: dict[str, str]) -> None:
    """Folders that lost their last file, the inner ones first, up to the tree's own."""
    empty = set(folders)
    for inner, top in folders.items():
        while inner != top and inner.startswith(f"{top}/"):
            inner = os.path.dirname(inner)  # noqa: PLW2901, PTH120
            empty.add(inner)
    for folder in sorted(empty, key=len, reverse=True):
        with contextlib.suppress(OSError):  # not empty, not there, a mount point
            (root / folder).rmdir()


def remove_strays(root: Path, intent: Intent) -> None:
    """What DVC takes for objects by its place, and finds or not by its name."""
    for path, recorded in intent.strays.items():
        stray = cache_dir(root) / path
        found = lstat(stray)
        if found is not None and (found.st_dev, found.st_ino, found.st_size) == recorded:
            stray.unlink()


def lstat(path: str | Path) -> os.stat_result | None:
    """Of a name itself; None where there is none."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
