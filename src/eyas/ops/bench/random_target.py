"""Targets of random weights that benches capture from, and samples of random ids.

Norm gains differ from 1, so that a missing norm shows.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from eyas import fs
from eyas.contracts import FinalNorm, TargetIdentity, TokenSample

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    },
}  # fmt: skip
"""Of Llama type: Llama-3.1-8B, and one for a CPU."""
MOE = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
MLA_SHAPES: dict[str, dict[str, Any]] = {
    "mla": MOE | {
        "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "q_lora_rank": 384, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 8192,
    },
    "tiny-mla": MOE | {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 2048,
    },
}  # fmt: skip
"""Of DeepSeek-V3 type: as wide as MLA kernels want it, and one for a CPU."""
BOUNDARIES = {"8b": (2, 16, 29), "tiny": (1, 3, 5), "mla": (2, 4, 6), "tiny-mla": (2, 3, 4)}
LOG_MEAN, LOG_SIGMA = 7.15, 0.6
"""Of the samples' lengths: about 1,500 tokens."""
EPS, THETA = 1e-5, 500_000.0
PUBLISHED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
"""Keys of DeepSeek's own config.json that SGLang reads and transformers does not write."""


def make_target(folder: Path, name: str, device: str) -> None:
    """Save a random model in transformers' layout.

    Args:
        folder: Where to.
        name: Of ``SHAPES`` or ``MLA_SHAPES``.
        device: Where the weights are drawn.
    """
    from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

    common = {"rms_norm_eps": EPS, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    if name in SHAPES:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": THETA}
        model_config: Any = LlamaConfig(**SHAPES[name], **common, rope_parameters=rope)
        further: dict[str, Any] = {"rope_theta": THETA}  # where older readers look for it
    else:
        context = MLA_SHAPES[name]["max_position_embeddings"]
        rope = {
            "rope_type": "yarn", "rope_theta": THETA, "factor": 2.0, "original_max_position_embeddings": context // 2,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        }  # fmt: skip
        model_config = DeepseekV3Config(**MLA_SHAPES[name], **common, pad_token_id=0, rope_parameters=rope)
        further = PUBLISHED | {"rope_theta": THETA, "rope_scaling": rope | {"type": "yarn"}}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="4GB")
    written = json.loads((folder / "config.json").read_text())
    fs.write_text(folder / "config.json", json.dumps(written | further, indent=1))


def identity(name: str) -> TargetIdentity:
    """Of a target that nobody fetched: sizes are true, hashes are none."""
    shape = SHAPES.get(name) or MLA_SHAPES[name]
    architecture, kind = ("LlamaForCausalLM", "llama") if name in SHAPES else ("DeepseekV3ForCausalLM", "deepseek_v3")
    return TargetIdentity(
        source=f"random:{name}", revision="0" * 64, files=(), architecture=architecture, model_type=kind,
        num_layers=shape["num_hidden_layers"], hidden_size=shape["hidden_size"], vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["max_position_embeddings"], tie_word_embeddings=False, dtype="bfloat16",
        final_norm=FinalNorm(kind="rms_norm", eps=EPS, weight_offset=0.0, num_zero_scales=0), eos_token_ids=(2,),
        tokenizer_sha256="0" * 64, chat_template_sha256="0" * 64,
    )  # fmt: skip


def make_samples(num_tokens: int, vocab_size: int, context: int) -> dict[str, TokenSample]:
    """Samples of random ids, of log-normal lengths up to half of the context."""
    dice, samples, total = random.Random(5), dict[str, TokenSample](), 0  # noqa: S311 - the same each time
    while total < num_tokens:
        length = max(32, min(context // 2, int(dice.lognormvariate(LOG_MEAN, LOG_SIGMA))))
        name = f"{len(samples):016x}"
        ids = tuple(dice.randrange(3, vocab_size) for _ in range(length))
        masked = length // 4
        samples[name] = TokenSample(
            sample_id=name, conversation_id=name, source="random", split="train", variant="greedy", input_ids=ids,
            loss_mask=(0,) * masked + (1,) * (length - masked),
        )  # fmt: skip
        total += length
    return samples
