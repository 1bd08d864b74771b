"""From walked documents to the figures of a prompt set: tau, its interval, alpha, coverage.

tau is emitted tokens over rounds, pooled over documents (so a long answer weighs more than a short one);
its 95 % interval resamples whole documents, because rounds of one answer are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.contracts import SetAcceptance
from eyas.drafter.walk import Round
from eyas.errors import DataError

LOOP_FREE_SHARE = 0.05
"""Documents that repeat fewer of their 8-grams than this count as free of loops."""
INTERVAL_PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkedDocument:
    """What one held-out document says about the drafter."""

    sample_id: str
    source: str
    rounds: tuple[Round, ...]
    loop_share: float
    num_tokens: int
    """Tokens that a round can emit: the assistant's, less the first of each span, which the prefill emits."""
    num_covered: int
    """Of these, equal to the target's argmax."""
    num_oov: int
    """Of these, argmax outside the draft vocab."""
    hits_S: tuple[int, ...]
    """Per step: rows whose draft is the target's argmax over the full vocab, accepted or not."""
    rows_S: tuple[int, ...]
    """Per step: rows that can be asked for it."""

    @property
    def num_emitted(self) -> int:
        """Tokens that the rounds emitted."""
        return sum(r.num_emitted for r in self.rounds)


def tau(documents: Sequence[WalkedDocument]) -> float | None:
    """Tokens emitted per target forward, bonus included; none without a round."""
    num_rounds = sum(len(d.rounds) for d in documents)
    return sum(d.num_emitted for d in documents) / num_rounds if num_rounds else None


def tau_interval(documents: Sequence[WalkedDocument], num_bootstrap: int, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of tau over documents."""
    emitted_N = np.array([d.num_emitted for d in documents if d.rounds], dtype=np.int64)
    rounds_N = np.array([len(d.rounds) for d in documents if d.rounds], dtype=np.int64)
    drawn_RN = np.random.Generator(np.random.PCG64(seed)).integers(len(rounds_N), size=(num_bootstrap, len(rounds_N)))
    taus_R = emitted_N[drawn_RN].sum(axis=1) / rounds_N[drawn_RN].sum(axis=1)
    low, high = np.percentile(taus_R, INTERVAL_PERCENTILES)
    return float(low), float(high)


def alpha(documents: Sequence[WalkedDocument]) -> tuple[float, ...]:
    """Conditional acceptance of draft token k over the rounds of the walk.

    Rounds that accepted k tokens and still had a token left for step k are asked; those that accepted it
    too are hits. The tuple ends at the first step that no round asked for.
    """
    rounds = [r for d in documents for r in d.rounds]
    result = []
    for step in range(max((r.num_asked for r in rounds), default=0)):
        asked = sum(r.num_accepted >= step and r.num_asked > step for r in rounds)
        if not asked:
            break
        result.append(sum(r.num_accepted > step for r in rounds) / asked)
    return tuple(result)


def loop_share(documents: Sequence[WalkedDocument]) -> float:
    """Share of repeated 8-grams, each document weighted by the tokens that a round can emit."""
    return _share(sum(d.loop_share * d.num_tokens for d in documents), sum(d.num_tokens for d in documents))


def summarise(documents: Sequence[WalkedDocument], num_bootstrap: int, seed: int) -> SetAcceptance:
    """Figures of one prompt set.

    Raises:
        DataError: No document has a round: every answer is a single token.
    """
    whole = tau(documents)
    if whole is None:
        raise DataError(f"{len(documents)} documents without a single round: every answer is one token long")
    free = [d for d in documents if d.loop_share < LOOP_FREE_SHARE]
    low, high = tau_interval(documents, num_bootstrap, seed)
    num_tokens = sum(d.num_tokens for d in documents)
    hits, rows = (np.sum([getattr(d, name) for d in documents], axis=0) for name in ("hits_S", "rows_S"))
    return SetAcceptance(
        tau=whole,
        tau_low=low,
        tau_high=high,
        tau_loop_free=tau(free),
        alpha=alpha(documents),
        step_accuracy=tuple(_share(h, r) for h, r in zip(hits.tolist(), rows.tolist(), strict=True)),
        num_documents=len(documents),
        num_documents_loop_free=len(free),
        num_rounds=sum(len(d.rounds) for d in documents),
        num_emitted=sum(d.num_emitted for d in documents),
        loop_share=loop_share(documents),
        coverage=_share(sum(d.num_covered for d in documents), num_tokens),
        oov_share=_share(sum(d.num_oov for d in documents), num_tokens),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
