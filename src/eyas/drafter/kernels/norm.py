"""RMSNorm on a GPU: one pass over the rows each way.

Letters: R rows, E width, M programs that share the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.drafter.kernels.launch import num_programs, num_warps


@triton.jit
def _forward(x_ptr, gain_ptr, out_ptr, inverse_ptr, E, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < E
    x = tl.load(x_ptr + row * E + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / E + eps)
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + columns, (x * inverse * gain).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(inverse_ptr + row, inverse)


@triton.jit
def _again(x_ptr, gain_ptr, out_ptr, inverse_ptr, E, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < E
    x = tl.load(x_ptr + row * E + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.load(inverse_ptr + row) * gain
    tl.store(out_ptr + row * E + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr, gain_ptr, inverse_ptr, grad_ptr, past_ptr, out_ptr, grad_gain_ptr, R, E, HAS_PAST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < E
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    grad_gain = tl.zeros([BLOCK], dtype=tl.float32)
    wide_E = tl.zeros([BLOCK], dtype=tl.int64) + E
    for row in range(program, R, tl.num_programs(0)):
        at = row * wide_E + columns
        inverse = tl.load(inverse_ptr + row)
        unit = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad_gain += grad * unit
        scaled = grad * gain
        grad_x = (scaled - unit * (tl.sum(scaled * unit, axis=0) / E)) * inverse
        if HAS_PAST:
            grad_x += tl.load(past_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, grad_x.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_gain_ptr + program.to(tl.int64) * E + columns, grad_gain, mask=inside)


def norm_forward(x_RE: torch.Tensor, gain_E: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``pointwise.rms_norm``."""
    (R, E), block = x_RE.shape, triton.next_power_of_2(x_RE.shape[1])
    x_RE = x_RE.contiguous()
    out_RE, inverse_R1 = torch.empty_like(x_RE), x_RE.new_empty(R, 1, dtype=torch.float32)
    if R:
        _forward[(R,)](x_RE, gain_E, out_RE, inverse_R1, E, eps, BLOCK=block, num_warps=num_warps(block))
    return out_RE, inverse_R1


def norm_again(x_RE: torch.Tensor, inverse_R1: torch.Tensor, gain_E: torch.Tensor) -> torch.Tensor:
    """See ``differentiable.rms_norm_again``."""
    (R, E), block = x_RE.shape, triton.next_power_of_2(x_RE.shape[1])
    out_RE = torch.empty_like(x_RE)
    if R:
        _again[(R,)](x_RE, gain_E, out_RE, inverse_R1, E, BLOCK=block, num_warps=num_warps(block))
    return out_RE


def norm_backward(
    x_RE: torch.Tensor,
    inverse_R1: torch.Tensor,
    gain_E: torch.Tensor,
    grad_RE: torch.Tensor,
    past_RE: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``pointwise.rms_norm_backward``."""
    (R, E), block = x_RE.shape, triton.next_power_of_2(x_RE.shape[1])
    grad_RE = grad_RE.contiguous()
    out_RE, programs = torch.empty_like(x_RE), num_programs(x_RE, R)
    grad_gain_ME = x_RE.new_empty(programs, E, dtype=torch.float32)
    past = grad_RE if past_RE is None else past_RE.contiguous()
    _backward[(programs,)](
        x_RE, gain_E, inverse_R1, grad_RE, past, out_RE, grad_gain_ME, R, E,
        HAS_PAST=past_RE is not None, BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip
    return out_RE, grad_gain_ME.sum(0)
