"""The walk over written texts takes the very rounds that real speculative decoding takes on the same prompts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from eyas.drafter.chain import DraftChain
from eyas.engines.decode import BlockDecoder
from eyas.evaluate.decode import DecodeTimes, Prompt, decode_batch
from eyas.evaluate.modes import GreedyChain
from eyas.ops.serve.offline import Written, as_served, walk_written
from eyas.target.load import load_model, read_ends
from learned_drafter import STEPS, learn, prompts
from servers.saved_target import make_target

BOUNDARIES = (1, 2, 3)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny target whose texts do not stand still, and a drafter that has seen some of them."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    target = make_target(folder)
    return folder, as_served(learn(folder, target, BOUNDARIES), "bfloat16")


def test_rounds_are_those_of_real_decoding(world):
    folder, drafter = world
    model = load_model(folder, "float32")
    asked = [Prompt(f"p{i}", "s", tuple(ids)) for i, ids in enumerate(prompts(8, 64) + prompts(4, 64, seed=9))]
    decoded = decode_batch(
        BlockDecoder(model, len(asked), 64, BOUNDARIES),
        GreedyChain(DraftChain(drafter, STEPS, len(asked), 64)),
        asked, chain_length=STEPS, max_new_tokens=30, eos_ids=(2,), times=DecodeTimes(),
    )  # fmt: skip
    written = [
        Written(prompt_id=one.prompt.sample_id, source="s", prompt_ids=one.prompt.ids, answer_ids=one.ids)
        for one in decoded
    ]
    walked = walk_written(drafter, model, BOUNDARIES, read_ends(folder).head_VD, written, STEPS)
    assert [tuple(r.num_emitted for r in each.rounds) for each in walked] == [one.round_sizes for one in decoded]
    sizes = [size for one in decoded for size in one.round_sizes]
    assert {1, STEPS + 1} <= set(sizes)  # rounds of every kind, or equality would say little
    assert 1.3 < sum(sizes) / len(sizes) < STEPS + 1


def test_weights_are_rounded_as_exported(world):
    _, drafter = world
    weights = list(drafter.parameters())
    assert all(weight.dtype == torch.float32 for weight in weights)
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in weights)
