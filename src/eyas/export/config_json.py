"""``config.json`` per server: the drafter's shape in each server's spelling.

SGLang reads a Llama config with an ``eagle_config`` inside; vLLM reads the speculators form. Both rope
schemas are written everywhere (``rope_theta`` with ``rope_scaling``, and ``rope_parameters``), because each
reader knows only one. ``tie_word_embeddings`` is always false: true would make the head the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.contracts import DrafterShape
from eyas.drafter.rope import rope_parameters

SGLANG_ARCHITECTURE = "LlamaForCausalLMEagle3"
VLLM_ARCHITECTURE = "Eagle3DraftModel"
SPECULATORS_VERSION = "0.9.0"
"""The version whose written form this is; vLLM reads the same keys."""
SPECULATIVE_TOKENS = 3
"""Draft tokens that a server proposes unless it is told otherwise."""


def layer_config(shape: DrafterShape) -> dict[str, Any]:
    """The one decoder layer as a Llama config, in both rope schemas."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": rope_parameters(shape.rope_theta, shape.rope_scaling),
        "rope_scaling": dict(shape.rope_scaling) if shape.rope_scaling else None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
    }


def sglang_config(shape: DrafterShape, layer_ids: Sequence[int], dtype: str) -> dict[str, Any]:
    """``sglang/config.json``; ``layer_ids`` are the boundaries in SGLang's spelling for this target."""
    return layer_config(shape) | {
        "architectures": [SGLANG_ARCHITECTURE],
        "draft_vocab_size": shape.draft_vocab_size,
        "dtype": dtype,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(layer_ids),
            "use_aux_hidden_state": True,
        },
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "torch_dtype": dtype,
    }


def vllm_config(
    shape: DrafterShape, layer_ids: Sequence[int], dtype: str, target_name: str, target_architecture: str
) -> dict[str, Any]:
    """``vllm/config.json`` in the speculators form; an empty target name is written as null."""
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [VLLM_ARCHITECTURE],
        "draft_vocab_size": shape.draft_vocab_size,
        "dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": list(layer_ids),
        "embed_requires_grad": False,
        "fc_norm": shape.fc_norm,
        "norm_before_fc": False,
        "norm_before_residual": shape.norm_before_residual,
        "norm_output": shape.norm_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [target_architecture], "name_or_path": target_name or None},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        # vLLM's Llama drafter counts streams here or takes three; it does not look at the list above
        "transformer_layer_config": layer_config(shape) | {"num_aux_hidden_states": shape.num_aux},
    }
