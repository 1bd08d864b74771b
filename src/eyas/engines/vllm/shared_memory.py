"""The bounded folder in shared memory through which states come: its size, its owner, and what dead owners left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from eyas import config, console
from eyas.errors import ServerError

ROOT = Path("/dev/shm")  # noqa: S108 - a file system in memory, not a place for temporary files
PREFIX = "eyas-vllm-"
DEFAULT_BYTES = 4 << 30
YOUNG_S = 60
"""Younger folders may not be locked yet by their owners."""


def budget(longest_bytes: int, free_bytes: int) -> int:
    """Bytes that states waiting in shared memory may take: at least two of the longest sample.

    Args:
        longest_bytes: File of the longest sample.
        free_bytes: Of the volume, now.

    Raises:
        ServerError: Two of the longest do not fit; says what to change.
    """
    wanted = config.knob("EYAS_SHM_BYTES", min(DEFAULT_BYTES, free_bytes // 2))
    wanted = max(wanted, 2 * longest_bytes)
    if wanted > free_bytes:
        raise ServerError(
            f"{ROOT} has {console.human_bytes(free_bytes)} free, the capture needs {console.human_bytes(wanted)}: "
            f"at least two samples of {console.human_bytes(longest_bytes)}",
            f"mount -o remount,size=8G {ROOT}; for a container: --shm-size=8g; or lower EYAS_SHM_BYTES",
        )
    return wanted


class Folder:
    """A folder of our own below ``ROOT``, locked while we live."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=ROOT))
        self._lock_fd = os.open(self.path / "owner", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)

    def free_bytes(self) -> int:
        """Free bytes of the volume."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def remove(self) -> None:
        """Remove it with all that is in it; safe to call twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of owners that were killed."""
    for folder in ROOT.glob(PREFIX + "*"):
        try:
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < YOUNG_S:
                continue
            fd = os.open(folder / "owner", os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)
        console.log(f"vllm: {folder} is removed: its owner was killed")
