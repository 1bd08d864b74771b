"""The files of one output in DVC's cache: found by hash, restored from, and mended with their links.

Objects lie under ``files/md5/<first two digits>/<rest>``. The workspace's file is a hard link of its object where
the cache links; damage in place then hits both names, and both get the repaired file.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

from eyas import fs
from eyas.contracts import ShardEntry
from eyas.plan.cache import cache_dir, cache_types, hashes, locked_stage

STAGE = "extract"
LINK = "hardlink"
PART = f".eyas-repair{fs.PART_SUFFIX}"


class CacheLinks:
    """DVC's cache as far as the files of one output folder need it.

    Args:
        root: The repository; without ``.dvc`` nothing is cached.
        output: The folder, relative to the repository.
    """

    def __init__(self, root: Path, output: Path) -> None:
        self._objects = cache_dir(root) / "files/md5"
        self._links = LINK in cache_types(root)
        self._listed = self._read_listed(root, output)

    def object_path(self, md5: str) -> Path:
        """Where the cache keeps a file of this hash."""
        return self._objects / md5[:2] / md5[2:]

    def restore(self, md5: str, path: Path) -> bool:
        """Put the cache's object at ``path`` when it is intact and another file than what lies there."""
        cached = self.object_path(md5)
        if not cached.is_file() or (path.exists() and cached.samefile(path)) or not fs.has_md5(cached, md5):
            return False
        self._replace(cached, path)
        return True

    def place(self, new: Path, path: Path, entry: ShardEntry) -> None:
        """Put a repaired file at ``path``, and into the cache where DVC knows this file.

        A damaged object of an older hash that ``path`` was a link of stays: its content is named wrongly in the
        cache, and only ``dvc gc`` deletes there.
        """
        cached = self.object_path(entry.md5)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.stat().st_mode & stat.S_IWUSR:
            new.chmod(0o444)
        if cached.exists() or entry.md5 in self._listed:
            cached.parent.mkdir(parents=True, exist_ok=True)
            new.chmod(0o444)
            self._replace(new, cached)  # first: after a kill in between the shard is restored from here
        os.replace(new, path)
        fs.fsync_dir(path.parent)

    def _replace(self, source: Path, path: Path) -> None:
        """Make ``path`` a link of ``source``, or a copy where the cache does not link, in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + PART)
        part.unlink(missing_ok=True)
        try:
            with fs.disk_errors(path):
                if self._links:
                    os.link(source, part)
                else:
                    shutil.copy2(source, part)
                    fs.fsync_file(part)
                os.replace(part, path)
        except BaseException:  # in the states folder it would be a file that nobody lists
            part.unlink(missing_ok=True)
            raise
        fs.fsync_dir(path.parent)

    def _read_listed(self, root: Path, output: Path) -> frozenset[str]:
        """Hashes of the output's files by the ``.dir`` object that ``dvc.lock`` names; empty without one."""
        md5 = hashes(locked_stage(root, STAGE), "outs").get(output.as_posix(), "")
        if not md5.endswith(".dir"):
            return frozenset()
        try:
            return frozenset(str(item["md5"]) for item in json.loads(self.object_path(md5).read_bytes()))
        except (OSError, ValueError, TypeError, KeyError):  # not there, or damaged: `dvc commit` makes it again
            return frozenset()
