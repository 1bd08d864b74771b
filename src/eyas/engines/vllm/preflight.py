"""What must hold before vLLM is started: its version, the target's norm, the boundaries, the engine's options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.config.engine_options import check_engine_options
from eyas.contracts import TargetIdentity
from eyas.engines.boundaries import layer_ids
from eyas.errors import ConfigError, ServerError
from eyas.plan.interpreter import VLLM_VARIABLE, vllm_python, vllm_versions

SUPPORTED = ("0.32.0",)
DEFAULTS: dict[str, Any] = {
    "attention_backend": None,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 64,
    "tensor_parallel_size": 1,
}
OPTIONS = tuple(DEFAULTS)
"""Engine options: they decide which kernels run and what shares a batch, and with it the last bits."""
HARMLESS = frozenset({
    "cpu_offload_gb", "disable_custom_all_reduce", "disable_log_stats", "distributed_executor_backend", "download_dir",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_parallel_loading_workers",
    "num_gpu_blocks_override", "safetensors_load_strategy", "swap_space",
})  # fmt: skip
"""Engine arguments that decide no state: what stands in the variable is in no identity. Others are refused unseen."""
ARGUMENTS = "EYAS_VLLM_ARGS"


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options, the defaults filled in.

    Raises:
        ConfigError: One is unknown, or not with such a value.
    """
    check_engine_options("vllm", options)
    return DEFAULTS | dict(options)


def more_arguments() -> dict[str, Any]:
    """``EYAS_VLLM_ARGS``: further engine arguments that cannot change a result, as one JSON object.

    Raises:
        ConfigError: It is no such object, or names an argument that is not known to be harmless.
    """
    text = os.environ.get(ARGUMENTS, "")
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"{ARGUMENTS}: {error}, expected a JSON object", f"unset {ARGUMENTS}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{ARGUMENTS}: {text!r}, expected a JSON object", f"unset {ARGUMENTS}")
    if others := sorted(found.keys() - HARMLESS):
        raise ConfigError(
            f"{ARGUMENTS}: {others[0]!r} may decide the states, expected one of {', '.join(sorted(HARMLESS))}",
            f"extract.engine_options takes {', '.join(OPTIONS)}",
        )
    return found


def check_target(target: TargetIdentity, boundaries: Sequence[int]) -> tuple[int, ...]:
    """The ids of the streams to ask vLLM for: the boundaries, and the last layer's output at the end.

    Raises:
        PlanError: A boundary does not exist.
        ServerError: The final norm is none that could be applied to a captured state.
    """
    if target.final_norm.kind != "rms_norm":
        raise ServerError(
            f"the target's final norm is {target.final_norm.kind!r}: vLLM gives the last state before it, and only "
            "'rms_norm' can be applied to it here",
            "capture with extract.engine: hf or sglang",
        )
    ids = layer_ids(boundaries, "vllm", model_type=target.model_type, num_layers=target.num_layers)
    return tuple(sorted({*ids, target.num_layers}))


def check_versions() -> tuple[str, dict[str, str]]:
    """The interpreter, and the versions in it.

    Raises:
        PlanError: There is none with vllm.
        ServerError: vLLM's version is not supported.
    """
    python, versions = vllm_python(), vllm_versions()
    if versions["vllm"] not in SUPPORTED:
        raise ServerError(
            f"{python} has vllm {versions['vllm']}, supported: {', '.join(SUPPORTED)}",
            f"`make setup-vllm`, or name another python: {VLLM_VARIABLE}",
        )
    return python, versions
