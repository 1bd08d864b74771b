"""Which keys the rows of one TTT step may see: an interval each, from the start of its document to itself.

Planned on the CPU when a pack is made, so that a step on a GPU waits for nothing.

Letters: T tokens of the pack, R rows that run at the step, X rows of one tile, Y keys of one tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

TILE_ROWS, TILE_KEYS = 128, 128
"""Where torch computes the scores: a tile of all heads of a group stays in a core's cache."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a document lies in a pack."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of keys that a tile of rows looks at."""

    keys: int
    """Keys ``TILE_KEYS * keys …`` of the pack."""
    bias_XY: torch.Tensor | None
    """Added to scores: -inf where this row may not see this key, 0 elsewhere; None when all see all."""


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
    _tiles: list[list[Tile]] | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> AttentionPlan:
        """The same plan with a function applied to every tensor (a move, a pin)."""
        names = ("order_R", "places_R", "begins_R", "rows_before_X", "ends_T")
        return dataclasses.replace(self, **{name: function(getattr(self, name)) for name in names}, _tiles=None)

    def tiles(self) -> list[list[Tile]]:
        """Per ``TILE_ROWS`` rows by rising place, the tiles of keys that some of them see; for torch's attention."""
        if self._tiles is None:
            edges = range(0, len(self.places_R), TILE_ROWS)
            self._tiles = [
                self._row(*(x_R[a : a + TILE_ROWS] for x_R in (self.begins_R, self.places_R))) for a in edges
            ]
        return self._tiles

    def _row(self, begins_X: torch.Tensor, places_X: torch.Tensor) -> list[Tile]:
        # rows that fill the last tile up see nothing
        fill = TILE_ROWS - len(places_X)
        first_X1, last_X1 = F.pad(begins_X, (0, fill))[:, None], F.pad(places_X, (0, fill), value=-1)[:, None]
        (begin, last_begin), (first_place, end) = begins_X[[0, -1]].tolist(), places_X[[0, -1]].tolist()
        tiles = []
        for number in range(begin // TILE_KEYS, end // TILE_KEYS + 1):
            first, last = number * TILE_KEYS, (number + 1) * TILE_KEYS
            if not fill and last_begin <= first and last <= first_place + 1:
                tiles.append(Tile(number, None))
                continue
            keys_Y = torch.arange(first, last)
            hidden_XY = (keys_Y < first_X1) | (keys_Y > last_X1)
            if not bool(hidden_XY.all()):
                tiles.append(Tile(number, torch.zeros(hidden_XY.shape).masked_fill_(hidden_XY, -torch.inf)))
        return tiles


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
    )
