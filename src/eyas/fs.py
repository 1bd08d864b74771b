"""Files: atomic writes, hashes, sizes and the lock. Every write is temp, fsync, rename.

A reader of any path of ours sees the old content or the new one, never a part. ``ENOSPC`` becomes a
``DiskError`` and leaves no temp file behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from eyas.canonical import canonical_json, from_plain
from eyas.contracts import FileDigest
from eyas.errors import DiskError, EyasError, StoreError

Record = TypeVar("Record")
PART_SUFFIX = ".part"
ASIDE_SUFFIX = f".old{PART_SUFFIX}"
CHUNK_BYTES = 1 << 20
WRITEBACK_BYTES = 8 << 20
LOCK_COMMAND_CHARS = 300
FICLONE = 0x40049409
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_HARDLINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
"""What link(2) says where there are no links: two mounts, or a file system without them."""


def fsync_dir(folder: Path) -> None:
    """Make renames and new names inside a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk into a ``DiskError`` that names path and free bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = free_bytes(path.parent if path.parent.exists() else Path.cwd())
        raise DiskError(
            f"disk full while writing {path}: {free:,} bytes free; nothing was published",
            "free space (`df -h .`), then run the same command again; it goes on from here",
        ) from error


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing so that it appears whole or not at all, also after a crash.

    Raises:
        DiskError: The volume is full; the temp file is removed.
    """
    path = Path(path)
    part = path.with_name(path.name + PART_SUFFIX)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


def write_all(handle: BinaryIO, buffers: Iterable[bytes | memoryview]) -> None:
    """Write buffers one after another, the disk at work all the while.

    Dirty pages would wait for the fsync at the end, which then takes as long as the whole file. The advice
    starts their way to the disk at once, and lets those go that arrived: a terabyte pushes nothing else out.
    """
    begin = end = handle.tell()
    for buffer in buffers:
        end += handle.write(buffer)
        if end - begin >= WRITEBACK_BYTES:
            handle.flush()
            os.posix_fadvise(handle.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
            begin = end


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_writer(path) as handle:
        handle.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file atomically, UTF-8."""
    write_bytes(path, text.encode())


def write_record(path: Path, record: Any) -> None:
    """Write a record (or plain value) as canonical JSON with a final newline."""
    write_text(path, canonical_json(record) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        StoreError: The file is missing, unreadable or no JSON.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - whoever opens a pipe waits for ever
            raise StoreError(f"{path} is no regular file", f"look at it: `ls -ld {path}`")
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path} is missing", "run `make repro`, or `dvc checkout` if it was made before") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}", f"look at it: `ls -ld {path}`") from None
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and numbers of 5,000 digits
        raise StoreError(f"{path} is no JSON: {error}", f"remove it and run `make repro` ({path})") from None


def read_record(kind: type[Record], path: Path) -> Record:
    """Read a record back, strictly.

    Raises:
        StoreError: The file is missing, is no JSON, or is not such a record.
    """
    value = read_json(path)
    try:
        return from_plain(kind, value)
    except ValueError as error:
        raise StoreError(
            f"{path} is no {kind.__name__}: {error}", "it was made by another version: run the stage again"
        ) from None


@contextlib.contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield an empty sibling folder that replaces ``path`` when the block ends without an error.

    What was there is renamed aside before it is removed: a kill never leaves half of it under its name.
    """
    path = Path(path)
    part, aside = (path.with_name(path.name + suffix) for suffix in (PART_SUFFIX, ASIDE_SUFFIX))
    with disk_errors(path):
        _remove(part)
        _remove(aside)
        part.mkdir(parents=True)
        try:
            yield part
            for folder, _, names in os.walk(part):
                for name in names:
                    fsync_file(Path(folder) / name)
                fsync_dir(Path(folder))
            if path.exists():
                os.replace(path, aside)
            os.replace(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        fsync_dir(path.parent)
        _remove(aside)


def _remove(path: Path) -> None:
    """Remove a folder or a file, there or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def walk_files(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files below a folder, links included, by their path relative to it; none where there is no folder."""
    start = len(f"{folder}{os.sep}")
    queue = [os.fspath(folder)] if folder.is_dir() else []
    while queue:
        with os.scandir(queue.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    queue.append(entry.path)
                else:
                    yield entry.path[start:], entry


def link_tree(source: Path, folder: Path, paths: Iterable[str]) -> None:
    """Make ``folder`` anew with hardlinks to files of ``source``, durably; nothing of it stays on an error.

    Raises:
        OSError: Links are impossible here (``NO_HARDLINKS``), or the volume is full.
    """
    _remove(folder)
    try:
        folder.mkdir()
        made = set[str]()
        for path in paths:
            inner = os.path.dirname(path)  # noqa: PTH120 - 80,000 times
            if inner not in made:
                (folder / inner).mkdir(parents=True, exist_ok=True)
                made.add(inner)
            os.link(f"{source}{os.sep}{path}", f"{folder}{os.sep}{path}")
        for inner, _, _ in os.walk(folder):
            fsync_dir(Path(inner))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def size_or_none(path: str | Path) -> int | None:
    """Bytes of a file; None when there is none."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - asked for 80,000 files, and a Path is dearer than the call
    except (FileNotFoundError, NotADirectoryError):
        return None


def fsync_file(path: Path) -> None:
    """Make a written file's content durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, algorithm).hexdigest()


def hash_bytes(data: bytes, algorithm: str = "sha256") -> str:
    """Hex digest of bytes; md5 is DVC's name for content here, not a protection."""
    return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()


def has_md5(path: Path, md5: str) -> bool:
    """Whether a file's content has this md5; what the disk cannot read has none."""
    try:
        return hash_file(path, "md5") == md5
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


def file_digest(path: Path, root: Path) -> FileDigest:
    """Path relative to root, size and SHA-256 of one file."""
    return FileDigest(path=path.relative_to(root).as_posix(), size_bytes=path.stat().st_size, sha256=hash_file(path))


def tree_digests(root: Path) -> tuple[FileDigest, ...]:
    """Digest of every file below a folder, sorted by path."""
    return tuple(file_digest(path, root) for path in sorted(root.rglob("*")) if path.is_file())


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user can still write on the volume that holds ``path``."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def can_hardlink(source_folder: Path, other_folder: Path) -> bool:
    """Whether a file of one folder can be linked into another: really links one, then removes both.

    Folders that do not exist yet are tried at their nearest existing parent.
    """
    name = f".eyas-link-probe-{os.getpid()}"
    source, link = _existing(source_folder) / name, _existing(other_folder) / f"{name}.link"
    try:
        source.write_bytes(b"")
        os.link(source, link)
    except OSError as error:
        if error.errno not in NO_HARDLINKS:
            raise
        return False
    finally:
        link.unlink(missing_ok=True)
        source.unlink(missing_ok=True)
    return True


def can_reflink(source_folder: Path, other_folder: Path) -> bool:
    """Whether a file of one folder can share its blocks with one of another: really tries, then removes both.

    Folders that do not exist yet are tried at their nearest existing parent; where nothing can be written, the
    answer is no.
    """
    name = f".eyas-reflink-probe-{os.getpid()}"
    source, clone = _existing(source_folder) / name, _existing(other_folder) / f"{name}.clone"
    try:
        source.write_bytes(bytes(4096))
        with open(source, "rb") as old, open(clone, "wb") as new:
            fcntl.ioctl(new, FICLONE, old.fileno())
    except OSError:
        return False
    finally:
        for path in (clone, source):
            with contextlib.suppress(OSError):
                path.unlink()
    return True


def device(path: Path) -> int:
    """Number of the file system that holds a path, or would hold it."""
    return _existing(path).stat().st_dev


def _existing(folder: Path) -> Path:
    folder = Path(folder).absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


@contextlib.contextmanager
def volume_lock(path: Path, what: str) -> Iterator[int]:
    """Hold an exclusive flock; the file says who holds it: what, pid, since when, host and command.

    Yields the descriptor: a child that gets it holds the lock as well.

    A flock is the kernel's: it holds across containers and PID namespaces on one machine, and ends with its holder.

    Raises:
        EyasError: Somebody else holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise EyasError(
                f"{path} is locked by {handle.read().strip() or 'another process'}",
                "wait for it, or stop that process",
            ) from None
        handle.truncate(0)
        with contextlib.suppress(OSError):  # on a full disk nobody is told who holds it: what makes room needs it too
            os.write(handle.fileno(), _holder(what).encode())
        yield handle.fileno()


def lock_holder(path: Path) -> str:
    """Who holds a ``volume_lock``; empty when nobody does."""
    try:
        with open(path) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return handle.read().strip() or "another process"
    except FileNotFoundError:
        pass
    return ""


def _holder(what: str) -> str:
    since, command = time.strftime("%Y-%m-%d %H:%M:%S"), shlex.join(sys.orig_argv)[:LOCK_COMMAND_CHARS]
    holder = f"{what}, pid {os.getpid()}, since {since}, on {socket.gethostname()}: {command}"
    return holder.encode(errors="backslashreplace").decode()  # a path of another encoding
