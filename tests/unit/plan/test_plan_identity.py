"""The capture identity: every fact that decides bytes changes it."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest

from eyas.canonical import from_plain, to_plain
from eyas.config import ExtractConfig
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
    capture = capture_identity(ExtractConfig(), TARGET, "bfloat16", "tokens")
    assert capture.boundaries == (2, 15, 27)
    assert capture.target == TARGET.digest
    versions = [f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in ("transformers", "torch")]
    assert capture.engine_version == ", ".join(versions)
    assert from_plain(CaptureIdentity, to_plain(capture)) == capture


def test_everything_that_decides_bytes_changes_the_identity():
    base = capture_identity(ExtractConfig(), TARGET, "bfloat16", "tokens").digest
    changes = [
        ({"boundaries": [2, 15, 28]}, "bfloat16", "tokens", TARGET),
        ({"shard_bytes": 4096}, "bfloat16", "tokens", TARGET),
        ({"batch_tokens": 17}, "bfloat16", "tokens", TARGET),
        ({"engine": "fake"}, "bfloat16", "tokens", TARGET),
        ({"engine_options": {"attention": "eager"}}, "bfloat16", "tokens", TARGET),
        ({"image": "sha256:1"}, "bfloat16", "tokens", TARGET),
        ({"revision": 2}, "bfloat16", "tokens", TARGET),
        ({}, "float32", "tokens", TARGET),
        ({}, "bfloat16", "others", TARGET),
        ({}, "bfloat16", "tokens", dataclasses.replace(TARGET, revision="s")),
    ]
    digests = {capture_identity(ExtractConfig(**e), target, dtype, tok).digest for e, dtype, tok, target in changes}
    assert len(digests | {base}) == len(changes) + 1


def test_what_cannot_change_bytes_does_not():
    base = capture_identity(ExtractConfig(), TARGET, "bfloat16", "tokens")
    assert capture_identity(ExtractConfig(reserve_bytes=5, max_failed_samples=3), TARGET, "bfloat16", "tokens") == base


def test_first_and_last_boundary_exist_and_one_beyond_does_not():
    capture = capture_identity(ExtractConfig(boundaries=[0, 30]), TARGET, "bfloat16", "tokens")
    assert capture.boundaries == (0, 30)
    with pytest.raises(ConfigError, match=r"extract\.boundaries.*31"):
        capture_identity(ExtractConfig(boundaries=[0, 31]), TARGET, "bfloat16", "tokens")


@pytest.mark.parametrize("boundaries", [[2, 2], [5, 2], [-1, 2]])
def test_repeated_falling_and_negative_boundaries_are_refused(boundaries):
    with pytest.raises(ConfigError, match=r"extract\.boundaries"):
        ExtractConfig(boundaries=boundaries).check()


def test_dtype_has_one_place():
    with pytest.raises(PlanError, match=r"target\.dtype"):
        capture_identity(ExtractConfig(engine_options={"dtype": "float32"}), TARGET, "bfloat16", "tokens")


def test_unknown_engine_is_named():
    with pytest.raises(PlanError, match="nonsense"):
        capture_identity(ExtractConfig(engine="nonsense"), TARGET, "bfloat16", "tokens")
