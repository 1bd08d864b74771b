"""Muon: momentum made orthogonal for the hidden matrices; ``lm_head`` and norm gains stay with AdamW.

An update has the root mean square of an AdamW update (0.2), so learning rate and weight decay mean the same.
"""

from __future__ import annotations

import torch

from eyas.drafter.weights import FlatWeights

MOMENTUM = 0.95
RMS = 0.2
NOT_HIDDEN = ("lm_head.weight",)
SMALLEST = 0.002
"""Singular values from this share of the Frobenius norm on end within ``BAND`` of 1; smaller ones end below, at
most 354 times themselves."""
BAND = 0.345
COEFFICIENTS = (
    (8.3442, -24.2061, 17.5975),
    (4.0757, -2.9734, 0.5478),
    (3.7024, -2.7174, 0.5201),
    (2.8141, -2.0703, 0.4510),
)
"""One odd polynomial a x + b x^3 + c x^5 an iteration: the one nearest to 1 (minimax) on the interval that the one
before ends in, widened by 1 % to either side because products round to bfloat16. The first has [SMALLEST, 1.01].
That every iteration has its own is the idea of Polar Express (Amsel, Persson, Musco, Gower)."""
SMALLEST_NORM = 1e-12
"""Of a gradient that is made orthogonal whole; one of zeros stays zero."""


def orthogonal(matrix_XY: torch.Tensor) -> torch.Tensor:
    """About U Vᵀ of a matrix U S Vᵀ, by Newton-Schulz iterations on the shorter side; in bfloat16."""
    norm = torch.linalg.vector_norm(matrix_XY, dtype=torch.float32).clamp_min(SMALLEST_NORM)
    x_XY = (matrix_XY / norm).bfloat16()  # products of a CPU with AMX are eight times faster so
    tall = x_XY.shape[0] > x_XY.shape[1]
    for a, b, c in COEFFICIENTS:
        gram = x_XY.T @ x_XY if tall else x_XY @ x_XY.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x_XY = torch.addmm(x_XY, *((x_XY, polynomial) if tall else (polynomial, x_XY)), beta=a)
    return x_XY


class Muon:
    """Updates the hidden matrices of flat weights.

    Args:
        weights: Masters and gradients.
    """

    def __init__(self, weights: FlatWeights) -> None:
        self._weights = weights
        named = {name: view for name, view in weights.views.items() if view.ndim == 2 and name not in NOT_HIDDEN}
        places = {name: int(view.storage_offset()) for name, view in named.items()}
        self._names = {places[name]: name for name in sorted(named, key=lambda name: places[name])}
        self.places = [slice(start, start + named[name].numel()) for start, name in self._names.items()]
        """Of the hidden matrices in the flat tensors, in their order."""

    def step(
        self, place: slice, momentum_X: torch.Tensor, lr: float, weight_decay: float, grad_scale: torch.Tensor
    ) -> None:
        """One update of a hidden matrix in place; its gradient is divided by ``grad_scale`` and overwritten."""
        name = self._names[place.start]
        master_XY, grad_XY = self._weights.views[name], self._weights.grad_views[name]
        momentum_XY = momentum_X.view_as(master_XY)
        momentum_XY.lerp_(grad_XY.div_(grad_scale), 1 - MOMENTUM)
        update_XY = orthogonal(grad_XY.lerp_(momentum_XY, MOMENTUM))
        if weight_decay:
            master_XY.mul_(1 - lr * weight_decay)
        master_XY.add_(update_XY, alpha=-lr * RMS * max(master_XY.shape) ** 0.5)
