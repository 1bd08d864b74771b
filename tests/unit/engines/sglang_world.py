"""What tests of the sglang engine share: samples, a capture as the loop does it, and the double of server and plugin."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from eyas.contracts import TokenSample
from eyas.engines.fake import FakeEngine
from eyas.errors import CaptureError
from fake_target import make_target

DOUBLE = Path(__file__).parents[2] / "sglang_double"
BOUNDARIES = (1, 2, 3)
OPTIONS = {"chunked_prefill_size": 16, "max_running_requests": 1}


def make_samples(num_samples: int, seed: int = 0, longest: int = 60) -> list[TokenSample]:
    rng = random.Random(seed)
    made = []
    for index in range(num_samples):
        ids = tuple(rng.randrange(3, 1000) for _ in range(rng.randrange(1, longest)))
        made.append(make_sample(f"s{index:03d}", ids))
    return made


def make_sample(name: str, ids: tuple[int, ...]) -> TokenSample:
    return TokenSample(
        sample_id=name, conversation_id="c", source="x", split="train", variant="given", input_ids=ids,
        loss_mask=(1,) * len(ids),
    )  # fmt: skip


def capture(engine, samples, batch=5):
    """As the loop does: batch by batch, what is missing once more and alone."""
    got, failed = {}, {}
    for begin in range(0, len(samples), batch):
        part = samples[begin : begin + batch]
        for tried in [part, *([sample] for sample in part)]:
            missing = [sample for sample in tried if sample.sample_id not in got]
            if missing:
                try:
                    for captured in engine.capture(missing):
                        got[captured.sample_id] = captured
                except CaptureError as error:
                    for sample in missing:
                        failed[sample.sample_id] = error.message
    return got, {name: reason for name, reason in failed.items() if name not in got}


def check_equal(got, samples):
    expected = {captured.sample_id: captured for captured in FakeEngine(make_target(), BOUNDARIES).capture(samples)}
    assert sorted(got) == sorted(expected)
    for name, captured in got.items():
        for part in ("input_ids_T", "aux_TAD", "last_TD"):
            assert torch.equal(getattr(captured, part), getattr(expected[name], part)), (name, part)
