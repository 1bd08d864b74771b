"""What the sections of the schema check their values with."""

from __future__ import annotations

from eyas.errors import ConfigError


def require(ok: bool, key: str, value: object, expected: str) -> None:
    """Raise ``ConfigError`` for a dotted key unless ``ok``."""
    if not ok:
        raise ConfigError(
            f"{key}: {value!r}, expected {expected}", "edit params.yaml, or compose presets: `make params`"
        )


DEVICES = ("cpu", "cuda")
LOSSES = ("kl", "ce", "lk")
MAX_SEED = 2**63 - 1


def require_seed(key: str, seed: int) -> None:
    """Raise ``ConfigError`` for a seed that some generator refuses."""
    require(0 <= seed <= MAX_SEED, key, seed, "0 to 2^63 - 1")
