"""AdamW over flat tensors in one pass on a GPU: masters, moments, and the products' copy.

Letters: X values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _adamw(
    master_ptr, first_ptr, second_ptr, grad_ptr, products_ptr, clip_ptr, X,
    rate, beta_1, beta_2, correction_1, correction_2_root, eps, decay,
    COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    clip = tl.load(clip_ptr)
    inside = at < tl.where(clip < 3.0e38, X, 0)  # a clip that is no number leaves everything as it is
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0) * clip
    first = tl.load(first_ptr + at, mask=inside, other=0.0)
    second = tl.load(second_ptr + at, mask=inside, other=0.0)
    master = tl.load(master_ptr + at, mask=inside, other=0.0) * (1 - rate * decay)
    first = first + (grad - first) * (1 - beta_1)
    second = second * beta_2 + grad * grad * (1 - beta_2)
    master -= rate / correction_1 * first / (tl.sqrt(second) / correction_2_root + eps)
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    tl.store(master_ptr + at, master, mask=inside)
    if COPY:
        tl.store(products_ptr + at, master.to(products_ptr.dtype.element_ty), mask=inside)


def adamw(
    master_X: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    grad_X: torch.Tensor,
    products_X: torch.Tensor | None,
    clip: torch.Tensor,
    *,
    step: int,
    rate: float,
    betas: tuple[float, float],
    decay: float,
    eps: float,
) -> None:
    """One update; torch's AdamW rule.

    Args:
        master_X: Float32 weights.
        moments: First and second, float32.
        grad_X: Float32 gradient.
        products_X: Copy in the dtype of products, renewed as well; None when there is none.
        clip: Scalar on the device that the gradient is multiplied with; NaN leaves everything as it is.
        step: Counted from 1.
        rate: Learning rate.
        betas: Of the moments.
        decay: Weight decay.
        eps: Added to the root of the second moment.
    """
    X = len(master_X)
    _adamw[(triton.cdiv(X, BLOCK),)](
        master_X, *moments, grad_X, master_X if products_X is None else products_X, clip, X,
        rate, *betas, 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5, eps, decay,
        COPY=products_X is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
