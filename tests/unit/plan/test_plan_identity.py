"""The capture identity: every fact that decides bytes changes it."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest

from eyas.canonical import from_plain, to_plain
from eyas.config import ExtractConfig, TargetConfig
from eyas.contracts import CaptureIdentity, FinalNorm, TargetIdentity
from eyas.errors import ConfigError, PlanError
from eyas.plan.identity import capture_identity

TARGET = TargetIdentity(
    source="wheel:x==1",
    revision="r",
    files=(),
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
    tokenizer_sha256="a",
    chat_template_sha256="b",
)


def test_default_boundaries_and_versions_without_importing():
    capture = capture_identity(ExtractConfig(), TARGET, TargetConfig(), "tokens")
    assert capture.boundaries == (2, 15, 27)
    assert capture.target == TARGET.digest
    versions = [f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in ("transformers", "torch")]
    assert capture.engine_version == ", ".join(versions)
    assert from_plain(CaptureIdentity, to_plain(capture)) == capture


def test_everything_that_decides_bytes_changes_the_identity():
    base = capture_identity(ExtractConfig(), TARGET, TargetConfig(), "tokens").digest
    changes = [
        ({"boundaries": [2, 15, 28]}, TargetConfig(), "tokens", TARGET),
        ({"shard_bytes": 4096}, TargetConfig(), "tokens", TARGET),
        ({"batch_tokens": 17}, TargetConfig(), "tokens", TARGET),
        ({"engine": "fake"}, TargetConfig(), "tokens", TARGET),
        ({"engine_options": {"attention": "eager"}}, TargetConfig(), "tokens", TARGET),
        ({"codec": "raw"}, TargetConfig(), "tokens", TARGET),
        ({"last_rows": "trained"}, TargetConfig(), "tokens", TARGET),
        ({"image": "sha256:1"}, TargetConfig(), "tokens", TARGET),
        ({"revision": 77}, TargetConfig(), "tokens", TARGET),
        ({}, TargetConfig(dtype="float32"), "tokens", TARGET),
        ({}, TargetConfig(device="cuda"), "tokens", TARGET),
        ({}, TargetConfig(), "others", TARGET),
        ({}, TargetConfig(), "tokens", dataclasses.replace(TARGET, revision="s")),
    ]
    digests = {capture_identity(ExtractConfig(**e), target, runs_as, tok).digest for e, runs_as, tok, target in changes}
    assert len(digests | {base}) == len(changes) + 1


def test_what_cannot_change_bytes_does_not():
    base = capture_identity(ExtractConfig(), TARGET, TargetConfig(), "tokens")
    assert (
        capture_identity(ExtractConfig(reserve_bytes=5, max_failed_samples=3), TARGET, TargetConfig(), "tokens") == base
    )


def test_first_and_last_boundary_exist_and_one_beyond_does_not():
    capture = capture_identity(ExtractConfig(boundaries=[0, 30]), TARGET, TargetConfig(), "tokens")
    assert capture.boundaries == (0, 30)
    with pytest.raises(ConfigError, match=r"extract\.boundaries.*31"):
        capture_identity(ExtractConfig(boundaries=[0, 31]), TARGET, TargetConfig(), "tokens")


@pytest.mark.parametrize("boundaries", [[2, 2], [5, 2], [-1, 2]])
def test_repeated_falling_and_negative_boundaries_are_refused(boundaries):
    with pytest.raises(ConfigError, match=r"extract\.boundaries"):
        ExtractConfig(boundaries=boundaries).check()


@pytest.mark.parametrize(("key", "value"), [("dtype", "float32"), ("device", "cuda")])
def test_dtype_and_device_have_one_place(key, value):
    with pytest.raises(PlanError, match=rf"target\.{key}"):
        capture_identity(ExtractConfig(engine_options={key: value}), TARGET, TargetConfig(), "tokens")


def test_unknown_engine_is_named():
    with pytest.raises(PlanError, match="nonsense"):
        capture_identity(ExtractConfig(engine="nonsense"), TARGET, TargetConfig(), "tokens")
