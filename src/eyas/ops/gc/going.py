"""What a gc takes away: objects of the cache that nothing kept names, and the names elsewhere that hold their bytes.

A name outside the cache goes only when its content is known to be a generation's that goes: it is the very inode of
the object, or a reflink of it, or DVC's state still knows its md5. What was changed since stays, and is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from eyas.errors import StoreError
from eyas.generations.listing import Situation
from eyas.generations.objects import DIR_SUFFIX, CachedObject
from eyas.generations.reclaim import removed_trees
from eyas.generations.trees import ADOPTED_HOME, STATES_NAME, NameTree, TreeFile, tree_file
from eyas.generations.working import SHARD
from eyas.shards.handover import RETIRED_MARK, known_md5s

RING_OWNER = "ring "


class GoingName(NamedTuple):
    """A name outside the cache that goes."""

    path: str
    """Relative to the repository; of an adopted folder's origin absolute."""
    generation: str
    """Whose bytes it holds: a hash, the identity of a spool, or that of a ring after ``RING_OWNER``."""
    folder: str
    """Removed as well, with the folders below it, once they are empty."""
    stat: TreeFile


@dataclass(frozen=True, kw_only=True)
class Going:
    """What goes, exactly."""

    objects: dict[str, CachedObject]
    strays: dict[str, CachedObject]
    """By path relative to the cache."""
    names: tuple[GoingName, ...]
    changed: tuple[str, ...]
    """Names that hold something else than was recorded, and stay."""

    @property
    def generations(self) -> set[str]:
        """Hashes of all folders whose list goes, and what names belong to."""
        return {name for name in self.objects if name.endswith(DIR_SUFFIX)} | {n.generation for n in self.names}


def going(found: Situation) -> Going:
    """Everything that a gc takes away as things are."""
    objects = {name: stat for name, stat in sorted(found.cache.objects.items()) if name not in found.kept.names}
    names: dict[str, GoingName] = {}
    changed: list[str] = []
    for tree in removed_trees(found):
        sure, doubtful = _tree_names(found, tree)
        names |= {name.path: name for name in sure}
        changed += doubtful
    for name in _without_manifest(found, objects, {name.generation for name in names.values()}):
        names.setdefault(name.path, name)
    for ring in found.working.idle:
        folder = below(found.root, ring.folder)
        # A shard without its record does not exist for whoever reads the ring: records go first.
        paths = sorted(ring.files, key=lambda path: (SHARD.fullmatch(path) is not None, path))
        listed = [GoingName(f"{folder}/{path}", RING_OWNER + ring.identity, folder, ring.files[path]) for path in paths]
        names |= {name.path: name for name in listed}
    return Going(
        objects=objects,
        strays=dict(sorted(found.cache.strays.items())),
        names=tuple(names.values()),
        changed=tuple(changed),
    )


def below(root: Path, folder: Path) -> str:
    """A folder relative to the repository; absolute where it lies elsewhere."""
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else os.fspath(folder.absolute())


def _tree_names(found: Situation, tree: NameTree) -> tuple[list[GoingName], list[str]]:
    """Names of a tree that go, its announcement first: shards without a manifest are no set. And those that stay."""
    owner, folder = tree.generation or tree.identity, below(found.root, tree.folder)
    names: list[GoingName] = []
    if tree.kind == "spool":
        home = tree.folder.parent
        folder = below(found.root, home)
        # The mark goes last: while it is there, no extraction has taken the spool up again.
        paths = sorted(_files(home), key=lambda path: (path == RETIRED_MARK, path != "manifest.json"))
        return [_name(found.root, f"{folder}/{path}", owner, folder) for path in paths], []
    if tree.manifest is not None:
        names.append(_name(found.root, below(found.root, tree.manifest), owner, folder))
    if tree.kind == "adopted":
        home = below(found.root, found.root / ADOPTED_HOME / tree.folder.name)
        names += [_name(found.root, f"{home}/{path}", owner, home) for path in _files(found.root / home)]
    sure, doubtful = _unchanged(found, tree)
    names += [GoingName(f"{folder}/{path}", owner, folder, tree.files[path]) for path in sure]
    return names, [f"{folder}/{path}" for path in doubtful]


def _unchanged(found: Situation, tree: NameTree) -> tuple[list[str], list[str]]:
    """Files that hold what was recorded, and files of which nobody knows it."""
    if tree.kind == "origin":  # listed only while inode and mtime are those of the adoption
        return list(tree.files), []
    listed = _list(found, tree.generation)
    sure, copies = set[str](), list[str]()
    for path, stat in tree.files.items():
        one, key = found.cache.objects.get(listed.get(path, "")), (stat.device, stat.inode)
        if one is not None and ((one.device, one.inode) == key or found.shared.is_same((one.device, one.inode), key)):
            sure.add(path)
        else:
            copies.append(path)
    if copies:
        known = known_md5s(found.root, [tree.folder / path for path in copies])
        sure |= {path for path in copies if known.get(tree.folder / path) == listed.get(path, "")}
    return [path for path in tree.files if path in sure], [path for path in copies if path not in sure]


def _without_manifest(found: Situation, objects: dict[str, CachedObject], done: set[str]) -> Iterator[GoingName]:
    """Hard links in the place of a folder that goes and has no manifest: states of another making."""
    places = {
        (out.name, out.path)
        for revision in found.revisions
        for stage in revision.stages
        for out in stage.outs
        if out.path.rpartition("/")[2] == STATES_NAME and out.name in objects and out.name not in done
    }
    for name, folder in sorted(places):
        if not name.endswith(DIR_SUFFIX) or not (found.root / folder).is_dir():
            continue
        base = f"{found.root / folder}{os.sep}"
        for path, hashed in _list(found, name).items():
            # An object that stays may be linked from another generation that lies in this place now.
            stat, one = _stat(base + path), objects.get(hashed)
            if stat is not None and one is not None and (one.device, one.inode) == (stat.device, stat.inode):
                yield GoingName(f"{folder}/{path}", name, folder, stat)


def _list(found: Situation, name: str) -> dict[str, str]:
    """A folder's list; empty where it is damaged: it goes, nobody needs it to be whole."""
    try:
        return found.cache.read_tree(name)
    except StoreError:
        return {}


def _files(folder: Path) -> list[str]:
    found = [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _name(root: Path, path: str, owner: str, folder: str) -> GoingName:
    stat = _stat(root / path)
    assert stat is not None, path
    return GoingName(path, owner, folder, stat)


def _stat(path: str | Path) -> TreeFile | None:
    try:
        return tree_file(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def stats(going: Going) -> Iterable[CachedObject | TreeFile]:
    """``stat`` of everything that goes."""
    yield from going.objects.values()
    yield from going.strays.values()
    yield from (name.stat for name in going.names)
