"""What changed between a plan and now, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def changes(planned: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for every kind of difference; empty when there is none.

    Args:
        planned: The snapshot that a plan's id stands for.
        now: The same of the present situation.
    """
    return [
        *_value(planned, now, "head", "HEAD"),
        *_refs(planned, now),
        *_listed(planned, now, "objects", "object of the cache", "objects of the cache"),
        *_listed(planned, now, "strays", "file that is no object", "files that are no objects"),
        *_listed(planned, now, "names", "name outside the cache", "names outside the cache"),
        *_value(planned, now, "cache", "DVC's cache"),
        *_value(planned, now, "projects", "PROJECTS"),
        *_removed(planned, now),
    ]


def _value(planned: Mapping[str, Any], now: Mapping[str, Any], key: str, what: str) -> Iterator[str]:
    if planned.get(key) != now[key]:
        yield f"{what}: {_shown(planned.get(key))} then, {_shown(now[key])} now"


def _shown(value: Any) -> str:
    text = " ".join(value) if isinstance(value, list) else str(value)
    return (text[:10] if len(text) == 40 else text) or "none"


def _refs(planned: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = _by_name(planned.get("refs", [])), _by_name(now["refs"])
    for name in sorted(old | new):
        if name not in old:
            yield f"new {name}"
        elif name not in new:
            yield f"{name} is gone"
        elif old[name] != new[name]:
            yield f"{name} was moved"


def _by_name(refs: list[str]) -> dict[str, set[str]]:
    """``branch main`` → commits; an experiment has several."""
    named: dict[str, set[str]] = {}
    for ref in refs:
        name, _, commit = ref.rpartition(" ")
        named.setdefault(name, set()).add(commit)
    return named


def _listed(planned: Mapping[str, Any], now: Mapping[str, Any], key: str, one: str, many: str) -> Iterator[str]:
    old, new = (_by_path(value) for value in (planned.get(key, []), now[key]))
    groups = (
        ("new", sorted(new.keys() - old.keys())),
        ("gone", sorted(old.keys() - new.keys())),
        ("other size, inode or number of names", sorted(k for k in old.keys() & new.keys() if old[k] != new[k])),
    )
    for how, names in groups:
        if names:
            yield f"{len(names):,} {one if len(names) == 1 else many}: {how} ({names[0]})"


def _by_path(lines: list[str]) -> dict[str, str]:
    """What stands before the four numbers → the whole line; a path may have spaces."""
    return {line.rsplit(" ", 4)[0]: line for line in lines}


def _removed(planned: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if planned.get("removed") != now["removed"]:
        yield "other objects are in use than then"
