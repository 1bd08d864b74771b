"""The drafter while decoding: greedy chains for a batch of sequences, with keys and values kept.

It is the same computation as ``ttt.unroll`` on the same functions of the model, row by row instead of
document by document: step-0 keys of every known row, then one key per chain step that only this row's
chain sees. Known rows come in blocks (the prompt, then what each verification made known).

Letters: B sequences, J rows of a block, S chain steps, L kept positions, A aux streams, D target hidden,
E drafter hidden, H heads, G key-value heads, K head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.drafter.model import Drafter, Qkv


class DraftChain:
    """Drafts for ``batch_size`` sequences side by side; a sequence's drafts depend on it alone.

    Args:
        drafter: With the target's embedding and draft vocab set.
        chain_length: S.
        batch_size: B.
        max_length: L, positions per sequence.
    """

    def __init__(self, drafter: Drafter, chain_length: int, batch_size: int, max_length: int) -> None:
        shape, weight = drafter.shape, drafter.fc.weight
        size = (batch_size, shape.num_key_value_heads, max_length + chain_length, shape.head_dim)
        # The last S places hold the keys of the running chain, so that nothing is copied per step.
        self._keys_BGXK, self._values_BGXK = weight.new_zeros(size), weight.new_zeros(size)
        self._place_X = torch.arange(max_length + chain_length, device=weight.device)
        self._known_B = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        self._sequence_B = torch.arange(batch_size, device=weight.device)
        self._hidden_BE = weight.new_zeros(batch_size, shape.hidden_size)
        self._qkv: Qkv | None = None
        drafter.rope.reserve(max_length + chain_length)
        self._drafter, self._chain_length, self._max_length = drafter, chain_length, max_length

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
        fused_RE = self._drafter.fuse(aux_BJAD.to(device).flatten(0, 1))
        embedded_RN = self._drafter.project_embeddings(next_ids_BJ.to(device).flatten())
        qkv = self._drafter.project(fused_RE, embedded_RN, position_BJ.flatten())
        self._write(position_BJ, qkv)
        last_B = self._sequence_B * J + count_B - 1
        self._known_B = start_B + count_B
        self._hidden_BE, self._qkv = fused_RE[last_B], Qkv(*(x[last_B] for x in qkv))

    @torch.no_grad()
    def draft(self) -> torch.Tensor:
        """Greedy chain from each sequence's last known row: target-vocab ids, [B, S]."""
        assert self._qkv is not None, "nothing is known yet: extend first"
        hidden_BE, qkv, drafted = self._hidden_BE, self._qkv, []
        for step in range(self._chain_length):
            if step:
                embedded_BN = self._drafter.project_embeddings(drafted[-1])
                qkv = self._drafter.project(hidden_BE, embedded_BN, self._known_B - 1 + step)
                place_B1 = torch.full_like(self._known_B, self._max_length + step)[:, None]
                self._write(place_B1, qkv)
            mask_BX = (self._place_X < self._known_B[:, None]) | (
                (self._place_X > self._max_length) & (self._place_X <= self._max_length + step)
            )
            output_BE = self._drafter.layer(hidden_BE, qkv, lambda own, mask=mask_BX: self._attend(own, mask))
            normed_BE, hidden_BE = self._drafter.finish(output_BE)
            drafted.append(self._drafter.target_ids(self._drafter.logits(normed_BE).argmax(-1)))
        return torch.stack(drafted, dim=1)

    def _write(self, place_BJ: torch.Tensor, qkv: Qkv) -> None:
        B, J = place_BJ.shape
        index = (self._sequence_B[:, None], slice(None), place_BJ)
        self._keys_BGXK[index] = qkv.k_RGK.view(B, J, *qkv.k_RGK.shape[1:])
        self._values_BGXK[index] = qkv.v_RGK.view(B, J, *qkv.v_RGK.shape[1:])

    def _attend(self, qkv: Qkv, mask_BX: torch.Tensor) -> torch.Tensor:
        B, H, K = qkv.q_RHK.shape
        G = self._keys_BGXK.shape[1]
        query_BGqK = qkv.q_RHK.reshape(B, G, H // G, K)
        mixed = F.scaled_dot_product_attention(
            query_BGqK, self._keys_BGXK, self._values_BGXK, attn_mask=mask_BX[:, None, None]
        )
        return mixed.reshape(B, H, K)
