"""Muon: momentum made orthogonal for the hidden matrices; ``lm_head`` and norm gains stay with AdamW.

An update has the root mean square of an AdamW update (0.2), so learning rate and weight decay mean the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eyas.drafter.weights import FlatWeights

if TYPE_CHECKING:
    from eyas.train.optimizer import Segment

MOMENTUM = 0.95
RMS = 0.2
NOT_HIDDEN = ("lm_head.weight",)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonal(matrix_XY: torch.Tensor) -> torch.Tensor:
    """About U Vᵀ of a matrix U S Vᵀ, by Newton-Schulz iterations; singular values end near 1, not at 1."""
    a, b, c = COEFFICIENTS
    x_XY = matrix_XY.bfloat16()  # products of a CPU with AMX are eight times faster so
    tall = x_XY.shape[0] > x_XY.shape[1]
    x_XY = x_XY.T if tall else x_XY
    x_XY = x_XY / (x_XY.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram_XX = x_XY @ x_XY.T
        x_XY = a * x_XY + (b * gram_XX + c * gram_XX @ gram_XX) @ x_XY
    return (x_XY.T if tall else x_XY).to(matrix_XY.dtype)


class Muon:
    """Updates the hidden matrices of flat weights.

    Args:
        weights: Masters and gradients.
    """

    def __init__(self, weights: FlatWeights) -> None:
        self._weights = weights
        self._names = [name for name, view in weights.views.items() if view.ndim == 2 and name not in NOT_HIDDEN]

    def others(self, segments: list[Segment]) -> list[Segment]:
        """What is left for AdamW of unsharded segments."""
        left: list[Segment] = []
        for segment in segments:
            start = segment.whole.start
            for name in sorted(self._names, key=self._place):
                first, last = self._place(name), self._place(name) + self._weights.views[name].numel()
                if segment.whole.start <= first < segment.whole.stop:
                    left += _piece(segment, start, first)
                    start = last
            left += _piece(segment, start, segment.whole.stop)
        return left

    def step(self, momentum_P: torch.Tensor, lr: float, weight_decay: float, grad_scale: torch.Tensor) -> None:
        """One update of every hidden matrix in place; gradients are divided by ``grad_scale``."""
        for name in self._names:
            master_XY, grad_XY = self._weights.views[name], self._weights.grad_views[name]
            momentum_XY = momentum_P[self._place(name) :][: master_XY.numel()].view_as(master_XY)
            grad_XY = grad_XY / grad_scale
            momentum_XY.lerp_(grad_XY, 1 - MOMENTUM)
            update_XY = orthogonal(grad_XY.lerp(momentum_XY, MOMENTUM))
            master_XY.mul_(1 - lr * weight_decay)
            master_XY.add_(update_XY, alpha=-lr * RMS * max(master_XY.shape) ** 0.5)

    def _place(self, name: str) -> int:
        return int(self._weights.views[name].storage_offset())


def _piece(segment: Segment, start: int, stop: int) -> list[Segment]:
    shift = segment.own.start - segment.whole.start
    if stop <= start:
        return []
    return [type(segment)(slice(start, stop), slice(start + shift, stop + shift), segment.weight_decay)]
