"""Rotary types against transformers' own functions, and both schemas of config.json."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ttt import SHAPE
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas import fs
from eyas.contracts import DrafterShape
from eyas.drafter.rope import Rope, RopeTypeError, inverse_frequencies, read_rope, read_theta, rope_parameters

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    YARN | {"attention_factor": 1.5},
    YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
]


def peer(scaling, theta=500_000.0, head_dim=64, longest=8192):
    """transformers' own module for a Llama of these positions, from the old schema."""
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_theta=theta,
        rope_scaling=None if scaling is None else dict(scaling),
    )
    return LlamaRotaryEmbedding(config)


def shape_of(config, head_dim=64):
    theta, scaling = read_rope(config)
    return dataclasses.replace(SHAPE, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("schema", ["old", "new"])
def test_tables_are_those_of_transformers(scaling, schema):
    """Case 79: either schema gives the same positions; every type, the attention factor included."""
    old = {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 8192}
    new = {"rope_parameters": {"rope_theta": 5e5, **(scaling or {})}, "max_position_embeddings": 8192}
    rope = Rope(shape_of(old if schema == "old" else new))
    positions = torch.tensor([0, 1, 5, 100, 2047, 2048, 8000])
    cos, signed_sin = (table[positions] for table in rope.table(8001, "cpu", torch.float64))
    embedding = peer(scaling)
    # the peer's frequencies are float32: its angles are taken in float64 from a float64 restatement of the same
    frequencies, factor = inverse_frequencies(64, 5e5, shape_of(old).rope_scaling)
    assert torch.allclose(frequencies, embedding.inv_freq.double(), rtol=2e-6, atol=0)
    assert factor == pytest.approx(embedding.attention_scaling, rel=1e-12)
    expected_cos, expected_sin = embedding(torch.zeros(1, dtype=torch.float64), positions[None])
    assert torch.allclose(cos, expected_cos[0].double(), atol=8000 * 2e-6)
    x = torch.randn(len(positions), 3, 64, dtype=torch.float64)
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], expected_cos, expected_sin)
    turned = x * cos[:, None] + x.roll(32, -1) * signed_sin[:, None]
    assert torch.allclose(turned, expected[0].transpose(0, 1), atol=8000 * 8e-6)


@pytest.mark.parametrize("scaling", SCALINGS[1:])
def test_a_scaling_differs_from_the_plain_type(scaling):
    """The comparison above could not see a scaling that does nothing."""
    plain, _ = inverse_frequencies(64, 5e5, None)
    scaled, _ = inverse_frequencies(64, 5e5, tuple(sorted(scaling.items())))
    assert not torch.allclose(plain, scaled, rtol=1e-2)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    factor=st.floats(1.0, 64.0),
    theta=st.floats(500.0, 5e6),
    half=st.integers(2, 64),
    original=st.integers(256, 65536),
    bounds=st.tuples(st.floats(0.5, 3.0), st.floats(3.5, 40.0)),
)
def test_any_numbers_give_transformers_frequencies(kind, factor, theta, half, original, bounds):
    low, high = bounds
    scaling = {"rope_type": kind, "factor": factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = original
    if kind == "llama3":
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        scaling |= {"beta_slow": low, "beta_fast": high}
    found, factor = inverse_frequencies(2 * half, theta, tuple(sorted(scaling.items())))
    expected = peer(scaling, theta, 2 * half, longest=int(original * 64))
    # near the bounds the float32 ramp of the peer loses digits
    assert torch.allclose(found, expected.inv_freq.double(), rtol=1e-3, atol=1e-9)
    assert factor == pytest.approx(expected.attention_scaling, rel=1e-9)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_written_reads_back(scaling, tmp_path):
    config = {"rope_theta": 7e4, "rope_scaling": scaling, "max_position_embeddings": 8192}
    shape = shape_of(config)
    assert read_rope({"rope_parameters": rope_parameters(shape.rope_theta, shape.rope_scaling)}) == (
        shape.rope_theta,
        shape.rope_scaling,
    )
    fs.write_record(tmp_path / "shape.json", shape)
    assert fs.read_record(DrafterShape, tmp_path / "shape.json") == shape


def test_a_record_without_the_key_still_reads(tmp_path):
    """Checkpoints of runs before the key."""
    fs.write_record(tmp_path / "shape.json", SHAPE)
    old = json.loads((tmp_path / "shape.json").read_text())
    del old["rope_scaling"]
    (tmp_path / "shape.json").write_text(json.dumps(old))
    assert fs.read_record(DrafterShape, tmp_path / "shape.json") == SHAPE


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, None),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}}, 1e6, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10_000.0, {"rope_type": "linear", "factor": 2.0}),
        # Qwen's text positions of its picture models
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, 1e6, None),
        # Gemma 3: one set per kind of layer
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            1e6,
            {"rope_type": "linear", "factor": 8.0},
        ),
        # what transformers fills in
        (
            {
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024},
                "max_position_embeddings": 4096,
            },
            10_000.0,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
    ],
)
def test_the_schemas_of_the_world(config, theta, scaling):
    assert read_theta(config) == theta
    assert read_rope(config) == (theta, None if scaling is None else tuple(sorted(scaling.items())))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic', expected one of default, linear, llama3, yarn"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "'longrope', expected one of"),
        ({"rope_type": "linear"}, "'linear' without factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' without high_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "on a part of each head"),
    ],
)
def test_types_whose_angles_a_server_would_not_repeat_are_refused(values, message):
    with pytest.raises(RopeTypeError, match=message):
        read_rope({"rope_scaling": values, "max_position_embeddings": 64})


def test_an_unknown_type_of_a_record_is_refused():
    with pytest.raises(RopeTypeError, match="'dynamic'"):
        Rope(dataclasses.replace(SHAPE, rope_scaling=(("factor", 2.0), ("rope_type", "dynamic"))))


def test_a_table_grows_and_keeps_its_rows():
    rope = Rope(SHAPE)
    small_cos, small_sin = rope.table(5, "cpu", torch.float64)
    assert len(small_cos) >= 5
    assert small_cos.shape[1] == SHAPE.head_dim
    cos, sin = rope.table(100, "cpu", torch.float64)
    assert len(cos) >= 100
    assert torch.equal(cos[: len(small_cos)], small_cos)
    assert torch.equal(sin[: len(small_sin)], small_sin)
    assert rope.table(50, "cpu", torch.float64)[0] is cos
    assert rope.table(50, "cpu", torch.float32)[0].dtype == torch.float32
