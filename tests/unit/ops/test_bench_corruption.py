"""The corruption bench counts what it tries, finds all of it, and leaves the repository alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from repair_cases import make_target
from safetensors.torch import save_file

from eyas import fs
from eyas.contracts import CaptureIdentity, EngineFacts, ShardManifest
from eyas.ops.bench import run as bench
from eyas.plan.build import build_plan
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder
from eyas.shards.writer import ShardAssembly
from eyas.target.store import target_dir
from eyas.tokens.dataset import make_sample, tokens_sha256, write_tokens

VOCAB, HIDDEN_SIZE, NUM_TOKENS = 1000, 64, 40


def _capture(target: str, tokens: str) -> CaptureIdentity:
    return CaptureIdentity(
        target=target,
        tokens=tokens,
        boundaries=(1, 2, 3),
        final_hidden="post_norm",
        dtype="bfloat16",
        codec="raw",
        last_rows="all",
        engine="hf",
        engine_version="1",
        engine_options={},
        image="",
        shard_bytes=1 << 30,
        batch_tokens=1 << 20,
        revision=1,
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """30 samples of one length whose last states point at the next token, under a target that is nothing but a head."""
    monkeypatch.delenv("EYAS_TARGETS_DIR", raising=False)
    generator = torch.Generator().manual_seed(0)
    head_VD = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator)
    target = dataclasses.replace(make_target(), hidden_size=HIDDEN_SIZE)
    folder = tmp_path / target_dir(target)
    folder.mkdir(parents=True)
    save_file({"lm_head.weight": head_VD}, folder / "model.safetensors")
    fs.write_record(tmp_path / "models/target.json", target)
    samples = [
        make_sample(
            torch.randint(VOCAB, (NUM_TOKENS,), generator=generator).tolist(),
            [0] * 10 + [1] * (NUM_TOKENS - 10),
            conversation_id=f"{i:016x}",
            source="a",
            split="train",
            variant="greedy",
        )
        for i in range(30)
    ]
    write_tokens(tmp_path / "data/tokens", samples)
    capture = _capture(target.digest, tokens_sha256(tmp_path / "data/tokens"))
    plan = build_plan([(s.sample_id, NUM_TOKENS) for s in samples], capture, HIDDEN_SIZE)
    with Encoder(make_codec("raw")) as encoder:
        assembly = ShardAssembly(plan.shards[0], capture, HIDDEN_SIZE, {s.sample_id: s for s in samples}, encoder)
        for s in samples:
            last_TD = head_VD[[*s.input_ids[1:], 7]] + 0.3 * torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator)
            streams = [last_TD + torch.randn(last_TD.shape, generator=generator) * a for a in (1.5, 1.0, 0.5)]
            ids_T = torch.tensor(s.input_ids, dtype=torch.int32)
            assembly.add(s.sample_id, ids_T, torch.stack(streams, 1).bfloat16(), last_TD.bfloat16())
        entry = assembly.write(tmp_path / "data/hidden_states").entry
    assert entry is not None
    manifest = ShardManifest(
        identity=capture.digest,
        capture=capture,
        engine=EngineFacts(name="hf", version="1", options={}, deterministic=True),
        hidden_size=HIDDEN_SIZE,
        num_planned_samples=30,
        num_planned_tokens=30 * NUM_TOKENS,
        num_stored_samples=30,
        num_stored_tokens=30 * NUM_TOKENS,
        stored_bytes=entry.size_bytes,
        shards=(entry,),
    )
    fs.write_record(tmp_path / "data/hidden_states.json", manifest)
    return tmp_path


@pytest.mark.slow
def test_all_damage_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases 28, 29 and 31 in numbers; only what carries new checksums passes a reader."""
    before = fs.tree_digests(root / "data")
    monkeypatch.setattr(bench, "NUM_FLIPS", 42)
    counts = bench.run(root, "corruption")
    assert counts["flipped_bits"]["tried"] == 42
    assert counts["swapped_shards"]["tried"] == 4 * 15
    for kind, count in counts.items():
        assert count["tried"] > 10, kind
        assert count["found_by_verify"] == count["tried"], kind
        assert count["found_by_reader"] == (0 if kind.endswith("_rewritten") else count["tried"]), kind
    assert fs.tree_digests(root / "data") == before
    assert not (root / ".eyas/bench").exists()
    assert json.loads((root / "reports/bench/corruption.json").read_text()) == counts
