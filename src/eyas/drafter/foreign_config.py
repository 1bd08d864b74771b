"""``config.json`` of an EAGLE-3 checkpoint, SGLang's form or speculators', as a ``DrafterShape`` and layer ids.

Which form it is: ``speculators_model_type`` is there, or the class is SGLang's (or the Llama of the EAGLE
authors' own files, with a draft vocab). Everything that a Llama-type drafter cannot be is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.contracts import DrafterShape
from eyas.drafter.rope import RopeTypeError, read_rope
from eyas.errors import TrainError

Form = Literal["sglang", "speculators", "eyas"]
Spelling = Literal["sglang", "vllm", "boundaries"]
SGLANG_CLASSES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM")
DEFAULT_NUM_AUX = 3
RMS_NORM_EPS, MAX_POSITION_EMBEDDINGS = 1e-6, 2048
"""Llama's in transformers, for a config that leaves them out."""
BOUNDARIES_SINCE = (0, 5)
"""Older trainers of speculators read states by the output of a layer: their default is one boundary later."""
PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1} | {
    "tie_word_embeddings": False
}


LARGEST_SIZE = 1 << 24
"""Nothing that a drafter is built of has more entries; a config that says so would fill the memory first."""


def _is_size(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_SIZE


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "draft_vocab_size",
            "target_hidden_size",
            "num_aux_hidden_states",
            "max_position_embeddings",
            "num_hidden_layers",
        ),
        _is_size,
        f"a whole number from 1 to {LARGEST_SIZE:,}",
    ),
    (
        (
            "fc_norm",
            "use_aux_norm",
            "norm_output",
            "norm_before_residual",
            "norm_before_fc",
            "use_aux_hidden_state",
            "embed_requires_grad",
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
        ),
        lambda value: isinstance(value, bool),
        "true or false",
    ),
    (("rms_norm_eps", "rope_theta", "factor"), _is_positive, "a finite number above 0"),
    (("eagle_config", "rope_scaling", "rope_parameters"), lambda value: isinstance(value, dict), "an object"),
    (
        ("eagle_aux_hidden_state_layer_ids",),
        lambda value: isinstance(value, list) and all(_is_size(each, least=0) for each in value),
        "a list of whole numbers",
    ),
    (
        ("architectures",),
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        "a list of names",
    ),
)
"""Names, what their value has to be, and how people say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """What a checkpoint says of itself."""

    form: Form
    shape: DrafterShape
    spelling: Spelling
    """How ``layer_ids`` count."""
    layer_ids: tuple[int, ...] | None
    """None when the config names none: ``default_boundaries`` then holds."""
    default_shift: int = 0
    embedding_trained: bool = False
    head_is_targets: bool = False

    def default_boundaries(self, num_layers: int) -> tuple[int, ...]:
        """What its trainer and servers take for a target of ``num_layers`` when no ids are written."""
        return tuple(b + self.default_shift for b in (2, num_layers // 2, num_layers - 3))


def read_config(config: Mapping[str, Any]) -> ConfigFacts:
    """Facts of a parsed ``config.json``.

    Raises:
        TrainError: It is of another kind of drafter; every reason is listed.
    """
    _refuse_odd(config)
    if "speculators_model_type" in config or "speculators_config" in config:
        return _speculators(config)
    names = config.get("architectures") or []
    if not any(name in SGLANG_CLASSES for name in names) or "draft_vocab_size" not in config:
        raise TrainError(
            f"architectures {names} with draft_vocab_size {config.get('draft_vocab_size')!r}, expected an EAGLE-3 "
            f"drafter of Llama type: {SGLANG_CLASSES[0]}, or a config with speculators_model_type"
        )
    return _sglang(config)


def _refuse_odd(config: Mapping[str, Any]) -> None:
    """Refuse values of another kind than a server reads under their names; null is as good as left out."""
    layer = config.get("transformer_layer_config")
    parts = [(config, "")] + ([(layer, "transformer_layer_config.")] if isinstance(layer, Mapping) else [])
    parts += [
        (part[key], f"{where}{key}.")
        for part, where in tuple(parts)
        for key in ("rope_parameters", "rope_scaling")
        if isinstance(part.get(key), Mapping)
    ]
    problems = [
        f"{where}{key}: {part[key]!r:.60}, expected {expected}"
        for part, where in parts
        for keys, is_right, expected in KINDS
        for key in keys
        if part.get(key) is not None and not is_right(part[key])
    ]
    if problems:
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise TrainError(f"config.json is no drafter's:\n{lines}")


def _sglang(config: Mapping[str, Any]) -> ConfigFacts:
    eagle = config.get("eagle_config") or {}
    _refuse_odd(eagle)
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    problems = _not_plain(config)
    if eagle.get("norm_before_fc", config.get("norm_before_fc")):
        problems.append("norm_before_fc: true, expected false (one norm per stream is drafter.fc_norm)")
    if eagle.get("use_aux_hidden_state", True) is False:
        problems.append("eagle_config.use_aux_hidden_state: false, expected a drafter on aux states")
    num_aux = config.get("num_aux_hidden_states") or (len(ids) if ids else DEFAULT_NUM_AUX)
    shape = _shape(
        config,
        problems,
        num_aux=num_aux,
        draft_vocab_size=config["draft_vocab_size"],
        target_hidden_size=config.get("target_hidden_size"),
        switches={
            "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")),
            "norm_output": bool(config.get("norm_output")),
            "norm_before_residual": bool(config.get("norm_before_residual")),
        },
    )
    return ConfigFacts(
        form="sglang",
        shape=shape,
        spelling="sglang",
        layer_ids=tuple(ids) if ids else None,
        head_is_targets=config["draft_vocab_size"] is None,
    )


def _speculators(config: Mapping[str, Any]) -> ConfigFacts:
    kind = config.get("speculators_model_type")
    layer = config.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, Mapping):
        raise TrainError(f"speculators_model_type: {kind!r}, expected 'eagle3' with a transformer_layer_config")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    problems = _not_plain({**layer, "tie_word_embeddings": config.get("tie_word_embeddings")})
    if config.get("norm_before_fc"):
        problems.append("norm_before_fc: true, expected false (one norm per stream is drafter.fc_norm)")
    shape = _shape(
        layer,
        problems,
        num_aux=len(ids) if ids else DEFAULT_NUM_AUX,
        draft_vocab_size=config.get("draft_vocab_size"),
        target_hidden_size=config.get("target_hidden_size"),
        switches={key: bool(config.get(key)) for key in ("fc_norm", "norm_output", "norm_before_residual")},
    )
    converted = "Eagle3Speculator" in (config.get("architectures") or [])
    old = not converted and _version(config.get("speculators_version")) < BOUNDARIES_SINCE
    return ConfigFacts(
        form="speculators",
        shape=shape,
        spelling="vllm",
        layer_ids=tuple(ids) if ids else None,
        default_shift=1 if old else 0,
        embedding_trained=bool(config.get("embed_requires_grad")),
    )


def _not_plain(layer: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: {layer[key]!r}, expected {expected!r}"
        for key, expected in PLAIN.items()
        if layer.get(key, expected) not in (expected, None)
    ]


def _shape(
    layer: Mapping[str, Any],
    problems: list[str],
    *,
    num_aux: int,
    draft_vocab_size: int | None,
    target_hidden_size: int | None,
    switches: Mapping[str, bool],
) -> DrafterShape:
    """The shape, or one error with every problem."""
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    problems += [f"{key}: missing" for key in needed if not isinstance(layer.get(key), int)]
    hidden_size = layer.get("hidden_size")
    if target_hidden_size not in (None, hidden_size):
        problems.append(f"target_hidden_size: {target_hidden_size}, expected the drafter's own {hidden_size}")
    theta, scaling = 0.0, None
    try:
        theta, scaling = read_rope(layer)
    except RopeTypeError as error:
        problems.append(error.message)
    else:
        problems += [] if _is_positive(theta) else [f"rope_theta: {theta!r:.60}, expected a finite number above 0"]
    heads, kv_heads = layer.get("num_attention_heads"), layer.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        problems.append(f"num_key_value_heads: {kv_heads}, expected a divisor of the {heads} heads")
    if (draft_vocab_size or 0) > (layer.get("vocab_size") or LARGEST_SIZE):
        problems.append(f"draft_vocab_size: {draft_vocab_size}, expected at most vocab_size {layer['vocab_size']}")
    if problems:
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise TrainError(f"a drafter of this config.json is none that eyas can train:\n{lines}")
    heads = layer["num_attention_heads"]
    return DrafterShape(
        target_hidden_size=layer["hidden_size"],
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
        num_aux=num_aux,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=draft_vocab_size or layer["vocab_size"],
        rms_norm_eps=float(layer.get("rms_norm_eps") or RMS_NORM_EPS),
        rope_theta=theta,
        max_position_embeddings=layer.get("max_position_embeddings") or MAX_POSITION_EMBEDDINGS,
        rope_scaling=scaling,
        **switches,
    )


def _version(text: Any) -> tuple[int, ...]:
    """Major and minor of a version; the newest for a config that names none."""
    parts = str(text or "").split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else BOUNDARIES_SINCE
