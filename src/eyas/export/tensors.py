"""Tensors of a drafter under each server's names, in the export dtype.

The drafter's own names are SGLang's. vLLM's speculators form calls the layer ``layers.0`` and carries the
target's embedding. The draft vocab maps are left out where the draft vocab is the whole vocab.

Letters: V target vocab, W draft vocab, D target hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eyas import fs
from eyas.contracts import DrafterShape
from eyas.errors import ExportError

WEIGHTS_FILE = "model.safetensors"
OWN_LAYER, VLLM_LAYER = "midlayer.", "layers.0."
EMBEDDING = "embed_tokens.weight"
MAPS = ("d2t", "t2d")


@dataclass(frozen=True, slots=True)
class DrafterTensors:
    """What is exported: trained weights by the drafter's own names, the maps and the embedding."""

    weights: Mapping[str, torch.Tensor]
    d2t_W: torch.Tensor
    """Offsets, int64: target id of draft id i is i + d2t[i]."""
    t2d_V: torch.Tensor
    """Bool: the target id is in the draft vocab."""
    embedding_VD: torch.Tensor


def weight_names(shape: DrafterShape) -> tuple[str, ...]:
    """The drafter's own weight names, the embedding left out."""
    norms = tuple(f"fc_norm.{i}.weight" for i in range(shape.num_aux)) if shape.fc_norm else ()
    layer = (
        *(f"{norm}.weight" for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    )
    return ("fc.weight", *norms, *(OWN_LAYER + name for name in layer), "norm.weight", "lm_head.weight")


def server_tensors(server: str, shape: DrafterShape, tensors: DrafterTensors, dtype: str) -> dict[str, torch.Tensor]:
    """All tensors of one server's file.

    Raises:
        ExportError: A weight of this shape is missing from ``tensors``, or there is one too many.
    """
    wanted = weight_names(shape)
    missing, extra = sorted(set(wanted) - set(tensors.weights)), sorted(set(tensors.weights) - set(wanted))
    if missing or extra:
        raise ExportError(
            f"the checkpoint has no {', '.join(missing) or 'missing tensor'}; unexpected: {', '.join(extra) or 'none'}",
            "`dvc repro train`: it was written by another version",
        )
    target_dtype = getattr(torch, dtype)
    named = {own_to_server(server, name): tensors.weights[name].to(target_dtype) for name in wanted}
    if server == "vllm":
        named[EMBEDDING] = tensors.embedding_VD.to(target_dtype)
    if shape.draft_vocab_size != shape.vocab_size:
        named |= {"d2t": tensors.d2t_W.to(torch.int64), "t2d": tensors.t2d_V.to(torch.bool)}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}


def own_to_server(server: str, name: str) -> str:
    """A drafter's own tensor name as the server's file calls it."""
    return name.replace(OWN_LAYER, VLLM_LAYER, 1) if server == "vllm" else name


def server_to_own(server: str, name: str) -> str:
    """The inverse of ``own_to_server``."""
    return name.replace(VLLM_LAYER, OWN_LAYER, 1) if server == "vllm" else name


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one safetensors file; equal tensors give equal bytes."""
    fs.write_bytes(path, save(tensors, metadata={"format": "pt"}))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file.

    Raises:
        ExportError: It is missing, cut off, or another kind of file.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ExportError(
            f"{path.parent.name}/{path.name}: cannot be read whole: {error}", "`dvc repro --force --single-item export`"
        ) from None
