"""Small captures for the tests of shards and of the extraction loop."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from eyas.contracts import CaptureIdentity, CapturePlan, EngineFacts, ShardEntry, ShardManifest, TokenSample
from eyas.plan.build import build_plan
from eyas.shards.calibration import Calibration, make_calibration
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder
from eyas.shards.writer import ShardAssembly
from eyas.tokens.dataset import make_sample

States = dict[str, tuple[torch.Tensor, torch.Tensor]]


def make_capture(**changes) -> CaptureIdentity:
    base = CaptureIdentity(
        target="a" * 64,
        tokens="b" * 64,
        boundaries=(1, 2, 3),
        final_hidden="post_norm",
        dtype="bfloat16",
        codec="raw",
        engine="fake",
        engine_version="1",
        engine_options={},
        image="",
        shard_bytes=4096,
        batch_tokens=64,
        revision=1,
    )
    return dataclasses.replace(base, **changes)


def make_tokens(lengths: Sequence[int], seed: int = 0) -> dict[str, TokenSample]:
    rng = random.Random(seed)
    samples = [
        make_sample(
            [rng.randrange(1000) for _ in range(n)],
            [rng.randrange(2) for _ in range(n)],
            conversation_id=f"{i:016x}",
            source="chatterbot",
            split="train",
            variant="greedy",
        )
        for i, n in enumerate(lengths)
    ]
    return {sample.sample_id: sample for sample in samples}


def make_plan(tokens: dict[str, TokenSample], capture: CaptureIdentity, hidden_size: int) -> CapturePlan:
    return build_plan([(s.sample_id, len(s.input_ids)) for s in tokens.values()], capture, hidden_size)


def make_states(tokens: dict[str, TokenSample], num_aux: int, hidden_size: int, seed: int = 0) -> States:
    generator = torch.Generator().manual_seed(seed)
    return {
        s.sample_id: (
            torch.randn(len(s.input_ids), num_aux, hidden_size, generator=generator).bfloat16(),
            torch.randn(len(s.input_ids), hidden_size, generator=generator).bfloat16(),
        )
        for s in tokens.values()
    }


def ids_of(sample: TokenSample) -> torch.Tensor:
    return torch.tensor(sample.input_ids, dtype=torch.int32)


def store(folder: Path, plan: CapturePlan, tokens: dict[str, TokenSample], states: States, seed: int = 0):
    """Write a whole plan, samples arriving in a random order; gives the manifest."""
    entries: list[ShardEntry] = []
    calibration = Calibration(make_calibration(states.values())) if plan.capture.codec == "int8" else None
    scales_ND = calibration.scales_ND if calibration else None
    with Encoder(make_codec(plan.capture.codec, scales_ND)) as encoder:
        for planned in plan.shards:
            assembly = ShardAssembly(planned, plan.capture, plan.hidden_size, tokens, encoder, scales_ND)
            arriving = [sample.sample_id for sample in planned.samples]
            random.Random(seed).shuffle(arriving)
            for sample_id in arriving:
                assembly.add(sample_id, ids_of(tokens[sample_id]), *states[sample_id])
            entry = assembly.write(folder).entry
            assert entry is not None
            entries.append(entry)
    manifest = make_manifest(plan, entries)
    return dataclasses.replace(manifest, calibration=calibration.digest) if calibration else manifest


def make_manifest(plan: CapturePlan, entries: Sequence[ShardEntry]) -> ShardManifest:
    return ShardManifest(
        identity=plan.identity,
        capture=plan.capture,
        engine=EngineFacts(name="fake", version="1", options={}, deterministic=True),
        hidden_size=plan.hidden_size,
        num_planned_samples=plan.num_samples,
        num_planned_tokens=plan.num_tokens,
        num_stored_samples=sum(e.num_samples for e in entries),
        num_stored_tokens=sum(e.num_tokens for e in entries),
        stored_bytes=sum(e.size_bytes for e in entries),
        shards=tuple(entries),
    )
