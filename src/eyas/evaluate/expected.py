"""The walk when acceptance is a matter of chance: expectations, with no random number drawn.

A round that starts at row ``p`` accepts its first draft with the probability of (p, 0), its second, given the first,
with that of (p, 1), and so on. How probably a round starts at each row follows row by row, and from that the
expected number of rounds, of rounds that asked for step k, and of those that accepted it.

On text that the target sampled, with min(1, q(x)/p(x)) of the text's token x, this is the exact expectation over
all runs of speculative decoding that gave this text: x is emitted as an accepted draft with min(p(x), q(x)) and
as a replacement with max(p(x) - q(x), 0), which add up to p(x).

Letters: T rows of the document, S draft steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Expected:
    """Expectations over the rounds of one document."""

    num_rounds: float
    asked_S: tuple[float, ...]
    """Rounds that accepted k tokens and had a token left for step k."""
    hits_S: tuple[float, ...]
    """Of these, rounds that accepted it."""
    accepted_S1: tuple[float, ...]
    """Rounds that accepted 0, 1, … S tokens."""


def expect(accept_TS: np.ndarray, spans: Sequence[tuple[int, int]], num_steps: int) -> Expected:
    """Expected rounds over the spans of one document, as ``drafter.walk`` takes them.

    Args:
        accept_TS: Probability that row t's draft for token t+k+2 is accepted, given that all before it were.
        spans: Half-open assistant spans.
        num_steps: Chain length, at most the table's.
    """
    asked, hits, accepted = ([0.0] * (num_steps + 1) for _ in range(3))
    table = accept_TS[:, :num_steps].tolist()
    num_rounds = 0.0
    for start, end in spans:
        first = max(start, 1) - 1
        starts = [1.0] + [0.0] * max(end - first, num_steps + 1)
        for row in range(first, end - 2):
            reach, left = starts[row - first], end - row - 2
            num_rounds += reach
            for step in range(min(num_steps, left)):
                asked[step] += reach
                hit = reach * table[row][step]
                hits[step] += hit
                accepted[step] += reach - hit
                starts[row - first + step + 1] += reach - hit
                reach = hit
            accepted[min(num_steps, left)] += reach
            starts[row - first + min(num_steps + 1, left)] += reach
    return Expected(num_rounds, tuple(asked[:num_steps]), tuple(hits[:num_steps]), tuple(accepted))
