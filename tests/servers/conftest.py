"""Models and the interpreter for real servers; without SGLang the tests say where they looked and are skipped."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "deepseek": DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        rope_parameters=YARN,
    ),
}
PUBLISHED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Keys of DeepSeek's own config.json that SGLang reads and transformers does not write."""


@pytest.fixture(scope="session")
def python() -> Path:
    """An interpreter that has sglang 0.5.23 and this eyas."""
    named = os.environ.get("EYAS_SGLANG_PYTHON")
    found = Path(named) if named else ROOT / ".venv-sglang/bin/python"
    if not found.exists():
        pytest.skip(f"{found} does not exist: `make setup-sglang`, or name an interpreter by EYAS_SGLANG_PYTHON")
    asked = subprocess.run(
        [found, "-c", "from importlib.metadata import *; version('eyas'); print(version('sglang'))"],
        capture_output=True,
        text=True,
    )
    if asked.stdout.strip() != "0.5.23":
        pytest.skip(
            f"{found} has no sglang 0.5.23 beside eyas: {asked.stdout or asked.stderr.strip().splitlines()[-1]}"
        )
    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models, float32; norms differ from 1, so a norm too many or too few shows."""
    folders = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "norm" in key:
                    weight.add_(0.3 * torch.randn_like(weight))
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        if name == "deepseek":
            file = folders[name] / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | PUBLISHED))
    smollm2 = _smollm2()
    if smollm2:
        folders["smollm2"] = smollm2
    return folders


def _smollm2() -> Path | None:
    for config in Path(os.environ.get("EYAS_TARGETS_DIR", ROOT / ".eyas/targets")).glob("*/config.json"):
        if json.loads(config.read_text()).get("hidden_size") == 576:
            return config.parent
    return None


@pytest.fixture
def arena_path() -> Iterator[Path]:
    path = Path(f"/dev/shm/eyas-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)
