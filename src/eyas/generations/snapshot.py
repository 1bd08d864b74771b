"""What DVC's files say at one revision: stages with their outputs, inputs and parameters.

``dvc.yaml`` says which stages and outputs there are and which are cached; ``dvc.lock`` their hashes; a ``.dvc`` file
says both for one folder. What ``dvc.lock`` still lists but ``dvc.yaml`` no longer has is not in use, for DVC too.
"""

from __future__ import annotations

import itertools
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
_TEMPLATE = re.compile(r"(?<!\\)\$\{.*?\}")


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
            stages.append(_dvc_file(path, load_yaml(path, data)))
        elif posixpath.basename(path) == PIPELINE:
            lock = posixpath.join(folder, LOCK)
            stages += _pipeline(folder, lock, load_yaml(path, data), load_yaml(lock, files.get(lock, b"")))
    return tuple(stages)


# Of the safe loaders the one written in C, where there is one: 200 locks in one second instead of ten.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_ONE_TWO = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", "-+.0123456789"),
)


class _Loader(_Safe):
    """YAML 1.2 as DVC writes it: plain ``no`` and ``12:30`` are text there, and may be an output's name."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML keeps them so
        first: [rule for rule in rules if rule[0].rpartition(":")[2] in ("null", "merge")]
        for first, rules in _Safe.yaml_implicit_resolvers.items()
    }


for _tag, _pattern, _first in _ONE_TWO:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


def load_yaml(path: str, data: bytes) -> dict[str, Any]:
    """A file of DVC's; empty where it is.

    Raises:
        StoreError: It is no YAML, or no mapping.
    """
    try:
        value = yaml.load(data, Loader=_Loader) if data else {}  # noqa: S506
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
            stage = _stage(specs, name)
            if stage is None:
                continue
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


def _stage(specs: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The stage that a lock's entry belongs to; None when it is gone.

    An item of ``foreach`` or ``matrix`` is locked as ``stage@item``, the group itself never.
    """
    repeated, stage = {"foreach", "matrix"}, specs.get(name)
    if stage is not None:
        return None if repeated & stage.keys() else stage
    group, _, item = name.rpartition("@")
    stage = specs.get(group)
    if stage is None or not repeated & stage.keys():
        return None
    items = _items(stage)
    return stage.get("do", stage) if items is None or item in items else None


def _items(stage: dict[str, Any]) -> set[str] | None:
    """Items of a stage that is repeated; None when parameters decide, then every locked one counts."""
    each = stage.get("foreach")
    if isinstance(each, dict):
        return set(map(_item, each))
    if isinstance(each, list):
        return None if _is_open(each) else {_item(one, str(index)) for index, one in enumerate(each)}
    axes = stage.get("matrix")
    if not isinstance(axes, dict) or not all(isinstance(axis, list) and not _is_open(axis) for axis in axes.values()):
        return None
    spelt = [[_item(one, f"{name}{index}") for index, one in enumerate(axis)] for name, axis in axes.items()]
    return set(map("-".join, itertools.product(*spelt)))


def _is_open(values: list[Any]) -> bool:
    return any(isinstance(value, str) and _TEMPLATE.search(value) for value in values)


def _item(value: Any, nested: str = "") -> str:
    if isinstance(value, (dict, list)):
        return nested
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cached_paths(stage: dict[str, Any]) -> list[tuple[re.Pattern[str], bool]]:
    """Outputs as ``dvc.yaml`` spells them, and whether DVC caches them; where a parameter stands, anything may."""
    paths: list[tuple[re.Pattern[str], bool]] = []
    for kind in _LISTS:
        listed = stage.get(kind) or []
        for item in listed if isinstance(listed, list) else [listed]:
            for path, options in (item if isinstance(item, dict) else {item: {}}).items():
                spelt = ".*".join(map(re.escape, _TEMPLATE.split(str(path))))
                paths.append((re.compile(spelt, re.DOTALL), bool((options or {}).get("cache", True))))
    return paths


def _outs(
    file: str, base: str, listed: list[dict[str, Any]], cached: list[tuple[re.Pattern[str], bool]]
) -> list[TrackedOut]:
    outs = []
    for item in listed:
        md5, path = str(item.get("md5") or ""), str(item["path"])
        spelt = [is_cached for pattern, is_cached in cached if pattern.fullmatch(path)]
        if not md5 or not spelt:
            continue
        if not _MD5.fullmatch(md5):
            raise StoreError(f"{file}: md5 of {path} is {md5!r}, expected 32 hexadecimal digits")
        outs.append(
            TrackedOut(
                path=_join(base, path),
                name=md5 if item.get("hash") == "md5" else LEGACY + md5,
                size_bytes=int(item.get("size") or 0),
                num_files=int(item.get("nfiles") or 1),
                is_cached=any(spelt),
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
        cached = [(re.compile(re.escape(str(item["path"]))), bool(item.get("cache", True))) for item in listed]
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
