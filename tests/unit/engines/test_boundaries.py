"""One table of layer-id spellings; expected lists are those in the servers' own documentation of each file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engines.boundaries import SGLANG_AS_IS, boundaries_of, layer_ids
from eyas.errors import PlanError


@pytest.mark.parametrize(
    ("boundaries", "spelling", "model_type", "expected"),
    [
        ((2, 16, 29), "sglang", "llama", (1, 15, 28)),
        ((2, 16, 29), "sglang", "qwen3", (1, 15, 28)),
        ((3, 16, 29), "sglang", "deepseek_v3", (3, 16, 29)),
        ((3, 16, 29), "sglang", "kimi_k2", (3, 16, 29)),
        ((1, 16, 29), "sglang", "llama", (0, 15, 28)),
        ((1, 16, 32), "vllm", "deepseek_v3", (1, 16, 32)),
        ((2, 16, 29), "output_of_layer", "llama", (1, 15, 28)),
    ],
)
def test_the_same_boundaries_in_each_spelling(boundaries, spelling, model_type, expected):
    """Case 23: the right list for each file, from one function."""
    assert layer_ids(boundaries, spelling, model_type=model_type, num_layers=32) == expected


@pytest.mark.parametrize(
    ("boundaries", "spelling", "model_type", "message"),
    [
        ((1, 16, 29), "sglang", "deepseek_v3", r"starts with 1"),
        ((0, 16, 29), "sglang", "deepseek_v3", r"first boundary of 2 or more"),
        ((0, 16, 29), "sglang", "llama", r"0 \(the embeddings\) cannot be asked of sglang"),
        ((0, 16), "output_of_layer", "llama", r"cannot be asked of output_of_layer"),
        ((2, 16, 32), "sglang", "llama", r"cannot capture 32, .* 31 would be another state"),
        ((2, 16, 32), "sglang", "deepseek_v3", r"cannot capture 32"),
        ((2, 33), "vllm", "llama", r"\[33\] do not exist: the target has 32 layers"),
    ],
)
def test_impossible_lists_are_refused(boundaries, spelling, model_type, message):
    """Cases 23 and 24: never a neighbouring layer instead."""
    with pytest.raises(PlanError, match=message):
        layer_ids(boundaries, spelling, model_type=model_type, num_layers=32)


@pytest.mark.parametrize(
    ("ids", "spelling", "model_type", "expected"),
    [
        ((1, 15, 28), "sglang", "llama", (2, 16, 29)),
        ((3, 31, 59), "sglang", "kimi_k2", (3, 31, 59)),
        ((1, 29, 57), "sglang", "kimi_k2", (2, 30, 58)),
        ((2, 16, 32), "vllm", "kimi_k2", (2, 16, 32)),
        ((0, 15, 28), "output_of_layer", "llama", (1, 16, 29)),
    ],
)
def test_written_lists_are_read_as_their_readers_read_them(ids, spelling, model_type, expected):
    """Case 23, the other way: Kimi's two published lists are one layer apart, and both are understood."""
    assert boundaries_of(ids, spelling, model_type=model_type) == expected


@given(
    st.sets(st.integers(2, 60), min_size=1),
    st.sampled_from(["sglang", "vllm", "output_of_layer"]),
    st.sampled_from(["llama", *SGLANG_AS_IS]),
)
def test_there_and_back(boundaries, spelling, model_type):
    listed = layer_ids(sorted(boundaries), spelling, model_type=model_type, num_layers=61)
    assert boundaries_of(listed, spelling, model_type=model_type) == tuple(sorted(boundaries))
