"""eyas inside an SGLang server, through SGLang's own plugin entry point: no fork, no patch of its files.

Inert unless ``EYAS_CAPTURE_SOCKET`` is set. Then, in each scheduler: once the model is loaded it is told which boundaries
to keep (every rank alike, since that decides which collectives run), and rank 0 listens for a collector. Nothing here
stops a server from serving: what fails is logged and told to whoever connects.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from eyas.engines.sglang import versions, wire
from eyas.engines.sglang.listener import Listener
from eyas.engines.sglang.tap import Prefill, Tap

_LOG = logging.getLogger(__name__)


class _Process:
    """This process' tap; None but in the scheduler of rank 0."""

    tap: Tap | None = None


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``; runs in each of a server's processes."""
    if not os.environ.get(wire.SOCKET_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(versions.LOAD_MODEL, _after_load_model, HookType.AFTER)
    HookRegistry.register(versions.LOGITS, _before_logits, HookType.BEFORE)


def _after_load_model(_result: object, runner: Any, *_further: object, **_named: object) -> None:
    if runner.is_draft_worker:
        return
    fault = ""
    try:
        _prepare(runner)
    except Exception as error:  # noqa: BLE001 - serving goes on, whatever hinders the capture
        fault = f"no capture: {type(error).__name__}: {error}"
        _LOG.error("eyas: %s", fault, exc_info=True)
    _listen(runner, fault)


def _prepare(runner: Any) -> None:
    """Tell the model what to keep; rank 0 gets the tap.

    Raises:
        ValueError: The variable is not as expected, or the model keeps something else.
        CaptureError: A version that eyas does not know.
    """
    version = _sglang_version()
    versions.check_supported(version)
    text = os.environ.get(wire.LAYERS_VARIABLE, "")
    layers = json.loads(text) if text else None
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{wire.LAYERS_VARIABLE} is {text!r}, expected a JSON list of layer ids")
    if not hasattr(runner.model, "set_eagle3_layers_to_capture"):
        raise ValueError(f"{type(runner.model).__name__} cannot keep hidden states of its layers")
    runner.model.set_eagle3_layers_to_capture(layers)
    kept = boundaries(runner.model)
    if len(kept) != len(layers):
        raise ValueError(f"layers {layers} were asked for, and the model keeps boundaries {kept}")
    if versions.tp_rank(version, runner) == 0:
        layout = wire.Layout(len(kept), runner.model_config.hidden_size, _dtype(runner))
        _Process.tap = Tap(layout, _device(runner))


def _listen(runner: Any, fault: str) -> None:
    try:
        if versions.tp_rank(_sglang_version(), runner) == 0:
            Listener(os.environ[wire.SOCKET_VARIABLE], lambda: hello(runner), _Process.tap, fault)
    except Exception:  # noqa: BLE001 - as above; without a socket the supervisor gives up and shows the log
        _LOG.exception("eyas: no capture: the socket %s cannot be opened", os.environ[wire.SOCKET_VARIABLE])


def _before_logits(
    _processor: object,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    lm_head: object,
    logits_metadata: Any,
    aux_hidden_states: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *_further: object,
    **_named: object,
) -> None:
    """Takes the arguments as both versions name them; leaves them as they are."""
    tap = _Process.tap
    if tap is None:
        return
    try:
        batch = logits_metadata
        rids = getattr(batch, "rids", None)
        if not rids or not batch.forward_mode.is_extend() or batch.extend_seq_lens_cpu is None:
            return  # a dummy run, the capture of a graph, or one decode step
        tap.capture(
            Prefill(
                rids,
                [int(rows) for rows in batch.extend_seq_lens_cpu],
                [int(rows) for rows in batch.extend_prefix_lens_cpu],
                input_ids,
                aux_hidden_states,
                hidden_states,
            )
        )
    except Exception:  # noqa: BLE001 - the collector misses the piece and says so; the server serves
        _LOG.exception("eyas: a batch could not be captured")


def boundaries(model: torch.nn.Module) -> list[int]:
    """The boundaries that a model of SGLang will copy, rising; empty if none."""
    for module in model.modules():
        layers = getattr(module, "layers_to_capture", None)
        if layers:
            return sorted({int(layer) for layer in layers})
    return []


def hello(runner: Any) -> wire.Hello:
    """What runs here."""
    version, config = _sglang_version(), runner.model_config
    return wire.Hello(
        protocol=wire.PROTOCOL,
        pid=os.getpid(),
        sglang=version,
        torch=torch.__version__,
        device=str(_device(runner)),
        model_path=str(config.model_path),
        model_class=type(runner.model).__name__,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        dtype=_dtype(runner),
        boundaries=boundaries(runner.model),
        server_args=versions.server_facts(version, runner),
    )


def _dtype(runner: Any) -> str:
    return str(runner.model_config.dtype).removeprefix("torch.")


def _device(runner: Any) -> torch.device:
    kind = str(runner.device)
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _sglang_version() -> str:
    import sglang  # pyright: ignore[reportMissingImports]

    return str(sglang.__version__)
