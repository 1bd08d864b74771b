"""The drafter's products with their gradients: what is kept for the way back, and what is computed again.

Each function is a product together with the cheap arithmetic around it, so that only its narrow inputs are
kept: norms and activations are made again on the way back. Gradients of weights go into ``Weight.sink`` where
there is one (see ``weights``).

Letters: R rows, E width, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eyas.drafter.pointwise import gate, gate_backward, rms_norm, rms_norm_backward
from eyas.drafter.weights import Weight


def add_weight_gradient(sink_OI: torch.Tensor | None, grad_RO: torch.Tensor, x_RI: torch.Tensor) -> torch.Tensor | None:
    """``grad^T x`` summed into the sink in the sink's dtype, or returned when there is none."""
    if sink_OI is None:
        return grad_RO.t() @ x_RI
    if sink_OI.dtype == grad_RO.dtype:
        sink_OI.addmm_(grad_RO.t(), x_RI)
    elif not sink_OI.is_cuda:  # torch has mixed dtypes in one product on CUDA alone
        sink_OI.add_(grad_RO.t() @ x_RI)
    else:
        torch.addmm(sink_OI, grad_RO.t(), x_RI, out_dtype=sink_OI.dtype, out=sink_OI)
    return None


def _add_gain_gradient(sink_E: torch.Tensor | None, grad_E: torch.Tensor) -> torch.Tensor | None:
    if sink_E is None:
        return grad_E
    sink_E.add_(grad_E)
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: torch.Tensor, weight_OI: torch.Tensor, sink_OI: torch.Tensor | None) -> torch.Tensor:
        ctx.sink_OI = sink_OI
        ctx.save_for_backward(x_RI, weight_OI)
        return F.linear(x_RI, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: torch.Tensor) -> Any:  # type: ignore[override]
        x_RI, weight_OI = ctx.saved_tensors
        grad_x_RI = grad_RO @ weight_OI if ctx.needs_input_grad[0] else None
        grad_weight_OI = add_weight_gradient(ctx.sink_OI, grad_RO, x_RI) if ctx.needs_input_grad[1] else None
        return grad_x_RI, grad_weight_OI, None


class _LinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RI: torch.Tensor, weight_OI: torch.Tensor, residual_RO: torch.Tensor, sink_OI: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.sink_OI = sink_OI
        ctx.save_for_backward(x_RI, weight_OI)
        return torch.addmm(residual_RO, x_RI, weight_OI.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: torch.Tensor) -> Any:  # type: ignore[override]
        x_RI, weight_OI = ctx.saved_tensors
        grad_weight_OI = add_weight_gradient(ctx.sink_OI, grad_RO, x_RI) if ctx.needs_input_grad[1] else None
        return grad_RO @ weight_OI, grad_weight_OI, grad_RO, None


class _GatedLinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up_RX: torch.Tensor,
        weight_EI: torch.Tensor,
        residual_RE: torch.Tensor,
        sink_EI: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.sink_EI = sink_EI
        ctx.save_for_backward(gate_up_RX, weight_EI)
        return torch.addmm(residual_RE, gate(gate_up_RX), weight_EI.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RE: torch.Tensor) -> Any:  # type: ignore[override]
        gate_up_RX, weight_EI = ctx.saved_tensors
        # detached: on a GPU the gradient is this very memory
        grad_gate_up_RX, active_RI = gate_backward(gate_up_RX.detach(), grad_RE @ weight_EI)
        grad_weight_EI = add_weight_gradient(ctx.sink_EI, grad_RE, active_RI) if ctx.needs_input_grad[1] else None
        return grad_gate_up_RX, grad_weight_EI, grad_RE, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RE: torch.Tensor, gain_E: torch.Tensor, eps: float, sink_E: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_RE, inverse_R1 = rms_norm(x_RE, gain_E, eps)
        ctx.sink_E = sink_E
        ctx.save_for_backward(x_RE, gain_E, inverse_R1)
        ctx.set_materialize_grads(False)
        return normed_RE, x_RE.view_as(x_RE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RE: torch.Tensor | None, past_RE: torch.Tensor | None) -> Any:  # type: ignore[override]
        if grad_RE is None:
            return past_RE, None, None, None
        x_RE, gain_E, inverse_R1 = ctx.saved_tensors
        grad_x_RE, grad_gain_E = rms_norm_backward(x_RE, inverse_R1, gain_E, grad_RE, past_RE)
        return grad_x_RE, _add_gain_gradient(ctx.sink_E, grad_gain_E), None, None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RE: torch.Tensor,
        gain_E: torch.Tensor,
        weight_OE: torch.Tensor,
        eps: float,
        normed_past: bool,
        sinks: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_RE, inverse_R1 = rms_norm(x_RE, gain_E, eps)
        ctx.sinks, ctx.normed_past = sinks, normed_past
        ctx.save_for_backward(x_RE, gain_E, weight_OE, inverse_R1)
        ctx.set_materialize_grads(False)
        return F.linear(normed_RE, weight_OE), normed_RE if normed_past else x_RE.view_as(x_RE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: torch.Tensor | None, past_RE: torch.Tensor | None) -> Any:  # type: ignore[override]
        x_RE, gain_E, weight_OE, inverse_R1 = ctx.saved_tensors
        grad_weight_OE = grad_normed_RE = None
        if grad_RO is not None:
            if ctx.needs_input_grad[2]:
                normed_RE = rms_norm_again(x_RE, inverse_R1, gain_E)
                grad_weight_OE = add_weight_gradient(ctx.sinks[1], grad_RO, normed_RE)
            grad_normed_RE = grad_RO @ weight_OE
        if ctx.normed_past and past_RE is not None:
            grad_normed_RE = past_RE if grad_normed_RE is None else grad_normed_RE.add_(past_RE)
            past_RE = None
        if grad_normed_RE is None:
            return past_RE, None, None, None, None, None
        grad_x_RE, grad_gain_E = rms_norm_backward(x_RE, inverse_R1, gain_E, grad_normed_RE, past_RE)
        return grad_x_RE, _add_gain_gradient(ctx.sinks[0], grad_gain_E), grad_weight_OE, None, None, None


def rms_norm_again(x_RE: torch.Tensor, inverse_R1: torch.Tensor, gain_E: torch.Tensor) -> torch.Tensor:
    """The normed rows once more, from the kept 1 / rms."""
    if x_RE.is_cuda:
        from eyas.drafter.kernels.norm import norm_again

        return norm_again(x_RE, inverse_R1, gain_E)
    return (x_RE * inverse_R1).mul_(gain_E).to(x_RE.dtype)


def linear(x_RI: torch.Tensor, weight: Weight) -> torch.Tensor:
    """``x W^T`` [R,O]."""
    return _Linear.apply(x_RI, *weight)  # type: ignore[no-any-return]


def linear_add(x_RI: torch.Tensor, weight: Weight, residual_RO: torch.Tensor) -> torch.Tensor:
    """``residual + x W^T`` [R,O], the sum inside the product."""
    return _LinearAdd.apply(x_RI, weight.value, residual_RO, weight.sink)  # type: ignore[no-any-return]


def gated_linear_add(gate_up_RX: torch.Tensor, weight: Weight, residual_RE: torch.Tensor) -> torch.Tensor:
    """``residual + (silu(gate) * up) W^T`` [R,E]; the activation is not kept."""
    return _GatedLinearAdd.apply(gate_up_RX, weight.value, residual_RE, weight.sink)  # type: ignore[no-any-return]


def norm(x_RE: torch.Tensor, gain: Weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed rows, and x itself: what goes past the norm must use this x, so that one kernel adds up."""
    return _Norm.apply(x_RE, gain.value, eps, gain.sink)  # type: ignore[no-any-return]


def norm_linear(
    x_RE: torch.Tensor, gain: Weight, weight: Weight, eps: float, normed_past: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm(x) W^T`` [R,O], and what goes past it: x itself, or the normed rows with ``normed_past``."""
    return _NormLinear.apply(x_RE, gain.value, weight.value, eps, normed_past, (gain.sink, weight.sink))  # type: ignore[no-any-return]
