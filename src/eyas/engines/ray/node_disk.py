"""The disk that a worker writes to: the shared volume, or with ``EYAS_RAY_SPOOL`` the node's own disk first.

    EYAS_RAY_SPOOL/<capture>-<worker>/…    one folder a worker, held by a lock of the kernel's on the folder itself

The lock ends with its process, however that ends: a folder that nobody holds was left by a killed worker, and the next
worker of that user on that node removes it, whatever capture it is of. Nothing there is ever taken up again. A worker that
makes its folder holds a lock on ``EYAS_RAY_SPOOL`` itself meanwhile: another user's worker can take that one too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from eyas import fs
from eyas.errors import DiskError, StoreError
from eyas.plan.watch import Watch

SPOOL_VARIABLE = "EYAS_RAY_SPOOL"
FOLDERS = "????????????????-w*-??????"
COPY_BYTES = 8 << 20


@contextlib.contextmanager
def own_folder(root: Path, name: str) -> Iterator[Path]:
    """A new folder on the node's own disk, removed at the end; what workers that are gone left is removed before.

    Raises:
        DiskError: Nothing can be written there, or it is relative: each node would take it below the shared repository.
    """
    if not root.is_absolute():
        raise DiskError(
            f"node {socket.gethostname()}: {SPOOL_VARIABLE}={root}, expected a path from / on",
            f"{SPOOL_VARIABLE}=/local/disk: a folder on the node's own disk, or unset it",
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        gate = os.open(root, os.O_RDONLY | os.O_DIRECTORY)  # no file: one user's is not another's to open
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)  # nobody looks between the making of a folder and its lock
            for left in root.glob(FOLDERS):
                _remove_left(left)
            folder = root / name
            folder.mkdir()
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(gate)
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) and not root.is_dir() else error.strerror
        raise DiskError(
            f"node {socket.gethostname()}: {SPOOL_VARIABLE}={root} cannot be written to: {reason}",
            f"name a folder on the node's own disk that its workers may write to (several users share one of mode 1777), or "
            f"unset {SPOOL_VARIABLE}",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_left(folder: Path) -> None:
    """Remove it unless somebody holds it, or it is another user's."""
    with contextlib.suppress(OSError):
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(found)


class WorkerWatch(Watch):
    """Guards the reserve where a worker writes; each look also shows that it goes on.

    Args:
        folder: Any on the volume.
        reserve_bytes: Must stay free.
        ratio: Expected bytes of a shard's states by its payload.
        moved: Told of every look.
        own: What ``EYAS_RAY_SPOOL`` names; empty on the shared volume.
    """

    def __init__(self, folder: Path, reserve_bytes: int, ratio: float, *, moved: Callable[[], None], own: str) -> None:
        super().__init__(folder, reserve_bytes, ratio)
        self._moved, self._own = moved, own

    def write(self, path: str, num_left_bytes: int) -> None:
        """As of ``Watch``."""
        self._moved()
        super().write(path, num_left_bytes)

    def _full(self, what: str, needed_bytes: int) -> DiskError:
        found = super()._full(what, needed_bytes)
        if not self._own:
            return found
        return DiskError(
            f"{SPOOL_VARIABLE}={self._own}: {found.message}",
            f"free space on that disk (`df -h {self._own}`), or unset {SPOOL_VARIABLE}; then run the same command again: "
            "it goes on from here",
        )


def copy_shard(source: Path, target: Path, md5: str, moved: Callable[[], None]) -> None:
    """Copy a shard's file; it appears whole or not at all. ``moved`` is told of every few MiB.

    Raises:
        StoreError: What was read is not what was written.
        DiskError: The volume is full.
    """
    hasher = hashlib.md5(usedforsecurity=False)
    with open(source, "rb") as read, fs.atomic_writer(target) as handle:
        while piece := read.read(COPY_BYTES):
            hasher.update(piece)
            fs.write_all(handle, [piece])
            moved()
        if hasher.hexdigest() != md5:
            raise StoreError(
                f"{source} has md5 {hasher.hexdigest()}, expected {md5}", f"look at that disk: df {source}"
            )
