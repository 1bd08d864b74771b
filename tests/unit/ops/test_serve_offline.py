"""The walk over written texts takes the very rounds that real speculative decoding takes on the same prompts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from eyas.drafter.chain import DraftChain
from eyas.engines.decode import BlockDecoder
from eyas.evaluate.decode import DecodeTimes, Prompt, decode_batch
from eyas.evaluate.modes import GreedyChain
from eyas.ops.serve.offline import Judge, Written, as_served, walk_written
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


def greedy(model, ids, num_tokens):
    """Transformers' own greedy text."""
    return model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)[0, len(ids) :].tolist()


def written(prompt_ids, answer_ids):
    return Written(prompt_id="p-0", source="s", prompt_ids=tuple(prompt_ids), answer_ids=tuple(answer_ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_judge_accepts_the_targets_own_text_and_names_another_token(world, dtype):
    model, ids = load_model(world[0], dtype), prompts(1, 64)[0]
    judge, answer = Judge(model, (2,), 20), greedy(model, ids, 20)
    found = judge(written(ids, answer))
    assert not found.fault
    with torch.no_grad():
        least = int(model(torch.tensor([[*ids, *answer[:7]]])).logits[0, -1].argmin())
    changed = judge(written(ids, [*answer[:7], least, *answer[8:]]))
    assert changed.fault.startswith(f"p-0, new token 7: {least}, the target's choice is {answer[7]} by ")
    assert changed.largest_gap > found.largest_gap


def test_a_tie_is_counted_and_a_text_cut_short_is_told(world):
    """Two tokens with one row of the head are as likely as each other: only rounding chooses."""
    model, ids = load_model(world[0], "bfloat16"), prompts(1, 64)[0]
    answer = greedy(model, ids, 12)
    head_VD = model.get_output_embeddings().weight
    model.get_output_embeddings().weight = torch.nn.Parameter(head_VD.detach().clone())
    own, twin = answer[5], next(i for i in range(3, 64) if i not in answer)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twin] = head[own] * (1 - 2**-6)
    found = Judge(model, (2,), 12)(written(ids, [*answer[:5], twin]))
    assert (found.num_ties, found.fault) == (1, "p-0 ends after 6 tokens without an end of turn")
    assert found.largest_gap > 0
    assert not Judge(model, (twin,), 12)(written(ids, [*answer[:5], twin])).fault
    model.get_output_embeddings().weight.data[:] = torch.nan
    assert "by nan" in Judge(model, (2,), 12)(written(ids, answer)).fault
