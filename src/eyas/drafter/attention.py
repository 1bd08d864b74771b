"""Exact attention of TTT rows over packed documents, in memory linear in the tokens.

At step k a row sees the step-0 keys of its own document up to itself, and its own keys of steps 1 … k.
The softmax runs over both together. Nothing of size rows x tokens outlives one block: the forward pass
keeps the log-sum-exp of each row, the backward pass computes the block's probabilities again. These
products are small and of ever new sizes, so they stay float32 (``precision`` says what a new size costs).

Letters: T tokens of the pack, R rows, H heads, G key-value heads, P = H / G heads per group, K head
dim, X rows of one block, Y keys of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from eyas.drafter.model import Qkv
from eyas.drafter.precision import full_precision
from eyas.drafter.rows import Pack

BLOCK_SCORES = 1 << 23
"""Scores per block (32 MiB in float32); long documents are cut into more blocks."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one document and the keys they may see."""

    rows_X: torch.Tensor
    """Indices of the rows among those that run at this step, by rising place."""
    start: int
    end: int
    """Keys ``start … end - 1`` of the pack."""
    hidden_XY: torch.Tensor
    """Bool: the key lies after the row."""


def plan_blocks(pack: Pack, count: int, num_heads: int) -> list[Block]:
    """Cut the first ``count`` rows into blocks, document by document."""
    places_R, order_R = torch.sort(pack.rows_R[:count])
    edges = torch.searchsorted(places_R, places_R.new_tensor([span.end for span in pack.documents])).tolist()
    blocks, first = [], 0
    for span, last in zip(pack.documents, edges, strict=True):
        size = max(1, BLOCK_SCORES // (num_heads * (span.end - span.start)))
        for a in range(first, last, size):
            places_X = places_R[a : min(a + size, last)]
            end = int(places_X[-1]) + 1
            hidden_XY = torch.arange(span.start, end, device=places_X.device) > places_X[:, None]
            blocks.append(Block(order_R[a : min(a + size, last)], span.start, end, hidden_XY))
        first = last
    return blocks


class RowAttention:
    """Attention of all steps of one pack.

    Args:
        pack: Documents and rows.
        qkv_T: Step-0 projections of every token of the pack; its keys and values are what rows see.
    """

    def __init__(self, pack: Pack, qkv_T: Qkv) -> None:
        self._pack = pack
        self._keys_GTK = qkv_T.k_RGK.transpose(0, 1).contiguous()
        self._values_GTK = qkv_T.v_RGK.transpose(0, 1).contiguous()
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._blocks: dict[int, list[Block]] = {}

    def __call__(self, qkv: Qkv, step: int) -> torch.Tensor:
        """Mixed values [R,H,K] of the rows that run at ``step``; call once a step, in order."""
        count, num_heads = qkv.q_RHK.shape[0], qkv.q_RHK.shape[1]
        if step:
            self._own.append((qkv.k_RGK, qkv.v_RGK))
        if count not in self._blocks:
            self._blocks[count] = plan_blocks(self._pack, count, num_heads)
        own = [tensor[:count] for pair in self._own for tensor in pair]
        return _Attend.apply(self._blocks[count], qkv.q_RHK, self._keys_GTK, self._values_GTK, *own)  # type: ignore[no-any-return]


def _grouped(x_XHK: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[X,H,K] as [G, X*P, K], so that one product serves all heads of a group."""
    X, H, K = x_XHK.shape
    return x_XHK.view(X, num_groups, H // num_groups, K).transpose(0, 1).reshape(num_groups, -1, K)


def _ungrouped(x_GZK: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[G, X*P, K] back to [X,H,K]."""
    G, _, K = x_GZK.shape
    return x_GZK.view(G, num_rows, -1, K).transpose(0, 1).reshape(num_rows, -1, K)


def _scores(block: Block, q_GZK: torch.Tensor, keys_GYK: torch.Tensor, scale: float) -> torch.Tensor:
    """Masked scores [G, X*P, Y] of one block."""
    scores_GZY = torch.bmm(q_GZK, keys_GYK.transpose(1, 2)).mul_(scale)
    G, Z, Y = scores_GZY.shape
    X = block.hidden_XY.shape[0]
    scores_GZY.view(G, X, Z // X, Y).masked_fill_(block.hidden_XY[:, None], -torch.inf)
    return scores_GZY


class _Attend(torch.autograd.Function):
    """(blocks, q_RHK, step-0 keys and values [G,T,K], own k and v [R,G,K] of each later step) → [R,H,K]."""

    @staticmethod
    @full_precision
    def forward(ctx: Any, blocks: list[Block], q_RHK: torch.Tensor, keys_GTK: torch.Tensor, *rest: torch.Tensor) -> Any:
        values_GTK, own = rest[0], rest[1:]
        R, H, K = q_RHK.shape
        G, scale = keys_GTK.shape[0], K**-0.5
        q_RGPK = q_RHK.reshape(R, G, H // G, K)
        own_scores = [(q_RGPK * key_RGK[:, :, None]).sum(-1).mul_(scale) for key_RGK in own[::2]]
        # rows of no document (padding) mix nothing: their shares are exp(score - inf) = 0
        mixed_RHK, lse_RH = torch.zeros_like(q_RHK), q_RHK.new_full((R, H), torch.inf)
        for block in blocks:
            rows_X, X = block.rows_X, len(block.rows_X)
            q_GZK = _grouped(q_RHK[rows_X], G)
            scores_GZY = _scores(block, q_GZK, keys_GTK[:, block.start : block.end], scale)
            lse_GZ = scores_GZY.logsumexp(-1)
            if own_scores:
                own_GZS = torch.stack([_grouped(s[rows_X].view(X, H, 1), G)[..., 0] for s in own_scores], -1)
                lse_GZ = torch.logaddexp(lse_GZ, own_GZS.logsumexp(-1))
            shares_GZY = scores_GZY.sub_(lse_GZ[..., None]).exp_()
            mixed_GZK = torch.bmm(shares_GZY, values_GTK[:, block.start : block.end])
            mixed_RHK[rows_X] = _ungrouped(mixed_GZK, X)
            lse_RH[rows_X] = _ungrouped(lse_GZ[..., None], X)[..., 0]
        mixed_RGPK = mixed_RHK.view(R, G, H // G, K)
        for score_RGP, value_RGK in zip(own_scores, own[1::2], strict=True):
            share_RGP = (score_RGP - lse_RH.view_as(score_RGP)).exp_()
            mixed_RGPK.addcmul_(share_RGP[..., None], value_RGK[:, :, None])
        ctx.blocks, ctx.scale = blocks, scale
        ctx.save_for_backward(q_RHK, keys_GTK, values_GTK, mixed_RHK, lse_RH, *own)
        return mixed_RHK

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, grad_RHK: torch.Tensor) -> Any:  # type: ignore[override]
        q_RHK, keys_GTK, values_GTK, mixed_RHK, lse_RH, *own = ctx.saved_tensors
        R, H, K = q_RHK.shape
        G, scale = keys_GTK.shape[0], ctx.scale
        delta_RH = (grad_RHK * mixed_RHK).sum(-1)
        grad_q_RHK = torch.zeros_like(q_RHK)
        grad_keys_GTK, grad_values_GTK = torch.zeros_like(keys_GTK), torch.zeros_like(values_GTK)
        for block in ctx.blocks:
            rows_X, X, keys = block.rows_X, len(block.rows_X), slice(block.start, block.end)
            q_GZK, grad_GZK = _grouped(q_RHK[rows_X], G), _grouped(grad_RHK[rows_X], G)
            lse_GZ1, delta_GZ1 = (_grouped(x_RH[rows_X].view(X, H, 1), G) for x_RH in (lse_RH, delta_RH))
            shares_GZY = _scores(block, q_GZK, keys_GTK[:, keys], scale).sub_(lse_GZ1).exp_()
            grad_values_GTK[:, keys] += torch.bmm(shares_GZY.transpose(1, 2), grad_GZK)
            grad_scores_GZY = torch.bmm(grad_GZK, values_GTK[:, keys].transpose(1, 2)).sub_(delta_GZ1)
            grad_scores_GZY.mul_(shares_GZY).mul_(scale)
            grad_q_RHK[rows_X] = _ungrouped(torch.bmm(grad_scores_GZY, keys_GTK[:, keys]), X)
            grad_keys_GTK[:, keys] += torch.bmm(grad_scores_GZY.transpose(1, 2), q_GZK)
        grad_own = []
        q_RGPK, grad_RGPK = q_RHK.reshape(R, G, H // G, K), grad_RHK.reshape(R, G, H // G, K)
        lse_RGP, delta_RGP = lse_RH.view(R, G, H // G), delta_RH.view(R, G, H // G)
        grad_q_RGPK = grad_q_RHK.view(R, G, H // G, K)
        for key_RGK, value_RGK in zip(own[::2], own[1::2], strict=True):
            share_RGP = ((q_RGPK * key_RGK[:, :, None]).sum(-1) * scale - lse_RGP).exp_()
            through_RGP = (grad_RGPK * value_RGK[:, :, None]).sum(-1)
            grad_score_RGP = share_RGP * (through_RGP - delta_RGP) * scale
            grad_q_RGPK.addcmul_(grad_score_RGP[..., None], key_RGK[:, :, None])
            grad_own += [
                (grad_score_RGP[..., None] * q_RGPK).sum(2),
                (share_RGP[..., None] * grad_RGPK).sum(2),
            ]
        return None, grad_q_RHK, grad_keys_GTK, grad_values_GTK, *grad_own
