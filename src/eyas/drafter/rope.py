"""Rotary positions in the Llama convention (first half with second half); angles are taken in float64."""

from __future__ import annotations

import torch

from eyas.contracts import DrafterShape


class Rope:
    """Cosines and signed sines by position; the table grows to the most positions asked for."""

    def __init__(self, shape: DrafterShape) -> None:
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        self._inverse_frequencies = shape.rope_theta**-exponents
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def table(
        self, num_positions: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [P,K] of positions 0 to P - 1, P at least ``num_positions``."""
        key = torch.device(device), dtype
        table = self._tables.get(key)
        if table is None or len(table[0]) < num_positions:
            num_rows = 1 << (max(num_positions, 1) - 1).bit_length()
            angles = torch.arange(num_rows, dtype=torch.float64)[:, None] * self._inverse_frequencies
            cos, sin = angles.cos(), angles.sin()
            pair = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
            self._tables[key] = table = pair[0].to(key[0], dtype), pair[1].to(key[0], dtype)
        return table
