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

LARGEST_INT = 2**63 - 1


def to_plain(value: Any) -> Any:
    """Records, tuples and mappings as plain JSON values; refuses NaN and infinities.

    A field of ``ADDED_LATER`` is left out while it has its default: records made before it keep their digests.
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is dict:
        return {key if type(key) is str else str(key): to_plain(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [to_plain(item) for item in value]
    if kind is float and math.isfinite(value):
        return value
    return _odd_to_plain(value)


def _odd_to_plain(value: Any) -> Any:
    """Records, values of derived types, and what is refused."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = ((name, later, getattr(value, name)) for name, later in _written_fields(type(value)))
        return {name: to_plain(item) for name, later, item in kept if not (later and item == later[0])}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"canonical JSON holds finite numbers only, not {value}")
    return value


@functools.cache
def _written_fields(kind: type) -> tuple[tuple[str, tuple[Any] | None], ...]:
    """(name, the default under which it is left out) of every field."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)
    return tuple((f.name, (f.default,) if f.metadata.get("added_later") else None) for f in fields)


def canonical_json(value: Any) -> str:
    """The one JSON spelling of a value: sorted keys, no spaces, shortest floats, UTF-8 kept."""
    return plain_json(to_plain(value))


def plain_json(value: Any) -> str:
    """The same of a value that holds plain JSON values alone, tuples included, under keys that are text: no copy."""
    return _ENCODER.encode(value)


# Kept: json.dumps makes one for every call, dearer than what it spells of a small record.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


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
    origin, args = _parts(kind)
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
        return {
            key if key.isascii() else _build(str, key, where): _build(args[1], item, f"{where}.{key}")
            for key, item in value.items()
        }
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}: {value!r}, expected one of {', '.join(map(repr, args))}")
        return value
    return _build_leaf(kind, value, where)


def _build_leaf(kind: Any, value: Any, where: str) -> Any:
    if type(value) is str and not _is_plain(value) and not is_utf8(value):
        raise ValueError(f"{where}: {ascii(value)[:60]}, expected whole characters")
    if kind in (int, float) and type(value) is int and not _is_plain(value):
        raise ValueError(f"{where}: {str(value)[:60]}, expected 64 bits")
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value}, expected a finite number")
    if kind is not Any and type(value) is not kind:
        raise ValueError(f"{where}: {value!r}, expected {kind.__name__}")
    return value


def _is_plain(value: Any) -> bool:
    """Whether it is a text or a count of the usual kind, told quickly."""
    return value.isascii() if type(value) is str else type(value) is int and -LARGEST_INT - 1 <= value <= LARGEST_INT


def is_utf8(text: str) -> bool:
    """Whether a text can be written: half a character, which JSON and names of files can hold, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
    fields = _fields(kind)
    if not value.keys() <= fields.keys():
        key = next(key for key in value if key not in fields)
        raise ValueError(f"{where}.{key}: unknown key, expected one of {', '.join(fields)}")
    built = {}
    for name, (hint, is_required, allowed) in fields.items():
        if name in value:
            item = value[name]
            # Most fields, a million times over: texts, numbers, and words out of a few.
            is_known = item in allowed if allowed else type(item) is hint and _is_plain(item)
            built[name] = item if is_known else _build(hint, item, f"{where}.{name}")
        elif is_required:
            raise ValueError(f"{where}.{name}: missing")
    return kind(**built)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool, tuple[Any, ...]]]:
    """Type of each field, whether it must be given, and the texts that it may be; found once for each record type."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    found = {}
    for f in dataclasses.fields(kind):
        origin, args = _parts(hints[f.name])
        is_text = origin is Literal and all(type(arg) is str for arg in args)
        is_required = f.default is missing and f.default_factory is missing
        found[f.name] = hints[f.name], is_required, args if is_text else ()
    return found


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)
