"""Learning rate and TTT steps by optimizer step; both are functions of the step number alone."""

from __future__ import annotations

import math
from collections.abc import Sequence


def learning_rate(step: int, num_steps: int, lr: float, warmup_steps: int, min_lr_share: float) -> float:
    """Rate of optimizer step ``step`` (from 0): linear warm-up, then a cosine to ``min_lr_share * lr``."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    share = min_lr_share + (1 - min_lr_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return lr * share


def ttt_steps_at(step: int, num_steps: int, ttt_steps: int, curriculum: Sequence[float]) -> int:
    """TTT steps unrolled at optimizer step ``step``.

    ``curriculum`` holds shares of the run: 1 step before the first, 2 before the second, …, and all
    ``ttt_steps`` after the last; empty unrolls all from the start.
    """
    for index, share in enumerate(curriculum):
        if step < share * num_steps:
            return index + 1
    return ttt_steps
