"""Tiny random models of the three kinds, saved as local folders; norms perturbed, so a norm too many shows."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from sglang_world import BOUNDARIES, DOUBLE, OPTIONS
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config

from eyas.contracts import FinalNorm, TargetIdentity
from eyas.engines.registry import make_engine
from eyas.engines.sglang import session
from eyas.plan import interpreter
from fake_target import make_target

COMMON = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**COMMON, head_dim=16),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "deepseek_v3": DeepseekV3Config(
        **COMMON | {"num_attention_heads": 4, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "norm" in key:
                    weight.add_(0.3 * torch.randn_like(weight))
                else:
                    weight.mul_(3)  # random targets have flat logits
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


@pytest.fixture(scope="session")
def identity():
    return TargetIdentity(
        source="directory:",
        revision="0",
        files=(),
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=4,
        hidden_size=96,
        vocab_size=320,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="float32",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-6, weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(2,),
        tokenizer_sha256="",
        chat_template_sha256="",
    )


@pytest.fixture
def sglang_double(tmp_path, monkeypatch):
    """This interpreter starts the double as its SGLang; no memory and no file of an arena is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{DOUBLE}:{DOUBLE.parents[1] / 'src'}")
    monkeypatch.setenv("EYAS_DOUBLE_FAULTS", str(tmp_path / "faults.json"))
    monkeypatch.setattr(session, "BACKOFF_S", (0.05, 0.05, 0.05))
    monkeypatch.setenv("EYAS_SHM_BYTES", str(16 << 20))  # pages of 4 GiB take a second to allocate
    monkeypatch.setattr(session.preflight, "LEAST_SHM_BYTES", 0)
    interpreter.installed_versions.cache_clear()
    yield
    interpreter.installed_versions.cache_clear()
    assert not list(Path("/dev/shm").glob(f"eyas-arena-{os.getpid()}-*"))
    assert "eyas-arena-" not in Path("/proc/self/maps").read_text(), "memory of a closed arena is still taken"


@pytest.fixture
def fail(tmp_path):
    """Tells the double how to fail."""

    def write(**faults):
        (tmp_path / "new").write_text(json.dumps(faults))
        (tmp_path / "new").rename(tmp_path / "faults.json")  # at once: a running double reads it

    return write


@pytest.fixture
def engine(tmp_path, sglang_double):
    """Of the double, not yet open."""
    opened = make_engine(
        "sglang", target=make_target(), folder=tmp_path, boundaries=BOUNDARIES, dtype="bfloat16", options=OPTIONS
    )
    yield opened
    opened.close()
