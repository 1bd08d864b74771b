"""What is refused before vLLM starts: options, targets, versions, too little shared memory."""

import dataclasses

import pytest

from eyas.engines.vllm import preflight, shared_memory
from eyas.errors import ConfigError, PlanError, ServerError
from eyas.plan import interpreter
from eyas.plan.identity import engine_version


@pytest.mark.parametrize(("options", "message"), [
    ({"chunk": 1}, "engine_options.chunk: unknown to engine vllm"),
    ({"max_num_seqs": 0}, "engine_options.max_num_seqs: 0, expected a number from 1"),
    ({"attention_backend": 3}, "engine_options.attention_backend: 3, expected CPU_ATTN or"),
])  # fmt: skip
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        preflight.checked_options(options)


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"enable_prefix_caching": true}',
        '{"max_num_seqs": 2}',
        '{"quantization": "fp8"}',
        '{"kv_cache_dtype": "fp8"}',
        '{"hf_overrides": {}}',
    ],
)
def test_further_arguments_cannot_change_the_states(text, monkeypatch):
    monkeypatch.setenv("EYAS_VLLM_ARGS", text)
    with pytest.raises(ConfigError, match="EYAS_VLLM_ARGS"):
        preflight.more_arguments()


def test_further_arguments_that_change_no_state_are_passed_on(monkeypatch):
    monkeypatch.setenv("EYAS_VLLM_ARGS", '{"gpu_memory_utilization": 0.8, "max_model_len": 16384}')
    assert preflight.more_arguments() == {"gpu_memory_utilization": 0.8, "max_model_len": 16384}


def test_targets_that_vllm_cannot_capture_are_refused(identity):
    assert preflight.check_target(identity, (1, 4)) == (1, 4)
    assert preflight.check_target(identity, (0, 2)) == (0, 2, 4)
    with pytest.raises(PlanError, match=r"boundaries \[5\] do not exist"):
        preflight.check_target(identity, (5,))
    layer_norm = dataclasses.replace(identity, final_norm=dataclasses.replace(identity.final_norm, kind="layer_norm"))
    with pytest.raises(ServerError, match="'layer_norm'"):
        preflight.check_target(layer_norm, (1,))


def test_another_version_is_named_beside_the_supported_one(monkeypatch, tmp_path):
    """Case 55."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"vllm": "0.33.1", "torch": "2.14.0+cpu"}\'\n')
    python.chmod(0o755)
    monkeypatch.setenv("EYAS_VLLM_PYTHON", str(python))
    assert interpreter.vllm_versions() == {"vllm": "0.33.1", "torch": "2.14.0"}
    assert engine_version("vllm") == "vllm 0.33.1, torch 2.14.0"
    with pytest.raises(ServerError, match=r"vllm 0\.33\.1, supported: 0\.32\.0"):
        preflight.check_versions()
    monkeypatch.setenv("EYAS_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(PlanError, match="is no program"):
        preflight.check_versions()


def test_too_little_shared_memory_is_refused_with_the_fix():
    assert shared_memory.budget(10, 1000) == 500
    assert shared_memory.budget(400, 1000) == 800
    with pytest.raises(ServerError, match=r"1.0 kB free, the capture needs 1.2 kB") as caught:
        shared_memory.budget(600, 1000)
    assert "--shm-size" in str(caught.value.hint)
