"""``eyas verify`` finds one flipped byte in any artifact, and says what is whole or not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eyas import fs
from eyas.canonical import digest
from eyas.contracts import (
    CaptureIdentity,
    CapturePlan,
    CheckpointMeta,
    DrafterShape,
    ExportMeta,
    FileDigest,
    FinalNorm,
    ShardManifest,
    TargetIdentity,
)
from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.registry import make_engine
from eyas.ops.verify import verified_text, verify_all
from eyas.plan.build import build_plan
from eyas.target.store import target_dir
from eyas.tokens.dataset import make_sample, tokens_sha256, write_tokens

STAGES = ("target.json", "tokens", "plan.json", "hidden_states.json", "checkpoint.json", "export.json")


def make_target(files: tuple[FileDigest, ...]) -> TargetIdentity:
    return TargetIdentity(
        source="wheel:none==1",
        revision="0" * 64,
        files=files,
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=6,
        hidden_size=16,
        vocab_size=1000,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(2,),
        tokenizer_sha256="0" * 64,
        chat_template_sha256="0" * 64,
    )


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with the fake engine; checkpoint and export are records over a few bytes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EYAS_TARGETS_DIR", raising=False)
    target = _write_target()
    samples = [
        make_sample(
            list(range(1, n + 2)),
            [0] + [1] * n,
            conversation_id=f"{n:016x}",
            source="a",
            split="train",
            variant="given",
        )
        for n in range(2, 30)
    ]
    write_tokens(Path("data/tokens"), samples)
    engine = make_engine(
        "fake",
        target=target,
        folder=None,
        boundaries=(1, 2, 3),
        dtype="bfloat16",
        batch_size=8,
        options={},
        device="cpu",
    )
    facts = engine.describe()
    capture = CaptureIdentity(
        target=target.digest,
        tokens=tokens_sha256(Path("data/tokens")),
        boundaries=(1, 2, 3),
        final_hidden="post_norm",
        dtype="bfloat16",
        codec="raw",
        engine=facts.name,
        engine_version=facts.version,
        engine_options=facts.options,
        image="",
        shard_bytes=8192,
        batch_tokens=64,
        revision=1,
    )
    plan = build_plan([(sample.sample_id, len(sample.input_ids)) for sample in samples], capture, 16)
    fs.write_record(Path("data/plan.json"), plan)
    limits = ExtractLimits(reserve_bytes=0, max_failed_samples=0)
    states, manifest = Path("data/hidden_states"), Path("data/hidden_states.json")
    by_id = {sample.sample_id: sample for sample in samples}
    extract(plan, by_id, engine, limits, out=states, manifest_path=manifest, home=Path(".eyas"))
    fs.write_record(manifest, fs.read_record(ShardManifest, manifest))
    _write_models(target, capture.digest)
    return tmp_path


def _write_target() -> TargetIdentity:
    draft = make_target(())
    fs.write_bytes(Path("weights/model.safetensors"), b"weights")
    target = dataclasses.replace(draft, files=fs.tree_digests(Path("weights")))
    target_dir(target).parent.mkdir(parents=True)
    Path("weights").rename(target_dir(target))
    fs.write_record(Path("models/target.json"), target)
    return target


def _write_models(target: TargetIdentity, identity: str) -> None:
    shape: dict[str, Any] = {spec.name: 1 for spec in dataclasses.fields(DrafterShape)}
    shape |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "fc_norm": False, "norm_output": False}
    shape |= {"rope_scaling": None, "norm_before_residual": False}
    fs.write_bytes(Path("models/drafter/drafter.safetensors"), b"drafter")
    checkpoint = CheckpointMeta(
        shape=DrafterShape(**shape),
        boundaries=(1, 2, 3),
        capture_identity=identity,
        target=target.digest,
        tokens="0" * 64,
        num_steps=1,
        num_trained_rows=1,
        ttt_steps=1,
        seed=0,
        revision=1,
        files=fs.tree_digests(Path("models/drafter")),
    )
    fs.write_record(Path("models/drafter/checkpoint.json"), checkpoint)
    fs.write_bytes(Path("models/export/sglang/model.safetensors"), b"export")
    export = ExportMeta(
        servers=("sglang",),
        boundaries=(1, 2, 3),
        layer_ids={"sglang": (1, 2, 3)},
        drafter=digest(checkpoint),
        capture_identity=identity,
        target=target.digest,
        max_logit_difference=0.0,
        files=fs.tree_digests(Path("models/export")),
    )
    fs.write_record(Path("models/export/export.json"), export)


def states_of(root: Path) -> dict[str, str]:
    return {result.artifact.rsplit("/", 1)[-1]: result.state for result in verify_all(root).artifacts}


def test_whole_run_is_whole(finished: Path) -> None:
    verified = verify_all(finished)
    assert not verified.is_damaged
    assert {(result.state, result.note) for result in verified.artifacts} == {("whole", "")}
    assert "belong to no model" in verified_text(verified)
    assert tuple(states_of(finished)) == STAGES


def test_empty_tree_is_not_damaged(tmp_path: Path) -> None:
    assert set(states_of(tmp_path).values()) == {"not there"}


def flip(path: Path, offset: int = -1) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("pattern", "damaged"),
    [
        (".eyas/targets/*/model.safetensors", "target.json"),
        ("data/hidden_states/000/shard-00001.safetensors", "hidden_states.json"),
        ("models/drafter/drafter.safetensors", "checkpoint.json"),
        ("models/export/sglang/model.safetensors", "export.json"),
    ],
)
def test_one_flipped_bit_is_found_and_nothing_else_is_blamed(finished: Path, pattern: str, damaged: str) -> None:
    (path,) = finished.glob(pattern)
    flip(path)
    states = states_of(finished)
    assert states.pop(damaged) == "damaged"
    assert set(states.values()) == {"whole"}


def test_missing_and_cut_files_are_named(finished: Path) -> None:
    (finished / "models/drafter/drafter.safetensors").unlink()
    (finished / "models/export/sglang/model.safetensors").write_bytes(b"exp")
    notes = {result.artifact: result.note for result in verify_all(finished).artifacts}
    assert notes["models/drafter/checkpoint.json"] == "drafter.safetensors is missing"
    assert notes["models/export/export.json"] == "sglang/model.safetensors: 3 bytes, expected 6"


def test_artifacts_of_two_runs_do_not_pass_together(finished: Path) -> None:
    """Each is whole in itself; what it was made from is another."""
    write_tokens(
        finished / "data/tokens",
        [make_sample([1, 2], [0, 1], conversation_id="f" * 16, source="a", split="train", variant="given")],
    )
    assert states_of(finished)["tokens"] == "damaged"


def test_an_artifact_of_older_inputs_is_out_of_date_and_not_damaged(finished: Path) -> None:
    path = finished / "models/drafter/checkpoint.json"
    identity = fs.read_json(path)["capture_identity"]
    path.write_text(path.read_text().replace(identity, "0" * 64))
    verified = verify_all(finished)
    states = {Path(result.artifact).name: result for result in verified.artifacts}
    assert states["checkpoint.json"].state == "out of date"
    assert "make repro" in states["checkpoint.json"].note
    assert not verified.is_damaged


def test_states_of_another_prefill_chunk_are_told(finished: Path) -> None:
    """Case 58: the chunk is part of the capture, and states of another one are not the plan's."""
    manifest = fs.read_record(ShardManifest, finished / "data/hidden_states.json")
    path = finished / "data/plan.json"
    plan = fs.read_record(CapturePlan, path)
    chunked = [
        dataclasses.replace(plan.capture, engine_options={"chunked_prefill_size": size}) for size in (8192, 32768)
    ]
    assert len({manifest.identity, *(capture.digest for capture in chunked)}) == 3
    fs.write_record(path, dataclasses.replace(plan, capture=chunked[1], identity=chunked[1].digest))
    found = {Path(result.artifact).name: result for result in verify_all(finished).artifacts}["hidden_states.json"]
    assert found.state == "out of date"
    assert f"identity {manifest.identity[:16]}, expected {chunked[1].digest[:16]} (the plan's)" in found.note


def test_account_of_the_plan_is_checked(finished: Path) -> None:
    path = finished / "data/plan.json"
    path.write_text(path.read_text().replace('"num_samples":28', '"num_samples":29'))
    notes = {result.artifact: result.note for result in verify_all(finished).artifacts}
    assert "num_samples 29, but its shards sum to 28" in notes["data/plan.json"]
