"""Second names for adopted files: in DVC's cache under their md5, and in ``adopted/<name>/``. Never a copy.

A hard link is another name of the same inode; a reflink (FICLONE) another inode over the same disk blocks. Which of
the two is tried on a real file before anything is hashed: only then it is known what mount and owner allow.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from eyas import fs
from eyas.errors import DiskError, StoreError
from eyas.generations.trees import ADOPTED
from eyas.ops.adopt.hashing import changed
from eyas.ops.adopt.source import FoundFile, FoundFolder
from eyas.plan.cache import cache_dir, cache_types, object_finder
from eyas.shards import handover

Way = Literal["hardlink", "reflink"]
WAYS: tuple[Way, ...] = ("hardlink", "reflink")
NO_REFLINKS = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM)
PROTECTED = 0o444
"""Mode of DVC's own objects, which it then takes for whole."""


def choose_ways(root: Path, found: FoundFolder) -> tuple[Way, Way]:
    """How files get into the cache, and from there into the workspace: really tried, in the order of ``cache.type``.

    Raises:
        DiskError: Neither is possible, so that only a copy would be left.
    """
    cache, sample = cache_dir(root), found.path / found.files[0].path
    types = cache_types(root)
    order = sorted(WAYS, key=lambda way: types.index(way) if way in types else len(types))
    with fs.disk_errors(cache):
        for folder in (cache, root / ADOPTED):
            folder.mkdir(parents=True, exist_ok=True)
    into_cache = _first_way(order, sample, cache)
    probe = cache / f".eyas-adopt-probe{fs.PART_SUFFIX}"
    probe.write_bytes(b"")
    try:
        out_of_cache = _first_way(order, probe, root / ADOPTED)
    finally:
        probe.unlink()
    for way, source, folder in ((into_cache, found.path, cache), (out_of_cache, cache, (root / ADOPTED).resolve())):
        if way is None:
            raise DiskError(
                f"files of {source} can be neither hard-linked nor reflinked into {folder}; a copy would need "
                f"{found.num_bytes:,} bytes more, and eyas makes none",
                "folder, repository and cache must lie on one file system that has links, under one mount (in a "
                "container: mount the folder that holds all three once); keep this repository there: git clone",
            )
    assert into_cache is not None
    assert out_of_cache is not None
    return into_cache, out_of_cache


def _first_way(order: Sequence[Way], source: Path, folder: Path) -> Way | None:
    probe = folder / f".eyas-adopt-try{fs.PART_SUFFIX}"
    for way in order:
        probe.unlink(missing_ok=True)
        try:
            with fs.disk_errors(probe):
                _make(way, source, probe)
        except OSError as error:
            if error.errno not in (fs.NO_HARDLINKS if way == "hardlink" else NO_REFLINKS):
                raise
        else:
            return way
        finally:
            probe.unlink(missing_ok=True)
    return None


def _make(way: Way, source: Path, path: Path) -> None:
    """``path``, which must not be there, as a link or reflink of ``source``; durable but for its name."""
    if way == "hardlink":
        os.link(source, path)
        return
    with open(source, "rb") as old, open(path, "xb") as new:
        fcntl.ioctl(new, fs.FICLONE, old.fileno())
        os.fsync(new.fileno())


class Placer:
    """Gives the files of a hashed folder their second and third names.

    Args:
        root: The repository.
        found: The folder.
        md5s: Of every file, by path.
        ways: Into the cache, out of the cache.
        copy: ``adopted/<name>``.
    """

    def __init__(
        self, root: Path, found: FoundFolder, md5s: Mapping[str, str], ways: tuple[Way, Way], copy: Path
    ) -> None:
        self._found, self._md5s, self._copy = found, md5s, copy
        self._into_cache: Way = ways[0]
        self._out_of_cache: Way = ways[1]
        self._cached = object_finder(root)
        there = [path for path in map(self._second, found.files) if path.exists()]
        self._known = handover.known_md5s(root, there) if there else {}
        self._touched: set[Path] = set()
        self._own: dict[str, set[int]] = {}
        for file in found.files:
            self._own.setdefault(md5s[file.path], set()).add(file.inode)
        self._placed: set[str] = set()
        self.num_shared_bytes = 0
        """Of files whose content the cache had under another inode: they lie on the disk twice until gc."""

    def place_all(self) -> None:
        """Place every file; one that has its names already keeps them.

        Raises:
            StoreError: A file changed since it was hashed, or the copy holds something else.
            DiskError: The volume is full; the same command goes on.
        """
        self._refuse_strangers()
        with fs.disk_errors(self._copy):
            self._copy.mkdir(parents=True, exist_ok=True)
            for file in self._found.files:
                md5 = self._md5s[file.path]
                self._into_the_cache(file, md5)
                self._out_of_the_cache(file, md5)
            for folder in self._touched:
                fs.fsync_dir(folder)

    def _second(self, file: FoundFile) -> Path:
        return self._copy / file.path

    def _refuse_strangers(self) -> None:
        names = {file.path for file in self._found.files}
        there = (path.relative_to(self._copy).as_posix() for path in self._copy.rglob("*") if not path.is_dir())
        strange = sorted(path for path in there if path not in names)
        if strange:
            raise StoreError(
                f"{self._copy} holds {len(strange):,} files that {self._found.path} does not: {strange[0]}",
                "take another name: NAME=",
            )

    def _into_the_cache(self, file: FoundFile, md5: str) -> None:
        source, target = self._found.path / file.path, Path(self._cached(md5))
        found = source.stat()
        if (found.st_size, found.st_mtime_ns, found.st_ino) != (file.size_bytes, file.mtime_ns, file.inode):
            raise changed(source, file, found)
        there = self._stat_whole(target, md5, file.size_bytes)
        if there is not None:
            if there.st_ino != file.inode and self._into_cache == "hardlink":
                self.num_shared_bytes += file.size_bytes
        else:
            self._folder(target.parent)
            self._protect_and_replace(source, target, target.with_name(target.name + fs.PART_SUFFIX))
        if there is None or stat.S_IMODE(there.st_mode) != PROTECTED:
            target.chmod(PROTECTED)
        self._placed.add(md5)

    def _stat_whole(self, target: Path, md5: str, size_bytes: int) -> os.stat_result | None:
        """An object that is there and is what its name says; None for none and for a damaged one."""
        try:
            there = target.stat()
        except FileNotFoundError:
            return None
        is_ours = md5 in self._placed or (self._into_cache == "hardlink" and there.st_ino in self._own[md5])
        return there if there.st_size == size_bytes and (is_ours or fs.has_md5(target, md5)) else None

    def _out_of_the_cache(self, file: FoundFile, md5: str) -> None:
        target, second = Path(self._cached(md5)), self._second(file)
        try:
            there = second.lstat()
        except FileNotFoundError:
            self._folder(second.parent)
            # Beside the copy: inside it DVC would list a half file.
            part = self._copy.with_name(self._copy.name + fs.PART_SUFFIX)
            try:
                self._replace(self._out_of_cache, target, second, part)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                # An object of 65,000 names takes no more (ext4); this file's own content is the same.
                self._protect_and_replace(self._found.path / file.path, second, part)
            return
        same = stat.S_ISREG(there.st_mode) and (
            target.samefile(second) or self._known.get(second) == md5 or fs.has_md5(second, md5)
        )
        if not same:
            raise StoreError(
                f"{second} has another content than {self._found.path}; it was not touched",
                f"look at both, then move it away, or take another name: NAME= ({second})",
            )

    def _protect_and_replace(self, source: Path, path: Path, part: Path) -> None:
        """Make ``path`` of a file of the folder."""
        if self._into_cache == "hardlink" and stat.S_IMODE(source.stat().st_mode) != PROTECTED:
            source.chmod(PROTECTED)  # before it has its new name: no writer opens it from here on
        self._replace(self._into_cache, source, path, part)

    def _replace(self, way: Way, source: Path, path: Path, part: Path) -> None:
        """Make ``path`` in one step, over what is there."""
        part.unlink(missing_ok=True)
        try:
            _make(way, source, part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        self._touched.add(path.parent)

    def _folder(self, folder: Path) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._touched.update(path.parent for path in missing)


def check_unchanged(before: FoundFolder, after: FoundFolder) -> None:
    """Refuse a folder that somebody wrote to while it was adopted.

    Raises:
        StoreError: Files came, went or changed.
    """
    old, new = ({file.path: file for file in found.files} for found in (before, after))
    differing = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    if differing:
        raise StoreError(
            f"{before.path} changed while it was adopted: {len(differing):,} files came, went or were written to "
            f"({differing[0]})",
            "stop what writes there, then run the same command again: what did not change is not hashed again",
        )
