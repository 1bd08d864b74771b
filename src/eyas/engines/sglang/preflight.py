"""What must hold before a server captures: looked at on this machine first, then in what the server says of itself.

Every refusal names what was found, what is expected and the flag, variable or parameter to change.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.console import human_bytes
from eyas.contracts import TargetIdentity
from eyas.engines.sglang import versions, wire
from eyas.engines.sglang.arena import MORE, SHM, free_shm_bytes
from eyas.errors import EyasError, ServerError
from eyas.plan.interpreter import VARIABLE, sglang_python, sglang_versions

INPUT_MARGIN = 7
"""A prompt must be so much shorter than context and KV pool: both versions refuse one of their longest length, context - 6."""
SM120_REFUSED = ("fa3", "flashmla", "trtllm_mla", "cutlass_mla", "trtllm_mha")
"""Attention without kernels for compute capability 12."""
HOPPER_ONLY = ("fa3", "flashmla")
MLA_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "kimi_vl")
LEAST_SHM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as the driver names it."""

    name: str
    capability: float
    driver: str
    memory_bytes: int


def gpus() -> list[Gpu]:
    """The devices that this process may use, by ``CUDA_VISIBLE_DEVICES``; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=name,compute_cap,driver_version,memory.total,uuid"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False, timeout=60
    )
    found: dict[str, Gpu] = {}
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[3].isdecimal():
            found[parts[4]] = Gpu(parts[0], float(parts[1]), parts[2], int(parts[3]) << 20)
    return _visible(found)


def _visible(found: Mapping[str, Gpu]) -> list[Gpu]:
    """Those of ``CUDA_VISIBLE_DEVICES``, which names numbers or beginnings of UUIDs; what follows an unknown one counts not."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or "MIG-" in text:  # parts of a device are none of nvidia-smi's lines
        return list(found.values())
    chosen = []
    for word in (word.strip() for word in text.split(",")):
        by_number = list(found.values())[int(word) : int(word) + 1] if word.isdecimal() else []
        match = by_number or [gpu for uuid, gpu in found.items() if word and uuid.startswith(word)]
        if len(match) != 1:
            break
        chosen += match
    return chosen


def check_attention(backend: str | None, capability: float, model_type: str) -> str | None:
    """The attention to start with: as chosen, or one that the GPU has kernels for.

    Args:
        backend: ``engine_options.attention_backend``; None leaves it to SGLang.
        capability: Of the GPU: 9.0, 12.0; 0 where it is not known.
        model_type: Of the target.

    Raises:
        ServerError: The GPU has no kernels for the chosen one.
    """
    is_refused = (capability >= 12 and backend in SM120_REFUSED) or (
        capability not in (0, 9.0) and backend in HOPPER_ONLY
    )
    if is_refused:
        raise ServerError(
            f"extract.engine_options.attention_backend: {backend!r} has no kernels for compute capability "
            f"{capability}, expected flashinfer or triton",
            "make params MACHINE=rtx_pro_6000_x8, or set extract.engine_options.attention_backend=triton",
        )
    if backend is None and capability >= 12:
        return "triton" if model_type in MLA_TYPES else "flashinfer"
    return backend


def check_machine(device: str, tp_size: int) -> float:
    """What SGLang needs of a machine with GPUs; gives their compute capability, 0 on a CPU.

    Raises:
        ServerError: GPUs or the compilers that SGLang calls at run time are missing.
    """
    if device == "cpu":
        return 0.0
    found = gpus()
    if len(found) < tp_size:
        raise ServerError(
            f"{len(found)} NVIDIA devices here, expected {tp_size} (extract.engine_options.tp_size)",
            "set tp_size, or CUDA_VISIBLE_DEVICES; `make doctor` shows what is there",
        )
    for program, hint in COMPILERS.items():
        if not has_program(program):
            raise ServerError(f"{program} is not found, and SGLang compiles kernels at run time", hint)
    return min(gpu.capability for gpu in found)


TOOLKIT = "/usr/local/cuda/bin"
COMPILERS = {
    "nvcc": "install the CUDA toolkit that torch was built with, or put its bin on PATH",
    "ninja": "pip install ninja, or apt-get install ninja-build",
    "c++": "apt-get install g++",
}


def has_program(name: str) -> bool:
    """Whether a compiler is there: on PATH, or where toolkits and the interpreter keep it."""
    beside = os.path.dirname(sglang_python())  # noqa: PTH120
    path = os.pathsep.join([os.environ.get("PATH", ""), TOOLKIT, beside])
    names = ("c++", "g++", "clang++") if name == "c++" else (name,)
    return any(shutil.which(each, path=path) for each in names)


ARGUMENTS_VARIABLE = "EYAS_SGLANG_ARGS"
HARMLESS = frozenset({
    "base-gpu-id", "context-length", "crash-dump-folder", "cuda-graph-bs-decode", "cuda-graph-max-bs-decode", "disable-cuda-graph",
    "disable-custom-all-reduce", "disable-overlap-schedule", "dist-init-addr", "dist-timeout", "download-dir",
    "enable-metrics", "enable-p2p-check", "enforce-disable-flashinfer-allreduce-fusion", "gpu-id-step", "log-level", "log-level-http", "max-queued-requests",
    "max-total-tokens", "mem-fraction-static", "nccl-port", "numa-node", "skip-server-warmup", "soft-watchdog-timeout",
    "watchdog-timeout", "weight-loader-disable-mmap",
})  # fmt: skip
"""Server arguments that decide no state: what stands in the variable is in no identity. Others are refused unseen."""


def more_arguments() -> list[str]:
    """``EYAS_SGLANG_ARGS``: further server arguments that cannot change a result.

    Raises:
        ServerError: It cannot be split, or names an argument that is not known to be harmless.
    """
    try:
        found = shlex.split(os.environ.get(ARGUMENTS_VARIABLE, ""))
    except ValueError as error:
        raise ServerError(f"{ARGUMENTS_VARIABLE}: {error}", f"unset {ARGUMENTS_VARIABLE}") from error
    for word in found:
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag.removeprefix("--") not in HARMLESS and not flag[1:2].isdigit():
            raise ServerError(
                f"{ARGUMENTS_VARIABLE}: {flag} may decide the states, expected one of --{', --'.join(sorted(HARMLESS))}",
                "what decides them stands in params.yaml: extract.engine_options, target.dtype",
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the plan expects of a server."""

    target: TargetIdentity
    boundaries: tuple[int, ...]
    dtype: str
    version: str
    """Of sglang."""
    options: Mapping[str, Any]
    """``engine_options``."""


FLAGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "disable_radix_cache": ((True,), "start the server with --disable-radix-cache"),
    "cuda_graph_backend_prefill": (
        ("disabled", None),
        "start the server with --cuda-graph-backend-prefill disabled: the plugin sees no replayed graph",
    ),
    "speculative_algorithm": ((None,), "start the server without --speculative-algorithm and without a draft"),
    "speculative_draft_model_path": ((None,), "start the server without --speculative-draft-model-path"),
    "pp_size": ((1, None), "start the server with --pp-size 1"),
    "dp_size": ((1, None), "start the server with --dp-size 1"),
    "attn_cp_size": ((1, None), "start the server without context parallelism"),
    "enable_dp_attention": ((False, None), "start the server without --enable-dp-attention"),
    "enable_mixed_chunk": ((False, None), "start the server without --enable-mixed-chunk"),
    "enable_two_batch_overlap": ((False, None), "start the server without --enable-two-batch-overlap"),
    "enable_hierarchical_cache": ((False, None), "start the server without --enable-hierarchical-cache"),
    "enable_lora": ((False, None), "start the server without --enable-lora"),
    "allow_auto_truncate": ((False, None), "start the server without --allow-auto-truncate"),
    "enable_torch_compile": ((False, None), "start the server without --enable-torch-compile"),
    # A later request that overtakes a given-up one would free its slot too early.
    "schedule_policy": (("fcfs", None), "start the server with --schedule-policy fcfs"),
    "enable_priority_scheduling": ((False, None), "start the server without --enable-priority-scheduling"),
    "disaggregation_mode": (("null", None), "start the server without --disaggregation-mode"),
}
"""Server arguments: what they may be, and what to change."""


def check_hello(hello: wire.Hello, expected: Expected) -> None:
    """Compare what a server says of itself with the plan.

    Raises:
        ServerError: Version, model, boundaries or an argument is not as expected.
    """
    versions.check_supported(hello.sglang)
    if hello.sglang != expected.version:
        raise ServerError(
            f"the server runs sglang {hello.sglang}, the plan was made for {expected.version}",
            f"make the plan with the server's interpreter: {VARIABLE}",
        )
    target = expected.target
    facts = {
        "hidden size": (hello.hidden_size, target.hidden_size),
        "layers": (hello.num_layers, target.num_layers),
        "vocab size": (hello.vocab_size, target.vocab_size),
        "dtype": (hello.dtype, expected.dtype),
        "boundaries": (tuple(hello.boundaries), expected.boundaries),
    }
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise ServerError(
                f"the server's {hello.model_class} has {name} {_text(found)}, the plan expects {_text(wanted)}",
                "the server runs another model or setting than params.yaml: `eyas sglang-command` prints the right one",
            )
    _check_arguments(hello.server_args, expected.options)


def _check_arguments(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    for name, (allowed, hint) in FLAGS.items():
        if name in arguments and arguments[name] not in allowed:
            raise ServerError(f"the server has {name} = {arguments[name]!r}, expected {allowed[0]!r}", hint)
    for name, wanted in options.items():
        found = arguments.get(name)
        if found is not None and found != wanted:
            flag = "--" + name.replace("_", "-")
            raise ServerError(
                f"the server has {name} = {found!r}, extract.engine_options says {wanted!r}",
                f"start the server with {flag} {wanted}, or change params.yaml",
            )


def longest_prompt(arguments: Mapping[str, Any], context: int) -> int:
    """Tokens of the longest prompt that a server takes, by its context and its KV pool."""
    limits = [context, arguments.get("context_len"), arguments.get("max_total_num_tokens")]
    return min(int(limit) for limit in limits if limit) - INPUT_MARGIN


def check_longest(num_tokens: int, arguments: Mapping[str, Any], context: int) -> None:
    """Refuse a capture whose longest sample the server would not take.

    Raises:
        ServerError: With both numbers.
    """
    limit = longest_prompt(arguments, context)
    if num_tokens > limit:
        raise ServerError(
            f"the longest sample has {num_tokens} tokens, the server takes {limit}: context "
            f"{arguments.get('context_len', context)}, KV pool {arguments.get('max_total_num_tokens')} tokens, "
            f"{INPUT_MARGIN} of them its own",
            "lower tokenize.max_tokens, or give the KV pool more: EYAS_SGLANG_ARGS='--mem-fraction-static 0.9'",
        )


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


Row = tuple[str, str, str, str]
"""What, ``found`` or ``problem``, value, hint."""


def findings(device: str, tp_size: int) -> list[Row]:
    """What ``eyas doctor`` shows of a machine that captures with SGLang."""
    rows: list[Row] = []
    try:
        found = sglang_versions()
        versions.check_supported(found["sglang"])
        text = ", ".join(f"{name} {version}" for name, version in found.items())
        rows.append(("sglang", "found", f"{text} in {sglang_python()}", ""))
    except EyasError as error:
        rows.append(("sglang", "problem", error.message, error.hint or ""))
    free = free_shm_bytes()
    enough = free >= LEAST_SHM_BYTES
    rows.append((str(SHM), "found" if enough else "problem", f"{human_bytes(free)} free", "" if enough else MORE))
    if device == "cpu":
        return rows
    rows += [(f"GPU {i}", "found", f"{gpu.name}, capability {gpu.capability}, driver {gpu.driver}", "")
             for i, gpu in enumerate(gpus())]  # fmt: skip
    try:
        check_machine(device, tp_size)
        rows.append(("GPUs and compilers for sglang", "found", f"{tp_size} wanted", ""))
    except EyasError as error:
        rows.append(("GPUs and compilers for sglang", "problem", error.message, error.hint or ""))
    return rows
