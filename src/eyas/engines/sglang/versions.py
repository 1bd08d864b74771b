"""What differs between the versions of SGLang that eyas knows: arguments, hook points, where a fact stands.

Read in the sources of each version and run: 0.5.23 on CPUs, 0.5.14 on an H200. The plugin runs inside the server and
the supervisor beside it, so nothing here imports sglang before it is asked to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import CaptureError

SUPPORTED = ("0.5.14", "0.5.23")
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
"""AFTER it the model is there and no graph is captured yet, in both versions."""
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
"""BEFORE it every state is final: input ids, hidden states after the norm, head, batch, aux states."""
FACTS = (
    "allow_auto_truncate", "attention_backend", "attn_cp_size", "chunked_prefill_size", "context_length",
    "disable_overlap_schedule", "disable_radix_cache", "disaggregation_mode", "dp_size", "dtype",
    "enable_deterministic_inference", "enable_dp_attention", "enable_hierarchical_cache", "enable_lora",
    "enable_mixed_chunk", "enable_priority_scheduling", "enable_torch_compile", "enable_two_batch_overlap",
    "kv_cache_dtype", "max_prefill_tokens", "max_running_requests", "mem_fraction_static", "page_size", "pp_size",
    "prefill_attention_backend", "quantization", "random_seed", "sampling_backend", "schedule_policy",
    "skip_tokenizer_init", "speculative_algorithm", "speculative_draft_model_path", "tp_size", "watchdog_timeout",
)  # fmt: skip
"""Server arguments that ``Hello`` carries, as the server resolved them."""


def check_supported(version: str) -> None:
    """Refuse another SGLang than those that eyas has been run with.

    Raises:
        CaptureError: It is another one.
    """
    if version not in SUPPORTED:
        raise CaptureError(
            f"sglang {version} is installed, expected one of {', '.join(SUPPORTED)}",
            f"pip install sglang=={SUPPORTED[-1]}, or name another interpreter by EYAS_SGLANG_PYTHON",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a capture server is started with. None leaves the choice to SGLang."""

    model_path: str
    port: int
    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    context_length: int | None = None
    attention_backend: str | None = None
    chunked_prefill_size: int | None = None
    """Tokens of one prefill chunk; -1 for whole prompts."""
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    """Tokens of the KV pool."""
    tp_size: int = 1
    decode: bool = False
    """The server writes answers too: decode graphs are worth their start-up."""
    host: str = "127.0.0.1"
    log_level: str = "warning"
    further: Sequence[str] = ()
    """Appended as they are; the last of two wins."""


def server_arguments(version: str, options: ServerOptions) -> list[str]:
    """Arguments of ``python -m sglang.launch_server`` for a server that captures.

    Radix cache, mixed chunks and prefill graphs would each take rows away from the tap; a tokenizer is not needed.

    Raises:
        CaptureError: A version that eyas does not know.
    """
    check_supported(version)
    arguments = [
        *("--model-path", options.model_path, "--host", options.host, "--port", str(options.port)),
        *("--device", options.device, "--dtype", options.dtype, "--tp-size", str(options.tp_size)),
        *("--log-level", options.log_level, "--grammar-backend", "none", "--sampling-backend", "pytorch"),
        *("--skip-tokenizer-init", "--disable-radix-cache", "--cuda-graph-backend-prefill", "disabled"),
        *(() if options.decode else ("--cuda-graph-backend-decode", "disabled")),
    ]
    chosen: Mapping[str, int | str | None] = {
        "--context-length": options.context_length,
        "--attention-backend": options.attention_backend or ("torch_native" if options.device == "cpu" else None),
        "--chunked-prefill-size": options.chunked_prefill_size,
        "--max-prefill-tokens": options.max_prefill_tokens,
        "--max-running-requests": options.max_running_requests,
        "--max-total-tokens": options.max_total_tokens,
    }
    for flag, value in chosen.items():
        if value is not None:
            arguments += [flag, str(value)]
    return [*arguments, *options.further]


def drafting_arguments(drafter: str, chain_length: int) -> list[str]:
    """Arguments that let a server draft chains with an EAGLE-3 drafter; the same in both versions.

    Args:
        drafter: Folder in SGLang's form.
        chain_length: Drafts of a round.
    """
    return [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter),
        *("--speculative-num-steps", str(chain_length), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(chain_length + 1)),
    ]


CPU_MODELS = "eyas_cpu_models"
"""Model package beside the CPU shim: the files that run without Triton."""


def cpu_environment(shim: str, python_path: str = "", tp_size: int = 1) -> dict[str, str]:
    """Environment of a server on a CPU without AMX and Triton.

    Args:
        shim: Folder of ``sitecustomize.py``: ``engines/sglang/cpu_shim``.
        python_path: PYTHONPATH that stays.
        tp_size: Ranks; each is bound to a core of its own.
    """
    environment = {
        "PYTHONPATH": f"{shim}:{python_path}" if python_path else shim,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": CPU_MODELS,
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_WAIT_POLICY": "passive",  # spinning threads make a busy machine several times slower
    }
    if tp_size > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(tp_size))
    return environment


def tp_rank(version: str, runner: Any) -> int:
    """The tensor-parallel rank of a ``ModelRunner``."""
    if version == "0.5.14":
        return int(runner.tp_rank)
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return int(get_parallel().tp_rank)


def server_facts(version: str, runner: Any) -> dict[str, Any]:
    """``FACTS`` and what only the running server knows, plain enough for JSON.

    ``context_len`` and ``max_total_num_tokens`` are the longest request and the KV pool in tokens;
    ``cuda_graph_backend_prefill`` and ``_decode`` are what the server really uses.
    """
    if version == "0.5.14":
        arguments = {name: getattr(runner.server_args, name, None) for name in (*FACTS, "cuda_graph_config")}
    else:
        from sglang.srt.runtime_context import get_context  # pyright: ignore[reportMissingImports]

        arguments = get_context().resolved_server_args_dict()
    facts = {name: _plain(arguments.get(name)) for name in FACTS}
    facts["context_len"] = _plain(runner.model_config.context_len)
    facts["max_total_num_tokens"] = _plain(getattr(runner, "max_total_num_tokens", None))
    graphs = arguments.get("cuda_graph_config")
    for phase in ("prefill", "decode"):
        of_phase = graphs.get(phase) if isinstance(graphs, Mapping) else getattr(graphs, phase, None)
        backend = of_phase.get("backend") if isinstance(of_phase, Mapping) else getattr(of_phase, "backend", None)
        facts[f"cuda_graph_backend_{phase}"] = _plain(getattr(backend, "value", backend))
    return facts


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
