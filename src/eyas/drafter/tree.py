"""The drafter while decoding, as a tree: several children per node, the likeliest nodes of all are checked together.

The tree is grown as servers grow it: every step gives each of the ``width`` carried nodes its ``width`` likeliest
children, and the ``width`` likeliest of all these (by the product of shares from the root) are carried on. Of all
nodes that were drafted the likeliest go to the target. A carried node computes what a chain computes that drafted
the same tokens.

Letters: B sequences, J tokens of a round's block (the root first), S steps, N carried nodes, C candidates,
X places of keys, Y of these for nodes, W draft vocab, E drafter hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.drafter.chain import DraftState, Projected
from eyas.drafter.model import Drafter


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes of one round; a parent lies before its children, and place 0 is the root, which is known already.

    Shapes: ids_BJ target-vocab ids (the root's is 0: the caller knows it); parent_BJ place of the parent, the
    root's own is 0; depth_BJ steps below the root.
    """

    ids_BJ: torch.Tensor
    parent_BJ: torch.Tensor
    depth_BJ: torch.Tensor

    def seen_BJJ(self) -> torch.Tensor:
        """Bool: second place is the first or one of its ancestors."""
        B, J = self.parent_BJ.shape
        seen_BJJ = torch.eye(J, dtype=torch.bool, device=self.parent_BJ.device).repeat(B, 1, 1)
        sequence_B = torch.arange(B, device=self.parent_BJ.device)
        for place in range(1, J):
            seen_BJJ[:, place] |= seen_BJJ[sequence_B, self.parent_BJ[:, place]]
        return seen_BJJ


@dataclass(slots=True)
class _Candidates:
    """Every node drafted so far: score, target id, parent among the candidates (-1: the root), depth."""

    score_BC: torch.Tensor
    ids_BC: torch.Tensor
    parent_BC: torch.Tensor
    depth_C: torch.Tensor

    def plus(self, other: _Candidates) -> _Candidates:
        return _Candidates(
            torch.cat([self.score_BC, other.score_BC], 1),
            torch.cat([self.ids_BC, other.ids_BC], 1),
            torch.cat([self.parent_BC, other.parent_BC], 1),
            torch.cat([self.depth_C, other.depth_C]),
        )


class DraftTree(DraftState):
    """Trees of up to ``num_tokens`` tokens, the root included.

    Args:
        drafter: See ``DraftState``.
        depth: S.
        width: Children per node, and nodes carried from step to step.
        num_tokens: J; fewer when the tree has no more.
        batch_size: B.
        max_length: See ``DraftState``.
    """

    def __init__(
        self, drafter: Drafter, depth: int, width: int, num_tokens: int, batch_size: int, max_length: int
    ) -> None:
        super().__init__(drafter, depth, batch_size, max_length, num_places=width * depth)
        self._width = min(width, drafter.shape.draft_vocab_size)
        self.num_tokens = min(num_tokens, 1 + self._width + (depth - 1) * self._width**2)

    @torch.no_grad()
    def draft(self) -> Tree:
        """The tree below each sequence's last known row."""
        assert self._last is not None, "nothing is known yet: extend first"
        device, B, N = self._known_B.device, len(self._known_B), self._width
        is_known_BX = (self._place_X < self._known_B[:, None])[:, None]
        logits_BW, hidden_BE = self._finish(self._last, is_known_BX)
        nodes = self._children(logits_BW[:, None], torch.zeros(B, 1, device=device), torch.full((B, 1), -1), 1)
        carried_BN = torch.arange(N, device=device).expand(B, N)
        hidden_BNE = hidden_BE[:, None].expand(-1, N, -1)
        own_BNX = torch.zeros(B, N, len(self._place_X), dtype=torch.bool, device=device)
        for step in range(1, self.chain_length):
            projected = self._project_nodes(hidden_BNE, nodes.ids_BC.gather(1, carried_BN), step)
            place_N = self._max_length + (step - 1) * N + torch.arange(N, device=device)
            self._write(place_N.expand(B, N), projected)
            own_BNX = own_BNX | (self._place_X == place_N[:, None])
            logits_RW, hidden_RE = self._finish(projected, is_known_BX | own_BNX)
            scores_BN = nodes.score_BC.gather(1, carried_BN)
            grown = self._children(logits_RW.view(B, N, -1), scores_BN, carried_BN, step + 1)
            best_BN = grown.score_BC.sort(dim=1, descending=True, stable=True).indices[:, :N]
            carried_BN, nodes = best_BN + nodes.score_BC.shape[1], nodes.plus(grown)
            from_BN1 = (best_BN // N)[..., None]
            hidden_BNE = hidden_RE.view(B, N, -1).gather(1, from_BN1.expand(-1, -1, hidden_RE.shape[1]))
            own_BNX = own_BNX.gather(1, from_BN1.expand_as(own_BNX))
        return self._likeliest(nodes)

    def _project_nodes(self, hidden_BNE: torch.Tensor, ids_BN: torch.Tensor, step: int) -> Projected:
        position_BN = (self._known_B - 1 + step)[:, None].expand_as(ids_BN)
        return self._project(hidden_BNE.flatten(0, 1), ids_BN.flatten(), position_BN.flatten())

    def _children(
        self, logits_BNW: torch.Tensor, score_BN: torch.Tensor, parent_BN: torch.Tensor, depth: int
    ) -> _Candidates:
        best = logits_BNW.float().log_softmax(-1).topk(self._width, -1)
        score_BNc = best.values + score_BN[..., None]
        ids_BNc = self._drafter.target_ids(best.indices)
        parent_BNc = parent_BN.to(ids_BNc.device)[..., None].expand_as(ids_BNc)
        depth_C = torch.full((ids_BNc[0].numel(),), depth, device=ids_BNc.device)
        return _Candidates(score_BNc.flatten(1), ids_BNc.flatten(1), parent_BNc.flatten(1), depth_C)

    def _likeliest(self, nodes: _Candidates) -> Tree:
        """A child is never likelier than its parent, and of equals the first wins: what is kept hangs together."""
        order_BC = nodes.score_BC.sort(dim=1, descending=True, stable=True).indices
        kept_BK = order_BC[:, : self.num_tokens - 1].sort(1).values
        place_BC = torch.zeros_like(order_BC).scatter_(1, kept_BK, 1).cumsum(1)
        parent_BK = nodes.parent_BC.gather(1, kept_BK)
        place_BK = torch.where(parent_BK < 0, 0, place_BC.gather(1, parent_BK.clamp_min(0)))
        blocks = (nodes.ids_BC.gather(1, kept_BK), place_BK, nodes.depth_C[kept_BK])
        return Tree(*(torch.cat([torch.zeros_like(x_BK[:, :1]), x_BK], 1) for x_BK in blocks))
