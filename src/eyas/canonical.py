"""Canonical JSON and strict rebuilding of records: equal content is equal bytes.

``digest`` is the only way anything here is named by its content.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from typing import Any, Literal, TypeVar

Record = TypeVar("Record")
ADDED_LATER = {"added_later": True}
"""Metadata of a record's field that is written only where it differs from its default."""


def to_plain(value: Any) -> Any:
    """Records, tuples and mappings as plain JSON values; refuses NaN and infinities.

    A field of ``ADDED_LATER`` is left out while it has its default: records made before it keep their digests.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: to_plain(v) for f, v in kept if not (f.metadata.get("added_later") and v == f.default)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"canonical JSON holds finite numbers only, not {value}")
    return value


def canonical_json(value: Any) -> str:
    """The one JSON spelling of a value: sorted keys, no spaces, shortest floats, UTF-8 kept."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) over the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def from_plain(kind: type[Record], value: Any) -> Record:
    """Rebuild a record from plain JSON values.

    Raises:
        ValueError: a key is unknown or missing, or a value has the wrong type.
    """
    return _build(kind, value, kind.__name__)


def _build(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build_record(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [arg for arg in args if arg is not type(None)]
        return _build(kinds[0], value, where)
    if origin is tuple:
        return _build_tuple(args, value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {type(value).__name__}, expected an object")
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}: {value!r}, expected one of {', '.join(map(repr, args))}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value}, expected a finite number")
    if kind is not Any and type(value) is not kind:
        raise ValueError(f"{where}: {value!r}, expected {kind.__name__}")
    return value


def _build_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {type(value).__name__}, expected a list")
    kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(value):
        raise ValueError(f"{where}: {len(value)} entries, expected {len(kinds)}")
    return tuple(_build(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))


def _build_record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {type(value).__name__}, expected an object")
    hints = _type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    for key in value:
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown key, expected one of {', '.join(known)}")
    built = {}
    for name, spec in known.items():
        if name in value:
            built[name] = _build(hints[name], value[name], f"{where}.{name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}.{name}: missing")
    return kind(**built)


@functools.cache
def _type_hints(kind: Any) -> dict[str, Any]:
    """Evaluating them costs more than building a record, and a plan holds a record per sample."""
    return typing.get_type_hints(kind)
