"""The drafter while decoding: greedy or sampled chains for a batch of sequences, with keys and values kept.

It is the same computation as ``ttt.unroll`` on the same functions of the model, row by row instead of
document by document: step-0 keys of every known row, then one key per chain step that only this row's
chain sees. Known rows come in blocks (the prompt, then what each verification made known).

Letters: B sequences, J rows of a block, S chain steps, L kept positions, A aux streams, D target hidden,
E drafter hidden, H heads, G key-value heads, K head dim, W draft vocab, Q queries per sequence, X places of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from eyas.drafter.differentiable import norm_linear
from eyas.drafter.layer import finish_layer, finish_step, fuse, project_embedding
from eyas.drafter.model import Drafter
from eyas.drafter.pointwise import Rotation, rotate
from eyas.drafter.weights import plain_weights


class Projected(NamedTuple):
    """One block of rows: rotated queries and keys, values, and the residual past them."""

    q_RHK: torch.Tensor
    k_RGK: torch.Tensor
    v_RGK: torch.Tensor
    residual_RE: torch.Tensor


class DraftState:
    """What the drafter knows of ``batch_size`` sequences side by side; what it drafts for one depends on it alone.

    Args:
        drafter: With the target's embedding and draft vocab set.
        chain_length: S, steps of a round.
        batch_size: B.
        max_length: L, positions per sequence.
        num_places: Keys of the running round, kept behind the L places so that nothing is copied per step.
    """

    def __init__(self, drafter: Drafter, chain_length: int, batch_size: int, max_length: int, num_places: int) -> None:
        shape, weight = drafter.shape, drafter.fc.weight
        size = (batch_size, shape.num_key_value_heads, max_length + num_places, shape.head_dim)
        self._keys_BGXK, self._values_BGXK = weight.new_zeros(size), weight.new_zeros(size)
        self._place_X = torch.arange(max_length + num_places, device=weight.device)
        self._known_B = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        self._sequence_B = torch.arange(batch_size, device=weight.device)
        self._last: Projected | None = None
        self._drafter, self.chain_length, self._max_length = drafter, chain_length, max_length
        self._weights = plain_weights(drafter)

    @torch.no_grad()
    def extend(
        self, aux_BJAD: torch.Tensor, next_ids_BJ: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor
    ) -> None:
        """Take in rows ``start .. start + count - 1`` of every sequence.

        Args:
            aux_BJAD: The target's aux states of J rows from ``start``; rows at and after ``count`` may hold
                anything, they are written over by the next block.
            next_ids_BJ: The token that follows each row.
            start_B: First row; all before it are known. Rows may be taken in again.
            count_B: Rows that count, 1 to J.
        """
        J = next_ids_BJ.shape[1]
        device = self._known_B.device
        start_B, count_B = start_B.to(device), count_B.to(device)
        position_BJ = start_B[:, None] + torch.arange(J, device=device)
        fused_RE = fuse(self._weights, self._drafter.shape, aux_BJAD.to(device).flatten(0, 1))
        projected = self._project(fused_RE, next_ids_BJ.to(device).flatten(), position_BJ.flatten())
        self._write(position_BJ, projected)
        last_B = self._sequence_B * J + count_B - 1
        self._known_B = start_B + count_B
        self._last = Projected(*(x[last_B] for x in projected))

    def _project(self, hidden_RE: torch.Tensor, ids_R: torch.Tensor, positions_R: torch.Tensor) -> Projected:
        shape, weights = self._drafter.shape, self._weights
        H, G, K = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        embedding_RE = F.embedding(ids_R, self._drafter.embed_tokens.weight)  # type: ignore[arg-type]
        embedded_RN = torch.cat([project_embedding(weights, shape, embedding_RE, queries=q) for q in (True, False)], 1)
        hidden_RN, residual_RE = norm_linear(
            hidden_RE, weights.hidden_norm, weights.qkv_hidden, shape.rms_norm_eps, shape.norm_before_residual
        )
        both_RXK = (hidden_RN + embedded_RN).unflatten(1, (-1, K))
        table = self._drafter.rope.table(self._max_length + self.chain_length, both_RXK.device, both_RXK.dtype)
        turned_RXK = rotate(both_RXK[:, : H + G], Rotation(*table, positions_R, 0))
        return Projected(turned_RXK[:, :H], turned_RXK[:, H:], both_RXK[:, H + G :], residual_RE)

    def _write(self, place_BJ: torch.Tensor, qkv: Projected) -> None:
        B, J = place_BJ.shape
        index = (self._sequence_B[:, None], slice(None), place_BJ)
        self._keys_BGXK[index] = qkv.k_RGK.view(B, J, *qkv.k_RGK.shape[1:])
        self._values_BGXK[index] = qkv.v_RGK.view(B, J, *qkv.v_RGK.shape[1:])

    def _finish(self, projected: Projected, mask_BQX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R,W] and next hidden [R,E] of the rows of one step, Q of each sequence; they see what the mask says."""
        mixed_RHK = self._attend(projected.q_RHK, mask_BQX)
        output_RE = finish_layer(self._weights, self._drafter.shape, projected.residual_RE, mixed_RHK)
        normed_RE, hidden_RE = finish_step(self._weights, self._drafter.shape, output_RE)
        return self._drafter.logits(normed_RE), hidden_RE

    def _attend(self, q_RHK: torch.Tensor, mask_BQX: torch.Tensor) -> torch.Tensor:
        R, H, K = q_RHK.shape
        (B, Q, X), G = mask_BQX.shape, self._keys_BGXK.shape[1]
        query_BGqK = q_RHK.view(B, Q, G, H // G, K).transpose(1, 2).reshape(B, G, Q * (H // G), K)
        mask_B1qX = mask_BQX[:, None, :, None].expand(B, 1, Q, H // G, X).reshape(B, 1, -1, X)
        mixed_BGqK = F.scaled_dot_product_attention(query_BGqK, self._keys_BGXK, self._values_BGXK, attn_mask=mask_B1qX)
        return mixed_BGqK.view(B, G, Q, H // G, K).transpose(1, 2).reshape(R, H, K)


class DraftChain(DraftState):
    """Chains of S draft tokens.

    Args:
        drafter: See ``DraftState``.
        chain_length: S.
        batch_size: B.
        max_length: L.
    """

    def __init__(self, drafter: Drafter, chain_length: int, batch_size: int, max_length: int) -> None:
        super().__init__(drafter, chain_length, batch_size, max_length, num_places=chain_length)

    def draft(self) -> torch.Tensor:
        """Greedy chain from each sequence's last known row: target-vocab ids, [B, S]."""
        return self._draft(lambda _, logits_BW: logits_BW.argmax(-1))

    def draft_sampled(self, temperature: float, uniform_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A chain whose tokens are drawn from the drafter's own distribution.

        Args:
            temperature: Above 0.
            uniform_BS: Float64 in [0, 1): what each token is drawn by.

        Returns:
            Target-vocab ids [B,S] and the distributions they were drawn from, [B,S,W] over draft ids.
        """
        shares: list[torch.Tensor] = []

        def choose(step: int, logits_BW: torch.Tensor) -> torch.Tensor:
            shares.append((logits_BW.float() / temperature).softmax(-1))
            return draw(shares[-1], uniform_BS[:, step].to(logits_BW.device))

        ids_BS = self._draft(choose)
        return ids_BS, torch.stack(shares, dim=1)

    @torch.no_grad()
    def _draft(self, choose: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        assert self._last is not None, "nothing is known yet: extend first"
        projected, hidden_BE, drafted = self._last, self._last.residual_RE, []
        for step in range(self.chain_length):
            if step:
                projected = self._project(hidden_BE, drafted[-1], self._known_B - 1 + step)
                place_B1 = torch.full_like(self._known_B, self._max_length + step)[:, None]
                self._write(place_B1, projected)
            mask_BX = (self._place_X < self._known_B[:, None]) | (
                (self._place_X > self._max_length) & (self._place_X <= self._max_length + step)
            )
            logits_BW, hidden_BE = self._finish(projected, mask_BX[:, None])
            drafted.append(self._drafter.target_ids(choose(step, logits_BW)))
        return torch.stack(drafted, dim=1)


def draw(share_RN: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Index [R] at which each row's cumulative share passes its uniform number; shares need not sum to 1.

    Args:
        share_RN: Not negative; some of a row above 0.
        uniform_R: Float64 in [0, 1).
    """
    upto_RN = share_RN.double().cumsum(-1)
    wanted_R1 = uniform_R[:, None] * upto_RN[:, -1:]
    passed_R = (upto_RN <= wanted_R1).sum(-1)
    last_R = share_RN.shape[1] - 1 - (share_RN.flip(-1) > 0).int().argmax(-1)  # rounding may pass the whole mass
    return torch.minimum(passed_R, last_R)
