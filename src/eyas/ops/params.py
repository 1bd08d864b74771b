"""``eyas params``: presets in, a complete ``params.yaml`` out, with what changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import config, fs
from eyas.canonical import to_plain
from eyas.errors import ConfigError

GROUPS = ("target", "data", "machine", "drafter")


@dataclass(frozen=True, slots=True)
class Change:
    """One key of ``params.yaml`` before and after; ``None`` where it is not there."""

    key: str
    old: Any
    new: Any


def write_params(root: Path, choices: Sequence[str]) -> list[Change]:
    """Compose presets below ``root/conf`` and write ``root/params.yaml``, atomically.

    Args:
        root: The repository's folder.
        choices: ``GROUP=PRESET`` each; a group that is left out takes its default of ``conf/presets.yaml``.

    Returns:
        What changed, in file order; all keys when the file before was missing or damaged.

    Raises:
        ConfigError: A group or preset does not exist, or the composition breaks a rule.
    """
    params = config.compose_presets(root / "conf", parse_choices(choices))
    path = root / config.PARAMS_PATH
    try:
        old = dict(_flat(config.load(path)))
    except ConfigError:
        old = {}
    fs.write_text(path, config.to_yaml(params))
    new = dict(_flat(params))
    return [Change(key, old.get(key), value) for key, value in new.items() if old.get(key) != value]


def parse_choices(choices: Sequence[str]) -> dict[str, str]:
    """``TARGET=x`` pairs as group -> preset.

    Raises:
        ConfigError: A pair names no group, has no preset, or repeats a group.
    """
    parsed: dict[str, str] = {}
    for choice in choices:
        group, _, preset = choice.partition("=")
        if group.lower() not in GROUPS or not preset or group.lower() in parsed:
            raise ConfigError(
                f"{choice}: expected {', '.join(f'{g.upper()}=PRESET' for g in GROUPS)}, each at most once",
                "make params TARGET=smollm2_135m",
            )
        parsed[group.lower()] = preset
    return parsed


def _flat(params: config.Params) -> Iterator[tuple[str, Any]]:
    def walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                yield from walk(item, f"{key}.{name}" if key else name)
        else:
            yield key, value

    yield from walk(to_plain(params), "")
