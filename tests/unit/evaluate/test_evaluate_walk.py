"""The exact walk against arithmetic and against a simulator that drafts and verifies token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.walk import Round, spans, trained_rows, walk
from eyas.errors import DataError
from eyas.evaluate.summary import WalkedDocument, alpha, summarise, tau, tau_interval


def document(rounds: tuple[Round, ...], name: str = "a", loop_share: float = 0.0, **changes: object) -> WalkedDocument:
    values: dict = {
        "sample_id": name,
        "source": "chatterbot",
        "rounds": rounds,
        "loop_share": loop_share,
        "num_tokens": sum(r.num_emitted for r in rounds) + 1,
        "num_covered": sum(r.num_emitted for r in rounds) + 1,
        "num_oov": 0,
        "hits_S": (1, 1, 1),
        "rows_S": (2, 2, 2),
    }
    return WalkedDocument(**(values | changes))


def agreement(accepted_T: list[int], num_steps: int) -> np.ndarray:
    """Agreement table whose leading runs are ``accepted_T``."""
    return np.arange(num_steps)[None, :] < np.array(accepted_T)[:, None]


def test_spans_are_runs_of_ones() -> None:
    assert spans(np.array([0, 1, 1, 0, 0, 1])) == [(1, 3), (5, 6)]
    assert spans(np.array([1, 1])) == [(0, 2)]
    assert spans(np.array([0, 0])) == []


def test_perfect_drafter_on_a_long_text_emits_chain_plus_bonus() -> None:
    """Case 73: tau is S + 1; 1 + 5 * 6 tokens are five whole rounds of a chain of 5."""
    rounds = walk(np.ones((40, 5), dtype=bool), 9, 9 + 1 + 30)
    assert [r.num_emitted for r in rounds] == [6] * 5
    assert tau([document(rounds)]) == 6.0


def test_perfect_drafter_on_a_span_of_four_has_conditional_acceptance_one() -> None:
    """Case 73: steps that no round asks for are not counted as failures."""
    rounds = walk(np.ones((10, 3), dtype=bool), 4, 8)
    assert rounds == (Round(row=3, num_asked=3, num_accepted=3, num_emitted=3),)
    assert alpha([document(rounds)]) == (1.0, 1.0, 1.0)
    assert alpha([document(walk(np.ones((10, 5), dtype=bool), 4, 8))]) == (1.0, 1.0, 1.0)


def test_always_wrong_drafter_has_tau_one() -> None:
    """Case 73: every round emits the bonus alone; alpha ends where no round asks."""
    rounds = walk(np.zeros((30, 5), dtype=bool), 5, 25)
    assert len(rounds) == 19
    assert tau([document(rounds)]) == 1.0
    assert alpha([document(rounds)]) == (0.0,)


def test_half_of_the_text_right_gives_the_walk_and_not_the_mean() -> None:
    """Case 74: half with a = 3, half with a = 0: 400 tokens in 100 + 400 rounds of 1.6, not 2.5 or 1.875."""
    accepted = [3] * 400 + [0] * 401
    rounds = walk(agreement(accepted, 3), 1, 802)
    assert [len([r for r in rounds if r.row < 400]), len([r for r in rounds if r.row >= 400])] == [100, 400]
    assert sum(r.num_emitted for r in rounds) / len(rounds) == pytest.approx(1.6)


def test_last_round_is_clipped_to_the_tokens_left() -> None:
    rounds = walk(np.ones((20, 5), dtype=bool), 3, 3 + 1 + 8)
    assert [(r.num_asked, r.num_accepted, r.num_emitted) for r in rounds] == [(5, 5, 6), (2, 2, 2)]


def test_spans_without_a_round() -> None:
    assert walk(np.ones((9, 3), dtype=bool), 4, 5) == ()
    assert [r.row for r in walk(np.zeros((9, 3), dtype=bool), 0, 4)] == [0, 1]


@st.composite
def texts(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    num_steps, start = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    end = start + draw(st.integers(1, 30))
    bits = draw(st.lists(st.booleans(), min_size=num_steps * (end + 2), max_size=num_steps * (end + 2)))
    return np.array(bits).reshape(end + 2, num_steps), start, end


def simulate(agree_TS: np.ndarray, start: int, end: int) -> list[tuple[int, int]]:
    """Really draft and verify over token strings; the target's text is 0, 1, 2, …, a wrong draft is -1."""
    known = max(start, 1) + 1  # tokens known after the prefill emitted the span's first
    rounds = []
    while known < end:
        row = known - 2
        drafted = [known + k if agree_TS[row, k] else -1 for k in range(agree_TS.shape[1])]
        block = [known - 1, *drafted]
        choices = [token + 1 for token in block]  # the target continues whatever it is given
        out = []
        for position, choice in enumerate(choices):
            out.append(choice)
            if position + 1 == len(block) or block[position + 1] != choice:
                break
        kept = [token for token in out if token < end]
        rounds.append((row, len(kept)))
        known += len(kept)
    return rounds


@given(texts())
def test_walk_equals_a_simulator_that_drafts_and_verifies(text: tuple[np.ndarray, int, int]) -> None:
    rounds = walk(*text)
    assert [(r.row, r.num_emitted) for r in rounds] == simulate(*text)


@given(texts())
def test_walk_emits_every_token_but_the_prefills(text: tuple[np.ndarray, int, int]) -> None:
    agree_TS, start, end = text
    rounds = walk(agree_TS, start, end)
    assert sum(r.num_emitted for r in rounds) == max(end - max(start, 1) - 1, 0)
    asked_TS = trained_rows([(start, end)], len(agree_TS), agree_TS.shape[1])
    for r in rounds:
        assert asked_TS[r.row, : r.num_asked].all()
        assert not asked_TS[r.row, r.num_asked :].any()


def test_trained_rows_hold_tokens_of_one_span_only() -> None:
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1])
    asked_TS = trained_rows(spans(mask), len(mask), 3)
    expected = [
        [all(t + i < len(mask) and mask[t + i] for i in range(1, k + 3)) for k in range(3)] for t in range(len(mask))
    ]
    assert asked_TS.tolist() == expected


def test_summary_pools_tokens_over_rounds_and_leaves_loops_out() -> None:
    right = document(walk(np.ones((40, 5), dtype=bool), 9, 40), "a", loop_share=0.05)
    wrong = document(walk(np.zeros((40, 5), dtype=bool), 9, 40), "b", loop_share=0.049)
    figures = summarise([right, wrong], 200, 0)
    assert figures.tau == 60 / 35
    assert figures.tau_loop_free == 1.0
    assert figures.num_documents_loop_free == 1
    assert (figures.tau_low, figures.tau_high) == (1.0, 6.0)
    assert figures.loop_share == pytest.approx(0.0495)
    assert figures.step_accuracy == (0.5, 0.5, 0.5)


def test_interval_is_seeded_and_shrinks_to_a_point_on_equal_documents() -> None:
    """Case 76: same recipe twice, same interval."""
    rounds = walk(np.ones((40, 5), dtype=bool), 9, 40)
    assert tau_interval([document(rounds, str(i)) for i in range(9)], 100, 3) == (6.0, 6.0)
    assert tau_interval([document(rounds)], 100, 3) == (None, None)
    mixed = [document(walk(agreement([i % 4] * 60, 5), 5, 50), str(i)) for i in range(12)]
    low, high = tau_interval(mixed, 500, 7)
    assert (low, high) == tau_interval(mixed, 500, 7)
    assert low < tau(mixed) < high  # type: ignore[operator]


def test_single_token_answers_alone_are_refused() -> None:
    with pytest.raises(DataError, match="single round"):
        summarise([document(())], 10, 0)
