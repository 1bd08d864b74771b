"""Which keys the rows of one TTT step may see: an interval each, from the start of its document to itself.

Planned on the CPU when a pack is made, so that a step on a GPU waits for nothing.

Letters: T tokens of the pack, R rows that run at the step, X rows of one block, Y keys of one block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

BLOCK_SCORES = 1 << 23
"""Scores per block (32 MiB in float32) where torch computes them; long documents are cut into more blocks."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a document lies in a pack."""

    start: int
    end: int


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


@dataclass(slots=True)
class AttentionPlan:
    """Rows of one step by rising place; all int32."""

    order_R: torch.Tensor
    """Which row of the step is the n-th by place."""
    places_R: torch.Tensor
    begins_R: torch.Tensor
    """First token of the row's document."""
    rows_before_X: torch.Tensor
    """[T+1]: rows whose place is below t."""
    ends_T: torch.Tensor
    """End of each token's document."""
    spans: tuple[Span, ...]
    _blocks: dict[int, list[Block]] = field(default_factory=dict)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> AttentionPlan:
        """The same plan with a function applied to every tensor (a move, a pin)."""
        names = ("order_R", "places_R", "begins_R", "rows_before_X", "ends_T")
        return dataclasses.replace(self, **{name: function(getattr(self, name)) for name in names}, _blocks={})

    def blocks(self, num_heads: int) -> list[Block]:
        """Blocks of at most ``BLOCK_SCORES`` scores, document by document."""
        if num_heads not in self._blocks:
            self._blocks[num_heads] = self._cut(num_heads)
        return self._blocks[num_heads]

    def _cut(self, num_heads: int) -> list[Block]:
        places_R, order_R, blocks, first = self.places_R.long(), self.order_R.long(), [], 0
        for span in self.spans:
            last = int(self.rows_before_X[span.end])
            size = max(1, BLOCK_SCORES // (num_heads * (span.end - span.start)))
            for a in range(first, last, size):
                places_X = places_R[a : min(a + size, last)]
                end = int(places_X[-1]) + 1
                hidden_XY = torch.arange(span.start, end, device=places_X.device) > places_X[:, None]
                blocks.append(Block(order_R[a : min(a + size, last)], span.start, end, hidden_XY))
            first = last
        return blocks


def plan_attention(rows_R: torch.Tensor, spans: Sequence[Span], num_tokens: int) -> AttentionPlan:
    """Plan one step.

    Args:
        rows_R: Place of each row that runs.
        spans: Documents without a gap, padding behind them included as one more.
        num_tokens: T.
    """
    places_R, order_R = torch.sort(rows_R, stable=True)
    lengths = torch.tensor([span.end - span.start for span in spans])
    begins_T = torch.tensor([span.start for span in spans]).repeat_interleave(lengths)
    ends_T = torch.tensor([span.end for span in spans]).repeat_interleave(lengths)
    return AttentionPlan(
        order_R=order_R.int(),
        places_R=places_R.int(),
        begins_R=begins_T[places_R].int(),
        rows_before_X=torch.searchsorted(places_R, torch.arange(num_tokens + 1)).int(),
        ends_T=ends_T.int(),
        spans=tuple(spans),
    )
