"""The bench of captures: what it counts. It was run whole against a real server; that takes minutes."""

import pytest

from eyas.ops.bench.capture import ceilings, flops_per_token
from eyas.ops.bench.random_target import SHAPES, identity, make_samples


def test_the_products_of_a_llama_of_eight_billion_are_those_of_its_weights():
    """6.98 billion weights lie in the layers: 32 x (3 x 4096 x 14336 + 4096 x (32 + 2 x 8 + 32) x 128), two FLOP each."""
    weights = 32 * (3 * 4096 * 14_336 + 4096 * 80 * 128)
    assert flops_per_token(SHAPES["8b"], 0.0, 1.0) == 2 * weights == pytest.approx(13.96e9, rel=1e-3)


def test_attention_of_one_sample_is_half_of_two_squares_a_layer():
    """T tokens: scores and values take 2 T T D each, half of which a causal mask leaves."""
    T, D = 2000, 4096
    attention = flops_per_token(SHAPES["8b"], T * T, T) - flops_per_token(SHAPES["8b"], 0.0, 1.0)
    assert attention * T == pytest.approx(32 * 2 * (2 * T * T * D) / 2)


def test_samples_fill_the_tokens_and_fit_the_context():
    shape = SHAPES["tiny"]
    samples = make_samples(20_000, shape["vocab_size"], shape["max_position_embeddings"])
    lengths = [len(sample.input_ids) for sample in samples.values()]
    assert sum(lengths) - lengths[-1] < 20_000 <= sum(lengths)
    assert max(lengths) <= shape["max_position_embeddings"] // 2
    assert all(0 <= i < shape["vocab_size"] for sample in samples.values() for i in sample.input_ids)
    assert identity("tiny").num_layers == 6


def test_the_lowest_rate_of_what_a_stage_needs_bounds_it() -> None:
    """Of an H200: 774 TFLOP/s for 14.47 GFLOP a token are 53,500 tokens/s, 0.9 GB/s of disk are 42,000."""
    machine = {"matrix_flop_s": 774e12, "copy_gb_s": 55.0, "encode_gb_s": 2.6, "disk_gb_s": 0.9}
    found, bound = ceilings(machine, 14.47e9, 32_768, 0.65 * 32_768)
    assert round(found["matrix"], -2) == 53_500
    assert round(found["disk"], -3) == 42_000
    assert bound == {"prefill": "matrix", "capture": "matrix", "store": "disk"}


def test_on_a_cpu_products_bound_everything_and_are_not_measured() -> None:
    _, bound = ceilings({"encode_gb_s": 0.2, "disk_gb_s": 1.5}, 1e7, 2048, 1400)
    assert set(bound.values()) == {"this CPU's products, not measured"}
