"""Which options each engine takes, and of what kind; the engines' own modules need not be imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.config.checks import require
from eyas.errors import ConfigError

ENGINES = ("hf", "sglang", "vllm", "fake")
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
VLLM_ATTENTION = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
VLLM_LEAST = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "tensor_parallel_size": 1}
"""Whole numbers of vllm; max_num_batched_tokens is the chunk of its prefill."""


def check_engine_options(engine: str, options: Mapping[str, Any]) -> None:
    """Check ``extract.engine_options``.

    Raises:
        ConfigError: The engine has no such option, or not with such a value.
    """
    known = {
        "hf": ("attention",),
        "sglang": ("attention_backend", *LEAST),
        "vllm": ("attention_backend", *VLLM_LEAST),
    }.get(engine, ())
    attention = VLLM_ATTENTION if engine == "vllm" else SGLANG_ATTENTION
    least = VLLM_LEAST if engine == "vllm" else LEAST
    for name, value in options.items():
        key = f"extract.engine_options.{name}"
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "no options"
            raise ConfigError(f"{key}: unknown to engine {engine}, expected {expected}")
        if name == "attention":
            require(value in HF_ATTENTION, key, value, " or ".join(HF_ATTENTION))
        elif name == "attention_backend":
            require(value in attention, key, value, " or ".join(attention))
        else:
            is_number = isinstance(value, int) and not isinstance(value, bool)
            right = is_number and value >= least[name] and value != 0
            require(right, key, value, f"a number from {least[name]}, not 0")
