"""How much of a text repeats itself: loops are easy to draft and inflate acceptance."""

from __future__ import annotations

from collections.abc import Sequence

GRAM_TOKENS = 8


def loop_share(ids: Sequence[int]) -> float:
    """Share of a sequence's 8-grams that already occurred earlier in it; 0 when shorter than 9 tokens."""
    grams = [tuple(ids[start : start + GRAM_TOKENS]) for start in range(len(ids) - GRAM_TOKENS + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0
