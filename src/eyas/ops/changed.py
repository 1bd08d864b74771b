"""Which parameters differ from those that each stage last ran with; DVC names the section alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config import PARAMS_PATH
from eyas.plan.cache import at_key, locked_stage, read_yaml

ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Changed:
    """One parameter of one stage."""

    stage: str
    key: str
    before: str
    """In ``dvc.lock``."""
    now: str


def changed(root: Path) -> list[Changed]:
    """Every parameter that a stage would run with and did not run with, by stage, then by key."""
    now, found = read_yaml(root / PARAMS_PATH), []
    locked = read_yaml(root / "dvc.lock").get("stages") or {}
    for stage in locked:
        entry = locked_stage(root, str(stage)).get("params")
        for section, before in (entry or {}).get(str(PARAMS_PATH), {}).items():
            old, new = dict(_flat(section, before)), dict(_flat(section, at_key(now, section, ABSENT)))
            keys = [key for key in {**old, **new} if old.get(key, ABSENT) != new.get(key, ABSENT)]
            found += [Changed(str(stage), key, _shown(old, key), _shown(new, key)) for key in sorted(keys)]
    return found


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


def _shown(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, ABSENT)
    return value if value is ABSENT else repr(value)
