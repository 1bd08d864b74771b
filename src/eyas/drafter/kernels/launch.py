"""How many programs and warps a row-wise kernel gets."""

from __future__ import annotations

import functools

import torch

PROGRAMS_PER_PROCESSOR = 4


def num_warps(block: int) -> int:
    """Warps for a row of ``block`` values: about 16 values a thread."""
    return max(1, min(16, block // 512))


def num_programs(tensor: torch.Tensor, rows: int) -> int:
    """Programs that share ``rows``: a few for each multiprocessor, a fixed number on a given device."""
    return max(1, min(rows, PROGRAMS_PER_PROCESSOR * _num_processors(tensor.device)))


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
