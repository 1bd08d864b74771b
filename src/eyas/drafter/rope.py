"""Rotary positions in the Llama convention (first half with second half), with the scalings servers know.

    config.json, old or new schema → read_rope → (theta, scaling) in DrafterShape → Rope → cosines and sines

``scaling`` holds (key, value) pairs sorted by key, ``rope_type`` among them; None is the plain type. The
types are those whose angles depend on the position alone: linear, llama3, yarn. ``dynamic`` and
``longrope`` are not: their angles follow the longest sequence so far, so keys that lie in a cache would
belong to other angles than new queries. Angles are float64.

Letters: P positions of a table, K head dim, F = K / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from eyas.contracts import DrafterShape, RopeScaling
from eyas.errors import ConfigError

ROPE_THETA = 10_000.0
"""What a config.json that names no theta means in transformers."""
KEYS: dict[str, dict[str, Any]] = {
    "linear": {"factor": float},
    "llama3": {
        "factor": float,
        "high_freq_factor": float,
        "low_freq_factor": float,
        "original_max_position_embeddings": int,
    },
    "yarn": {
        "attention_factor": float,
        "beta_fast": float,
        "beta_slow": float,
        "factor": float,
        "mscale": float,
        "mscale_all_dim": float,
        "original_max_position_embeddings": int,
        "truncate": bool,
    },
}
"""Keys of each scaled type and what they hold; all of linear's and llama3's are needed."""


class RopeTypeError(ConfigError):
    """A rotary type that a drafter cannot have, or one that lacks a number."""


def read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of a Llama-type ``config.json``, read as transformers reads it.

    ``rope_scaling`` (old schema) wins over ``rope_parameters`` (new); a theta inside wins over the one at
    the top. Numbers that transformers would fill in (yarn's factor, the original length) are filled in.

    Raises:
        RopeTypeError: The type is not one of default, linear, llama3 and yarn, or a number is missing.
    """
    values = _nested(config)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        return read_theta(config), None
    if kind not in KEYS:
        raise RopeTypeError(f"rope type {kind!r}, expected one of default, {', '.join(KEYS)}")
    if values.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise RopeTypeError(f"rope type {kind!r} on a part of each head, expected whole heads")
    longest = config.get("max_position_embeddings")
    if "original_max_position_embeddings" in KEYS[kind]:
        original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
        values["original_max_position_embeddings"] = original or longest
        if kind == "yarn" and values.get("factor") is None and original and longest:
            values["factor"] = longest / original
    return read_theta(config), _scaling(kind, values)


def read_theta(config: Mapping[str, Any]) -> float:
    """Base of the frequencies, in either schema."""
    return float(_nested(config).get("rope_theta") or config.get("rope_theta") or ROPE_THETA)


def rope_parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """``rope_parameters`` of the new schema, the inverse of ``read_rope``."""
    return {"rope_theta": theta, "rope_type": "default"} | dict(scaling or ())


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    # models with two kinds of layers have one set each; a drafter's attention is full
    full = values.get("full_attention")
    return dict(full) if isinstance(full, Mapping) else values


def _scaling(kind: str, values: Mapping[str, Any]) -> RopeScaling:
    optional = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    pairs: list[tuple[str, Any]] = [("rope_type", kind)]
    for key, to_type in KEYS[kind].items():
        if values.get(key) is not None:
            pairs.append((key, to_type(values[key])))
        elif key not in optional:
            raise RopeTypeError(f"rope type {kind!r} without {key}, expected a number")
    return tuple(sorted(pairs))


class Rope:
    """Cosines and signed sines by position; the table grows to the most positions asked for.

    Args:
        shape: Gives theta, scaling and head dim.

    Raises:
        RopeTypeError: The scaling is of an unknown type.
    """

    def __init__(self, shape: DrafterShape) -> None:
        self._frequencies_F, self._attention_factor = inverse_frequencies(
            shape.head_dim, shape.rope_theta, shape.rope_scaling
        )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def table(
        self, num_positions: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [P,K] of positions 0 to P - 1, P at least ``num_positions``.

        Args:
            num_positions: Longest document plus the steps behind its end.
            device: Where the table is kept.
            dtype: float32 or float64.
        """
        key = torch.device(device), dtype
        table = self._tables.get(key)
        if table is None or len(table[0]) < num_positions:
            num_rows = 1 << (max(num_positions, 1) - 1).bit_length()
            angles_PF = torch.arange(num_rows, dtype=torch.float64)[:, None] * self._frequencies_F
            cos_PF, sin_PF = angles_PF.cos() * self._attention_factor, angles_PF.sin() * self._attention_factor
            pair = torch.cat([cos_PF, cos_PF], -1), torch.cat([-sin_PF, sin_PF], -1)
            self._tables[key] = table = pair[0].to(key[0], dtype), pair[1].to(key[0], dtype)
        return table


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[torch.Tensor, float]:
    """Radians per position [F], float64, and the factor on cosines and sines (other than 1 for yarn alone).

    Raises:
        RopeTypeError: The scaling is of an unknown type.
    """
    frequencies_F = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    values = dict(scaling or ())
    kind = values.get("rope_type", "default")
    if kind == "default":
        return frequencies_F, 1.0
    if kind == "linear":
        return frequencies_F / values["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies_F, values), 1.0
    if kind == "yarn":
        return _yarn(frequencies_F, head_dim, theta, values), _yarn_attention_factor(values)
    raise RopeTypeError(f"rope type {kind!r}, expected one of default, {', '.join(KEYS)}")


def _llama3(frequencies_F: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    turns_F = values["original_max_position_embeddings"] * frequencies_F / (2 * math.pi)
    kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    return frequencies_F * (kept_F + (1 - kept_F) / values["factor"])


def _yarn(frequencies_F: torch.Tensor, head_dim: int, theta: float, values: Mapping[str, Any]) -> torch.Tensor:
    """The same with bounds in turns over the original length, blended along the channel."""

    def channel(num_turns: float) -> float:
        length = values["original_max_position_embeddings"]
        return head_dim * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(values.get("beta_fast") or 32.0), channel(values.get("beta_slow") or 1.0)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0  # as the reference does, against a division by 0
    stretched_F = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return frequencies_F * (1 - stretched_F + stretched_F / values["factor"])


def _yarn_attention_factor(values: Mapping[str, Any]) -> float:
    def of(scale: float) -> float:
        return 1.0 if values["factor"] <= 1 else 0.1 * scale * math.log(values["factor"]) + 1.0

    if values.get("attention_factor") is not None:
        return values["attention_factor"]
    if values.get("mscale") and values.get("mscale_all_dim"):
        return of(values["mscale"]) / of(values["mscale_all_dim"])
    return of(1.0)
