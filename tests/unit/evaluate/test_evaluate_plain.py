"""Near ties are counted and faults refused; p-values, costs and intervals against arithmetic."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_evaluate_walk import document

from eyas.config import EvaluateConfig
from eyas.drafter.walk import Round, walk
from eyas.errors import EvaluateError
from eyas.evaluate.compare import Compared, ModeSums
from eyas.evaluate.cost import RoundCosts, predictions
from eyas.evaluate.decode import Decoded, Prompt
from eyas.evaluate.plain import Leads, uniform_p_value
from eyas.evaluate.report import tau_of_sampled_text
from eyas.evaluate.summary import accepted_counts, ratio_interval, summarise_chain, tau_by_place

PROMPT = Prompt("sample-7", "chatterbot", (1, 2))


def leads(*tokens: int) -> Leads:
    return Leads("tree", [PROMPT], [tokens])


def test_a_lead_within_rounding_is_a_tie_and_counted() -> None:
    """Logits near 16 in bf16 are 1/16 apart: half of one is 2^-5 of 16."""
    judge, logits_V = leads(0, 1, 1, 2), torch.tensor([16.0, 15.9375, 15.5, 3.0], dtype=torch.bfloat16)
    for place in range(4):
        judge(0, place, logits_V)
    assert (judge.num_ties, judge.largest_gap) == (3, 0.5)


def test_two_equal_logits_are_a_tie() -> None:
    """In bf16 they happen: the other of both is as right, and the text then differs from plain decoding's."""
    judge = leads(0, 1)
    judge(0, 0, torch.tensor([16.0, 16.0, 3.0], dtype=torch.bfloat16))
    assert judge.num_ties == 0
    judge(0, 1, torch.tensor([16.0, 16.0, 3.0], dtype=torch.bfloat16))
    assert (judge.num_ties, judge.largest_gap) == (1, 0.0)


@pytest.mark.parametrize(("dtype", "second"), [(torch.bfloat16, 15.4375), (torch.float32, 15.99)])
def test_a_larger_lead_is_a_fault_and_names_the_place(dtype: torch.dtype, second: float) -> None:
    with pytest.raises(
        EvaluateError, match=r"\(tree\) is not lossless: prompt sample-7 .*new token 1: emitted 1, .*is 0"
    ):
        leads(0, 1)(0, 1, torch.tensor([16.0, second, 3.0], dtype=dtype))


def test_p_value_is_that_of_the_chi_square_table() -> None:
    """15 degrees of freedom: the table has 24.996 for 5 %; 160 numbers whose bins miss 10 by 5 ten times give 25.0."""
    counts = [10] * 6 + [15] * 5 + [5] * 5
    values = [(place + 0.5) / 16 for place, count in enumerate(counts) for _ in range(count)]
    assert uniform_p_value(values) == pytest.approx(0.05, abs=2e-4)
    assert uniform_p_value([(i % 16 + 0.5) / 16 for i in range(160)]) == 1.0
    assert uniform_p_value([0.1] * 79) is None


def test_a_distribution_that_is_not_the_targets_is_refused() -> None:
    compared = Compared(sums={"chatterbot": {"sampled": ModeSums(1.0, 4, draws=[0.1] * 200)}})
    with pytest.raises(EvaluateError, match=r"speculative sampling \(sampled, chatterbot\) is not lossless"):
        compared.checks(EvaluateConfig())


def test_speed_up_follows_from_costs() -> None:
    """tau 3 with chains of 4: 3 x 40 ms / (60 + 2 + 4 x 2 ms) = 120 / 70."""
    costs = RoundCosts(1, plain_s=0.040, draft_s=0.002, check_s={4: 0.060, 1: 0.045}, extend_s={4: 0.002, 1: 0.001})
    assert costs.speedup(4, 3.0) == pytest.approx(120 / 70)
    assert predictions(costs, {1: 1.0, 4: 3.0, 5: 9.0}) == {"1": round(40 / 48, 3), "4": round(120 / 70, 3)}


def test_measured_speed_up_is_what_plain_decoding_takes_for_the_same_text() -> None:
    """90 tokens in 1 s of chains; plain decoding would take 1.8 s for them, and made 100 others in 2 s."""
    one = Decoded(PROMPT, (0,) * 91, (3,) * 30, (2,) * 30, None)
    sums = {"chatterbot": {"chain": ModeSums(0.0, 8, decoded=[one], seconds=1.0, rival_s=1.8)}}
    costs = RoundCosts(8, 0.04, 0.002, {5: 0.05}, {5: 0.002})
    facts = Compared(sums, {"": (100, 2.0)}, {"": costs}).facts(5)
    assert facts["batch"]["plain_tokens_per_s"] == 50.0
    assert facts["batch"]["chain"] == {
        "tokens_per_s": 91.0,
        "speedup": 1.8,
        "tau": 3.0,
        "predicted_speedup": round(3 * 0.04 / (0.052 + 0.01), 3),
    }
    check = sums["chatterbot"]["chain"].check(EvaluateConfig())
    assert (check.tau, check.tau_low, check.tau_high) == (3.0, None, None), "one prompt has no interval"
    assert (check.accepted, check.p_value) == ((0, 0, 30, 0, 0, 0), None)


def test_headline_of_sampled_text_pools_rounds() -> None:
    """60 tokens in 20 expected rounds and 40 in 30: 100 / 50."""
    check = ModeSums(1.0, 4).check(EvaluateConfig())
    one, other = (
        dataclasses.replace(check, num_rounds=rounds, tau=tau, tau_expected=expected)
        for rounds, tau, expected in ((24, 2.5, 3.0), (32, 1.25, 4 / 3))
    )
    assert tau_of_sampled_text([one, other]) == pytest.approx(2.0)
    assert tau_of_sampled_text([]) is None


def test_documents_of_one_conversation_are_resampled_together() -> None:
    """Two of tau 1 and 3 in one conversation always come together, so tau stays 1.5; apart it does not."""
    slow, fast = walk(np.zeros((9, 2), dtype=bool), 1, 8), walk(np.ones((9, 2), dtype=bool), 1, 8)
    apart = [document(slow, "a"), document(fast, "b")]
    together = [document(slow, "a", conversation="c"), document(fast, "b", conversation="c")]
    other = [document(slow, "d", conversation="e"), document(fast, "f", conversation="e")]
    rounds = [6, 2]
    assert ratio_interval([*together, *other], [*rounds, *rounds], 200, 0) == (1.5, 1.5)
    assert ratio_interval(together, rounds, 200, 0) == (None, None), "one conversation has no interval"
    low, high = ratio_interval(apart, rounds, 200, 0)
    assert (low, high) == (1.0, 3.0)
    assert ratio_interval(apart, rounds, 200, 0) == (low, high)


def test_histogram_counts_rounds_by_accepted_tokens() -> None:
    rounds = [Round(row=0, num_asked=3, num_accepted=a, num_emitted=a + 1) for a in (0, 2, 2, 3)]
    assert accepted_counts(rounds, 5) == (1, 0, 2, 1, 0, 0)


def test_rounds_are_grouped_by_their_place_in_the_answer() -> None:
    rounds = tuple(Round(row=0, num_asked=3, num_accepted=e - 1, num_emitted=e) for e in (1, 3, 2, 4, 1))
    one = document(rounds, places=(1, 31, 32, 127, 128))
    assert tau_by_place([one]) == {"0": 2.0, "32": 2.0, "64": 4.0, "128": 1.0}


def test_figures_of_a_chain_length_are_those_of_its_walk() -> None:
    """Case 73: a perfect drafter has S + 1 at every length: 30 tokens in 15, 10 and 6 rounds with chains of 1, 2, 4."""
    agree_TS = np.ones((40, 4), dtype=bool)
    chains = tuple(walk(agree_TS[:, :s], 9, 40) for s in range(1, 5))
    one = document(chains[3], chains=chains)
    for length, tau in ((1, 2.0), (2, 3.0), (4, 5.0)):
        figures = summarise_chain([one], length, 10, 0)
        assert (figures.tau, figures.alpha) == (tau, (1.0,) * length)
        assert figures.accepted == (0,) * length + (figures.num_rounds,)
