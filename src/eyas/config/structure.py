"""Keys and types of a params file against the schema, before Hydra composes it.

Hydra's own messages often lack the key, the value or both. This pass names all three, and the closest
known key. Values are checked as written: text is never taken for a number, nor a number for text.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator
from typing import Any

from eyas.config.schema import MISSING, Params
from eyas.errors import ConfigError

DEFAULTS = ["schema", "_self_"]
WHOLE_LIMIT = 2**63
"""What databases, tensors and seeds can hold."""
KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def check_structure(content: Any, file_name: str) -> None:
    """Check the content of a params file.

    Args:
        content: What the YAML holds.
        file_name: For messages.

    Raises:
        ConfigError: With the dotted name, the value, what was expected and a hint.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{file_name}: {_shown(content)}, expected sections such as `train:`", _RESTORE)
    defaults = content.get("defaults")
    if defaults != DEFAULTS:
        raise ConfigError(
            f"defaults: {_shown(defaults)}, expected [schema, _self_]",
            f"let {file_name} begin with the lines `defaults:`, `- schema`, `- _self_`",
        )
    _check(Params, {key: value for key, value in content.items() if key != "defaults"}, "")


_RESTORE = "run `make params`, which writes a complete file, or `git checkout params.yaml`"


def dotted_names(kind: type = Params, prefix: str = "") -> Iterator[str]:
    """Every key of the schema by its dotted name, in order; items of lists as ``name[].key``."""
    hints = typing.get_type_hints(kind)
    for spec in dataclasses.fields(kind):
        name, hint = f"{prefix}{spec.name}", hints[spec.name]
        items = typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            yield from dotted_names(typing.cast(type, hint), f"{name}.")
        elif items and dataclasses.is_dataclass(items[0]):
            yield from dotted_names(typing.cast(type, items[0]), f"{name}[].")
        else:
            yield name


def _check(kind: Any, value: Any, where: str) -> None:
    if isinstance(value, str) and "${" in value:
        raise ConfigError(
            f"{where}: {_shown(value)}, expected the value itself: DVC would not see it change with another key",
            "write the value out",
        )
    if dataclasses.is_dataclass(kind):
        _check_section(kind, value, where)
    elif typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {_shown(value)}, expected a list", f"write `{where.split('.')[-1]}: [...]`")
        for index, item in enumerate(value):
            _check(typing.get_args(kind)[0], item, f"{where}[{index}]")
    elif typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {_shown(value)}, expected a mapping", "write `{}` for an empty one")
        _check_free(value, where)
    else:
        _check_value(kind, value, where)


def _check_section(kind: Any, value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {_shown(value)}, expected a section with keys", _RESTORE)
    hints = typing.get_type_hints(kind)
    prefix = f"{where}." if where else ""
    for key, item in value.items():
        if key not in hints:
            raise ConfigError(f"{prefix}{key}: unknown key", _suggestion(str(key), prefix, list(hints)))
        _check(hints[key], item, f"{prefix}{key}")
    for spec in dataclasses.fields(kind):
        required = spec.default == MISSING
        if required and value.get(spec.name, MISSING) == MISSING:
            raise ConfigError(
                f"{prefix}{spec.name}: no value, expected {KIND_NAMES[hints[spec.name]]}",
                "set it in params.yaml, or compose presets with `make params`",
            )


def _check_value(kind: type, value: Any, where: str) -> None:
    accepted = (int, float) if kind is float else (kind,)
    right_kind = isinstance(value, accepted) and not (isinstance(value, bool) and kind is not bool)
    if value is None:
        raise ConfigError(f"{where}: no value (null), expected {KIND_NAMES[kind]}", _hint_of(kind, value))
    if not right_kind:
        raise ConfigError(f"{where}: {_shown(value)}, expected {KIND_NAMES[kind]}", _hint_of(kind, value))
    _check_number(value, where)


def _check_number(value: Any, where: str) -> None:
    hint = _hint_of(float, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {_shown(value)}, expected a finite number", hint)
    if isinstance(value, int) and abs(value) >= WHOLE_LIMIT:
        raise ConfigError(f"{where}: {_shown(value)}, expected less than 2**63", hint)


def _check_free(value: Any, where: str) -> None:
    """A value of an open mapping: anything that JSON can spell."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where}: key {_shown(key)}, expected text", f"put it in quotes: '{key}'")
            _check_free(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_free(item, f"{where}[{index}]")
    elif isinstance(value, int | float | str) or value is None:
        if isinstance(value, str):
            _check(str, value, where)
        _check_number(value, where)
    else:
        raise ConfigError(f"{where}: {_shown(value)}, expected a value that JSON can spell", "write it as text")


def _hint_of(kind: type, value: Any) -> str:
    if kind is str and value is not None:
        return f"put it in quotes: '{value}'"
    return "`git diff params.yaml` shows what was changed; the schema is src/eyas/config/schema.py"


def _suggestion(key: str, prefix: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{prefix}{near[0]}`?"
    elsewhere = [name for name in dotted_names() if name.split(".")[-1] == key]
    if elsewhere:
        return f"did you mean `{elsewhere[0]}`?"
    return f"known here: {', '.join(known)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
