"""Between the states and DVC: their md5s handed over, and the spool given up once DVC holds the set.

A commit hashes every file that DVC's state does not know. The md5s were taken while the shards were written;
registering them before the commit saves reading a terabyte back (measured: 0 bytes of the shards instead of all).
DVC's state is an internal interface of a pinned DVC: where it is another one, nothing is registered and DVC hashes
by itself. An entry counts only for the inode, mtime and size it was made for: what is changed later is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.contracts import ShardManifest

HOME = Path(".eyas")
"""The working folder below a repository, in neither git nor DVC."""
LOCK_NAME = "extract.lock"
SPOOL = Path("spool")
RING = Path("ring")
"""Below the working folder: the shards that a streamed training has captured ahead, by identity."""
RING_LOCK = "ring.lock"
"""Held by a streamed training and by its capturing process, as long as one of them lives."""
SHARD_CACHE = HOME / "shard_cache"
"""Shards of a remote, by md5."""
RETIRED_MARK = "retired"
"""An empty file in a spool that was given up; gc deletes that spool, unless a capture takes it up before."""
SETTLED_SUFFIX = f".settled{fs.PART_SUFFIX}"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A shard as the manifest lists it, and nothing more: read in 80,000s by the guard."""

    path: str
    size_bytes: int
    md5: str


def is_dvc_repository(root: Path) -> bool:
    """Whether DVC manages the files below ``root``."""
    return (root / ".dvc").is_dir()


def hand_over(root: Path, manifest: ShardManifest, states: Path, manifest_path: Path) -> bool:
    """Tell DVC the md5 of every published file, so that its commit reads none of them.

    The files must lie under their published names; one whose size is not the manifest's is left out.

    Returns:
        Whether DVC took them; False outside a DVC repository and with a DVC that works otherwise.
    """
    if not is_dvc_repository(root):
        return False
    known = [(states / entry.path, entry.md5, entry.size_bytes) for entry in manifest.shards]
    known.append((manifest_path, fs.hash_file(manifest_path, "md5"), manifest_path.stat().st_size))
    return register(root, known)


def register(root: Path, known: Sequence[tuple[Path, str, int]]) -> bool:
    """Tell DVC the md5 of files, each with the size that it must still have; False when this DVC takes none."""

    def save(state: Any, localfs: Any) -> None:
        from dvc_data.hashfile.hash_info import HashInfo

        infos = [(str(path.absolute()), md5, size_bytes) for path, md5, size_bytes in known]
        rows = ((path, HashInfo("md5", md5), localfs.info(path), size_bytes) for path, md5, size_bytes in infos)
        state.save_many([(path, hashed, info) for path, hashed, info, size in rows if info["size"] == size], localfs)

    return _with_state(root, save) is not _NO_STATE


def known_md5s(root: Path, paths: Sequence[Path]) -> dict[Path, str]:
    """Files that DVC takes for unchanged since it learnt their md5, with that md5."""
    named = {str(path.absolute()): path for path in paths}

    def ask(state: Any, localfs: Any) -> dict[Path, str]:
        infos = {name: localfs.info(name) for name in named}
        answers = state.get_many(list(named), localfs, infos)
        return {named[name]: hashed.value for name, _, hashed in answers if hashed is not None and hashed.name == "md5"}

    known = _with_state(root, ask)
    return {} if known is _NO_STATE else known


_NO_STATE = object()


def _with_state(root: Path, use: Callable[[Any, Any], Any]) -> Any:
    """Run ``use(state, localfs)`` on DVC's state; ``_NO_STATE`` when this DVC has no such thing."""
    try:
        from dvc.exceptions import DvcException
        from dvc.repo import Repo
        from dvc_objects.fs.local import localfs
    except ImportError as error:
        return _log_no_state(error)
    try:
        with Repo(str(root)) as repo:  # DVC releases its lock while a stage's command runs
            return use(repo.state, localfs)
    except (DvcException, ImportError, AttributeError, TypeError, ValueError, OSError, sqlite3.Error) as error:
        return _log_no_state(error)


def _log_no_state(error: Exception) -> object:
    console.log(f"DVC's state cannot be used ({error!r}); DVC reads the shards once to commit them")
    return _NO_STATE


def dir_object(files: Iterable[StoredFile]) -> bytes:
    """What DVC's cache holds for a folder of these files."""
    listed = [{"md5": file.md5, "relpath": file.path} for file in sorted(files, key=lambda file: file.path)]
    return json.dumps(listed, sort_keys=True).encode()


def dir_md5(files: Iterable[StoredFile]) -> str:
    """The hash by which DVC names a folder of these files, ``.dir`` included."""
    return hashlib.md5(dir_object(files), usedforsecurity=False).hexdigest() + ".dir"


def stored_files(manifest: Mapping[str, Any]) -> list[StoredFile]:
    """The shards of a manifest that was only parsed, not rebuilt: 80,000 of them in a quarter of a second.

    Raises:
        KeyError, TypeError: It is no manifest.
    """
    return [StoredFile(entry["path"], entry["size_bytes"], entry["md5"]) for entry in manifest["shards"]]


def settle(home: Path, locked: Mapping[str, str], outs: tuple[str, str], cached: Callable[[str], str]) -> list[str]:
    """Remove the spools whose published set DVC holds: no byte is lost, each is in the cache under its hash.

    Args:
        home: The working folder, ``.eyas``; its lock must be held.
        locked: What ``dvc.lock`` names for the stage: path → md5.
        outs: States folder and manifest as ``dvc.lock`` spells them.
        cached: Where the cache keeps an object, by md5.

    Returns:
        Identities of the settled sets.
    """
    root = Path(home) / SPOOL
    folders = sorted(root.iterdir()) if root.is_dir() else []
    settled = []
    for folder in folders:
        if folder.name.endswith(SETTLED_SUFFIX):
            shutil.rmtree(folder)
        elif _holds(folder / "manifest.json", locked, outs, cached):
            # One rename first: half a spool would be taken for one to go on from.
            part = folder.with_name(folder.name + SETTLED_SUFFIX)
            folder.rename(part)
            shutil.rmtree(part)
            settled.append(folder.name)
    return settled


def _holds(manifest_path: Path, locked: Mapping[str, str], outs: tuple[str, str], cached: Callable[[str], str]) -> bool:
    """Whether ``dvc.lock`` names exactly this manifest and its shards, and the cache has all of them."""
    try:
        data = manifest_path.read_bytes()
        files = stored_files(json.loads(data))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    manifest_md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if (locked.get(outs[0]), locked.get(outs[1])) != (dir_md5(files), manifest_md5):
        return False
    whole = [*files, StoredFile(outs[1], len(data), manifest_md5)]
    return fs.size_or_none(cached(locked[outs[0]])) is not None and not not_cached(whole, cached)


def not_cached(files: Iterable[StoredFile], cached: Callable[[str], str]) -> list[StoredFile]:
    """Files whose cache object is missing or of another size."""
    return [file for file in files if fs.size_or_none(cached(file.md5)) != file.size_bytes]
