"""KL(target || draft) over the draft vocab and its gradient, from float32 logits, on a GPU.

One program reads a row twice, the second time from the cache: once for maximum and sum, once for the
gradient. Value and hit cost nothing beside that. Keeping the row in registers instead is no faster.

Letters: C teachers, X pairs, W draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from eyas.drafter.loss import Part

BLOCK = 4096
WARPS = 8


@triton.jit
def _maximum_and_sum(row_ptr, W, BLOCK: tl.constexpr):
    """Maximum, where it is first, and sum of exp(x - maximum)."""
    columns = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, W, BLOCK):
        x = tl.load(row_ptr + start + columns, mask=start + columns < W, other=float("-inf"))
        higher = x > best
        # a lane that saw nothing yet has maximum and sum -inf and 0
        scale = tl.where(best == float("-inf"), 0.0, tl.exp(best - tl.maximum(best, x)))
        own = tl.where(x == float("-inf"), 0.0, tl.exp(x - tl.maximum(best, x)))
        total = total * scale + own
        where = tl.where(higher, start + columns, where)
        best = tl.maximum(best, x)
    maximum = tl.max(best, axis=0)
    first = tl.min(tl.where(best == maximum, where, W), axis=0)
    return maximum, first, tl.sum(tl.where(total > 0, total * tl.exp(best - maximum), 0.0), axis=0)


@triton.jit
def _teacher(logits_ptr, entropy_ptr, best_ptr, W, BLOCK: tl.constexpr):
    """Softmax in place; sum of p log p and argmax of each row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * W
    maximum, first, total = _maximum_and_sum(row_ptr, W, BLOCK)
    log_total = tl.log(total)
    columns = tl.arange(0, BLOCK)
    negative_entropy = tl.zeros([BLOCK], tl.float32)
    for start in range(0, W, BLOCK):
        inside = start + columns < W
        log_p = tl.load(row_ptr + start + columns, mask=inside, other=float("-inf")) - maximum - log_total
        p = tl.exp(log_p)
        negative_entropy += tl.where(p > 0, p * log_p, 0.0)
        tl.store(row_ptr + start + columns, p, mask=inside)
    tl.store(entropy_ptr + row, tl.sum(negative_entropy, axis=0))
    tl.store(best_ptr + row, first)


@triton.jit
def _draft(
    logits_ptr, p_ptr, teachers_ptr, entropy_ptr, best_ptr, grad_ptr, losses_ptr, hits_ptr, W,
    MEASURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient q - p of each pair; its KL and whether both argmaxes agree."""
    row = tl.program_id(0).to(tl.int64)
    teacher = tl.load(teachers_ptr + row).to(tl.int64)
    row_ptr, teacher_ptr = logits_ptr + row * W, p_ptr + teacher * W
    maximum, first, total = _maximum_and_sum(row_ptr, W, BLOCK)
    columns = tl.arange(0, BLOCK)
    cross = tl.zeros([BLOCK], tl.float32)
    log_total = tl.log(total)
    for start in range(0, W, BLOCK):
        inside = start + columns < W
        log_q = tl.load(row_ptr + start + columns, mask=inside, other=float("-inf")) - maximum - log_total
        p = tl.load(teacher_ptr + start + columns, mask=inside, other=0.0)
        grad = tl.exp(log_q) - p
        tl.store(grad_ptr + row * W + start + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)
        if MEASURE:
            cross += tl.where(p > 0, p * log_q, 0.0)
    if MEASURE:
        tl.store(losses_ptr + row, tl.load(entropy_ptr + teacher) - tl.sum(cross, axis=0))
        tl.store(hits_ptr + row, tl.load(best_ptr + teacher) == first)


def divergence(
    teacher_CW: torch.Tensor,
    logits_XW: torch.Tensor,
    parts: Sequence[Part],
    found: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
    grad_XW: torch.Tensor,
) -> None:
    """See ``loss.gradient_of_logits``."""
    C, W = teacher_CW.shape
    entropy_C, best_C = teacher_CW.new_empty(C), teacher_CW.new_empty(C, dtype=torch.int32)
    _teacher[(C,)](teacher_CW, entropy_C, best_C, W, BLOCK=BLOCK, num_warps=WARPS)
    num_pairs = sum(len(part.rows) for part in parts)
    if not num_pairs:
        return
    # one launch for the pairs of all steps, which lie side by side
    teachers_X = torch.cat([part.teachers for part in parts])
    losses_X, hits_X = teacher_CW.new_empty(num_pairs), teacher_CW.new_empty(num_pairs, dtype=torch.bool)
    _draft[(num_pairs,)](
        logits_XW, teacher_CW, teachers_X, entropy_C, best_C, grad_XW, losses_X, hits_X, W,
        MEASURE=found is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    if found is not None:
        for part in parts:
            losses, hits = found[part.step]
            losses.copy_(losses_X[part.at])
            hits.copy_(hits_X[part.at])
