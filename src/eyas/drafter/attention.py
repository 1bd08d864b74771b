"""Exact attention of TTT rows over packed documents, in memory linear in the tokens.

At step k a row sees the step-0 keys of its own document up to itself, and its own keys of steps 1 … k.
The softmax runs over both together.

The work is cut into tiles of a fixed size, whatever the documents: ``TILE_ROWS`` rows by rising place
against up to ``TILE_KEYS`` keys of the pack. Tiles that no row of theirs may look into are left out, tiles
that all may look into need no mask, so the causal half is not computed. A tile's scores stay in the
processor's cache, which is worth more than any product saved, and a library that prepares its products per
size meets the same few sizes again and again. The forward pass keeps a running maximum and sum per row and
then the log-sum-exp; the backward pass computes a tile's probabilities again from it.

Letters: T tokens of the pack, R rows, H heads, G key-value heads, P = H / G heads per group, K head dim,
N tiles of rows, X = TILE_ROWS, Z = X P queries of a group in a tile, Y keys of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eyas.drafter.model import Qkv
from eyas.drafter.rows import Pack

TILE_ROWS, TILE_KEYS = 64, 256
KEY_MULTIPLE = 64
"""Keys of a tile are a multiple of this; keys that fill up are hidden from every row."""
LOWEST = -1e20
"""Stands for the maximum of nothing: any score of -inf less this is -inf again."""


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Keys that a tile of rows looks at."""

    keys: slice
    hidden_XY: torch.Tensor | None
    """Bool: this row may not see this key; None when all see all."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the rows of one step are attended to."""

    order_R: torch.Tensor
    """Rows by rising place."""
    num_tiles: int
    keys: tuple[tuple[KeyTile, ...], ...]
    """Of each tile of rows."""


def plan_tiles(pack: Pack, count: int) -> Tiles:
    """Cut the first ``count`` rows and the keys they may see into tiles."""
    places_R, order_R = torch.sort(pack.rows_R[:count])
    starts = places_R.new_tensor([span.start for span in pack.documents])
    ends = places_R.new_tensor([span.end for span in pack.documents])
    num_tiles = -(-count // TILE_ROWS)
    document_R = torch.searchsorted(starts, places_R, right=True) - 1
    inside_R = places_R < ends[document_R]
    # rows of no document (padding) see nothing, like those that fill the last tile up
    fill = num_tiles * TILE_ROWS - count
    first_NX = F.pad(starts[document_R].where(inside_R, len(pack.ids_T)), (0, fill), value=len(pack.ids_T))
    last_NX = F.pad(places_R.where(inside_R, -1), (0, fill), value=-1)
    first_NX, last_NX = first_NX.view(-1, TILE_ROWS), last_NX.view(-1, TILE_ROWS)
    keys_T = torch.arange(_filled(len(pack.ids_T)), device=places_R.device)
    begins, stops = first_NX.amin(1).tolist(), (last_NX.amax(1) + 1).tolist()
    keys = []
    for tile, (begin, stop) in enumerate(zip(begins, stops, strict=True)):
        begin = begin // KEY_MULTIPLE * KEY_MULTIPLE
        edges = [*range(begin, stop, TILE_KEYS), _filled(stop)]
        seen = []
        for a, b in zip(edges, edges[1:], strict=False):
            keys_Y = keys_T[a:b]
            hidden_XY = (keys_Y < first_NX[tile, :, None]) | (keys_Y > last_NX[tile, :, None])
            num_hidden = int(hidden_XY.sum())
            if num_hidden < hidden_XY.numel():
                seen.append(KeyTile(slice(a, b), hidden_XY if num_hidden else None))
        keys.append(tuple(seen))
    return Tiles(order_R, num_tiles, tuple(keys))


def _filled(count: int) -> int:
    return -(-count // KEY_MULTIPLE) * KEY_MULTIPLE


class RowAttention:
    """Attention of all steps of one pack.

    Args:
        pack: Documents and rows.
        qkv_T: Step-0 projections of every token of the pack; its keys and values are what rows see.
    """

    def __init__(self, pack: Pack, qkv_T: Qkv) -> None:
        self._pack = pack
        fill = _filled(len(pack.ids_T)) - len(pack.ids_T)
        self._keys_GTK = F.pad(qkv_T.k_RGK.transpose(0, 1), (0, 0, 0, fill)).contiguous()
        self._values_GTK = F.pad(qkv_T.v_RGK.transpose(0, 1), (0, 0, 0, fill)).contiguous()
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tiles: dict[int, Tiles] = {}

    def __call__(self, qkv: Qkv, step: int) -> torch.Tensor:
        """Mixed values [R,H,K] of the rows that run at ``step``; call once a step, in order."""
        count = qkv.q_RHK.shape[0]
        if step:
            self._own.append((qkv.k_RGK, qkv.v_RGK))
        if count not in self._tiles:
            self._tiles[count] = plan_tiles(self._pack, count)
        own = [tensor[:count] for pair in self._own for tensor in pair]
        return _Attend.apply(self._tiles[count], qkv.q_RHK, self._keys_GTK, self._values_GTK, *own)  # type: ignore[no-any-return]


def _tiled(x_RHK: torch.Tensor, tiles: Tiles, num_groups: int) -> torch.Tensor:
    """[R,H,K] as [N,G,Z,K], so that one product serves all heads of a group; what fills up is 0."""
    R, H, K = x_RHK.shape
    sorted_RHK = F.pad(x_RHK[tiles.order_R], (0, 0, 0, 0, 0, tiles.num_tiles * TILE_ROWS - R))
    x_NXGPK = sorted_RHK.view(tiles.num_tiles, TILE_ROWS, num_groups, H // num_groups, K)
    return x_NXGPK.transpose(1, 2).reshape(tiles.num_tiles, num_groups, -1, K)


def _untiled(x_NGZK: torch.Tensor, tiles: Tiles, num_heads: int) -> torch.Tensor:
    """[N,G,Z,K] back to [R,H,K]."""
    N, G, _, K = x_NGZK.shape
    sorted_RHK = x_NGZK.view(N, G, TILE_ROWS, -1, K).transpose(1, 2).reshape(N * TILE_ROWS, num_heads, K)
    x_RHK = sorted_RHK.new_empty(len(tiles.order_R), num_heads, K)
    x_RHK[tiles.order_R] = sorted_RHK[: len(x_RHK)]
    return x_RHK


def _scores(q_GZK: torch.Tensor, keys_GTK: torch.Tensor, tile: KeyTile) -> torch.Tensor:
    """Masked scores [G,Z,Y] of one tile."""
    scores_GZY = torch.bmm(q_GZK, keys_GTK[:, tile.keys].transpose(1, 2))
    if tile.hidden_XY is not None:
        G, _, Y = scores_GZY.shape
        scores_GZY.view(G, TILE_ROWS, -1, Y).masked_fill_(tile.hidden_XY[:, None], -torch.inf)
    return scores_GZY


def _mix(
    tiles: Tiles, q_NGZK: torch.Tensor, keys_GTK: torch.Tensor, values_GTK: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Per query: sum of exp(score - maximum) times value [N,G,Z,K], that maximum and the sum of shares [N,G,Z,1]."""
    mixed_NGZK = torch.zeros_like(q_NGZK)
    peak_NGZ1 = q_NGZK.new_full((*q_NGZK.shape[:3], 1), LOWEST)
    sum_NGZ1 = torch.zeros_like(peak_NGZ1)
    for n, seen in enumerate(tiles.keys):
        mixed_GZK, peak_GZ1, sum_GZ1 = mixed_NGZK[n], peak_NGZ1[n], sum_NGZ1[n]
        for tile in seen:
            scores_GZY = _scores(q_NGZK[n], keys_GTK, tile)
            higher_GZ1 = torch.maximum(peak_GZ1, scores_GZY.amax(-1, keepdim=True))
            shares_GZY = scores_GZY.sub_(higher_GZ1).exp_()
            shrink_GZ1 = peak_GZ1.sub_(higher_GZ1).exp_()
            sum_GZ1.mul_(shrink_GZ1).add_(shares_GZY.sum(-1, keepdim=True))
            mixed_GZK.mul_(shrink_GZ1).add_(torch.bmm(shares_GZY, values_GTK[:, tile.keys]))
            peak_GZ1.copy_(higher_GZ1)
    return mixed_NGZK, peak_NGZ1, sum_NGZ1


class _Attend(torch.autograd.Function):
    """(tiles, q_RHK, step-0 keys and values [G,T,K], own k and v [R,G,K] of each later step) → [R,H,K]."""

    @staticmethod
    def forward(ctx: Any, tiles: Tiles, q_RHK: torch.Tensor, keys_GTK: torch.Tensor, *rest: torch.Tensor) -> Any:
        values_GTK, own = rest[0], rest[1:]
        R, H, K = q_RHK.shape
        G = keys_GTK.shape[0]
        q_RHK = q_RHK * K**-0.5
        q_RGPK = q_RHK.view(R, G, H // G, K)
        mixed_NGZK, peak_NGZ1, sum_NGZ1 = _mix(tiles, _tiled(q_RHK, tiles, G), keys_GTK, values_GTK)
        # rows that see nothing (padding) mix nothing: their shares are exp(score - inf) = 0
        lse_NGZ1 = (peak_NGZ1 + sum_NGZ1.log()).masked_fill_(sum_NGZ1 == 0, torch.inf)
        mixed_RHK = _untiled(mixed_NGZK, tiles, H)
        peak_RH1, lse_RH1 = (_untiled(x_NGZ1, tiles, H) for x_NGZ1 in (peak_NGZ1, lse_NGZ1))
        own_scores = [torch.einsum("rgpk,rgk->rgp", q_RGPK, key_RGK) for key_RGK in own[::2]]
        for score_RGP in own_scores:
            lse_RH1 = torch.logaddexp(lse_RH1, score_RGP.reshape(R, H, 1))
        mixed_RHK *= (peak_RH1 - lse_RH1).exp_()
        mixed_RGPK, lse_RGP = mixed_RHK.view(R, G, H // G, K), lse_RH1.view(R, G, H // G)
        for score_RGP, value_RGK in zip(own_scores, own[1::2], strict=True):
            mixed_RGPK.addcmul_((score_RGP - lse_RGP).exp_()[..., None], value_RGK[:, :, None])
        ctx.tiles = tiles
        ctx.save_for_backward(q_RHK, keys_GTK, values_GTK, mixed_RHK, lse_RH1, *own)
        return mixed_RHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHK: torch.Tensor) -> Any:  # type: ignore[override]
        q_RHK, keys_GTK, values_GTK, mixed_RHK, lse_RH1, *own = ctx.saved_tensors
        R, H, K = q_RHK.shape
        G, tiles = keys_GTK.shape[0], ctx.tiles
        delta_RH1 = torch.linalg.vecdot(grad_RHK, mixed_RHK)[..., None]
        q_NGZK, grad_NGZK, lse_NGZ1, delta_NGZ1 = (
            _tiled(x_RHK, tiles, G) for x_RHK in (q_RHK, grad_RHK, lse_RH1, delta_RH1)
        )
        grad_q_NGZK = torch.zeros_like(q_NGZK)
        grad_keys_GTK, grad_values_GTK = torch.zeros_like(keys_GTK), torch.zeros_like(values_GTK)
        for n, seen in enumerate(tiles.keys):
            q_GZK, grad_GZK = q_NGZK[n], grad_NGZK[n]
            for tile in seen:
                shares_GZY = _scores(q_GZK, keys_GTK, tile).sub_(lse_NGZ1[n]).exp_()
                grad_values_GTK[:, tile.keys] += torch.bmm(shares_GZY.transpose(1, 2), grad_GZK)
                through_GZY = torch.bmm(grad_GZK, values_GTK[:, tile.keys].transpose(1, 2))
                grad_scores_GZY = through_GZY.sub_(delta_NGZ1[n]).mul_(shares_GZY)
                grad_q_NGZK[n] += torch.bmm(grad_scores_GZY, keys_GTK[:, tile.keys])
                grad_keys_GTK[:, tile.keys] += torch.bmm(grad_scores_GZY.transpose(1, 2), q_GZK)
        grad_q_RGPK = _untiled(grad_q_NGZK, tiles, H).view(R, G, H // G, K)
        q_RGPK, grad_RGPK = q_RHK.view(R, G, H // G, K), grad_RHK.reshape(R, G, H // G, K)
        lse_RGP, delta_RGP = lse_RH1.view(R, G, H // G), delta_RH1.view(R, G, H // G)
        grad_own = []
        for key_RGK, value_RGK in zip(own[::2], own[1::2], strict=True):
            share_RGP = (torch.einsum("rgpk,rgk->rgp", q_RGPK, key_RGK) - lse_RGP).exp_()
            through_RGP = torch.einsum("rgpk,rgk->rgp", grad_RGPK, value_RGK)
            grad_score_RGP = share_RGP * (through_RGP - delta_RGP)
            grad_q_RGPK.addcmul_(grad_score_RGP[..., None], key_RGK[:, :, None])
            grad_own += [
                torch.einsum("rgp,rgpk->rgk", grad_score_RGP, q_RGPK),
                torch.einsum("rgp,rgpk->rgk", share_RGP, grad_RGPK),
            ]
        return None, grad_q_RGPK.view(R, H, K) * K**-0.5, grad_keys_GTK, grad_values_GTK, *grad_own
