"""The published hidden states as they lie there: what the manifest says, what the disk has, what DVC last proved.

Everything here is read from small files and ``stat``: nothing imports torch or DVC, no state is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.canonical import digest
from eyas.errors import StoreError
from eyas.plan.cache import at_key, hashes, locked_stage, object_finder, read_yaml
from eyas.shards.handover import HOME, StoredFile, dir_md5, not_cached, stored_files

STATES, MANIFEST, PLAN = "data/hidden_states", "data/hidden_states.json", "data/plan.json"
OUTS = (STATES, MANIFEST)
RECORD = HOME / "guard.json"
FileStat = tuple[int, int, int]
"""Inode, mtime in nanoseconds, size: what DVC's own state recognises an unchanged file by."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A manifest, parsed but not rebuilt record by record."""

    identity: str
    capture: dict[str, Any]
    num_planned: tuple[int, int]
    """Samples and tokens."""
    num_stored: tuple[int, int]
    num_failed: int
    num_bytes: int
    files: tuple[StoredFile, ...]
    manifest: StoredFile
    """The manifest itself, as a file."""

    @property
    def all_files(self) -> tuple[StoredFile, ...]:
        """The shards, then the manifest."""
        return (*self.files, self.manifest)

    @functools.cached_property
    def states_md5(self) -> str:
        """The hash by which DVC names the folder of shards."""
        return dir_md5(self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What ``data/plan.json`` asks for."""

    identity: str
    capture: dict[str, Any]
    num_planned: tuple[int, int]
    paths: frozenset[str]


def read_published(path: Path) -> Published | None:
    """Read a manifest; None when there is none.

    Raises:
        StoreError: It is no manifest.
    """
    if not path.exists():
        return None
    value, data = fs.read_json(path), path.read_bytes()
    try:
        return Published(
            identity=value["identity"],
            capture=value["capture"],
            num_planned=(value["num_planned_samples"], value["num_planned_tokens"]),
            num_stored=(value["num_stored_samples"], value["num_stored_tokens"]),
            num_failed=len(value["failed"]),
            num_bytes=value["stored_bytes"],
            files=tuple(stored_files(value)),
            manifest=StoredFile(MANIFEST, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest()),
        )
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is no manifest of hidden states: {error!r}", f"look at it: head -c 500 {path}"
        ) from None


def read_planned(path: Path) -> Planned:
    """Read the plan.

    Raises:
        StoreError: It is missing or no plan.
    """
    if not path.exists():
        raise StoreError(f"{path} is missing: nothing says which hidden states are wanted", "dvc repro plan")
    value = fs.read_json(path)
    try:
        return Planned(
            identity=value["identity"],
            capture=value["capture"],
            num_planned=(value["num_samples"], value["num_tokens"]),
            paths=frozenset(shard["path"] for shard in value["shards"]),
        )
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path} is no plan: {error!r}", "make it again: `dvc repro -f -s plan`") from None


def stat_tree(folder: Path) -> dict[str, FileStat]:
    """Every file below a folder by relative path; empty without the folder."""
    start = len(f"{folder}{os.sep}")
    return {entry.path[start:]: _key(entry.stat()) for entry in (_walk(str(folder)) if folder.is_dir() else ())}


def _key(stat: os.stat_result) -> FileStat:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _walk(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            else:
                yield entry


def is_locked(root: Path, published: Published) -> bool:
    """Whether ``dvc.lock`` names exactly these states and this manifest."""
    outs = hashes(locked_stage(root, "extract"), "outs")
    return (outs.get(STATES), outs.get(MANIFEST)) == (published.states_md5, published.manifest.md5)


def lost_objects(root: Path, published: Published) -> list[StoredFile]:
    """Files that DVC's cache lacks, or has in another size."""
    return not_cached(published.all_files, object_finder(root))


def _stage_is_current(root: Path) -> bool:
    """Whether DVC has no reason outside the outputs to run ``extract``, given that ``plan`` is up to date.

    Command, names of dependencies and parameters are compared with ``dvc.yaml``, the parameters' values with
    ``params.yaml``. The dependencies' hashes are compared with those that ``dvc.lock`` has for stage ``plan``:
    ``dvc repro plan``, which the guard runs before, has just made sure that these are the files' own.
    """
    stages = read_yaml(root / "dvc.yaml").get("stages", {})
    spec, entry, plan = stages.get("extract", {}), locked_stage(root, "extract"), locked_stage(root, "plan")
    params = read_yaml(root / "params.yaml")
    if not entry or set(spec) - {"desc"} != {"cmd", "deps", "params", "outs"} or "${" in str(spec):
        return False
    known = hashes(plan, "deps") | hashes(plan, "outs")
    deps = hashes(entry, "deps")
    return (
        entry.get("cmd") == spec["cmd"]
        and set(deps) == set(spec["deps"])
        and all(md5 and md5 == known.get(path) for path, md5 in deps.items())
        and set(hashes(entry, "outs")) == set(spec["outs"]) == set(OUTS)
        and entry.get("params") == {"params.yaml": {name: at_key(params, name) for name in spec["params"]}}
    )


def remember(root: Path, published: Published) -> None:
    """Note what DVC has just found to be up to date, so that the next look takes a second.

    To be called right after DVC said so. What is noted is what DVC's state keeps as well: inode, mtime and size
    of every file, here and in the cache.
    """
    files = _fingerprint(root, published)
    if files is not None and is_locked(root, published):
        fs.write_record(root / RECORD, {"stage": digest(locked_stage(root, "extract")), "files": files})


def is_proven(root: Path, published: Published) -> bool:
    """Whether DVC would find stage ``extract`` up to date, without asking it.

    True only when DVC said so before and nothing that it looks at has changed since: the stage's command,
    parameters and dependencies; the hashes in ``dvc.lock``, which are those of this very manifest and of the
    folder it lists; inode, mtime and size of every file in the workspace and of every object in the cache.
    That is the rule by which DVC itself takes a file for unchanged; only the database is not opened.
    """
    path = root / RECORD
    if not path.exists():
        return False
    try:
        noted = json.loads(path.read_bytes())
    except ValueError:
        return False
    return (
        _stage_is_current(root)
        and is_locked(root, published)
        and noted == {"stage": digest(locked_stage(root, "extract")), "files": _fingerprint(root, published)}
    )


def _fingerprint(root: Path, published: Published) -> str | None:
    """Digest of (inode, mtime, size) of every file and of its cache object; None when something is not there."""
    there, cached = stat_tree(root / STATES), object_finder(root)
    if there.keys() != {file.path for file in published.files}:
        return None
    try:
        md5s = [published.states_md5, *(file.md5 for file in published.all_files)]
        objects = [_key(os.stat(cached(md5))) for md5 in md5s]  # noqa: PTH116 - 80,000 Path objects cost half a second
        objects.append(_key((root / MANIFEST).stat()))
    except FileNotFoundError:
        return None
    return hashlib.sha256(json.dumps([sorted(there.items()), objects]).encode()).hexdigest()


def differing_fields(stored: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Fields of the capture identity that differ: name, stored, wanted; options one by one."""
    old, new = _flat(stored), _flat(wanted)
    return [(key, old.get(key, "-"), new.get(key, "-")) for key in sorted(old | new) if old.get(key) != new.get(key)]


def _flat(capture: dict[str, Any]) -> dict[str, str]:
    options = capture.get("engine_options", {})
    rest = {key: value for key, value in capture.items() if key != "engine_options"}
    return {
        key: _short(value) for key, value in (rest | {f"engine_options.{k}": v for k, v in options.items()}).items()
    }


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:16]}…" if isinstance(value, str) and len(text) == 64 else text


def strangers(found: dict[str, FileStat], files: Sequence[StoredFile]) -> list[str]:
    """Files in the states folder that the manifest does not list."""
    return sorted(set(found) - {file.path for file in files})
