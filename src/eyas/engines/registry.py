"""Engines by name. An engine's module is imported only when that engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.contracts import TargetIdentity
from eyas.engines.base import Engine, OnWait, nobody
from eyas.errors import ConfigError
from eyas.plan.interpreter import sglang_versions

NAMES = ("hf", "sglang", "vllm", "fake")
SERVER_ENGINES = ("sglang", "vllm")
"""Those whose states are looked at on every start; transformers is the reference itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine for captures, as a record: it can be made here, or by a worker on another node."""

    name: str
    target: TargetIdentity
    folder: Path | None
    """The target's files, under the same path on every node; None is enough for ``fake``."""
    boundaries: tuple[int, ...]
    dtype: str
    device: str
    options: dict[str, Any]
    trust_remote_code: bool = False

    def make(self, *, longest_tokens: int = 0, label: str = "", on_wait: OnWait = nobody) -> Engine:
        """The engine, not yet open; see ``make_engine``."""
        return make_engine(
            self.name,
            target=self.target,
            folder=self.folder,
            boundaries=self.boundaries,
            dtype=self.dtype,
            device=self.device,
            options=self.options,
            trust_remote_code=self.trust_remote_code,
            longest_tokens=longest_tokens,
            label=label,
            on_wait=on_wait,
        )

    @property
    def num_gpus(self) -> int:
        """Devices of one engine."""
        if self.device == "cpu":
            return 0
        return int(self.options.get("tp_size", self.options.get("tensor_parallel_size", 1)))


def make_engine(
    name: str,
    *,
    target: TargetIdentity,
    folder: Path | None,
    boundaries: Sequence[int],
    dtype: str,
    batch_size: int = 1,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    longest_tokens: int = 0,
    label: str = "",
    on_wait: OnWait = nobody,
) -> Engine:
    """An engine that is not yet open.

    Args:
        name: One of ``NAMES``.
        target: Identity of the target; states its shape and end-of-turn tokens.
        folder: The target's files; None is enough for ``fake``.
        boundaries: Aux boundaries to capture, in stored order; may be empty for generation.
        dtype: Dtype of the weights while running.
        batch_size: Rows of a decoding batch, when the engine is to generate.
        options: Engine options that touch numerics.
        device: Where the target runs.
        trust_remote_code: Let transformers run the repository's own model code.
        longest_tokens: Of all that may be asked for, when it is announced bit by bit.
        label: Begins the names of a server's logs, where several engines run in one folder.
        on_wait: Called while the engine waits for its server; others wait for none.

    Raises:
        ConfigError: The engine or one of its options is unknown.
    """
    chosen: dict[str, Any] = dict(options or {})
    if name == "fake":
        _refuse_unknown(name, chosen, ())
        from eyas.engines.fake import FakeEngine

        return FakeEngine(target, boundaries)
    if name not in NAMES:
        raise ConfigError(f"engine: {name!r}, expected one of {', '.join(NAMES)}")
    assert folder is not None
    runs_as: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if name == "hf":
        from eyas.engines.hf import OPTIONS, HfEngine

        _refuse_unknown(name, chosen, OPTIONS)
        return HfEngine(target, folder, boundaries, batch_size=batch_size, **runs_as, **chosen)
    runs_as["on_wait"] = on_wait
    if name == "vllm":
        from eyas.engines.vllm.engine import VllmEngine

        chosen = chosen if boundaries else {"max_num_seqs": batch_size} | chosen
        return VllmEngine(target, folder, boundaries, options=chosen, **runs_as)
    from eyas.engines.sglang.engine import OPTIONS, SglangEngine

    _refuse_unknown(name, chosen, OPTIONS)
    chosen = chosen if boundaries else {"max_running_requests": batch_size} | chosen
    return SglangEngine(target, folder, boundaries, longest_tokens=longest_tokens, label=label, **runs_as, **chosen)


def check_installed(name: str) -> None:
    """Look for the program of an engine that runs in an interpreter of its own; others are installed with eyas.

    Raises:
        PlanError: There is no interpreter with it.
        CaptureError: Another SGLang than those that eyas knows.
        ServerError: Another vLLM.
    """
    if name == "sglang":
        from eyas.engines.sglang.versions import check_supported

        check_supported(sglang_versions()["sglang"])
    elif name == "vllm":
        from eyas.engines.vllm.preflight import check_versions

        check_versions()


def _refuse_unknown(name: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        expected = f"one of {', '.join(known)}" if known else "no options"
        raise ConfigError(f"engine_options.{unknown[0]}: unknown to engine {name}, expected {expected}")
