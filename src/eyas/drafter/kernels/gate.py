"""The gated activation of the MLP on a GPU.

Letters: R rows, I inner width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _forward(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    active = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * inner + columns, active.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate_up_ptr, grad_ptr, grad_gate_up_ptr, active_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * inner + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    kind = grad_gate_up_ptr.dtype.element_ty
    tl.store(grad_gate_up_ptr + row * 2 * inner + columns, grad_gate.to(kind), mask=inside)
    tl.store(grad_gate_up_ptr + row * 2 * inner + inner + columns, (grad * silu).to(kind), mask=inside)
    tl.store(active_ptr + row * inner + columns, (silu * up).to(active_ptr.dtype.element_ty), mask=inside)


def gate_forward(gate_up_RX: torch.Tensor) -> torch.Tensor:
    """See ``pointwise.gate``."""
    R, inner = gate_up_RX.shape[0], gate_up_RX.shape[1] // 2
    out_RI = gate_up_RX.new_empty(R, inner)
    if R:
        _forward[(R, triton.cdiv(inner, BLOCK))](gate_up_RX, out_RI, inner, BLOCK=BLOCK)
    return out_RI


def gate_backward(gate_up_RX: torch.Tensor, grad_RI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``pointwise.gate_backward``; in place, for these are the largest tensors of a step."""
    R, inner = gate_up_RX.shape[0], gate_up_RX.shape[1] // 2
    if R:
        _backward[(R, triton.cdiv(inner, BLOCK))](gate_up_RX, grad_RI, gate_up_RX, grad_RI, inner, BLOCK=BLOCK)
    return gate_up_RX, grad_RI
