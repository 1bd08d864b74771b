"""Values of a JSON file by name, asked for kindly: what is missing, or of another kind, was not measured.

The report reads files of several versions. Records that a stage depends on are read strictly elsewhere; what is only
shown must not stop the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eyas.canonical import to_plain

LARGEST = 1e100
"""Nothing that is measured is more; a percentage of the largest float would not be finite."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A mapping of a JSON file."""

    values: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> Figures:
        """A mapping or a record; of anything else none."""
        plain = to_plain(value) if dataclasses.is_dataclass(value) else value
        return cls(plain if isinstance(plain, dict) else {})

    def number(self, name: str) -> float | None:
        """A finite number; a flag is none."""
        return _number(self.values.get(name))

    def words(self, name: str) -> str:
        """A text; empty when there is none."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def flag(self, name: str) -> bool | None:
        """A yes or no."""
        value = self.values.get(name)
        return value if isinstance(value, bool) else None

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; empty when an entry is none."""
        value = self.values.get(name)
        found = [_number(entry) for entry in value] if isinstance(value, list) else []
        return () if None in found else tuple(entry for entry in found if entry is not None)

    def group(self, name: str) -> Figures:
        """A mapping below this one."""
        return Figures.of(self.values.get(name))

    def groups(self, name: str) -> dict[str, Figures]:
        """Named mappings below one of this one, by name."""
        found = self.group(name).values
        return {key: Figures(found[key]) for key in sorted(found) if isinstance(found[key], dict)}

    def listed(self, name: str) -> tuple[Figures, ...]:
        """A list of mappings."""
        value = self.values.get(name)
        return tuple(Figures(entry) for entry in value if isinstance(entry, dict)) if isinstance(value, list) else ()


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    return value if is_number else None


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf; a list of plain values is one leaf, other lists are left out."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from flat(value[key], f"{name}.{key}" if name else key)
    elif not isinstance(value, list):
        yield name, value
    elif not any(isinstance(entry, (dict, list)) for entry in value):
        yield name, ", ".join(leaf(entry) or "none" for entry in value)


def leaf(value: Any, form: str = ".4g") -> str | None:
    """A plain value of a JSON file as it is shown; None where it was not measured."""
    return f"{value:{form}}" if isinstance(value, float) else None if value is None else str(value)


def other_sets(acceptance: Figures) -> dict[str, float]:
    """Tau by prompt set, of those that the headline is not of."""
    headline = acceptance.values.get("headline_sets")
    own = headline if isinstance(headline, list | tuple) else ()
    taus = {name: entry.number("tau") for name, entry in acceptance.groups("sets").items() if name not in own}
    return {name: tau for name, tau in taus.items() if tau is not None}
