"""Which options each engine takes, and of what kind; the engines' own modules need not be imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.config.checks import require
from eyas.errors import ConfigError

ENGINES = ("hf", "sglang", "fake")
HF_ATTENTION = ("sdpa", "eager")
SGLANG_ATTENTION = (
    "fa3",
    "flashinfer",
    "triton",
    "flashmla",
    "trtllm_mla",
    "trtllm_mha",
    "cutlass_mla",
    "torch_native",
)
LEAST = {"chunked_prefill_size": -1, "max_prefill_tokens": 1, "max_running_requests": 1, "tp_size": 1}
"""Whole numbers of sglang; a chunk of -1 means whole prompts."""


def check_engine_options(engine: str, options: Mapping[str, Any]) -> None:
    """Check ``extract.engine_options``.

    Raises:
        ConfigError: The engine has no such option, or not with such a value.
    """
    known = {"hf": ("attention",), "sglang": ("attention_backend", *LEAST)}.get(engine, ())
    for name, value in options.items():
        key = f"extract.engine_options.{name}"
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "no options"
            raise ConfigError(f"{key}: unknown to engine {engine}, expected {expected}")
        if name == "attention":
            require(value in HF_ATTENTION, key, value, " or ".join(HF_ATTENTION))
        elif name == "attention_backend":
            require(value in SGLANG_ATTENTION, key, value, " or ".join(SGLANG_ATTENTION))
        else:
            is_number = isinstance(value, int) and not isinstance(value, bool)
            right = is_number and value >= LEAST[name] and value != 0
            require(right, key, value, f"a number from {LEAST[name]}, not 0")
