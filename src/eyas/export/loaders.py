"""What each server's loader would do with a written folder, from ``config.json`` and tensor names alone.

Servers skip unknown names in silence and start with random weights where a name is missing, so nobody
notices a misnamed tensor until acceptance is low. These are their rules, restated: which parameters the
config builds, which name in the file reaches which parameter, and which boundaries would be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SGLANG_LEGACY_NAMES = {"midlayer": "layers.0", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1"} | {
    "aux_norm_high": "fc_norm.2"
}
DEFAULT_NUM_AUX = 3
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How a load would end."""

    loaded: dict[str, str]
    """Parameter -> name in the file."""
    skipped: tuple[str, ...]
    """Names in the file that reach no parameter."""
    missing: tuple[str, ...]
    """Parameters that would keep random values."""
    misshapen: tuple[str, ...]
    """``name [found] expected [shape]``."""


def simulate_load(
    server: str, expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> LoadOutcome:
    """Follow a server's loader.

    Args:
        server: ``sglang`` or ``vllm``.
        expected: From ``expected_parameters``.
        shapes: Tensor name -> shape, as stored.
    """
    loaded, skipped, misshapen = {}, [], []
    for name, found in sorted(shapes.items()):
        parameter = parameter_of(server, name)
        if parameter not in expected:
            skipped.append(name)
            continue
        loaded[parameter] = name
        if tuple(found) != expected[parameter]:
            misshapen.append(f"{name} {list(found)} expected {list(expected[parameter])}")
    missing = sorted(set(expected) - set(loaded))
    return LoadOutcome(loaded, tuple(skipped), tuple(missing), tuple(misshapen))


def parameter_of(server: str, name: str) -> str:
    """The parameter that a name in the file reaches; both servers accept either layer name."""
    if server == "sglang":
        for legacy, current in SGLANG_LEGACY_NAMES.items():
            name = name.replace(legacy, current)
        # These loaders test for the text anywhere in the name.
        if "d2t" in name:
            return "d2t"
        if "t2d" in name:
            return "t2d"
        return name.removeprefix("model.")
    if name == "d2t":
        return "d2t"
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def num_aux_states(server: str, config: Mapping[str, Any]) -> int:
    """Aux states that the server's ``fc`` is built for; vLLM's Llama drafter does not look at the top-level ids."""
    ids = written_layer_ids(server, config) if server == "sglang" else None
    return layer_section(server, config).get("num_aux_hidden_states") or len(ids or ()) or DEFAULT_NUM_AUX


def written_layer_ids(server: str, config: Mapping[str, Any]) -> list[int] | None:
    """The layer ids where this server looks for them; None when it would fall back to its default."""
    place = (config.get("eagle_config") or {}) if server == "sglang" else config
    return place.get("eagle_aux_hidden_state_layer_ids")


def layer_section(server: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the config that describes the decoder layer."""
    return config if server == "sglang" else config.get("transformer_layer_config") or {}


def expected_parameters(server: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape of the module that the server builds from this config."""
    layer = layer_section(server, config)
    E, inner, heads, kv_heads, head_dim, V = (layer[key] for key in SHAPE_KEYS)
    W = config["draft_vocab_size"]
    num_aux = num_aux_states(server, config)
    D = config.get("target_hidden_size") or E
    parameters = {
        "fc.weight": (E, num_aux * D),
        "norm.weight": (E,),
        "lm_head.weight": (W, E),
        "layers.0.self_attn.q_proj.weight": (heads * head_dim, 2 * E),
        "layers.0.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * E),
        "layers.0.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * E),
        "layers.0.self_attn.o_proj.weight": (E, heads * head_dim),
        "layers.0.mlp.gate_proj.weight": (inner, E),
        "layers.0.mlp.up_proj.weight": (inner, E),
        "layers.0.mlp.down_proj.weight": (E, inner),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    parameters |= {f"layers.0.{norm}.weight": (E,) for norm in norms}
    if config.get("fc_norm"):
        parameters |= {f"fc_norm.{i}.weight": (D,) for i in range(num_aux)}
    if config.get("norm_before_fc") or (config.get("eagle_config") or {}).get("norm_before_fc"):
        parameters["input_norm.weight"] = (num_aux * D,)
    if server == "vllm":
        parameters["embed_tokens.weight"] = (V, E)
    if W != V:
        parameters |= {"d2t": (W,), "t2d": (V,)}
    return parameters
