"""Pinned container images: how a pin is written, and whether this process runs in the one that is pinned."""

from __future__ import annotations

import os
import re

from eyas.config.checks import require
from eyas.errors import ConfigError

VARIABLE = "EYAS_IMAGE"
"""Name and digest of the image that this process runs in; set by whoever started it, empty outside containers."""
PIN = re.compile(r"(?:[a-zA-Z0-9._:/-]+@)?(sha256:[0-9a-f]{64})")


def require_pin(key: str, value: str) -> None:
    """Raise ``ConfigError`` unless a pin is empty or names a digest."""
    require(not value or PIN.fullmatch(value) is not None, key, value, "nothing, or NAME@sha256:<64 hex digits>")


def check_image(key: str, pinned: str) -> None:
    """Refuse to go on in another image than the pinned one; without a pin any is right.

    Raises:
        ConfigError: This process runs in another image, or in none.
    """
    running = os.environ.get(VARIABLE, "")
    if not pinned or _digest(pinned) == _digest(running):
        return
    raise ConfigError(
        f"{key} pins {pinned}, this runs in {running or 'no container'}",
        "`make extract IN_CONTAINER=1` runs in the image that `make image` built; another pin is another capture",
    )


def _digest(image: str) -> str:
    found = PIN.fullmatch(image)
    return found[1] if found else ""
