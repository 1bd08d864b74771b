"""Learning rates and unrolled steps over a training."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.train.schedule import learning_rate, ttt_steps_at


def test_learning_rate_warms_up_and_ends_at_its_share():
    rates = [learning_rate(s, 100, 1e-3, 20, 0.02) for s in range(100)]
    assert rates[0] == pytest.approx(1e-3 / 20)
    assert rates[19] == rates[20] == pytest.approx(1e-3)
    assert rates[99] == pytest.approx(2e-5)
    assert rates[59] == pytest.approx(1e-3 * (0.02 + 0.98 / 2), rel=0.02)
    assert all(a > b for a, b in itertools.pairwise(rates[20:]))


def test_the_curriculum_unrolls_one_more_step_at_each_share():
    steps = [ttt_steps_at(s, 100, 5, [0.35, 0.65]) for s in range(100)]
    assert steps == [1] * 35 + [2] * 30 + [5] * 35
    assert ttt_steps_at(0, 100, 3, []) == 3


@given(st.integers(1, 500), st.integers(0, 50), st.floats(0, 1))
def test_the_learning_rate_is_never_above_its_peak_nor_below_its_floor(num_steps, warmup, share):
    for step in range(num_steps):
        rate = learning_rate(step, num_steps, 1.0, warmup, share)
        assert rate <= 1.0 + 1e-12
        assert step < warmup or rate >= share - 1e-12
