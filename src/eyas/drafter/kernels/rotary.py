"""Sum of the two halves of a projection and its rotation, on a GPU, and the way back.

Letters: R rows, X heads, K head dim, T tokens of the embedding half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.drafter.pointwise import Rotation


@triton.jit(do_not_specialize=["shift"])
def _turn(
    in_ptr, in_stride, other_ptr, places_ptr, cos_ptr, sin_ptr, positions_ptr, shift, out_ptr, out_stride, X, num_turned,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Forward: out = turn(in + other[place]). Backward: out = turn back(in); other[place] += out."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    inside = (heads < X) & (columns < K)
    place = tl.load(places_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64) + shift
    partner = tl.where(columns < K // 2, columns + K // 2, columns - K // 2)
    at, at_partner = row * in_stride + heads * K + columns, row * in_stride + heads * K + partner
    other_at, other_partner = (place * X + heads) * K + columns, (place * X + heads) * K + partner
    known = (heads < tl.where(place >= 0, X, 0)) & (columns < K)
    x = tl.load(in_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(in_ptr + at_partner, mask=inside, other=0.0).to(tl.float32)
    if not BACKWARD:
        x += tl.load(other_ptr + other_at, mask=known, other=0.0).to(tl.float32)
        y += tl.load(other_ptr + other_partner, mask=known, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + position * K + columns, mask=columns < K, other=0.0)
    sin = tl.load(sin_ptr + position * K + columns, mask=columns < K, other=0.0)
    turned = x * cos - y * sin if BACKWARD else x * cos + y * sin
    out = tl.where(heads < num_turned, turned, x)
    tl.store(out_ptr + row * out_stride + heads * K + columns, out.to(out_ptr.dtype.element_ty), mask=inside)
    if BACKWARD:
        before = tl.load(other_ptr + other_at, mask=known, other=0.0)
        tl.store(other_ptr + other_at, before + out, mask=known)


def rotate_forward(
    hidden_RXK: torch.Tensor,
    embedded_TXK: torch.Tensor,
    places_R: torch.Tensor,
    rotation: Rotation,
    num_turned: int,
    out_RXK: torch.Tensor,
) -> torch.Tensor:
    """See ``pointwise.add_and_rotate``."""
    return _launch(hidden_RXK, embedded_TXK, places_R, rotation, num_turned, out_RXK, backward=False)


def rotate_backward(
    grad_RXK: torch.Tensor,
    places_R: torch.Tensor,
    rotation: Rotation,
    num_turned: int,
    grad_embedded_TXK: torch.Tensor,
    out_RXK: torch.Tensor,
) -> torch.Tensor:
    """See ``pointwise.add_and_rotate_backward``; no two rows read the same place."""
    return _launch(grad_RXK, grad_embedded_TXK, places_R, rotation, num_turned, out_RXK, backward=True)


def _launch(
    in_RXK: torch.Tensor,
    other_TXK: torch.Tensor,
    places_R: torch.Tensor,
    rotation: Rotation,
    num_turned: int,
    out_RXK: torch.Tensor,
    *,
    backward: bool,
) -> torch.Tensor:
    R, X, K = in_RXK.shape
    block_k = triton.next_power_of_2(K)
    block_x = max(1, min(triton.next_power_of_2(X), 2048 // block_k))
    _turn[(R, triton.cdiv(X, block_x))](
        in_RXK, in_RXK.stride(0), other_TXK, places_R, rotation.cos_PK, rotation.sin_PK, rotation.positions_R,
        rotation.shift, out_RXK, out_RXK.stride(0), X, num_turned, K=K, BLOCK_K=block_k, BLOCK_X=block_x,
        BACKWARD=backward,
    )  # fmt: skip
    return out_RXK
