"""Knobs: ``EYAS_*`` environment variables that cannot change a result (``docs/map.md`` lists them)."""

from __future__ import annotations

import os

from eyas.errors import ConfigError


def knob(name: str, default: int) -> int:
    """A whole number from 1 of the environment, ``default`` when it is not set.

    Raises:
        ConfigError: It is another thing.
    """
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}: {text!r}, expected a number from 1", f"unset {name}")
    return int(text)


def watchdog_s() -> int:
    """Seconds of silence after which a server, a worker or a capturing process counts as hung."""
    return knob("EYAS_WATCHDOG_S", 300)


def start_s() -> int:
    """Seconds that an engine may take to start."""
    return knob("EYAS_SGLANG_START_S", 1800)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
