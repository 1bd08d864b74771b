"""Samples are checked in threads; what the loop sees is as if they were checked one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eyas.contracts import TokenSample
from eyas.engines.base import CapturedSample
from eyas.engines.checked import Checks
from eyas.errors import CaptureError

A, D = 3, 8


def sample(name: str, num_tokens: int) -> TokenSample:
    return TokenSample(
        sample_id=name, conversation_id=name, source="s", split="train", variant="greedy",
        input_ids=tuple(range(num_tokens)), loss_mask=(1,) * num_tokens,
    )  # fmt: skip


def captured(wanted: TokenSample) -> CapturedSample:
    T = len(wanted.input_ids)
    return CapturedSample(
        sample_id=wanted.sample_id,
        input_ids_T=torch.tensor(wanted.input_ids, dtype=torch.int32),
        aux_TAD=torch.ones(T, A, D, dtype=torch.bfloat16),
        last_TD=torch.ones(T, D, dtype=torch.bfloat16),
    )


# the first ones take longest
SAMPLES = {f"{n:02}": sample(f"{n:02}", 20_000 >> n) for n in range(12)}


def test_the_order_is_the_engines() -> None:
    with Checks(A, D) as checks:
        given = list(checks.of((captured(s) for s in SAMPLES.values()), SAMPLES))
    assert [each.sample_id for each, _ in given] == list(SAMPLES)
    assert {problem for _, problem in given} == {""}


def test_what_is_wrong_is_told_of_the_sample_that_has_it() -> None:
    def captures() -> Iterator[CapturedSample]:
        for name, wanted in SAMPLES.items():
            each = captured(wanted)
            if name == "03":
                each.aux_TAD[5, 1, 2] = torch.inf
            yield each

    with Checks(A, D) as checks:
        problems = {each.sample_id: problem for each, problem in checks.of(captures(), SAMPLES)}
    assert [name for name, problem in problems.items() if problem] == ["03"]
    assert "sample 03: aux stream 1: inf at token 5, channel 2" in problems["03"]


def test_an_engine_that_fails_gave_its_samples_before() -> None:
    def captures() -> Iterator[CapturedSample]:
        for wanted in list(SAMPLES.values())[:3]:
            yield captured(wanted)
        raise CaptureError("the server is gone")

    seen: list[str] = []

    def gather(checks: Checks) -> None:
        seen.extend(each.sample_id for each, _ in checks.of(captures(), SAMPLES))

    with Checks(A, D) as checks, pytest.raises(CaptureError, match="the server is gone"):
        gather(checks)
    assert seen == ["00", "01", "02"]


def test_a_sample_that_nobody_wants_is_handed_on() -> None:
    with Checks(A, D) as checks:
        given = list(checks.of(iter([captured(sample("foreign", 3))]), SAMPLES))
    assert [(each.sample_id, problem) for each, problem in given] == [("foreign", "")]
