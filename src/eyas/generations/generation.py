"""One generation: what it is, how large, who names it, and whether its objects are whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from eyas.contracts import payload_bytes
from eyas.errors import StoreError
from eyas.generations.objects import DIR_SUFFIX, Cache

GenerationKind = Literal["pipeline", "adopted", "imported", "unrecorded", "spool"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a generation says of itself; empty or zero where nobody knows."""

    identity: str = ""
    engine: str = ""
    engine_version: str = ""
    target: str = ""
    codec: str = ""
    layout: str = ""
    """Of an adopted one."""
    note: str = ""
    num_samples: int = 0
    num_tokens: int = 0
    payload_bytes: int = 0
    """bf16 states before the codec."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One version of the hidden states."""

    kind: GenerationKind
    hash: str
    """DVC's md5 of the folder; of an unfinished spool its capture identity."""
    path: str
    """Where it lies when it is checked out."""
    facts: Facts
    when_s: int
    """Seconds since 1970: when its list was written, else the first commit that names it."""
    stored_bytes: int
    """Sizes of its files."""
    disk_bytes: int
    """Allocated blocks, each inode once: in the cache and under the names that are known."""
    num_objects: int
    num_missing: int
    """Objects that the cache lacks; all of them where its list is lost."""
    is_kept: bool
    is_stale: bool
    """Named by the workspace, but another one is planned; an imported one is no plan's."""
    is_retired: bool
    freed_now_bytes: int
    """What gc would free of it now."""
    freed_bytes: int
    """What gc would free of it when nothing named it any more."""
    named_by: tuple[str, ...]
    used_by: tuple[str, ...]
    """Drafters that were trained from it."""
    is_needed: bool
    """Whether the workspace has one of them, trained from these very states."""
    objects: frozenset[str]
    """Its files and its list in the cache; empty where the list is lost."""

    @property
    def is_whole(self) -> bool:
        """Whether the cache has every object."""
        return self.num_missing == 0

    @property
    def name(self) -> str:
        """Short, as people type it: an adopted one's name, else the first digits of its hash."""
        return PurePosixPath(self.path).name if self.kind == "adopted" else self.hash[:10]


def manifest_facts(value: Mapping[str, Any]) -> Facts:
    """Facts of a manifest that was only parsed."""
    try:
        capture = value["capture"]
        return Facts(
            identity=value["identity"],
            engine=capture["engine"],
            engine_version=capture["engine_version"],
            target=capture["target"],
            codec=capture["codec"],
            num_samples=value["num_stored_samples"],
            num_tokens=value["num_stored_tokens"],
            payload_bytes=payload_bytes(
                value["num_stored_tokens"], value["hidden_size"], len(capture["boundaries"]) + 1
            ),
        )
    except (KeyError, TypeError):
        return Facts()


def read_manifest(cache: Cache, name: str) -> Facts:
    """Facts of a manifest in the cache; empty when it is not there."""
    try:
        value = json.loads(cache.path(name).read_bytes())
    except (OSError, ValueError):
        return Facts()
    return manifest_facts(value) if isinstance(value, dict) else Facts()


def adopted_facts(meta: Mapping[str, Any]) -> Facts:
    """Facts that an adoption noted in its ``.dvc`` file."""
    noted = meta.get("eyas", {}).get("adopted", {}) if isinstance(meta.get("eyas"), dict) else {}
    if not isinstance(noted, dict):
        return Facts()

    def text(key: str) -> str:
        return str(noted.get(key) or "")

    def number(key: str) -> int:
        value = noted.get(key)
        return value if isinstance(value, int) else 0

    return Facts(
        engine=text("engine"),
        engine_version=text("engine_version"),
        target=text("target"),
        layout=text("layout"),
        note=text("note"),
        num_samples=number("num_samples"),
        num_tokens=number("num_tokens"),
        payload_bytes=number("payload_bytes"),
    )


def param_facts(params: Mapping[str, Any]) -> Facts:
    """Facts that ``dvc.lock`` notes of the stage that made it, for when its manifest is gone."""
    target = params.get("target")

    def of_extract(key: str) -> str:
        """Noted by itself, or in its section as earlier pipelines have it."""
        section = params.get("extract")
        return str(params.get(f"extract.{key}") or (section.get(key) if isinstance(section, dict) else "") or "")

    return Facts(
        engine=of_extract("engine"),
        codec=of_extract("codec"),
        target=str(target.get("name") or "") if isinstance(target, dict) else "",
    )


def objects_of(cache: Cache, name: str) -> frozenset[str]:
    """A folder's list and everything on it; empty when the list is lost."""
    if not name.endswith(DIR_SUFFIX):
        return frozenset((name,))
    try:
        return frozenset((name, *cache.read_tree(name).values()))
    except StoreError:
        return frozenset()
