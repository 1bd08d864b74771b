"""Attention of TTT rows on a GPU: an interval of shared keys and a few keys of the row's own.

A program takes a block of rows, ordered by place, with all heads of one key-value group: the group's keys are
loaded once for all of them, and what a row's own keys get as gradient is summed inside the program. Products
take the inputs' dtype (IEEE for float32) and sum in float32.

Letters: R rows, H heads, G groups, P = H / G heads of a group (filled up to a power of two), K head dim, T
tokens, C = 2 G, S TTT steps. A line is one head of one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.drafter.spans import AttentionPlan


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee" if a.dtype == tl.float32 else "tf32")


@triton.jit
def _bounds(begin, place, exists, BLOCK_Y: tl.constexpr):
    """First key that some line sees, end of the blocks from there that all lines see, end of the keys."""
    first, last = tl.min(begin, axis=0), tl.max(place, axis=0) + 1
    shared_first = tl.max(tl.where(exists, begin, 0), axis=0)
    shared_last = tl.min(tl.where(exists, place, 2147483646), axis=0) + 1
    blocks = tl.where(shared_first == first, (shared_last - first) // BLOCK_Y, 0)
    return first, first + tl.maximum(blocks, 0) * BLOCK_Y, last


@triton.jit
def _load_block(
    ptr, key, last, group, columns, G: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr
):
    """A group's keys of a block and their values; only an edge may lie partly outside."""
    at = ptr + (key.to(tl.int64) * 2 * G + group)[:, None] * K + columns[None, :]
    if EDGE:
        inside = (key < last)[:, None] & (columns < K)[None, :]
        keys, values = tl.load(at, mask=inside, other=0.0), tl.load(at + G * K, mask=inside, other=0.0)
    elif BLOCK_K == K:
        keys, values = tl.load(at), tl.load(at + G * K)
    else:
        inside = (columns < K)[None, :]
        keys, values = tl.load(at, mask=inside, other=0.0), tl.load(at + G * K, mask=inside, other=0.0)
    return keys, values


@triton.jit
def _forward_tile(
    q, shared_ptr, key, place, begin, maximum, total, mixed, last, scale, group,
    G: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One block of keys; at an edge not every line sees each of them."""
    keys, values = _load_block(shared_ptr, key, last, group, tl.arange(0, BLOCK_K), G, K, BLOCK_K, EDGE)
    scores = _dot(q, tl.trans(keys)) * (scale * 1.4426950408889634)
    if EDGE:
        seen = (key[None, :] >= begin[:, None]) & (key[None, :] <= place[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, axis=1))
    safe = higher
    if EDGE:
        safe = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(scores - safe[:, None])
    rescale = tl.exp2(maximum - safe)
    total = total * rescale + tl.sum(shares, axis=1)
    mixed = mixed * rescale[:, None] + _dot(shares.to(values.dtype), values)
    return higher, total, mixed


@triton.jit(do_not_specialize=["step"])
def _forward(
    q_ptr, shared_ptr, own_ptr, mixed_ptr, lse_ptr, order_ptr, places_ptr, begins_ptr, R, own_stride, step, scale,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    lines = tl.arange(0, BLOCK_R * BLOCK_P)
    n, head = tl.program_id(0) * BLOCK_R + lines // BLOCK_P, lines % BLOCK_P
    exists = n < R
    valid = exists & (head < P)
    row = tl.load(order_ptr + n, mask=exists, other=0).to(tl.int64)
    place = tl.load(places_ptr + n, mask=exists, other=-1)
    begin = tl.load(begins_ptr + n, mask=exists, other=2147483647)
    columns = tl.arange(0, BLOCK_K)
    in_head = columns < K
    q_at = (row * H + group * P + head)[:, None] * K + columns[None, :]
    tile = valid[:, None] & in_head[None, :]
    q = tl.load(q_ptr + q_at, mask=tile, other=0.0)
    maximum = tl.full([BLOCK_R * BLOCK_P], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R * BLOCK_P], tl.float32)
    mixed = tl.zeros([BLOCK_R * BLOCK_P, BLOCK_K], tl.float32)
    y = tl.arange(0, BLOCK_Y)
    first, seen_by_all, last = _bounds(begin, place, exists, BLOCK_Y)
    for start in range(first, seen_by_all, BLOCK_Y):
        maximum, total, mixed = _forward_tile(
            q, shared_ptr, start + y, place, begin, maximum, total, mixed, last, scale, group, G, K, BLOCK_K, False
        )
    for start in range(seen_by_all, last, BLOCK_Y):
        maximum, total, mixed = _forward_tile(
            q, shared_ptr, start + y, place, begin, maximum, total, mixed, last, scale, group, G, K, BLOCK_K, True
        )
    wide_q = q.to(tl.float32)
    for k in range(step):
        own_at = k * own_stride + (row * 2 * G + group)[:, None] * K + columns[None, :]
        key = tl.load(own_ptr + own_at, mask=tile, other=0.0).to(tl.float32)
        score = tl.sum(wide_q * key, axis=1) * (scale * 1.4426950408889634)
        higher = tl.maximum(maximum, score)
        share, rescale = tl.exp2(score - higher), tl.exp2(maximum - higher)
        value = tl.load(own_ptr + own_at + G * K, mask=tile, other=0.0).to(tl.float32)
        total = total * rescale + share
        mixed = mixed * rescale[:, None] + share[:, None] * value
        maximum = higher
    mixed = mixed / total[:, None]
    tl.store(mixed_ptr + q_at, mixed.to(mixed_ptr.dtype.element_ty), mask=tile)
    tl.store(lse_ptr + n.to(tl.int64) * H + group * P + head, maximum + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["step"])
def _backward_own(
    q_ptr, own_ptr, mixed_ptr, lse_ptr, grad_ptr, grad_q_ptr, grad_own_ptr, sorted_q_ptr, sorted_grad_ptr, delta_ptr,
    order_ptr, R, own_stride, step, scale,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What goes through the rows' own keys and values; delta, and queries and gradients in order of place."""
    group = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.load(order_ptr + n, mask=n < R, other=0).to(tl.int64)
    heads = tl.arange(0, BLOCK_P)
    columns = tl.arange(0, BLOCK_K)
    in_head = (columns < K)[None, None, :]
    valid = (n < R)[:, None] & (heads < P)[None, :]
    tile = valid[:, :, None] & in_head
    head_at = row[:, None] * H + group * P + heads[None, :]
    q_at = head_at[:, :, None] * K + columns[None, None, :]
    q = tl.load(q_ptr + q_at, mask=tile, other=0.0)
    grad = tl.load(grad_ptr + q_at, mask=tile, other=0.0)
    sorted_at = n.to(tl.int64)[:, None] * H + group * P + heads[None, :]
    tl.store(sorted_q_ptr + sorted_at[:, :, None] * K + columns[None, None, :], q, mask=tile)
    tl.store(sorted_grad_ptr + sorted_at[:, :, None] * K + columns[None, None, :], grad, mask=tile)
    q, grad = q.to(tl.float32), grad.to(tl.float32)
    delta = tl.sum(grad * tl.load(mixed_ptr + q_at, mask=tile, other=0.0).to(tl.float32), axis=2)
    tl.store(delta_ptr + sorted_at, delta, mask=valid)
    lse = tl.load(lse_ptr + sorted_at, mask=valid, other=float("inf"))
    grad_q = tl.zeros([BLOCK_R, BLOCK_P, BLOCK_K], tl.float32)
    own_tile = (n < R)[:, None] & (columns < K)[None, :]
    for k in range(step):
        own_at = k * own_stride + (row * 2 * G + group)[:, None] * K + columns[None, :]
        key = tl.load(own_ptr + own_at, mask=own_tile, other=0.0).to(tl.float32)[:, None, :]
        value = tl.load(own_ptr + own_at + G * K, mask=own_tile, other=0.0).to(tl.float32)[:, None, :]
        share = tl.exp2(tl.sum(q * key, axis=2) * (scale * 1.4426950408889634) - lse)
        grad_score = share * (tl.sum(grad * value, axis=2) - delta) * scale
        grad_q += grad_score[:, :, None] * key
        grad_key = tl.sum(grad_score[:, :, None] * q, axis=1)
        grad_value = tl.sum(share[:, :, None] * grad, axis=1)
        kind = grad_own_ptr.dtype.element_ty
        before = tl.load(grad_own_ptr + own_at, mask=own_tile, other=0.0).to(tl.float32)
        tl.store(grad_own_ptr + own_at, (before + grad_key).to(kind), mask=own_tile)
        before = tl.load(grad_own_ptr + own_at + G * K, mask=own_tile, other=0.0).to(tl.float32)
        tl.store(grad_own_ptr + own_at + G * K, (before + grad_value).to(kind), mask=own_tile)
    tl.store(grad_q_ptr + q_at, grad_q.to(grad_q_ptr.dtype.element_ty), mask=tile)


@triton.jit
def _rows_tile(
    q, grad, lse, delta, shared_ptr, key, place, begin, grad_q, last, scale, group,
    G: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What one block of keys gives to the gradients of the queries, before the scale."""
    keys, values = _load_block(shared_ptr, key, last, group, tl.arange(0, BLOCK_K), G, K, BLOCK_K, EDGE)
    scores = _dot(q, tl.trans(keys)) * (scale * 1.4426950408889634)
    shares = tl.exp2(scores - lse[:, None])
    if EDGE:
        seen = (key[None, :] >= begin[:, None]) & (key[None, :] <= place[:, None])
        shares = tl.where(seen, shares, 0.0)
    grad_scores = shares * (_dot(grad, tl.trans(values)) - delta[:, None])
    return grad_q + _dot(grad_scores.to(keys.dtype), keys)


@triton.jit
def _backward_rows(
    q_ptr, shared_ptr, lse_ptr, grad_ptr, delta_ptr, grad_q_ptr, order_ptr, places_ptr, begins_ptr, R, scale,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of the queries what goes through the shared keys."""
    group = tl.program_id(1)
    lines = tl.arange(0, BLOCK_R * BLOCK_P)
    n, head = tl.program_id(0) * BLOCK_R + lines // BLOCK_P, lines % BLOCK_P
    exists = n < R
    valid = exists & (head < P)
    place = tl.load(places_ptr + n, mask=exists, other=-1)
    begin = tl.load(begins_ptr + n, mask=exists, other=2147483647)
    columns = tl.arange(0, BLOCK_K)
    in_head = columns < K
    tile = valid[:, None] & in_head[None, :]
    line_at = n.to(tl.int64) * H + group * P + head
    q = tl.load(q_ptr + line_at[:, None] * K + columns[None, :], mask=tile, other=0.0)
    grad = tl.load(grad_ptr + line_at[:, None] * K + columns[None, :], mask=tile, other=0.0)
    lse = tl.load(lse_ptr + line_at, mask=valid, other=float("inf"))
    delta = tl.load(delta_ptr + line_at, mask=valid, other=0.0)
    grad_q = tl.zeros([BLOCK_R * BLOCK_P, BLOCK_K], tl.float32)
    y = tl.arange(0, BLOCK_Y)
    first, seen_by_all, last = _bounds(begin, place, exists, BLOCK_Y)
    for start in range(first, seen_by_all, BLOCK_Y):
        grad_q = _rows_tile(
            q, grad, lse, delta, shared_ptr, start + y, place, begin, grad_q, last, scale, group, G, K, BLOCK_K, False
        )
    for start in range(seen_by_all, last, BLOCK_Y):
        grad_q = _rows_tile(
            q, grad, lse, delta, shared_ptr, start + y, place, begin, grad_q, last, scale, group, G, K, BLOCK_K, True
        )
    row = tl.load(order_ptr + n, mask=exists, other=0).to(tl.int64)
    q_at = (row * H + group * P + head)[:, None] * K + columns[None, :]
    grad_q = grad_q * scale + tl.load(grad_q_ptr + q_at, mask=tile, other=0.0).to(tl.float32)
    tl.store(grad_q_ptr + q_at, grad_q.to(grad_q_ptr.dtype.element_ty), mask=tile)


@triton.jit
def _keys_tile(
    keys, values, key, q_ptr, grad_ptr, lse_ptr, delta_ptr, places_ptr, begins_ptr, n, last,
    grad_keys, grad_values, scale, group,
    H: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What one block of rows gives to a block of keys and values; at an edge not every row sees each of them."""
    head, columns = tl.arange(0, BLOCK_R * BLOCK_P) % BLOCK_P, tl.arange(0, BLOCK_K)
    line_at = n.to(tl.int64) * H + group * P + head
    at = line_at[:, None] * K + columns[None, :]
    if EDGE or BLOCK_P != P or BLOCK_K != K:
        valid = (n < last) & (head < P)
        tile = valid[:, None] & (columns < K)[None, :]
        q, grad = tl.load(q_ptr + at, mask=tile, other=0.0), tl.load(grad_ptr + at, mask=tile, other=0.0)
        lse = tl.load(lse_ptr + line_at, mask=valid, other=float("inf"))
        delta = tl.load(delta_ptr + line_at, mask=valid, other=0.0)
    else:
        q, grad = tl.load(q_ptr + at), tl.load(grad_ptr + at)
        lse, delta = tl.load(lse_ptr + line_at), tl.load(delta_ptr + line_at)
    scores = _dot(keys, tl.trans(q)) * (scale * 1.4426950408889634)
    shares = tl.exp2(scores - lse[None, :])
    if EDGE:
        place = tl.load(places_ptr + n, mask=n < last, other=-1)
        begin = tl.load(begins_ptr + n, mask=n < last, other=2147483647)
        seen = (key[:, None] >= begin[None, :]) & (key[:, None] <= place[None, :])
        shares = tl.where(seen, shares, 0.0)
    grad_values += _dot(shares.to(grad.dtype), grad)
    grad_scores = shares * (_dot(values, tl.trans(grad)) - delta[None, :])
    grad_keys += _dot(grad_scores.to(q.dtype), q)
    return grad_keys, grad_values


@triton.jit
def _backward_keys(
    q_ptr, shared_ptr, lse_ptr, grad_ptr, delta_ptr, grad_shared_ptr, places_ptr, begins_ptr,
    rows_before_ptr, ends_ptr, T, scale,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """Adds what the rows give to a block of shared keys and values."""
    group = tl.program_id(1)
    start = tl.program_id(0) * BLOCK_Y
    key = start + tl.arange(0, BLOCK_Y)
    columns = tl.arange(0, BLOCK_K)
    in_head = columns < K
    in_keys = (key < T)[:, None] & in_head[None, :]
    key_at = (key.to(tl.int64) * 2 * G + group)[:, None] * K + columns[None, :]
    keys = tl.load(shared_ptr + key_at, mask=in_keys, other=0.0)
    values = tl.load(shared_ptr + key_at + G * K, mask=in_keys, other=0.0)
    grad_keys = tl.zeros([BLOCK_Y, BLOCK_K], tl.float32)
    grad_values = tl.zeros([BLOCK_Y, BLOCK_K], tl.float32)
    # rows from the first key's place to the end of the last key's document
    first = tl.load(rows_before_ptr + start)
    last = tl.load(rows_before_ptr + tl.load(ends_ptr + tl.minimum(start + BLOCK_Y, T) - 1))
    # from some row on all see every key of the block, if it is of one document
    end = tl.minimum(start + BLOCK_Y, T)
    is_one = (start + BLOCK_Y <= T) & (tl.load(ends_ptr + start) == tl.load(ends_ptr + end - 1))
    seeing = tl.where(is_one, tl.load(rows_before_ptr + end - 1), last)
    edge = tl.minimum(first + tl.cdiv(seeing - first, BLOCK_R) * BLOCK_R, last)
    whole = edge + (last - edge) // BLOCK_R * BLOCK_R
    n = tl.arange(0, BLOCK_R * BLOCK_P) // BLOCK_P
    for block in range(first, edge, BLOCK_R):
        grad_keys, grad_values = _keys_tile(
            keys, values, key, q_ptr, grad_ptr, lse_ptr, delta_ptr, places_ptr, begins_ptr, block + n, last,
            grad_keys, grad_values, scale, group, H, P, K, BLOCK_P, BLOCK_R, BLOCK_K, True,
        )  # fmt: skip
    for block in range(edge, whole, BLOCK_R):
        grad_keys, grad_values = _keys_tile(
            keys, values, key, q_ptr, grad_ptr, lse_ptr, delta_ptr, places_ptr, begins_ptr, block + n, last,
            grad_keys, grad_values, scale, group, H, P, K, BLOCK_P, BLOCK_R, BLOCK_K, False,
        )  # fmt: skip
    for block in range(whole, last, BLOCK_R):
        grad_keys, grad_values = _keys_tile(
            keys, values, key, q_ptr, grad_ptr, lse_ptr, delta_ptr, places_ptr, begins_ptr, block + n, last,
            grad_keys, grad_values, scale, group, H, P, K, BLOCK_P, BLOCK_R, BLOCK_K, True,
        )  # fmt: skip
    before = tl.load(grad_shared_ptr + key_at, mask=in_keys, other=0.0)
    tl.store(grad_shared_ptr + key_at, before + grad_keys * scale, mask=in_keys)
    before = tl.load(grad_shared_ptr + key_at + G * K, mask=in_keys, other=0.0)
    tl.store(grad_shared_ptr + key_at + G * K, before + grad_values, mask=in_keys)


@dataclass(frozen=True, slots=True)
class Tile:
    """Lines and keys of a block, warps, and stages of the loads ahead; the fastest of those tried on an H200."""

    lines: int
    keys: int
    warps: int
    stages: int

    def sizes(self, H: int, G: int, K: int) -> dict[str, int]:
        """Compile-time arguments."""
        block_p = triton.next_power_of_2(H // G)
        return {
            "H": H,
            "G": G,
            "P": H // G,
            "K": K,
            "BLOCK_P": block_p,
            "BLOCK_R": max(1, self.lines // block_p),
            "BLOCK_K": max(16, triton.next_power_of_2(K)),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


FORWARD = Tile(64, 64, 4, 3)
OWN = Tile(16, 0, 2, 1)
ROWS = Tile(128, 32, 8, 3)
KEYS = Tile(32, 64, 4, 3)


def attend_forward(
    q_RHK: torch.Tensor, shared_TCK: torch.Tensor, own_SRCK: torch.Tensor, step: int, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixed values [R,H,K] of the rows of one step, and their log-sum-exp in bits [R,H] in order of place.

    Args:
        q_RHK: Rotated queries.
        shared_TCK: Step-0 keys, then values, of every token.
        own_SRCK: The rows' own keys and values of steps 1, 2, …; the first ``step`` are read.
        step: k.
        plan: Of this step.
    """
    R, H, K = q_RHK.shape
    G = shared_TCK.shape[1] // 2
    mixed_RHK, lse_RH = torch.empty_like(q_RHK), q_RHK.new_empty(R, H, dtype=torch.float32)
    sizes = FORWARD.sizes(H, G, K)
    _forward[(triton.cdiv(R, sizes["BLOCK_R"]), G)](
        q_RHK, shared_TCK, own_SRCK, mixed_RHK, lse_RH, plan.order_R, plan.places_R, plan.begins_R,
        R, own_SRCK.stride(0), step, K**-0.5, BLOCK_Y=FORWARD.keys, **sizes,
    )  # fmt: skip
    return mixed_RHK, lse_RH


def attend_backward(
    grad_RHK: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shared_TCK: torch.Tensor,
    own_SRCK: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    step: int,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Gradient of the queries; keys' and values' are added to ``sums`` (shared float32, own)."""
    q_RHK, mixed_RHK, lse_RH = saved
    (R, H, K), (T, C) = q_RHK.shape, shared_TCK.shape[:2]
    G, grad_RHK, scale = C // 2, grad_RHK.contiguous(), K**-0.5
    grad_q_RHK, delta_RH = torch.empty_like(q_RHK), torch.empty_like(lse_RH)
    sorted_q_RHK, sorted_grad_RHK = torch.empty_like(q_RHK), torch.empty_like(q_RHK)
    sizes = OWN.sizes(H, G, K)
    _backward_own[(triton.cdiv(R, sizes["BLOCK_R"]), G)](
        q_RHK, own_SRCK, mixed_RHK, lse_RH, grad_RHK, grad_q_RHK, sums[1], sorted_q_RHK, sorted_grad_RHK, delta_RH,
        plan.order_R, R, own_SRCK.stride(0), step, scale, **sizes,
    )  # fmt: skip
    sizes = ROWS.sizes(H, G, K)
    _backward_rows[(triton.cdiv(R, sizes["BLOCK_R"]), G)](
        sorted_q_RHK, shared_TCK, lse_RH, sorted_grad_RHK, delta_RH, grad_q_RHK,
        plan.order_R, plan.places_R, plan.begins_R, R, scale, BLOCK_Y=ROWS.keys, **sizes,
    )  # fmt: skip
    sizes = KEYS.sizes(H, G, K)
    _backward_keys[(triton.cdiv(T, KEYS.keys), G)](
        sorted_q_RHK, shared_TCK, lse_RH, sorted_grad_RHK, delta_RH, sums[0], plan.places_R, plan.begins_R,
        plan.rows_before_X, plan.ends_T, T, scale, BLOCK_Y=KEYS.keys, **sizes,
    )  # fmt: skip
    return grad_q_RHK
