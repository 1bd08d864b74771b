"""Packs of made-up documents on a device, for our trainer and a peer alike; needs torch and safetensors alone.

A job names ``packs``, files of documents side by side, and ``steps_per_order``: the first order trains on the first
pack, the next on the second, round and round. Ids, masks and states are tensors of all tokens, ``lengths_D`` cuts them.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

NAMES = ("ids_T", "mask_T", "aux_TAD", "last_TD")


def read_documents(path: str) -> list[dict[str, torch.Tensor]]:
    """The documents of a pack: ids_T int64, mask_T uint8, aux_TAD and last_TD bfloat16."""
    tensors = load_file(path)
    parts = {name: tensors[name].split(tensors["lengths_D"].tolist()) for name in NAMES}
    return [{name: parts[name][number] for name in NAMES} for number in range(len(parts["ids_T"]))]


def pack_number(job: dict[str, Any], step: int) -> int:
    """Which pack a step trains on."""
    return step // job["steps_per_order"] % len(job["packs"])


def takes_loss(job: dict[str, Any], step: int) -> bool:
    """Whether a step's loss is read: at the last of each order, where everybody waits for the device anyway."""
    return step % job["steps_per_order"] == job["steps_per_order"] - 1


def begin() -> None:
    """Wait for the device, count its memory anew."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def end() -> dict[str, Any]:
    """Wait for the device; most bytes that tensors took on it since ``begin``."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    return {"device_peak_bytes": torch.cuda.max_memory_allocated(), "device": torch.cuda.get_device_name()}
