"""read_ends against transformers' own modules, and facts of architectures that nest or offset things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from eyas.errors import TargetError
from eyas.target.facts import OFFSET_NORM_MODELS, final_norm
from eyas.target.load import TensorFiles, read_ends, text_config

COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
DEEPSEEK = COMMON | {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "llama": (LlamaConfig, COMMON),
    "qwen3": (Qwen3Config, COMMON),
    "deepseek_v3": (DeepseekV3Config, DEEPSEEK),
    "gemma2": (Gemma2Config, COMMON),
}


def small(kind: str, tied: bool) -> torch.nn.Module:
    config_class, values = CONFIGS[kind]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_class(**values, tie_word_embeddings=tied)).to(torch.bfloat16)
    model.model.norm.weight.data = torch.randn(32).to(torch.bfloat16)
    return model


@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_ends_are_the_modules_own_weights(kind, tied, max_shard_size, tmp_path):
    model = small(kind, tied)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (max_shard_size == "10KB")
    ends = read_ends(tmp_path)
    assert torch.equal(ends.embedding_VD, model.get_input_embeddings().weight)
    assert torch.equal(ends.head_VD, model.get_output_embeddings().weight)
    assert torch.equal(ends.final_norm_D, model.model.norm.weight)


def test_a_stored_head_wins_over_a_tied_config_as_in_transformers(tmp_path):
    model = small("llama", tied=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(96, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(read_ends(tmp_path).head_VD, reloaded.get_output_embeddings().weight)


def test_kimi_style_nesting(tmp_path):
    """Kimi-K2.5 wraps a DeepSeek-V3 text model: names under language_model., sizes under text_config."""
    model = small("deepseek_v3", tied=False)
    tensors = {f"language_model.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    raw = {"model_type": "kimi_k25", "text_config": json.loads(model.config.to_json_string())}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ends = read_ends(tmp_path)
    assert torch.equal(ends.head_VD, model.lm_head.weight)
    assert torch.equal(ends.final_norm_D, model.model.norm.weight)
    norm = final_norm(text_config(raw), TensorFiles(tmp_path))
    assert (norm.kind, norm.eps, norm.weight_offset) == ("rms_norm", model.config.rms_norm_eps, 0.0)


def test_gemma3_style_nesting(tmp_path):
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=COMMON, vision_config=vision))
    model.save_pretrained(tmp_path)
    ends = read_ends(tmp_path)
    assert torch.equal(ends.embedding_VD, model.get_input_embeddings().weight)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert final_norm(text_config(raw), TensorFiles(tmp_path)).weight_offset == 1.0


def offset_of(norm: torch.nn.Module) -> float:
    """0 or 1, from what the module does with a zero weight."""
    norm.weight.data.zero_()
    return 1.0 if norm(torch.ones(1, norm.weight.shape[0])).abs().sum() > 0 else 0.0


NEXT = COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "linear_num_key_heads": 2,
                 "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "config"),
    [(kind, config_class(**values)) for kind, (config_class, values) in CONFIGS.items()]
    + [("qwen3_next", Qwen3NextConfig(**NEXT))],
)
def test_the_offset_table_agrees_with_transformers(model_type, config):
    model = AutoModelForCausalLM.from_config(config)
    assert offset_of(model.model.norm) == (1.0 if model_type in OFFSET_NORM_MODELS else 0.0)


@pytest.mark.parametrize("model_type", OFFSET_NORM_MODELS)
def test_every_listed_model_type_offsets_its_norm(model_type):
    """By the norm class of transformers' own module, called with a zero weight."""
    import importlib
    import inspect

    package = model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    norms = [c for n, c in inspect.getmembers(module, inspect.isclass) if n.endswith("RMSNorm") and "Gated" not in n]
    assert len(norms) == 1
    assert offset_of(norms[0](8)) == 1.0


def test_missing_shard_and_missing_tensor_are_named(tmp_path):
    small("llama", tied=False).save_pretrained(tmp_path, max_shard_size="10KB")
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    content = first.read_bytes()
    first.unlink()
    with pytest.raises(TargetError, match=f"{first.name} is missing"):
        read_ends(tmp_path)
    first.write_bytes(content)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.norm.weight", "model.other.weight"))
    with pytest.raises(TargetError, match=r"model\.other\.weight"):
        read_ends(tmp_path)


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path):
    save_file({"transformer.wte.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetError, match=r"(?s)model.embed_tokens.weight is in none.*language_model"):
        read_ends(tmp_path)
