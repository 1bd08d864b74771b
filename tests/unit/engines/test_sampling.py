"""Sampling against the distribution it should follow."""

import pytest
import torch

from eyas.engines.sampling import argmax, choose, draw_key, uniform


def test_frequencies_follow_the_softmax():
    """20,000 draws over 700 tokens (three blocks): within five standard deviations of the expectation."""
    logits = torch.randn(700, generator=torch.Generator().manual_seed(0)) * 2
    probs, draws = torch.softmax(logits / 0.7, 0), 20_000
    key = draw_key(1, [1, 2, 3])
    counts = torch.zeros(700)
    for start in range(0, draws, 1000):
        us = [uniform(key, start + i) for i in range(1000)]
        for token in choose(logits.expand(1000, 700), [0.7] * 1000, [1.0] * 1000, us):
            counts[token] += 1
    deviation = (draws * probs * (1 - probs)).sqrt()
    assert ((counts - draws * probs).abs() <= 5 * deviation + 1).all()


def test_nucleus_keeps_the_smallest_head_that_reaches_top_p():
    """Probabilities 0.5, 0.3, 0.15, 0.05 and top_p 0.8: the first two, in the ratio 5 to 3."""
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log().expand(1000, 4)
    tokens = choose(logits, [1.0] * 1000, [0.8] * 1000, [i / 1000 for i in range(1000)])
    assert set(tokens) == {1, 3}
    assert abs(tokens.count(1) - 625) <= 1


def test_a_flat_nucleus_wider_than_the_sorted_head_is_found_whole():
    tokens = choose(torch.zeros(1, 5000), [1.0], [0.9], [0.99905])
    assert tokens == [4995]  # 0.99905 * 5000; equal probabilities are kept together


def test_draws_at_both_ends_stay_inside_the_mass():
    logits = torch.full((2, 600), float("-inf"))
    logits[:, 300] = 0
    assert choose(logits, [1.0, 1.0], [1.0, 1.0], [0.0, 1.0 - 2**-53]) == [300, 300]


def test_greedy_rows_ignore_the_draw():
    logits = torch.tensor([[0.0, 1.0, 0.9]] * 2)
    assert choose(logits, [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]) == [1, 0]


@pytest.mark.parametrize("vocab", [3, 256, 700, 4096])
def test_argmax_is_the_first_of_equals(vocab):
    """bf16 logits have many exact ties: against numpy, whose argmax is the first by definition."""
    logits = torch.randint(-3, 4, (50, vocab), generator=torch.Generator().manual_seed(vocab)).bfloat16()
    assert argmax(logits).tolist() == logits.float().numpy().argmax(-1).tolist()
