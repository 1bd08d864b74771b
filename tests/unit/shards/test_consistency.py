"""States that carry valid checksums and are the wrong ones: shifted, swapped, another sample's.

The target here is a random head; ``last[t]`` is the row of the next token plus noise, and each stream is the next one
plus noise, so that it is known which rows belong together.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from shard_cases import make_capture, make_plan, make_tokens, store

from eyas.shards.verify import verify

VOCAB, HIDDEN_SIZE = 1000, 64
LENGTHS = [40] * 24 + [300, 9, 2, 1]


@pytest.fixture(scope="module")
def world():
    generator = torch.Generator().manual_seed(0)
    head_VD = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator)
    tokens = {}
    for sample in make_tokens(LENGTHS, seed=3).values():
        mask = tuple(int(t >= 10) for t in range(len(sample.input_ids)))
        tokens[sample.sample_id] = dataclasses.replace(sample, loss_mask=mask)
    states = {}
    for name, sample in tokens.items():
        ids_T = torch.tensor([*sample.input_ids[1:], 7])
        last_TD = head_VD[ids_T] + 0.3 * torch.randn(len(ids_T), HIDDEN_SIZE, generator=generator)
        streams = [last_TD]
        for _ in range(3):
            streams.insert(0, streams[0] + torch.randn(last_TD.shape, generator=generator))
        aux_TAD = torch.stack(streams[:3], 1)
        states[name] = (aux_TAD.bfloat16(), last_TD.bfloat16())
    return tokens, states, head_VD


def problems(tmp_path, world, changed=(), last_rows="all", head=True) -> dict[str, list[str]]:
    tokens, states, head_VD = world
    plan = make_plan(tokens, make_capture(codec="raw", last_rows=last_rows, shard_bytes=1 << 16), HIDDEN_SIZE)
    manifest = store(tmp_path, plan, tokens, {**states, **dict(changed)})
    found: dict[str, list[str]] = {}
    for finding in verify(tmp_path, manifest, tokens, head_VD if head else None):
        found.setdefault(finding.sample_id, []).append(finding.problem)
    return found


def rolled(states_TX: torch.Tensor, way: int) -> torch.Tensor:
    return torch.roll(states_TX, way, dims=0)


@pytest.mark.parametrize("last_rows", ["all", "trained"])
def test_right_states_are_not_blamed(tmp_path, world, last_rows):
    assert problems(tmp_path, world, last_rows=last_rows) == {}


@pytest.mark.parametrize("last_rows", ["all", "trained"])
@pytest.mark.parametrize(("way", "word"), [(1, "late"), (-1, "early")])
def test_states_a_row_late_or_early_are_named(tmp_path, world, last_rows, way, word):
    """Case 31: shifted before they were written, so that every checksum is right."""
    tokens, states, _ = world
    short, long = next(iter(tokens)), list(tokens)[24]
    changed = {name: tuple(rolled(block, way) for block in states[name]) for name in (short, long)}
    found = problems(tmp_path, world, changed, last_rows)
    assert found.keys() == {short, long}
    assert all(any(f"states are a row {word}" in problem for problem in named) for named in found.values())


@pytest.mark.parametrize("kind", [0, 1])
def test_one_stream_a_row_apart_from_the_others_is_named(tmp_path, world, kind):
    tokens, states, _ = world
    name = next(iter(tokens))
    blocks = list(states[name])
    blocks[kind] = rolled(blocks[kind], 1)
    found = problems(tmp_path, world, {name: tuple(blocks)}, head=kind == 1)
    if kind == 0:
        found = problems(tmp_path / "again", world, {name: tuple(blocks)})
    assert found.keys() == {name}
    assert any("a row apart" in problem for problem in found[name])


def test_states_that_are_shifted_from_the_middle_on_are_found(tmp_path, world):
    """A chunk boundary lost one row: the first window is right."""
    tokens, states, _ = world
    name = list(tokens)[24]
    aux_TAD, last_TD = states[name]
    cut = [torch.cat([block[:200], block[199:-1]]) for block in (aux_TAD, last_TD)]
    found = problems(tmp_path, world, {name: tuple(cut)})
    assert found.keys() == {name}


def test_states_of_two_samples_of_one_length_that_changed_places_are_found(tmp_path, world):
    """Case 31: whole states of another sample, checksums over them."""
    tokens, states, _ = world
    one, other = list(tokens)[:2]
    found = problems(tmp_path, world, {one: states[other], other: states[one]})
    assert found.keys() == {one, other}
    assert all("not this sample's states" in named[0] for named in found.values())


def test_aux_states_of_another_sample_are_found_by_the_measure_of_the_set(tmp_path, world):
    tokens, states, _ = world
    one, other = list(tokens)[:2]
    changed = {one: (states[other][0], states[one][1]), other: (states[one][0], states[other][1])}
    found = problems(tmp_path, world, changed)
    assert found.keys() == {one, other}
    assert all("aux and last states correlate by" in named[0] for named in found.values())


def test_text_that_the_target_did_not_write_has_no_floor(tmp_path, world):
    """Few next tokens are the target's choice, none of it is damage."""
    tokens, states, head_VD = world
    name = next(iter(tokens))
    generator = torch.Generator().manual_seed(5)
    wild_T = torch.randint(VOCAB, (40,), generator=generator)
    right_T = torch.tensor([*tokens[name].input_ids[1:], 7])
    is_wild_T = torch.rand(40, generator=generator) < 0.5
    last_TD = head_VD[torch.where(is_wild_T, wild_T, right_T)].bfloat16()
    streams = torch.stack([last_TD.float() + torch.randn(last_TD.shape, generator=generator) for _ in range(3)], 1)
    changed = {name: (streams.bfloat16(), last_TD)}
    assert problems(tmp_path / "greedy", world, changed).keys() == {name}
    given = {**tokens, name: dataclasses.replace(tokens[name], variant="given")}
    assert problems(tmp_path / "given", (given, states, head_VD), changed) == {}
