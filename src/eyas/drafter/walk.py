"""The exact walk: which rounds a greedy draft chain would have taken over a given text.

Row ``p`` drafts tokens ``p+2 .. p+S+1`` once token ``p+1`` is known. The first token of a span comes
from the prefill, which is no round, so the walk starts at the row before the span. A round that accepts
``a`` draft tokens emits ``a + 1`` (the target's own next token is the bonus) and the next round starts
at row ``p + a + 1``. The last round is clipped to the tokens left in the span, which is what a server
does at an end-of-turn token and at the token limit: what it verified behind that point is thrown away.

Letters: T rows of the document, S draft steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Round:
    """One target forward of the walk."""

    row: int
    """The row whose state starts the chain; its next token is already known."""
    num_asked: int
    """Draft tokens inside the span: steps, or the tokens left if fewer."""
    num_accepted: int
    num_emitted: int
    """Accepted tokens plus the bonus, clipped to the tokens left."""


def spans(loss_mask_T: np.ndarray) -> list[tuple[int, int]]:
    """Half-open runs of ones in a loss mask: the assistant spans."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask_T.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def walk(agree_TS: np.ndarray, start: int, end: int) -> tuple[Round, ...]:
    """Rounds over one span of tokens ``start .. end - 1``.

    Args:
        agree_TS: Bool; row t, step k: the draft for token t+k+2 is what the target chose there. Entries
            whose token lies outside the span are never read.
        start: First token of the span; a span that opens the document starts one token later, because
            no row lies before it.
        end: One past the last token.

    Returns:
        The rounds in order; none for a span of one token, which the prefill emits.
    """
    num_steps = agree_TS.shape[1]
    rounds, row = [], max(start, 1) - 1
    while (left := end - row - 2) > 0:
        num_asked = min(num_steps, left)
        misses = np.flatnonzero(~agree_TS[row, :num_asked])
        accepted = int(misses[0]) if misses.size else num_asked
        emitted = min(accepted + 1, left)
        rounds.append(Round(row=row, num_asked=num_asked, num_accepted=accepted, num_emitted=emitted))
        row += emitted
    return tuple(rounds)


def trained_rows(spans_: list[tuple[int, int]], num_rows: int, num_steps: int) -> np.ndarray:
    """Bool [T, S]: tokens t+1 .. t+k+2 all lie in one span, so step k of row t can be asked for.

    The row before a span, whose next token is the span's first, is the first such row.
    """
    asked_TS = np.zeros((num_rows, num_steps), dtype=bool)
    for start, end in spans_:
        for step in range(num_steps):
            asked_TS[max(start, 1) - 1 : max(end - 2 - step, 0), step] = True
    return asked_TS
