"""From walked documents to the figures of a prompt set: tau, its interval, alpha, coverage.

tau is emitted tokens over rounds, pooled over documents (so a long answer weighs more than a short one);
its 95 % interval resamples whole conversations, because rounds of one are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.contracts import ChainAcceptance, SampledAcceptance, SetAcceptance
from eyas.drafter.walk import Round
from eyas.errors import DataError
from eyas.evaluate.expected import Expected

Interval = tuple[float, float] | tuple[None, None]
LOOP_FREE_SHARE = 0.05
"""Documents that repeat fewer of their 8-grams than this count as free of loops."""
INTERVAL_PERCENTILES = (2.5, 97.5)
LONGEST_CHAIN = 7
"""Chains of 1 to this many draft tokens are walked, whatever was trained."""
FIRST_PLACES = 32
"""Places of an answer in the first group of ``tau_by_place``; each further group has as many as all before it."""


@dataclass(frozen=True, slots=True)
class SampledWalk:
    """Expectations for one document when drafter and target sample."""

    chains: tuple[Expected, ...]
    """By chain length, from 1."""
    greedy_drafts: Expected
    covered_mass: float
    """Sum over tokens of the target's probability inside the draft vocab."""
    num_covered: int
    """Tokens of that sum."""


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
    conversation: str = ""
    """Documents of one are resampled together; empty: the document stands alone."""
    chains: tuple[tuple[Round, ...], ...] = ()
    """Rounds by chain length, from 1."""
    places: tuple[int, ...] = ()
    """Of each round: place in its answer of the first token it drafts."""
    sampled: SampledWalk | None = None

    @property
    def num_emitted(self) -> int:
        """Tokens that the rounds emitted."""
        return sum(r.num_emitted for r in self.rounds)


def tau(documents: Sequence[WalkedDocument]) -> float | None:
    """Tokens emitted per target forward, bonus included; none without a round."""
    num_rounds = sum(len(d.rounds) for d in documents)
    return sum(d.num_emitted for d in documents) / num_rounds if num_rounds else None


def tau_interval(documents: Sequence[WalkedDocument], num_bootstrap: int, seed: int) -> Interval:
    """95 % bootstrap interval of tau over conversations."""
    asked = [d for d in documents if d.rounds]
    return ratio_interval(asked, [len(d.rounds) for d in asked], num_bootstrap, seed)


def ratio_interval(
    documents: Sequence[WalkedDocument], num_rounds: Sequence[float], num_bootstrap: int, seed: int
) -> Interval:
    """95 % bootstrap interval, over conversations, of the documents' tokens over these rounds; deterministic."""
    sums: dict[tuple[str, str], list[float]] = {}
    for document, rounds in zip(documents, num_rounds, strict=True):
        both = sums.setdefault((document.source, document.conversation or document.sample_id), [0.0, 0.0])
        both[0], both[1] = both[0] + document.num_emitted, both[1] + rounds
    return bootstrap([(emitted, rounds) for emitted, rounds in sums.values()], num_bootstrap, seed)


def bootstrap(pairs: Sequence[tuple[float, float]], num_bootstrap: int, seed: int) -> Interval:
    """95 % interval of the sum of firsts over the sum of seconds, resampling the pairs; the same every time.

    A single pair, resampled, is always itself: it has no interval, not one without width.
    """
    if len(pairs) < 2:
        return None, None
    emitted_N, rounds_N = np.array(pairs).T
    drawn_RN = np.random.Generator(np.random.PCG64(seed)).integers(len(rounds_N), size=(num_bootstrap, len(rounds_N)))
    taus_R = emitted_N[drawn_RN].sum(axis=1) / rounds_N[drawn_RN].sum(axis=1)
    low, high = np.percentile(taus_R, INTERVAL_PERCENTILES)
    return float(low), float(high)


def alpha(documents: Sequence[WalkedDocument]) -> tuple[float, ...]:
    """Conditional acceptance of draft token k over the rounds of the walk.

    Rounds that accepted k tokens and still had a token left for step k are asked; those that accepted it
    too are hits. The tuple ends at the first step that no round asked for.
    """
    return alpha_of_rounds([r for d in documents for r in d.rounds])


def alpha_of_rounds(rounds: Sequence[Round]) -> tuple[float, ...]:
    """See ``alpha``."""
    result = []
    for step in range(max((r.num_asked for r in rounds), default=0)):
        asked = sum(r.num_accepted >= step and r.num_asked > step for r in rounds)
        if not asked:
            break
        result.append(sum(r.num_accepted > step for r in rounds) / asked)
    return tuple(result)


def accepted_counts(rounds: Sequence[Round], chain_length: int) -> tuple[int, ...]:
    """Rounds that accepted 0, 1, … ``chain_length`` draft tokens."""
    counts = np.bincount([r.num_accepted for r in rounds], minlength=chain_length + 1)
    return tuple(counts.tolist())


def tau_by_place(documents: Sequence[WalkedDocument]) -> dict[str, float]:
    """Tau of the rounds that begin at places 0 to 31, 32 to 63, 64 to 127, … of their answers, by first place."""
    groups: dict[int, list[int]] = {}
    for document in documents:
        for one, place in zip(document.rounds, document.places, strict=False):
            first = 0 if place < FIRST_PLACES else FIRST_PLACES << (place // FIRST_PLACES).bit_length() - 1
            groups.setdefault(first, []).append(one.num_emitted)
    return {str(first): sum(sizes) / len(sizes) for first, sizes in sorted(groups.items())}


def summarise_chain(documents: Sequence[WalkedDocument], length: int, num_bootstrap: int, seed: int) -> ChainAcceptance:
    """Figures of the walk with chains of one length."""
    walked = [d for d in documents if d.rounds]
    rounds = [r for d in walked for r in d.chains[length - 1]]
    low, high = ratio_interval(walked, [len(d.chains[length - 1]) for d in walked], num_bootstrap, seed)
    return ChainAcceptance(
        tau=sum(d.num_emitted for d in walked) / len(rounds),
        tau_low=low,
        tau_high=high,
        alpha=alpha_of_rounds(rounds),
        accepted=accepted_counts(rounds, length),
        num_rounds=len(rounds),
    )


def summarise_sampled(
    documents: Sequence[WalkedDocument], chain_length: int, temperature: float, num_bootstrap: int, seed: int
) -> SampledAcceptance | None:
    """Expected figures when sampling; none when no document has any."""
    pairs = [(d, d.sampled) for d in documents if d.rounds and d.sampled is not None]
    if not pairs:
        return None
    walked, sampled = zip(*pairs, strict=True)
    num_emitted = sum(d.num_emitted for d in walked)
    chosen = [s.chains[chain_length - 1] for s in sampled]
    low, high = ratio_interval(walked, [e.num_rounds for e in chosen], num_bootstrap, seed)
    asked_S, hits_S = (np.sum([getattr(e, name) for e in chosen], axis=0) for name in ("asked_S", "hits_S"))
    return SampledAcceptance(
        temperature=temperature,
        tau=num_emitted / sum(e.num_rounds for e in chosen),
        tau_low=low,
        tau_high=high,
        alpha=tuple(float(hit / asked) for hit, asked in zip(hits_S, asked_S, strict=True) if asked > 0),
        accepted=tuple(np.sum([e.accepted_S1 for e in chosen], axis=0).tolist()),
        tau_by_chain={
            str(length): num_emitted / sum(s.chains[length - 1].num_rounds for s in sampled)
            for length in range(1, min(LONGEST_CHAIN, len(sampled[0].chains)) + 1)
        },
        tau_greedy_drafts=num_emitted / sum(s.greedy_drafts.num_rounds for s in sampled),
        covered_mass=_share(sum(s.covered_mass for s in sampled), sum(s.num_covered for s in sampled)),
    )


def loop_share(documents: Sequence[WalkedDocument]) -> float:
    """Share of repeated 8-grams, each document weighted by the tokens that a round can emit."""
    return _share(sum(d.loop_share * d.num_tokens for d in documents), sum(d.num_tokens for d in documents))


def summarise(
    documents: Sequence[WalkedDocument], num_bootstrap: int, seed: int, temperature: float = 0.0
) -> SetAcceptance:
    """Figures of one prompt set.

    Args:
        documents: Walked with one chain length.
        num_bootstrap: Resamples of the intervals.
        seed: Of the resampling.
        temperature: That the documents' ``sampled`` are of.

    Raises:
        DataError: No document has a round: every answer is a single token.
    """
    whole = tau(documents)
    if whole is None:
        raise DataError(f"{len(documents)} documents without a single round: every answer is one token long")
    free = [d for d in documents if d.loop_share < LOOP_FREE_SHARE]
    low, high = tau_interval(documents, num_bootstrap, seed)
    num_tokens = sum(d.num_tokens for d in documents)
    num_oov, chain_length = sum(d.num_oov for d in documents), len(documents[0].rows_S)
    lengths = range(1, min(LONGEST_CHAIN, len(documents[0].chains)) + 1)
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
        oov_share=_share(num_oov, num_tokens),
        draft_vocab_coverage=_share(num_tokens - num_oov, num_tokens),
        accepted=accepted_counts([r for d in documents for r in d.rounds], chain_length),
        tau_by_place=tau_by_place(documents),
        chains={str(length): summarise_chain(documents, length, num_bootstrap, seed) for length in lengths},
        sampled=summarise_sampled(documents, chain_length, temperature, num_bootstrap, seed),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
