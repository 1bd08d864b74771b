"""Names outside the cache that hold a generation's bytes: the workspace, the spool, an adopted folder and its origin.

While one of them lives, deleting an object of the cache frees nothing. A tree is matched to its generation by what
eyas wrote beside it (manifest, journal of the adoption), never by guessing, and holds only files that are listed there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from eyas import fs
from eyas.generations.objects import BLOCK_BYTES
from eyas.generations.revisions import Revision
from eyas.generations.snapshot import LOCK
from eyas.shards.handover import HOME, RETIRED_MARK, SPOOL, dir_md5, stored_files

STATES_NAME = "hidden_states"
ADOPTED = Path("adopted")
IMPORTS = Path("imports")
ADOPTED_HOME = HOME / "adopted"
"""Facts of this machine about adoptions: ``<name>/origin.json`` holds ``generation`` (hash), ``folder`` (absolute),
``files`` (``path``, ``size_bytes``, ``inode`` and ``mtime_ns`` of each as it was linked) and ``witness``."""
SOURCE = "source.json"
RETIRED_HOME = HOME / "retired"
"""A file per generation that was retired and not collected yet, named by its hash."""
TreeKind = Literal["workspace", "spool", "adopted", "origin"]


class TreeFile(NamedTuple):
    """One name's ``stat``."""

    size_bytes: int
    disk_bytes: int
    device: int
    inode: int
    num_links: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class NameTree:
    """Files of one generation below one folder."""

    kind: TreeKind
    folder: Path
    generation: str
    """Hash of the folder as DVC names it; empty for a spool that is not complete."""
    identity: str
    """Capture identity; empty where nobody knows it."""
    files: dict[str, TreeFile]
    """Path relative to the folder → stat; of the listed files those that are there in their size."""
    num_listed: int
    manifest: Path | None = None
    is_retired: bool = False

    @property
    def disk_bytes(self) -> int:
        """Allocated blocks, each inode once."""
        return sum({(f.device, f.inode): f.disk_bytes for f in self.files.values()}.values())


def read_trees(root: Path, revisions: Iterable[Revision]) -> list[NameTree]:
    """Every tree of names that this repository knows of."""
    found = [_published(root, path) for path in _states_paths(root, revisions)]
    spools = sorted((root / HOME / SPOOL).iterdir()) if (root / HOME / SPOOL).is_dir() else []
    found += [_spool(folder) for folder in spools if folder.is_dir() and not folder.name.endswith(fs.PART_SUFFIX)]
    homes = sorted((root / ADOPTED_HOME).iterdir()) if (root / ADOPTED_HOME).is_dir() else []
    for home in homes:
        found += _adopted(root, home)
    return [tree for tree in found if tree is not None]


def is_imported(path: str) -> bool:
    """Whether states lie in a set of their own below ``imports/``."""
    return path.startswith(f"{IMPORTS}/")


def _states_paths(root: Path, revisions: Iterable[Revision]) -> list[str]:
    paths = {out.path for r in revisions for stage in r.stages for out in stage.outs}
    states = {path for path in paths if path.rpartition("/")[2] == STATES_NAME}
    imported = {path.relative_to(root).as_posix() for path in (root / IMPORTS).glob(f"*/{STATES_NAME}")}
    return sorted(states | imported | {f"data/{STATES_NAME}"})


def _published(root: Path, path: str) -> NameTree | None:
    """States in the workspace, as their manifest lists them."""
    manifest = root / f"{path}.json"
    value = _json(manifest)
    if value is None or not (root / path).is_dir():
        return None
    try:
        files = stored_files(value)
        identity = str(value["identity"])
    except (KeyError, TypeError):
        return None
    return NameTree(
        kind="workspace",
        folder=root / path,
        generation=dir_md5(files),
        identity=identity,
        files=_stat_listed(root / path, ((file.path, file.size_bytes) for file in files)),
        num_listed=len(files),
        manifest=manifest,
    )


def _spool(folder: Path) -> NameTree | None:
    """A spool: finished when its manifest is there, else as far as it got; None for one that holds nothing yet."""
    value = _json(folder / "manifest.json")
    states = folder / "states"
    listed: list[tuple[str, int]] = []
    generation = ""
    try:
        if value is not None:
            files = stored_files(value)
            listed, generation = [(file.path, file.size_bytes) for file in files], dir_md5(files)
    except (KeyError, TypeError):
        pass
    present: dict[str, TreeFile] = {}
    for path, entry in fs.walk_files(states):
        with contextlib.suppress(FileNotFoundError):  # an extraction renames its files meanwhile
            if entry.is_file(follow_symlinks=False):
                present[path] = tree_file(entry.stat())
    if listed:
        present = {path: present[path] for path, size in listed if path in present and present[path].size_bytes == size}
    is_retired = (folder / RETIRED_MARK).exists()
    if not listed and not present and not is_retired:
        return None
    return NameTree(
        kind="spool",
        folder=states,
        generation=generation,
        identity=folder.name,
        files=present,
        num_listed=len(listed) or len(present),
        is_retired=is_retired,
    )


def _adopted(root: Path, home: Path) -> list[NameTree]:
    """The copy below ``adopted/`` and the folder that it came from, as the adoption noted them."""
    value = _json(home / "origin.json")
    if value is None:
        return []
    try:
        generation, origin = str(value["generation"]), Path(value["folder"])
        listed = [(str(file["path"]), int(file["size_bytes"])) for file in value["files"]]
        # Who wrote to an origin's file since then meant something else with it.
        unchanged = {str(file["path"]): (int(file["inode"]), int(file["mtime_ns"])) for file in value["files"]}
    except (KeyError, TypeError, ValueError):
        return []
    if value.get("witness") != witness(home) or os.path.realpath(origin) != os.fspath(origin):
        unchanged = {}  # noted by the repository that this is a copy of; or moved, and a link put in its place
    trees = []
    places: tuple[tuple[TreeKind, Path], ...] = (("adopted", root / ADOPTED / home.name), ("origin", origin))
    for kind, folder in places:
        files = _stat_listed(folder, listed, unchanged if kind == "origin" else None)
        trees.append(
            NameTree(kind=kind, folder=folder, generation=generation, identity="", files=files, num_listed=len(listed))
        )
    return trees


def mark_retired(root: Path, generation: str) -> None:
    """Note that the workspace was told to give a generation up."""
    fs.write_text(root / RETIRED_HOME / generation, _lock_stamp(root))


def is_retired(root: Path, generation: str) -> bool:
    """Whether it was, and ``dvc.lock`` is as it was then: ``git checkout`` takes a retirement back, and not its mark."""
    try:
        return (root / RETIRED_HOME / generation).read_text() == _lock_stamp(root)
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return False


def _lock_stamp(root: Path) -> str:
    try:
        found = (root / LOCK).stat()
    except FileNotFoundError:
        return ""
    return f"{found.st_ino} {found.st_mtime_ns}"


def witness(home: Path) -> list[int]:
    """What no copy of a repository can have of an adoption's own file: its inode and its time of change.

    The origin's absolute name is in the copy too, and is not the copy's to delete.
    """
    try:
        found = (home / SOURCE).stat()
    except FileNotFoundError:
        return []
    return [found.st_ino, found.st_ctime_ns]


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _stat_listed(
    folder: Path, listed: Iterable[tuple[str, int]], unchanged: dict[str, tuple[int, int]] | None = None
) -> dict[str, TreeFile]:
    files: dict[str, TreeFile] = {}
    base = f"{folder}{os.sep}"
    for path, size_bytes in listed:
        try:
            found = os.stat(base + path, follow_symlinks=False)  # noqa: PTH116 - 80,000 times
        except (FileNotFoundError, NotADirectoryError):
            continue
        if found.st_size != size_bytes:
            continue
        if unchanged is not None and unchanged.get(path) != (found.st_ino, found.st_mtime_ns):
            continue
        files[path] = tree_file(found)
    return files


def tree_file(found: os.stat_result) -> TreeFile:
    """What is kept of a name's ``stat``."""
    return TreeFile(
        found.st_size, found.st_blocks * BLOCK_BYTES, found.st_dev, found.st_ino, found.st_nlink, found.st_mtime_ns
    )
