"""The fake engine's formula and the checks every captured sample passes."""

import dataclasses

import pytest
import torch

from eyas.contracts import TokenSample
from eyas.conversations.generation import GenerateRequest
from eyas.engines.checks import check_captured
from eyas.engines.registry import make_engine
from eyas.errors import CaptureError


@pytest.fixture
def planned():
    return TokenSample(
        sample_id="abc",
        conversation_id="c",
        source="x",
        split="train",
        variant="given",
        input_ids=(3, 5, 8, 13),
        loss_mask=(0, 0, 1, 1),
    )


@pytest.fixture
def engine(identity):
    return make_engine("fake", target=identity, folder=None, boundaries=(1, 3), dtype="bfloat16")


@pytest.fixture
def captured(engine, planned):
    (got,) = engine.capture([planned])
    return got


def test_fake_states_follow_the_written_formula(captured):
    assert captured.aux_TAD.shape == (4, 2, 96)
    assert captured.aux_TAD[2, 1, 10].item() == (8 + 7 * 2 + 31 * 3 + 3 * 10) % 251 - 125
    assert captured.last_TD[3, 63].item() == (13 + 7 * 3 + 97 + 3 * 63) % 251 - 125


def test_a_whole_capture_passes(captured, planned):
    check_captured(captured, planned, 2, 96)


def changed(captured, **fields):
    return dataclasses.replace(captured, **fields)


def with_value(captured, value):
    aux = captured.aux_TAD.clone()
    aux[1, 1, 7] = value
    return changed(captured, aux_TAD=aux)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda c: changed(c, sample_id="xyz"), r"sample abc: states of sample xyz"),
        (lambda c: changed(c, aux_TAD=c.aux_TAD[1:]), r"abc: aux: shape \(3, 2, 96\), expected \(4, 2, 96\)"),
        (lambda c: changed(c, aux_TAD=c.aux_TAD[:, :1]), r"aux: shape \(4, 1, 96\), expected \(4, 2, 96\)"),
        (lambda c: changed(c, last_TD=c.last_TD[:-1]), r"last: shape \(3, 96\), expected \(4, 96\)"),
        (lambda c: changed(c, last_TD=c.last_TD.float()), r"last: dtype torch.float32"),
        (lambda c: changed(c, input_ids_T=torch.tensor([3, 5, 9, 13])), r"token id 9 at index 2, expected 8"),
        (lambda c: changed(c, input_ids_T=torch.tensor([3, 5, 8])), r"3 token ids, expected 4"),
        (lambda c: with_value(c, float("nan")), r"aux stream 1: nan at token 1, channel 7"),
        (lambda c: with_value(c, float("-inf")), r"aux stream 1: -inf at token 1, channel 7"),
        (lambda c: changed(c, last_TD=c.last_TD * torch.tensor([[1], [1], [0], [1]])), r"last: token 2 is all zero"),
    ],
)
def test_a_broken_capture_names_sample_found_and_expected(captured, planned, break_it, message):
    """Cases 30, 31, 32, 33, 46: not finite, short, a stream too few, other ids, another sample."""
    with pytest.raises(CaptureError, match=message):
        check_captured(break_it(captured), planned, 2, 96)


def test_fake_answers_are_repeatable_and_end_as_flagged(engine):
    wanted = [
        GenerateRequest(
            request_id=str(i), prompt_ids=(i, 7), max_new_tokens=12, temperature=i % 2, top_p=1, seed=i // 2
        )
        for i in range(40)
    ]
    answers = list(engine.generate(wanted))
    assert answers == list(engine.generate(wanted))
    assert {a.finish for a in answers} == {"stop", "length"}
    for answer in answers:
        assert (answer.ids[-1] == 2) == (answer.finish == "stop")
        assert len(answer.ids) <= 12 or answer.finish == "stop"
