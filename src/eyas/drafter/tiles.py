"""The attention of TTT rows in torch, tile by tile: ``TILE_ROWS`` rows by rising place against ``TILE_KEYS`` keys.

Tiles that no row of theirs may look into are left out and tiles that all may look into need no mask, so the
causal half is not computed. A tile's scores stay in a core's cache, and all products are of one size whatever
the documents: a library that prepares a kernel per size does it once (see ``precision``). The forward pass keeps
a running maximum and sum per query; all is float32 (float64 when the model is).

Scores are in bits, times log2(e), and shares powers of two: torch's ``exp`` takes ten to a hundred times as long
where its result is next to zero, and a mask in booleans as long again as a product; ``exp2`` and a sum do not.

Letters: R rows, H heads, G key-value heads, P = H / G, C = 2 G, K head dim, S later steps, N tiles of rows, M tiles
of keys, X = TILE_ROWS, Z = X P queries of a group in a tile, Y = TILE_KEYS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.drafter import spans
from eyas.drafter.precision import matmul_dtype, widened
from eyas.drafter.spans import AttentionPlan, Tile

BITS = math.log2(math.e)
LOWEST = -1e20
"""The maximum of nothing: a hidden score, -inf, less this is -inf again."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Between rows as they come and tiles of rows by rising place, as the products want them."""

    plan: AttentionPlan
    num_groups: int

    def tiled(self, x_RHK: torch.Tensor) -> torch.Tensor:
        """[R,H,K] as [N,G,Z,K], so that one product serves all heads of a group; what fills up is 0."""
        R, H, K = x_RHK.shape
        sorted_RHK = F.pad(widened(x_RHK)[self.plan.order_R], (0, 0, 0, 0, 0, -R % spans.TILE_ROWS))
        x_NXGPK = sorted_RHK.view(-1, spans.TILE_ROWS, self.num_groups, H // self.num_groups, K)
        return x_NXGPK.transpose(1, 2).reshape(len(x_NXGPK), self.num_groups, -1, K)

    def rows(self, x_NGZK: torch.Tensor) -> torch.Tensor:
        """[N,G,Z,K] back to [R,H,K]."""
        N, G, _, K = x_NGZK.shape
        sorted_RHK = x_NGZK.view(N, G, spans.TILE_ROWS, -1, K).transpose(1, 2).reshape(N * spans.TILE_ROWS, -1, K)
        order_R = self.plan.order_R.long()
        return sorted_RHK.new_empty(len(order_R), *sorted_RHK.shape[1:]).index_copy_(
            0, order_R, sorted_RHK[: len(order_R)]
        )


def _key_tiles(shared_TCK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Step-0 keys and values, each [M,G,Y,K]."""
    T, C, K = shared_TCK.shape
    filled_TCK = F.pad(widened(shared_TCK), (0, 0, 0, 0, 0, -T % spans.TILE_KEYS))
    keys_MCYK = filled_TCK.view(-1, spans.TILE_KEYS, C, K).transpose(1, 2).contiguous()
    return keys_MCYK[:, : C // 2], keys_MCYK[:, C // 2 :]


def _scores(q_GZK: torch.Tensor, keys_GKY: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Masked scores [G,Z,Y] in bits; queries come scaled."""
    scores_GZY = torch.bmm(q_GZK, keys_GKY)
    if tile.bias_XY is not None:
        G, Z, Y = scores_GZY.shape
        scores_GZY.view(G, spans.TILE_ROWS, Z // spans.TILE_ROWS, Y).add_(tile.bias_XY[:, None])
    return scores_GZY


def _own_scores(q_RGPK: torch.Tensor, own_SRCK: torch.Tensor) -> list[torch.Tensor]:
    """Per later step, scores [R,G,P] of each row with its own key, in bits."""
    R, G = q_RGPK.shape[:2]
    return [(q_RGPK * widened(own_RCK[:R, :G, None])).sum(-1) for own_RCK in own_SRCK]


def attend_forward(
    q_RHK: torch.Tensor, shared_TCK: torch.Tensor, own_SRCK: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixed values [R,H,K] in q's dtype, and each query's log-sum-exp [R,H], in bits.

    Args:
        q_RHK: Rotated queries.
        shared_TCK: Step-0 keys, then values, of every token.
        own_SRCK: The rows' own keys and values of steps 1 … k.
        plan: Which step-0 keys each row sees.
    """
    (R, H, K), G = q_RHK.shape, shared_TCK.shape[1] // 2
    layout = _Layout(plan, G)
    scaled_RHK = widened(q_RHK) * (K**-0.5 * BITS)
    with matmul_dtype("bfloat16" if q_RHK.dtype == torch.bfloat16 else "float32"):
        mixed_NGZK, peak_NGZ1, sum_NGZ1 = _mix(plan, layout.tiled(scaled_RHK), *_key_tiles(shared_TCK))
    mixed_RHK, peak_RH1, lse_RH1 = (layout.rows(x) for x in (mixed_NGZK, peak_NGZ1, peak_NGZ1 + sum_NGZ1.log2()))
    own_scores = _own_scores(scaled_RHK.view(R, G, H // G, K), own_SRCK)
    for score_RGP in own_scores:
        lse_RH1 = torch.logaddexp2(lse_RH1, score_RGP.reshape(R, H, 1))
    mixed_RHK *= (peak_RH1 - lse_RH1).exp2_()
    mixed_RGPK, lse_RGP = mixed_RHK.view(R, G, H // G, K), lse_RH1.view(R, G, H // G)
    for score_RGP, own_RCK in zip(own_scores, own_SRCK, strict=True):
        mixed_RGPK.addcmul_((score_RGP - lse_RGP).exp2_()[..., None], widened(own_RCK[:R, G:, None]))
    return mixed_RHK.to(q_RHK.dtype), lse_RH1[..., 0]


def _mix(
    plan: AttentionPlan, q_NGZK: torch.Tensor, keys_MGYK: torch.Tensor, values_MGYK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per query: sum of share x value [N,G,Z,K]; the largest score; the sum of shares, 2^(score - largest)."""
    keys_MGKY = keys_MGYK.transpose(2, 3).contiguous()
    mixed_NGZK = torch.zeros_like(q_NGZK)
    peak_NGZ1 = torch.full_like(q_NGZK[..., :1], LOWEST)
    sum_NGZ1 = torch.zeros_like(peak_NGZ1)
    for n, tiles in enumerate(plan.tiles()):
        q_GZK, mixed_GZK, peak_GZ1, sum_GZ1 = q_NGZK[n], mixed_NGZK[n], peak_NGZ1[n], sum_NGZ1[n]
        for tile in tiles:
            scores_GZY = _scores(q_GZK, keys_MGKY[tile.keys], tile)
            higher_GZ1 = torch.maximum(peak_GZ1, scores_GZY.amax(-1, keepdim=True))
            shares_GZY = scores_GZY.sub_(higher_GZ1).exp2_()
            shrink_GZ1 = peak_GZ1.sub_(higher_GZ1).exp2_()
            sum_GZ1.mul_(shrink_GZ1).add_(shares_GZY.sum(-1, keepdim=True))
            mixed_GZK.mul_(shrink_GZ1).add_(torch.bmm(shares_GZY, values_MGYK[tile.keys]))
            peak_GZ1.copy_(higher_GZ1)
    return mixed_NGZK, peak_NGZ1, sum_NGZ1


def attend_backward(
    grad_RHK: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shared_TCK: torch.Tensor,
    own_SRCK: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    plan: AttentionPlan,
) -> torch.Tensor:
    """Gradient of the queries; those of keys and values are added to ``sums``.

    Args:
        grad_RHK: Of the mixed values.
        saved: q, the mixed values and the log-sum-exp of the forward pass.
        shared_TCK: As in the forward pass.
        own_SRCK: Likewise.
        sums: Of the shape of ``shared_TCK`` and of ``own_SRCK``.
        plan: As in the forward pass.
    """
    q_RHK, mixed_RHK, lse_RH = saved
    (R, H, K), G = q_RHK.shape, shared_TCK.shape[1] // 2
    layout = _Layout(plan, G)
    scaled_RHK, grad_RHK = widened(q_RHK) * (K**-0.5 * BITS), widened(grad_RHK)
    delta_RH = torch.linalg.vecdot(grad_RHK, widened(mixed_RHK))
    tiled = [layout.tiled(x_RHK) for x_RHK in (scaled_RHK, grad_RHK, lse_RH[..., None], delta_RH[..., None])]
    with matmul_dtype("bfloat16" if q_RHK.dtype == torch.bfloat16 else "float32"):
        grad_q_NGZK, grad_shared_MCYK = _mix_backward(plan, tiled, *_key_tiles(shared_TCK))
    sums[0].add_(grad_shared_MCYK.transpose(1, 2).reshape(-1, 2 * G, K)[: len(shared_TCK)])
    grad_q_RHK = layout.rows(grad_q_NGZK)
    grad_q_RGPK = grad_q_RHK.view(R, G, H // G, K)
    q_RGPK, grad_RGPK = scaled_RHK.view(R, G, H // G, K), grad_RHK.reshape(R, G, H // G, K)
    lse_RGP, delta_RGP = lse_RH.view(R, G, H // G), delta_RH.view(R, G, H // G)
    for score_RGP, own_RCK, grad_own_RCK in zip(_own_scores(q_RGPK, own_SRCK), own_SRCK, sums[1], strict=True):
        share_RGP = (score_RGP - lse_RGP).exp2_()
        through_RGP = (grad_RGPK * widened(own_RCK[:R, G:, None])).sum(-1)
        grad_score_RGP = share_RGP * (through_RGP - delta_RGP)
        grad_q_RGPK.addcmul_(grad_score_RGP[..., None], widened(own_RCK[:R, :G, None]))
        grad_own_RCK[:R, :G] += (grad_score_RGP[..., None] * q_RGPK).sum(2).div_(BITS)
        grad_own_RCK[:R, G:] += (share_RGP[..., None] * grad_RGPK).sum(2)
    return grad_q_RHK.mul_(K**-0.5).to(q_RHK.dtype)


def _mix_backward(
    plan: AttentionPlan, tiled: list[torch.Tensor], keys_MGYK: torch.Tensor, values_MGYK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the scaled queries [N,G,Z,K] and of keys and values [M,C,Y,K]."""
    q_NGZK, grad_NGZK, lse_NGZ1, delta_NGZ1 = tiled
    keys_MGKY, values_MGKY = (x_MGYK.transpose(2, 3).contiguous() for x_MGYK in (keys_MGYK, values_MGYK))
    grad_q_NGZK = torch.zeros_like(q_NGZK)
    M, G, Y, K = keys_MGYK.shape
    grad_MCYK = keys_MGYK.new_zeros(M, 2 * G, Y, K)
    for n, tiles in enumerate(plan.tiles()):
        q_GZK, grad_GZK = q_NGZK[n], grad_NGZK[n]
        for tile in tiles:
            m = tile.keys
            shares_GZY = _scores(q_GZK, keys_MGKY[m], tile).sub_(lse_NGZ1[n]).exp2_()
            grad_MCYK[m, G:] += torch.bmm(shares_GZY.transpose(1, 2), grad_GZK)
            grad_scores_GZY = torch.bmm(grad_GZK, values_MGKY[m]).sub_(delta_NGZ1[n]).mul_(shares_GZY)
            grad_q_NGZK[n] += torch.bmm(grad_scores_GZY, keys_MGYK[m])
            grad_MCYK[m, :G] += torch.bmm(grad_scores_GZY.transpose(1, 2), q_GZK)
    grad_MCYK[:, :G] /= BITS  # queries came in bits
    return grad_q_NGZK, grad_MCYK
