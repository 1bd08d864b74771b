"""One hashing pass over a folder: md5 of every file, in threads, written down as it goes.

``journal.jsonl`` has a line per file: path, size, mtime, inode and md5. A line counts as long as the file is still the
one that it was taken of; a run that was stopped hashes what has no such line, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from eyas import console, fs
from eyas.canonical import canonical_json
from eyas.errors import StoreError
from eyas.ops.adopt.source import FoundFile

JOURNAL = "journal.jsonl"
READ_BYTES = 1 << 20
SHOW_EVERY_S = 0.5
SYNC_EVERY_S = 1.0


def hash_files(folder: Path, files: Sequence[FoundFile], journal: Path, num_threads: int) -> dict[str, str]:
    """Md5 of every file by path; those that the journal has are not read.

    Args:
        folder: The files' folder.
        files: As they were found.
        journal: Read first, appended to.
        num_threads: Files hashed at a time; a file is one thread's.

    Raises:
        StoreError: A file cannot be read, or changed while it was.
        DiskError: No room for the journal; what was hashed before is kept.
    """
    known = read_journal(journal)
    md5s = {file.path: known[file] for file in files if file in known}
    left = [file for file in files if file not in known]
    if not left:
        return md5s
    if md5s:
        console.log(f"adopt: {len(md5s):,} of {len(files):,} files were hashed by an earlier run and did not change")
    num_bytes = sum(file.size_bytes for file in files)
    progress = console.Progress("adopt: hash", num_bytes, num_bytes - sum(file.size_bytes for file in left), unit="B")
    # Closed here, so that the threads have stopped before an error goes on.
    with _Journal(journal) as lines, contextlib.closing(_hash_all(folder, left, num_threads, progress)) as hashed:
        for file, md5 in hashed:
            md5s[file.path] = md5
            lines.append(file, md5)
    progress.close()
    return md5s


def read_journal(path: Path) -> dict[FoundFile, str]:
    """The md5 of every file that was hashed, as far as the lines are whole."""
    known: dict[FoundFile, str] = {}
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                value = json.loads(line)
                md5 = value.pop("md5")
                known[FoundFile(**value)] = md5
            except (ValueError, TypeError, KeyError, AttributeError):  # torn by a kill or a full disk
                continue
    return known


class _Journal:
    """Lines appended; on the disk every second and at the end, whatever ends it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Journal:
        with fs.disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self._path)
            self._handle: BinaryIO = self._path.open("ab", buffering=0)
        self._synced_s = time.monotonic()
        return self

    def append(self, file: FoundFile, md5: str) -> None:
        """Note one file."""
        with fs.disk_errors(self._path):
            line = (canonical_json(asdict(file) | {"md5": md5}) + "\n").encode()
            if self._handle.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._path))
            if time.monotonic() - self._synced_s > SYNC_EVERY_S:
                os.fsync(self._handle.fileno())
                self._synced_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        with fs.disk_errors(self._path), self._handle:
            os.fsync(self._handle.fileno())


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        lines = path.read_bytes()
        whole = lines.rfind(b"\n") + 1
        if whole != len(lines):
            os.truncate(path, whole)


def _hash_all(
    folder: Path, files: Iterable[FoundFile], num_threads: int, progress: console.Progress
) -> Generator[tuple[FoundFile, str]]:
    """Files with their md5 as they get ready; an error or Ctrl-C stops every thread within a megabyte."""
    stop, counted = threading.Event(), _Counter()
    queue = iter(files)
    pending: dict[Future[str], FoundFile] = {}
    with ThreadPoolExecutor(num_threads, "adopt-hash") as pool:
        try:
            while True:
                while len(pending) < 2 * num_threads and (file := next(queue, None)) is not None:
                    pending[pool.submit(_hash_file, folder / file.path, file, stop, counted)] = file
                if not pending:
                    return
                done, _ = wait(pending, SHOW_EVERY_S, FIRST_COMPLETED)
                progress.advance(counted.take())
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            stop.set()
            for future in pending:
                future.cancel()


class _Counter:
    """Bytes hashed since they were last asked for."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count

    def take(self) -> int:
        with self._lock:
            count, self._count = self._count, 0
        return count


def _hash_file(path: Path, file: FoundFile, stop: threading.Event, counted: _Counter) -> str:
    md5, buffer = hashlib.md5(usedforsecurity=False), bytearray(READ_BYTES)
    view = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while (count := handle.readinto(buffer)) and not stop.is_set():
                md5.update(view[:count])
                counted.add(count)
            # Hundreds of gigabytes would push everything else out of memory.
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = os.fstat(handle.fileno())
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}; every file before it is noted",
            "mend or move it, then run the same command again: it goes on from here",
        ) from error
    if (found.st_size, found.st_mtime_ns, found.st_ino) != (file.size_bytes, file.mtime_ns, file.inode):
        raise changed(path, file, found)
    return md5.hexdigest()


def changed(path: Path, file: FoundFile, found: os.stat_result) -> StoreError:
    """A file is not the one that was found: somebody writes."""
    return StoreError(
        f"{path} changes while it is adopted: {file.size_bytes:,} bytes before, {found.st_size:,} now, "
        f"{abs(found.st_mtime_ns - file.mtime_ns) / 1e9:,.3f} s between the two modifications",
        f"stop what writes there (`lsof {path}`), then run the same command again",
    )
