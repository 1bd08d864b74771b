"""The walk by chance against the walk that is certain, against recursion, and against all runs of a toy language."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.walk import walk
from eyas.evaluate.expected import expect


def test_certain_acceptance_is_perfect_and_none_is_useless() -> None:
    """31 tokens: the prefill's one and 30 in five rounds of 6; or in thirty rounds of 1."""
    perfect, useless = (expect(np.full((40, 5), value), [(3, 34)], 5) for value in (1.0, 0.0))
    assert (perfect.num_rounds, perfect.accepted_S1) == (5.0, (0, 0, 0, 0, 0, 5.0))
    assert (useless.num_rounds, useless.accepted_S1) == (30.0, (30.0, 0, 0, 0, 0, 0))


def test_half_of_the_text_gives_the_walk_and_not_the_mean() -> None:
    """Case 74: half with a = 3, half with a = 0 is 1.6, by chance as by the walk."""
    table_TS = (np.arange(3) < np.array([3] * 400 + [0] * 401)[:, None]).astype(float)
    found = expect(table_TS, [(1, 802)], 3)
    assert 800 / found.num_rounds == pytest.approx(1.6)


@given(st.data())
def test_of_zeros_and_ones_it_is_the_greedy_walk(data: st.DataObject) -> None:
    num_steps, length = data.draw(st.integers(1, 7)), data.draw(st.integers(2, 30))
    agree_TS = np.array(data.draw(st.lists(st.booleans(), min_size=length * 7, max_size=length * 7))).reshape(length, 7)
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    rounds = walk(agree_TS[:, :num_steps], start, end)
    found = expect(agree_TS.astype(float), [(start, end)], num_steps)
    assert found.num_rounds == len(rounds)
    assert found.accepted_S1 == tuple(sum(r.num_accepted == a for r in rounds) for a in range(num_steps + 1))
    for step in range(num_steps):
        asked = [r for r in rounds if r.num_accepted >= step and r.num_asked > step]
        assert found.asked_S[step] == len(asked)
        assert found.hits_S[step] == sum(r.num_accepted > step for r in asked)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_equals_the_recursion_over_rows(num_steps: int, num_tokens: int, seed: int) -> None:
    """E(p) = 1 + sum over a of P(a accepted) E(p + a + 1), in exact fractions."""
    table_TS = np.random.default_rng(seed).integers(0, 9, (num_tokens + 2, num_steps)) / 8
    end = num_tokens + 1

    @cache
    def rounds(row: int) -> Fraction:
        if (left := end - row - 2) <= 0:
            return Fraction(0)
        asked = min(num_steps, left)
        total, reach = Fraction(1), Fraction(1)
        for step in range(asked):
            hit = reach * Fraction(table_TS[row, step])
            total += (reach - hit) * rounds(row + step + 1)
            reach = hit
        return total + reach * rounds(row + min(asked + 1, left))

    found = expect(table_TS, [(1, end)], num_steps)
    assert found.num_rounds == pytest.approx(float(rounds(0)), abs=1e-9)
    assert sum(found.accepted_S1) == pytest.approx(found.num_rounds)


def test_over_the_targets_texts_it_is_the_mean_of_all_runs_of_speculative_sampling() -> None:
    """A language of three tokens whose p and q depend on the token before: every run, with its probability.

    The runs draft from q, accept with min(1, p/q) and replace from max(p - q, 0); the expectation knows the text alone.
    """
    rng = np.random.default_rng(4)
    p_XX, q_XX = (rng.dirichlet(np.ones(3), 3) for _ in range(2))
    num_tokens, num_steps = 4, 2

    def runs(known: tuple[int, ...]) -> float:
        """Expected rounds until the text has its tokens."""
        if len(known) == num_tokens:
            return 0.0
        asked = min(num_steps, num_tokens - len(known))
        total = 1.0
        for drafts in itertools.product(range(3), repeat=asked):
            reach, before, text = 1.0, known[-1], list(known)
            for x in drafts:
                reach *= q_XX[before, x]
                before = x
            before = known[-1]
            for x in drafts:
                accept = min(1.0, p_XX[before, x] / q_XX[before, x])
                left = np.maximum(p_XX[before] - q_XX[before], 0)
                for y in range(3):
                    total += reach * (1 - accept) * left[y] / left.sum() * runs((*text, y))
                reach *= accept
                text.append(x)
                before = x
            for y in range(3):
                share = p_XX[before, y]
                total += reach * share * runs((*text, y)[:num_tokens])
        return total

    expected = 0.0
    for text in itertools.product(range(3), repeat=num_tokens - 1):
        ids, share = [0, *text], 1.0
        for one, other in itertools.pairwise(ids):
            share *= p_XX[one, other]
        accept_TS = np.zeros((num_tokens + 1, num_steps))
        for row, step in itertools.product(range(num_tokens), range(num_steps)):
            if row + step + 1 < num_tokens:  # row 0 is the prompt's; token 1 the prefill's
                before, x = ids[row + step], ids[row + step + 1]
                accept_TS[row, step] = min(1.0, q_XX[before, x] / p_XX[before, x])
        expected += share * expect(accept_TS, [(1, num_tokens + 1)], num_steps).num_rounds
    assert expected == pytest.approx(runs((0,)), abs=1e-12)
