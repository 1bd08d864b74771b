"""Plain decoding, one token a forward: the rival that a speed-up is over, and the judge of other modes' texts.

In bf16 a forward of one token and one of several differ by rounding, so where two tokens are nearly equal they may
choose differently; from there on two greedy texts differ, and both are right. So a text is not held against another
text but followed: the target reads it token by token, one a forward, and at every place says by how much it would have
preferred another token. A lead within the rounding of the dtype is a tie, and counted; a larger one is an error.

A text that was sampled is followed likewise. Where its tokens are drawn from the target's distribution p, the mass of
all tokens likelier than the one that stands there, plus a random part of its own mass, is uniform in [0, 1): that is
what the chi-square test looks at.

Letters: B rows, V target vocab.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from eyas.engines.decode import BlockDecoder
from eyas.errors import EvaluateError
from eyas.evaluate.decode import Prompt, Rows

TIE_SHARES = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-14}
"""Largest lead of a tie, as a share of the largest logit: eight units in the last place of a bf16 number near it.
A layer's rounding is one unit; of thirty layers several are left."""
NUM_BINS = 16
FEWEST_TOKENS = 5 * NUM_BINS
"""Five expected tokens a bin, or the test says nothing."""


@torch.inference_mode()
def decode_plainly(
    decoder: BlockDecoder, prompts: Sequence[Prompt], max_new_tokens: int, eos_ids: Sequence[int]
) -> tuple[list[list[int]], float]:
    """Greedy answers of B prompts, one token a forward, and the seconds without the prefill."""
    rows = Rows(prompts, max_new_tokens, frozenset(eos_ids))
    for row, choice in enumerate(decoder.prefill([p.ids for p in prompts]).logits_RV.argmax(-1).tolist()):
        rows.take(row, [choice])
    decoder.settle()
    started_s = time.perf_counter()
    while live := rows.live:
        choice_B = decoder.forward(rows.last_B()[:, None], rows.start_B()).logits_BJV[:, 0].argmax(-1).tolist()
        for row in live:
            rows.take(row, [choice_B[row]])
    return rows.new, time.perf_counter() - started_s


@torch.inference_mode()
def follow(
    decoder: BlockDecoder,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    see: Callable[[int, int, torch.Tensor], None],
) -> None:
    """Read given answers one token a forward.

    Args:
        decoder: Of B rows.
        prompts: B of them.
        answers: One per prompt.
        see: Called with row, place in the answer and the target's logits [V] of that place, for every token.
    """
    rows = Rows(prompts, max(map(len, answers)), frozenset())
    logits_BV = decoder.prefill([p.ids for p in prompts]).logits_RV
    for place in range(max(map(len, answers))):
        for row, answer in enumerate(answers):
            if place < len(answer):
                see(row, place, logits_BV[row])
            rows.take(row, [answer[place] if place < len(answer) else 0])
        if place + 1 < max(map(len, answers)):
            logits_BV = decoder.forward(rows.last_B()[:, None], rows.start_B()).logits_BJV[:, 0]


def tie_limit(logits_RV: torch.Tensor) -> torch.Tensor:
    """Float32 [R]: the largest lead over another token that rounding explains."""
    return TIE_SHARES[logits_RV.dtype] * logits_RV.float().abs().amax(-1)


class Leads:
    """Counts ties of greedy answers while ``follow`` reads them.

    Args:
        mode: For the message.
        prompts: That are followed.
        answers: Their greedy answers.
    """

    def __init__(self, mode: str, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> None:
        self._mode, self._prompts, self._answers = mode, prompts, answers
        self.num_ties, self.largest_gap = 0, 0.0

    def __call__(self, row: int, place: int, logits_V: torch.Tensor) -> None:
        """Judge one token.

        Raises:
            EvaluateError: Another token leads by more than rounding explains.
        """
        token, best = self._answers[row][place], int(logits_V.argmax())
        gap = float(logits_V[best].float() - logits_V[token].float())
        if token == best and gap == 0:  # NaN less NaN is none
            return
        limit = float(tie_limit(logits_V))
        if not gap <= limit:  # NaN is no tie
            prompt = self._prompts[row]
            raise EvaluateError(
                f"speculative decoding ({self._mode}) is not lossless: prompt {prompt.sample_id} ({prompt.source}), "
                f"new token {place}: emitted {token}, the target's choice is {best} by {gap:.4g} in logits, "
                f"expected at most {limit:.4g} (a near tie)",
                "`make evaluate` with evaluate.dtype=float32 tells rounding from a fault; a fault please report",
            )
        self.num_ties, self.largest_gap = self.num_ties + 1, max(self.largest_gap, gap)


class Draws:
    """Collects where sampled tokens stand in the target's distribution while ``follow`` reads them.

    Args:
        answers: Sampled ones.
        temperature: They were sampled at.
        generator: Of the random part of each token's own mass.
    """

    def __init__(self, answers: Sequence[Sequence[int]], temperature: float, generator: torch.Generator) -> None:
        self._answers, self._temperature, self._generator = answers, temperature, generator
        self.values: list[float] = []

    def __call__(self, row: int, place: int, logits_V: torch.Tensor) -> None:
        """Take in one token."""
        share_V = (logits_V.double() / self._temperature).softmax(-1)
        own = share_V[self._answers[row][place]]
        equal, likelier = float(share_V[share_V == own].sum()), float(share_V[share_V > own].sum())
        self.values.append(likelier + float(torch.rand((), generator=self._generator, dtype=torch.float64)) * equal)


def uniform_p_value(values: Sequence[float]) -> float | None:
    """Chi-square test that numbers in [0, 1) are uniform; none for too few of them."""
    if len(values) < FEWEST_TOKENS:
        return None
    counts = torch.histc(torch.tensor(values, dtype=torch.float64), NUM_BINS, 0.0, 1.0)
    expected = len(values) / NUM_BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((NUM_BINS - 1) / 2, dtype=torch.float64), statistic / 2))
