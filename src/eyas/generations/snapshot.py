"""What DVC's files say at one revision: stages with their outputs, inputs and parameters.

``dvc.yaml`` says which stages and outputs there are and which are cached; ``dvc.lock`` their hashes; a ``.dvc`` file
says both for one folder. What ``dvc.lock`` still lists but ``dvc.yaml`` no longer has is not in use, for DVC too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from eyas.errors import StoreError
from eyas.generations.objects import LEGACY

PIPELINE, LOCK, SUFFIX = "dvc.yaml", "dvc.lock", ".dvc"
_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")
_LISTS = ("outs", "metrics", "plots")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedOut:
    """An output with a hash."""

    path: str
    """Relative to the repository."""
    name: str
    """Of its object in the cache."""
    size_bytes: int
    num_files: int
    is_cached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedStage:
    """A stage that has run, or a ``.dvc`` file."""

    name: str
    file: str
    """``dvc.lock`` or the ``.dvc`` file, relative to the repository."""
    outs: tuple[TrackedOut, ...]
    deps: Mapping[str, str]
    """Path → hash."""
    params: Mapping[str, Any]
    meta: Mapping[str, Any]
    """Of a ``.dvc`` file: what its owner notes there."""


Snapshot = tuple[TrackedStage, ...]


def is_metafile(name: str) -> bool:
    """Whether a file name is one that DVC reads stages from."""
    return name in (PIPELINE, LOCK) or (name.endswith(SUFFIX) and name != SUFFIX)


def parse_snapshot(files: Mapping[str, bytes]) -> Snapshot:
    """Stages of a revision from its metafiles: path relative to the repository → content.

    Raises:
        StoreError: One of them is not what DVC would write.
    """
    stages: list[TrackedStage] = []
    for path, data in sorted(files.items()):
        folder = posixpath.dirname(path)
        if path.endswith(SUFFIX):
            stages.append(_dvc_file(path, _load(path, data)))
        elif posixpath.basename(path) == PIPELINE:
            lock = posixpath.join(folder, LOCK)
            stages += _pipeline(folder, lock, _load(path, data), _load(lock, files.get(lock, b"")))
    return tuple(stages)


def _load(path: str, data: bytes) -> dict[str, Any]:
    try:
        # Of the safe loaders the one written in C, where there is one: 200 locks in one second instead of ten.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        value = yaml.load(data, Loader=loader) if data else {}  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise StoreError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise StoreError(f"{path} holds {type(value).__name__}, expected a mapping")
    return value


def _pipeline(folder: str, lock: str, spec: dict[str, Any], locked: dict[str, Any]) -> list[TrackedStage]:
    try:
        specs, entries = spec.get("stages") or {}, locked.get("stages") or {}
        found = []
        for name, entry in entries.items():
            # An item of `foreach` or `matrix` is locked as stage@item.
            stage = specs.get(name) or specs.get(name.split("@")[0])
            if stage is None:
                continue
            stage = stage.get("do", stage)
            base = posixpath.join(folder, stage.get("wdir") or ".")
            cached = _cached_paths(stage)
            found.append(
                TrackedStage(
                    name=name,
                    file=lock,
                    outs=tuple(_outs(lock, base, entry.get("outs") or [], cached)),
                    deps={_join(base, d["path"]): str(d.get("md5") or "") for d in entry.get("deps") or []},
                    params=(entry.get("params") or {}).get("params.yaml") or {},
                    meta={},
                )
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{lock} is not a lock of {posixpath.join(folder, PIPELINE)}: {error!r}") from None
    return found


def _cached_paths(stage: dict[str, Any]) -> dict[str, bool] | None:
    """Output as ``dvc.yaml`` spells it → whether DVC caches it; None when a template decides the spelling."""
    paths: dict[str, bool] = {}
    for kind in _LISTS:
        listed = stage.get(kind) or []
        for item in listed if isinstance(listed, list) else [listed]:
            for path, options in ({item: {}} if isinstance(item, str) else item).items():
                if "${" in str(path):
                    return None
                paths[str(path)] = (options or {}).get("cache", True)
    return paths


def _outs(file: str, base: str, listed: list[dict[str, Any]], cached: dict[str, bool] | None) -> list[TrackedOut]:
    outs = []
    for item in listed:
        md5 = str(item.get("md5") or "")
        if not md5 or (cached is not None and item["path"] not in cached):
            continue
        if not _MD5.fullmatch(md5):
            raise StoreError(f"{file}: md5 of {item['path']} is {md5!r}, expected 32 hexadecimal digits")
        outs.append(
            TrackedOut(
                path=_join(base, item["path"]),
                name=md5 if item.get("hash") == "md5" else LEGACY + md5,
                size_bytes=int(item.get("size") or 0),
                num_files=int(item.get("nfiles") or 1),
                is_cached=cached is None or cached[item["path"]],
            )
        )
    return outs


def _dvc_file(path: str, spec: dict[str, Any]) -> TrackedStage:
    try:
        base = posixpath.join(posixpath.dirname(path), spec.get("wdir") or ".")
        deps = spec.get("deps") or []
        # What `dvc import` brought from another repository stays that repository's: DVC does not count it as used.
        imported = any("repo" in dep for dep in deps)
        listed = [] if imported else spec.get("outs") or []
        cached = {item["path"]: item.get("cache", True) for item in listed}
        return TrackedStage(
            name=path,
            file=path,
            outs=tuple(_outs(path, base, listed, cached)),
            deps={_join(base, dep["path"]): str(dep.get("md5") or "") for dep in deps if "path" in dep},
            params={},
            meta=spec.get("meta") or {},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no file of DVC's: {error!r}") from None


def _join(base: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(base, path))
