"""Figures as the page writes them; what was not measured stays ``None`` and is said so by ``html.text``."""

from __future__ import annotations

from eyas.console import human_bytes, human_seconds
from eyas.report.figures import Figures

SHORT_S = 10.0
"""Below it tenths are told."""


def number(value: float | None, digits: int = 3) -> str | None:
    """A tau, alpha or loss."""
    return None if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str | None:
    """A share as a percentage."""
    return None if value is None else f"{value:.1%}"


def count(value: float | None) -> str | None:
    """A whole number."""
    return None if value is None else f"{value:,.0f}"


def size(value: float | None) -> str | None:
    """Bytes in decimal units."""
    return None if value is None else human_bytes(value)


def seconds(value: float | None) -> str | None:
    """A duration."""
    if value is None:
        return None
    return f"{value:.1f}s" if value < SHORT_S else human_seconds(value)


def span(entry: Figures, name: str = "tau") -> str | None:
    """An interval that stands beside a figure as ``<name>_low`` and ``<name>_high``."""
    low, high = entry.number(f"{name}_low"), entry.number(f"{name}_high")
    return None if low is None or high is None else f"{low:.3f} to {high:.3f}"
