"""The training-time test (TTT): the drafter unrolled over its own outputs, on packed documents.

``unroll`` gives what ``lm_head`` reads at every step; ``ttt_loss`` trains on it; ``draft_tokens`` is what
evaluation asks for. All three run on the same rows (see ``drafter.rows``) and the same attention.

Letters: T tokens of the pack, R rows that run, U tokens that queries read, S TTT steps, E drafter hidden, H
heads, G key-value heads, K head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eyas.drafter.attention import Embedded, Keys, attend, rotate_first, rotate_own
from eyas.drafter.differentiable import norm_linear
from eyas.drafter.layer import finish_layer, finish_step, fuse, project_embedding
from eyas.drafter.model import Drafter
from eyas.drafter.pointwise import Rotation
from eyas.drafter.precision import wide_dtype, wide_product
from eyas.drafter.rows import Pack
from eyas.drafter.weights import LayerWeights, plain_weights

DRAFT_LOGITS = 1 << 24
"""Logits that a GPU has in memory at a time when it drafts: 64 MiB in float32."""


class _TakeRows(torch.autograd.Function):
    """Rows of x; no row is taken twice, but for padding, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x_TE: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        ctx.num_rows = len(x_TE)
        ctx.save_for_backward(rows_R)
        return x_TE[rows_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RE: torch.Tensor) -> Any:  # type: ignore[override]
        (rows_R,) = ctx.saved_tensors
        grad_TE = grad_RE.new_zeros(ctx.num_rows, grad_RE.shape[1])
        return grad_TE.index_copy_(0, rows_R, grad_RE), None


def unroll(
    drafter: Drafter, pack: Pack, ttt_steps: int | None = None, weights: LayerWeights | None = None
) -> list[torch.Tensor]:
    """Run the drafter on its own outputs.

    At step k the row at place t reads its hidden state (``fc``'s at step 0, then its own last output),
    token t+k+1 from the data, position + k, the step-0 keys of its document up to itself, and its own
    keys of steps 1 … k.

    Args:
        drafter: With the target's embedding set, unless the pack carries it.
        pack: Documents and rows; its S bounds the steps.
        ttt_steps: Steps to run; all of the pack's by default.
        weights: What to multiply with; the drafter's own parameters by default.

    Returns:
        Per step k what ``lm_head`` reads, [num_rows[k], E], for the first ``num_rows[k]`` of ``pack.rows_R``.
    """
    steps = len(pack.num_rows) if ttt_steps is None else ttt_steps
    num_rows = [n for n in pack.num_rows[:steps] if n > 0]
    outputs: list[torch.Tensor] = []
    if not num_rows:
        return outputs
    shape, weights = drafter.shape, weights or plain_weights(drafter)
    G, K, eps = shape.num_key_value_heads, shape.head_dim, shape.rms_norm_eps
    fused_TE = fuse(weights, shape, pack.aux_TAD)
    embedded = _embed(drafter, pack, weights)
    keys = Keys(pack, (G, K), fused_TE)
    table = drafter.rope.table(pack.num_positions, fused_TE.device, wide_dtype(fused_TE.dtype))
    positions_R = pack.positions_T[pack.rows_R]
    # every token gives step-0 keys and values; only rows that run ask
    kv_TN, fused_TE = norm_linear(fused_TE, weights.hidden_norm, weights.kv_hidden, eps)
    hidden_RE = _TakeRows.apply(fused_TE, pack.rows_R)
    for k, count in enumerate(num_rows):
        rotation = Rotation(*table, positions_R[:count], k)
        weight = weights.qkv_hidden if k else weights.q_hidden
        projected_RN, residual_RE = norm_linear(
            hidden_RE[:count], weights.hidden_norm, weight, eps, shape.norm_before_residual
        )
        projected_RXK = projected_RN.unflatten(1, (-1, K))
        if k:
            q_RHK = rotate_own(projected_RXK, embedded, keys, k, rotation)
        else:
            rotations = rotation, Rotation(*table, pack.positions_T, 0)
            q_RHK = rotate_first(projected_RXK, kv_TN.view(-1, 2 * G, K), embedded, keys, rotations)
        output_RE = finish_layer(weights, shape, residual_RE, attend(q_RHK, keys, k))
        normed_RE, hidden_RE = finish_step(weights, shape, output_RE)
        outputs.append(normed_RE)
    return outputs


def _embed(drafter: Drafter, pack: Pack, weights: LayerWeights) -> Embedded:
    embedding_TE = pack.embedding_TE
    if embedding_TE is None:
        embedding_TE = drafter.embed_tokens.weight[pack.ids_T]  # type: ignore[index]
    K = drafter.shape.head_dim
    q_UN = project_embedding(weights, drafter.shape, embedding_TE[pack.q_tokens_U], queries=True)
    kv_TN = project_embedding(weights, drafter.shape, embedding_TE, queries=False)
    return Embedded(q_UN.unflatten(1, (-1, K)), kv_TN.unflatten(1, (-1, K)))


@torch.no_grad()
def draft_tokens(drafter: Drafter, pack: Pack, weights: LayerWeights | None = None) -> torch.Tensor:
    """Greedy draft of every row: target-vocab ids [R,S] of token t+k+2, -1 where the row does not train.

    Args:
        drafter: See ``unroll``.
        pack: See ``unroll``.
        weights: What to multiply with; the drafter's own parameters by default.

    Returns:
        In host memory.
    """
    weights = weights or plain_weights(drafter)
    ids_RS = torch.full((len(pack.rows_R), len(pack.num_rows)), -1)
    for k, normed_RE in enumerate(unroll(drafter, pack, weights=weights)):
        draft_ids_R = _draft_ids(normed_RE, weights.head.value)
        ids_RS[: len(normed_RE), k] = drafter.target_ids(draft_ids_R.to(drafter.d2t.device)).cpu()
    return ids_RS.masked_fill(~pack.trains_RS.cpu(), -1)


def _draft_ids(normed_RE: torch.Tensor, head_WE: torch.Tensor) -> torch.Tensor:
    """Argmax [R] of the logits; on a GPU of float32 ones, for bfloat16 has too many ties, and of some rows at a time."""
    if not normed_RE.is_cuda:
        return F.linear(normed_RE, head_WE).argmax(-1)
    parts = normed_RE.split(max(1, DRAFT_LOGITS // len(head_WE)))
    return torch.cat([wide_product(part_RE, head_WE).argmax(-1) for part_RE in parts])
