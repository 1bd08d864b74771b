"""Shards of a remote on this disk: at most so many bytes, the least recently read go first.

A shard is fetched whole when a sample of it is read, its md5 compared while it arrives; each block is checked again on
every read, so a file that was damaged here is dropped and fetched anew. Processes share the folder, in containers and on
hosts that mount it too: room is made and taken under a lock, and files being fetched count with their full size. Whoever
fetches a file holds a lock on it, which ends with its holder: a part that can be locked is nobody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import queue
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from eyas import config, fs
from eyas.contracts import ShardEntry, ShardManifest
from eyas.errors import ConfigError, EyasError, RemoteError, StoreError
from eyas.shards.handover import SHARD_CACHE
from eyas.shards.opening import open_shard
from eyas.shards.remote import RemoteStore

VARIABLE = "EYAS_SHARD_CACHE_BYTES"
LOCK_NAME = "lock"
FETCHES = 3
"""Of a shard whose md5 is not its name's, before it is given up."""
WAIT_S = 0.05
AHEAD_THREADS = 4
"""Shards fetched before they are read, at a time."""


class ShardCache:
    """A bounded folder of shards.

    Args:
        folder: Where they lie, by md5.
        max_bytes: Of all files together, those being fetched included.
        remote: Where they come from.
        largest_bytes: The largest shard that will be asked for.

    Raises:
        ConfigError: The largest shard does not fit.
    """

    def __init__(self, folder: Path, max_bytes: int, remote: RemoteStore, largest_bytes: int) -> None:
        if max_bytes < largest_bytes:
            raise ConfigError(
                f"EYAS_SHARD_CACHE_BYTES: {max_bytes:,}, expected at least {largest_bytes:,}: the largest shard",
                "a training reads from 32 shards at a time: room for 33 of them fetches each once an epoch",
            )
        self._folder, self._max_bytes, self._remote = folder, max_bytes, remote
        self._being_fetched: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._expected: dict[str, ShardEntry] = {}
        self._queue: queue.SimpleQueue[ShardEntry] = queue.SimpleQueue()
        self._ahead: list[threading.Thread] = []
        self.num_fetched_bytes = 0
        with fs.disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def open(self, entry: ShardEntry) -> open_shard:
        """An open file of a shard, fetched if it is not there; it stays readable when the name goes.

        Raises:
            RemoteError: The remote lacks it, does not answer, or has other bytes under its name.
            DiskError: The volume is full, or this process may open no more files.
            StoreError: It lies here and cannot be read.
        """
        path = self._folder / entry.md5
        while True:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)  # before it is opened: what is read now goes last
            if fs.size_or_none(path) == entry.size_bytes:
                try:
                    return open_shard(path, entry.path)
                except StoreError:
                    if path.exists():  # else another process made room
                        raise
            with self._being_fetched[entry.md5]:
                if fs.size_or_none(path) != entry.size_bytes:
                    self._fetch(entry, path)

    def expect(self, entry: ShardEntry) -> None:
        """Fetch a shard in the background that will be read soon; forgotten when half of the room is spoken for."""
        waiting = list(self._expected.values())
        if entry.md5 in self._expected or fs.size_or_none(self._folder / entry.md5) == entry.size_bytes:
            return
        if sum(one.size_bytes for one in waiting) + entry.size_bytes > self._max_bytes // 2:
            return
        self._expected[entry.md5] = entry
        self._queue.put(entry)
        if not self._ahead:  # daemons: the end of a training does not wait for what nobody will read
            self._ahead = [threading.Thread(target=self._fetch_ahead, daemon=True) for _ in range(AHEAD_THREADS)]
            for thread in self._ahead:
                thread.start()

    def _fetch_ahead(self) -> None:
        while True:
            entry = self._queue.get()
            with contextlib.suppress(EyasError):  # whoever reads the shard is told
                self.open(entry).__exit__()
            del self._expected[entry.md5]

    def drop(self, entry: ShardEntry) -> None:
        """Forget a shard whose file here is damaged."""
        (self._folder / entry.md5).unlink(missing_ok=True)

    def read(self, entry: ShardEntry, begin: int, end: int) -> bytes:
        """Some bytes of a shard from the remote; nothing is kept."""
        return self._remote.read(entry.md5, begin, end)

    def _fetch(self, entry: ShardEntry, path: Path) -> None:
        found = ""
        for _ in range(FETCHES):
            with fs.disk_errors(path), self._part(entry) as (part, handle):
                found = self._download(entry, handle)
                if found == entry.md5:
                    with self._locked():  # who counts the files meanwhile would see neither name
                        os.replace(part, path)
                    self.num_fetched_bytes += entry.size_bytes
                    return
        raise RemoteError(
            f"{entry.path}: remote {self._remote.name} holds bytes of md5 {found} under {entry.md5}",
            "the remote is damaged: `make verify ARGS=--remote` names what is; push it again from where it is whole",
        )

    def _download(self, entry: ShardEntry, handle: BinaryIO) -> str:
        md5 = hashlib.md5(usedforsecurity=False)
        for piece in self._remote.pieces(entry.md5, entry.size_bytes):
            md5.update(piece)
            handle.write(piece)
        handle.flush()
        return md5.hexdigest()

    @contextlib.contextmanager
    def _part(self, entry: ShardEntry) -> Iterator[tuple[Path, BinaryIO]]:
        """A file to fetch into, ours as long as it is open."""
        part = self._folder / f"{entry.md5}.{secrets.token_hex(4)}{fs.PART_SUFFIX}"
        with self._take_room(part, entry.size_bytes) as handle:
            try:
                yield part, handle
            finally:
                part.unlink(missing_ok=True)

    def _take_room(self, part: Path, num_bytes: int) -> BinaryIO:
        """Make room for a file and take it, by giving the empty file, locked, its full size."""
        while True:
            with self._locked():
                files = sorted(self._files(), key=lambda file: file[1])
                total = sum(size for _, _, size in files)
                for path, _, size in files:
                    if total + num_bytes <= self._max_bytes:
                        break
                    if path.suffix != fs.PART_SUFFIX:
                        path.unlink(missing_ok=True)
                        total -= size
                if total + num_bytes <= self._max_bytes:
                    handle = part.open("xb")
                    fcntl.flock(handle, fcntl.LOCK_EX)
                    handle.truncate(num_bytes)
                    return handle
            time.sleep(WAIT_S)  # others are fetching; each of them ends

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """Shards and parts with time of the last read and size; parts that nobody fetches are removed."""
        for entry in os.scandir(self._folder):
            path = Path(entry.path)
            if entry.name == LOCK_NAME:
                continue
            if path.suffix == fs.PART_SUFFIX and not _is_locked(path):
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                yield path, stat.st_mtime_ns, stat.st_size

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _is_locked(part: Path) -> bool:
    """Whether somebody fetches it, in whatever process, container or host."""
    with contextlib.suppress(FileNotFoundError), part.open("r+b") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def shard_cache(root: Path, manifest: ShardManifest) -> ShardCache | None:
    """The cache that ``EYAS_SHARD_CACHE_BYTES`` asks for; None when it is not set: shards lie in the workspace.

    Args:
        root: The repository; ``EYAS_SHARD_REMOTE`` names one of its remotes, or its default one is taken.
        manifest: Of the set that is read.

    Raises:
        ConfigError: The number is none, or too small.
        StoreError: There is no such remote.
    """
    if not os.environ.get(VARIABLE):
        return None
    largest = max((entry.size_bytes for entry in manifest.shards), default=0)
    remote = RemoteStore(root, os.environ.get("EYAS_SHARD_REMOTE", ""))
    return ShardCache(root / SHARD_CACHE, config.knob(VARIABLE, 1), remote, largest)
