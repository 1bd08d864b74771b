"""The export's own key check: read the written folder back as its server would, and list every fault.

It reads files only; nothing of what was in memory while writing is trusted. Problems come as lines that
name the key or tensor, so that one run shows all of them.

Letters: V target vocab, W draft vocab.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas import fs
from eyas.contracts import DrafterShape
from eyas.errors import ExportError, StoreError
from eyas.export import loaders
from eyas.export.config_json import SGLANG_ARCHITECTURE, VLLM_ARCHITECTURE, layer_config
from eyas.export.tensors import WEIGHTS_FILE, read_tensors

CONFIG_FILE = "config.json"
ARCHITECTURES = {"sglang": SGLANG_ARCHITECTURE, "vllm": VLLM_ARCHITECTURE}
LOCAL_PATH = re.compile(r"^(/|~|\.{1,2}/|file:|[A-Za-z]:\\)")


def read_checked(
    folder: Path, server: str, shape: DrafterShape, layer_ids: Sequence[int], dtype: str
) -> dict[str, torch.Tensor]:
    """Tensors of a server's folder, after every check.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``.
        server: ``sglang`` or ``vllm``.
        shape: What was trained.
        layer_ids: The boundaries in this server's spelling.
        dtype: Of the weights.

    Raises:
        ExportError: The server would load something else than what was trained; all faults are listed.
    """
    try:
        config = fs.read_json(folder / CONFIG_FILE)
    except StoreError as error:
        raise ExportError(f"{server}: {error.message}", "`dvc repro --force --single-item export`") from error
    problems = list(config_problems(server, config, shape, layer_ids))
    tensors: dict[str, torch.Tensor] = {}
    if not problems:
        tensors = read_tensors(folder / WEIGHTS_FILE)
        problems += tensor_problems(server, config, tensors, dtype)
    if problems:
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise ExportError(f"{server} would not load what was trained:\n{lines}")
    return tensors


def config_problems(
    server: str, config: Mapping[str, Any], shape: DrafterShape, layer_ids: Sequence[int]
) -> Iterator[str]:
    """Faults of a ``config.json``, one line each."""
    if config.get("architectures") != [ARCHITECTURES[server]]:
        yield f"architectures: {config.get('architectures')}, expected ['{ARCHITECTURES[server]}']"
    residual = bool(config.get("norm_before_residual"))
    if residual != shape.norm_before_residual:
        yield f"norm_before_residual: {str(residual).lower()}, expected {str(shape.norm_before_residual).lower()} as trained"
    if server == "vllm" and "speculators_config" not in config:
        yield "speculators_config: missing, the server would take the folder for a plain model"
    found_ids = loaders.written_layer_ids(server, config)
    if found_ids != list(layer_ids):
        used = f"{found_ids}" if found_ids else "its own default [2, n//2, n-3]"
        yield f"layer ids: the engine would use {used}, expected {list(layer_ids)}"
    layer = loaders.layer_section(server, config)
    for key, expected in layer_config(shape).items():
        if layer.get(key) != expected:
            yield f"{key}: {layer.get(key)!r}, expected {expected!r} as trained"
    top = {name: getattr(shape, name) for name in ("draft_vocab_size", "fc_norm", "norm_output")}
    for key, expected in (top | {"tie_word_embeddings": False}).items():
        if config.get(key) != expected:
            yield f"{key}: {config.get(key)!r}, expected {expected!r} as trained"
    for where, text in _strings(config, ""):
        if LOCAL_PATH.match(text):
            yield f"{where}: {text!r} is a path of this machine; the server would try to open it"


def tensor_problems(
    server: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: str
) -> Iterator[str]:
    """Faults of the weights against their config, one line each."""
    outcome = loaders.simulate_load(server, config, {name: tuple(t.shape) for name, t in tensors.items()})
    yield from (f"{name}: the loader would skip it in silence" for name in outcome.skipped)
    yield from (f"{name}: missing, it would keep random values" for name in outcome.missing)
    yield from (f"{text}: wrong shape" for text in outcome.misshapen)
    for name, tensor in sorted(tensors.items()):
        expected = {"d2t": torch.int64, "t2d": torch.bool}.get(name, getattr(torch, dtype))
        if tensor.dtype != expected:
            yield f"{name}: {tensor.dtype}, expected {expected}"
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"{name}: holds NaN or infinite values"
    if not outcome.missing and not outcome.misshapen and "d2t" in tensors and "t2d" in tensors:
        yield from map_problems(tensors["d2t"], tensors["t2d"])


def map_problems(d2t_W: torch.Tensor, t2d_V: torch.Tensor) -> Iterator[str]:
    """Faults of the draft vocab maps, one line each."""
    W, V = len(d2t_W), len(t2d_V)
    target_W = torch.arange(W) + d2t_W.long()
    if not bool((target_W.diff() > 0).all()):
        yield "d2t: target ids do not rise strictly, so it is no map of the draft vocab"
    if int(target_W.min()) < 0 or int(target_W.max()) >= V:
        yield f"d2t: target ids {int(target_W.min())} to {int(target_W.max())}, expected 0 to {V - 1}"
        return
    if int(t2d_V.sum()) != W:
        yield f"t2d: {int(t2d_V.sum())} ids are marked, expected {W}"
    elif not bool(t2d_V.bool()[target_W].all()):
        yield "t2d: does not mark the ids that d2t names"


def refuse_unservable(shape: DrafterShape, servers: Sequence[str]) -> None:
    """Refuse shapes that a server would run as something else.

    Raises:
        ExportError: The drafter's width is not the target's, ``fc`` would be passed over, or SGLang would add the
            raw hidden state where the normed one was trained.
    """
    if shape.norm_before_residual and "sglang" in servers:
        raise ExportError(
            "drafter.norm_before_residual true: SGLang's residual is the raw hidden state, so it would run another "
            "model, expected false",
            "set drafter.norm_before_residual to false and train again, or leave sglang out of export.servers",
        )
    if shape.hidden_size != shape.target_hidden_size:
        raise ExportError(
            f"drafter.hidden_size {shape.hidden_size}: servers share the target's embedding of "
            f"{shape.target_hidden_size}, expected the same width",
            "set drafter.hidden_size to 0 and train again",
        )
    if shape.num_aux * shape.target_hidden_size == shape.hidden_size:
        raise ExportError(
            "one aux stream as wide as the drafter: SGLang recognises captured states by their width and "
            "would pass over fc, expected at least two boundaries",
            "name more extract.boundaries",
        )


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _strings(item, f"{where}[{index}]")
