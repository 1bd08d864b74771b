"""The arena: a file in shared memory that a server's plugin writes into, and who has which part of it.

The file is allocated to the last page before anybody writes: a page that is missing later would end the server by a
signal, in the middle of a batch. Its name goes as soon as both sides have it mapped: its memory ends with them then,
however they end. Until then it is locked, so that a left-over is known by its lock and not by a process number, which
other containers count differently.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path

from eyas import console
from eyas.engines.sglang import wire
from eyas.errors import DiskError

SHM = Path("/dev/shm")  # noqa: S108 - shared memory, not a temporary file
PREFIX = "eyas-arena-"
DEFAULT_BYTES = 4 << 30
VARIABLE = "EYAS_SHM_BYTES"
MORE = "give the container more shared memory: docker run --shm-size=16g, or --ipc=host"


class Slots:
    """First fit over the ranges of an arena.

    Args:
        num_bytes: Of the arena.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)]
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Of all free ranges together."""
        return sum(end - begin for begin, end in self._free)

    def take(self, num_bytes: int) -> int | None:
        """Offset of a free range of this size, a multiple of ``wire.ALIGN``; None when there is none."""
        size = -(-num_bytes // wire.ALIGN) * wire.ALIGN
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                self._taken[begin] = size
                return begin
        return None

    def give_back(self, offset: int) -> None:
        """Free what ``take`` gave."""
        begin, end = offset, offset + self._taken.pop(offset)
        after = [span for span in self._free if span[0] >= end]
        before = [span for span in self._free if span[1] <= begin]
        if before and before[-1][1] == begin:
            begin = before.pop()[0]
        if after and after[0][0] == end:
            end = after.pop(0)[1]
        self._free = [*before, (begin, end), *after]


class Arena:
    """A shared memory file of this process, gone when it is closed.

    Args:
        num_bytes: Its size.
        folder: A folder in memory.

    Raises:
        DiskError: There is not so much shared memory.
    """

    def __init__(self, num_bytes: int, folder: Path = SHM) -> None:
        remove_leftovers(folder)
        self.num_bytes = num_bytes
        self._map: mmap.mmap | None = None
        self.path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.posix_fallocate(self._fd, 0, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes)
            self.memory = memoryview(self._map)
        except OSError as error:
            self.close()
            raise DiskError(
                f"{folder}: no {console.human_bytes(num_bytes)} of shared memory for hidden states: {error.strerror}",
                f"{MORE}; or less by {VARIABLE}",
            ) from error

    def hide(self) -> None:
        """Remove the file's name; whoever has it mapped keeps it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the file and give its memory back, as far as nobody else has it mapped. Safe to call twice.

        At once, not when Python collects a session that failed: the next one allocates as much again.
        """
        if self._fd < 0:
            return
        self.hide()
        if self._map is not None:
            self.memory.release()
            self._map.close()
        os.close(self._fd)
        self._fd = -1


def remove_leftovers(folder: Path = SHM) -> None:
    """Remove the arenas of processes that ended without closing them: those that nobody holds locked."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone by now
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def free_shm_bytes(folder: Path = SHM) -> int:
    """Free shared memory."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def arena_bytes(longest_bytes: int, total_bytes: int, free_bytes: int) -> int:
    """How large the arena becomes.

    ``EYAS_SHM_BYTES``, else 4 GiB but at most half of what is free and no more than all samples need; never less than
    two of the longest samples, so that one can be tried again beside another.

    Args:
        longest_bytes: Slot of the longest sample.
        total_bytes: Slots of all samples.
        free_bytes: Free shared memory.

    Raises:
        DiskError: Two of the longest samples do not fit, or not what the variable asks for.
    """
    human, least = console.human_bytes, 2 * longest_bytes + wire.ALIGN
    text = os.environ.get(VARIABLE, "")
    if text and not text.isdecimal():
        raise DiskError(f"{VARIABLE}: {text!r}, expected a number of bytes", f"unset {VARIABLE}")
    wanted = int(text) if text else max(least, min(DEFAULT_BYTES, free_bytes // 2, total_bytes + least))
    if wanted < least:
        raise DiskError(
            f"{VARIABLE}: {human(wanted)}, expected at least {human(least)}: two of the longest samples",
            f"unset {VARIABLE}, or lower tokenize.max_tokens",
        )
    if wanted > free_bytes:
        raise DiskError(f"{SHM} has {human(free_bytes)} free, the capture needs {human(wanted)} of shared memory", MORE)
    return -(-wanted // wire.ALIGN) * wire.ALIGN
