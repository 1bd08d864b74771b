"""The export's key check against deliberate corruptions: each is refused by the name of what is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.contracts import DrafterShape
from eyas.drafter.rope import Rope
from eyas.errors import ExportError
from eyas.export import check, config_json, loaders, tensors

SHAPE = DrafterShape(
    target_hidden_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_aux=3,
    vocab_size=40,
    draft_vocab_size=12,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    max_position_embeddings=128,
    fc_norm=True,
    norm_output=True,
)
IDS = {"sglang": [1, 2, 3], "vllm": [2, 3, 4]}


def random_tensors(shape: DrafterShape) -> tensors.DrafterTensors:
    """Weights of the right shapes, written out here and not taken from the code under test."""
    E, D, A = shape.hidden_size, shape.target_hidden_size, shape.num_aux
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sizes = {
        "fc.weight": (E, A * D),
        "norm.weight": (E,),
        "lm_head.weight": (shape.draft_vocab_size, E),
        "midlayer.hidden_norm.weight": (E,),
        "midlayer.input_layernorm.weight": (E,),
        "midlayer.post_attention_layernorm.weight": (E,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * E),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * E),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * E),
        "midlayer.self_attn.o_proj.weight": (E, q),
        "midlayer.mlp.gate_proj.weight": (shape.intermediate_size, E),
        "midlayer.mlp.up_proj.weight": (shape.intermediate_size, E),
        "midlayer.mlp.down_proj.weight": (E, shape.intermediate_size),
    }
    if shape.fc_norm:
        sizes |= {f"fc_norm.{i}.weight": (D,) for i in range(A)}
    generator = torch.Generator().manual_seed(1)
    target_ids = torch.arange(shape.draft_vocab_size) * 3 + 1
    t2d_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
    t2d_V[target_ids] = True
    return tensors.DrafterTensors(
        weights={name: torch.randn(size, generator=generator) for name, size in sizes.items()},
        d2t_W=target_ids - torch.arange(shape.draft_vocab_size),
        t2d_V=t2d_V,
        embedding_VD=torch.randn(shape.vocab_size, E, generator=generator),
    )


def write(folder: Path, server: str, shape: DrafterShape = SHAPE) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A right folder of one server; returns its config and tensors for corrupting."""
    if server == "sglang":
        config = config_json.sglang_config(shape, IDS[server], "bfloat16")
    else:
        config = config_json.vllm_config(shape, IDS[server], "bfloat16", "", "LlamaForCausalLM")
    named = tensors.server_tensors(server, shape, random_tensors(shape), "bfloat16")
    store(folder, config, named)
    return config, named


def store(folder: Path, config: dict[str, Any], named: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors.write_tensors(folder / "model.safetensors", named)


def read(folder: Path, server: str, shape: DrafterShape = SHAPE) -> dict[str, torch.Tensor]:
    return check.read_checked(folder, server, shape, IDS[server], "bfloat16")


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_right_folder_passes_and_reads_back(tmp_path: Path, server: str, fc_norm: bool) -> None:
    shape = replace(SHAPE, fc_norm=fc_norm)
    _, named = write(tmp_path, server, shape)
    found = read(tmp_path, server, shape)
    assert sorted(found) == sorted(named)
    assert all(torch.equal(found[name], named[name]) for name in named)


def replace(shape: DrafterShape, **changes: Any) -> DrafterShape:
    import dataclasses

    return dataclasses.replace(shape, **changes)


def test_names_per_server_are_the_formats() -> None:
    """Case 78: SGLang's file has midlayer and no embedding; vLLM's has layers.0 and the embedding."""
    names = {s: set(tensors.server_tensors(s, SHAPE, random_tensors(SHAPE), "bfloat16")) for s in ("sglang", "vllm")}
    assert {n for n in names["sglang"] if n.startswith("midlayer.")}
    assert "embed_tokens.weight" not in names["sglang"]
    assert "embed_tokens.weight" in names["vllm"]
    assert names["vllm"] - {"embed_tokens.weight"} == {n.replace("midlayer.", "layers.0.") for n in names["sglang"]}
    whole = replace(SHAPE, draft_vocab_size=40)
    kept = tensors.server_tensors("vllm", whole, random_tensors(replace(SHAPE, draft_vocab_size=12)), "bfloat16")
    assert not {"d2t", "t2d"} & set(kept)


Tensors = dict[str, torch.Tensor]


def rename(named: Tensors, old: str, new: str) -> None:
    named[new] = named.pop(old)


def shuffled(d2t_W: torch.Tensor) -> torch.Tensor:
    target_ids = (d2t_W + torch.arange(len(d2t_W))).flip(0)
    return target_ids - torch.arange(len(d2t_W))


def set_(key: str, value: Any) -> Callable[[dict, Tensors], Any]:
    def change(config: dict, named: Tensors) -> None:
        place: Any = config
        *parents, last = key.split(".")
        for parent in parents:
            place = place[parent]
        if value is KeyError:
            del place[last]
        else:
            place[last] = value

    return change


CORRUPTIONS: list[tuple[str, str, Callable[[dict, Tensors], Any], str]] = [
    ("sglang", "dropped key", lambda c, t: t.pop("fc.weight"), "fc.weight: missing"),
    ("vllm", "dropped key", lambda c, t: t.pop("embed_tokens.weight"), "embed_tokens.weight: missing"),
    ("sglang", "dropped norm", lambda c, t: t.pop("fc_norm.1.weight"), "fc_norm.1.weight: missing"),
    ("sglang", "dropped shard", lambda c, t: t.pop("midlayer.mlp.up_proj.weight"), "mlp.up_proj.weight: missing"),
    (
        "sglang",
        "renamed key",
        lambda c, t: rename(t, "norm.weight", "final_norm.weight"),
        "final_norm.weight: the loader would skip",
    ),
    (
        "vllm",
        "renamed key",
        lambda c, t: rename(t, "layers.0.hidden_norm.weight", "layers.1.hidden_norm.weight"),
        "layers.1.hidden_norm.weight: the loader would skip",
    ),
    ("sglang", "no map", lambda c, t: t.pop("d2t"), "d2t: missing"),
    ("sglang", "shuffled d2t", lambda c, t: t.update(d2t=shuffled(t["d2t"])), "d2t: target ids do not rise"),
    (
        "vllm",
        "target ids instead of offsets",
        lambda c, t: t.update(d2t=t["d2t"] + torch.arange(12)),
        "d2t: target ids 1 to 45",
    ),
    ("vllm", "t2d of another vocab", lambda c, t: t.update(t2d=t["t2d"].roll(1)), "t2d: does not mark"),
    ("sglang", "t2d too many", lambda c, t: t.update(t2d=torch.ones(40, dtype=torch.bool)), "t2d: 40 ids"),
    ("sglang", "d2t dtype", lambda c, t: t.update(d2t=t["d2t"].int()), "d2t: torch.int32"),
    (
        "sglang",
        "wrong head size",
        lambda c, t: t.update({"lm_head.weight": torch.zeros(13, 16, dtype=torch.bfloat16)}),
        "lm_head.weight [13, 16] expected [12, 16]",
    ),
    ("vllm", "NaN", lambda c, t: t["fc.weight"].fill_(float("nan")), "fc.weight: holds NaN"),
    ("vllm", "fp32 weights", lambda c, t: t.update({"fc.weight": t["fc.weight"].float()}), "fc.weight: torch.float32"),
    (
        "sglang",
        "wrong ids",
        set_("eagle_config.eagle_aux_hidden_state_layer_ids", [2, 3, 4]),
        "would use [2, 3, 4], expected [1, 2, 3]",
    ),
    (
        "vllm",
        "wrong ids",
        set_("eagle_aux_hidden_state_layer_ids", [1, 2, 3]),
        "would use [1, 2, 3], expected [2, 3, 4]",
    ),
    ("sglang", "no eagle_config", set_("eagle_config", KeyError), "its own default"),
    ("vllm", "no ids", set_("eagle_aux_hidden_state_layer_ids", KeyError), "its own default"),
    (
        "sglang",
        "architectures of the target",
        set_("architectures", ["LlamaForCausalLM"]),
        "architectures: ['LlamaForCausalLM']",
    ),
    ("vllm", "plain model", set_("speculators_config", KeyError), "speculators_config: missing"),
    ("sglang", "tied", set_("tie_word_embeddings", True), "tie_word_embeddings: True"),
    ("sglang", "normed residual", set_("norm_before_residual", True), "norm_before_residual: True"),
    ("vllm", "normed residual", set_("norm_before_residual", True), "norm_before_residual: True"),
    ("sglang", "no theta", set_("rope_theta", KeyError), "rope_theta: None"),
    ("sglang", "no rope_parameters", set_("rope_parameters", KeyError), "rope_parameters: None"),
    (
        "vllm",
        "other theta",
        set_("transformer_layer_config.rope_theta", 10000.0),
        "rope_theta: 10000.0, expected 100000.0",
    ),
    (
        "vllm",
        "other theta, new schema",
        set_("transformer_layer_config.rope_parameters.rope_theta", 1e4),
        "rope_parameters: ",
    ),
    ("sglang", "null draft vocab", set_("draft_vocab_size", None), "draft_vocab_size: None"),
    ("sglang", "norm_output lost", set_("norm_output", KeyError), "norm_output: None"),
    (
        "vllm",
        "training path",
        set_("speculators_config.verifier.name_or_path", "/data/models/target"),
        "speculators_config.verifier.name_or_path: '/data/models/target' is a path",
    ),
]


@pytest.mark.parametrize(
    ("server", "what", "corrupt", "named_in_error"), CORRUPTIONS, ids=[f"{c[0]}-{c[1]}" for c in CORRUPTIONS]
)
def test_each_corruption_is_refused_by_name(
    tmp_path: Path, server: str, what: str, corrupt: Callable[[dict, Tensors], Any], named_in_error: str
) -> None:
    """Cases 77 (normed residual), 78 (architectures, names, ids), 79 (rope) and 80 (local path)."""
    config, named = write(tmp_path, server)
    corrupt(config, named)
    store(tmp_path, config, named)
    with pytest.raises(ExportError) as error:
        read(tmp_path, server)
    assert named_in_error in str(error.value), what


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    config, named = write(tmp_path, "sglang")
    rename(named, "fc.weight", "proj.weight")
    named.pop("norm.weight")
    store(tmp_path, config, named)
    with pytest.raises(ExportError) as error:
        read(tmp_path, "sglang")
    assert [line for line in str(error.value).splitlines() if line.startswith("- ")] == [
        "- proj.weight: the loader would skip it in silence",
        "- fc.weight: missing, it would keep random values",
        "- norm.weight: missing, it would keep random values",
    ]


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"config\.json is missing"):
        read(tmp_path, "sglang")


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_both_rope_schemas_equal_training(kind: str) -> None:
    """Case 79: theta and scaling stand in both schemas, and transformers turns by each as training did."""
    scaling = {
        "default": None,
        "linear": {"factor": 2.0},
        "llama3": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
        | {"original_max_position_embeddings": 64},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    }[kind]
    pairs = None if scaling is None else tuple(sorted((scaling | {"rope_type": kind}).items()))
    shape = replace(SHAPE, rope_scaling=pairs)
    trained_cos_PK, trained_sin_PK = Rope(shape).table(100, "cpu", torch.float32)
    half = shape.head_dim // 2
    for layer in (
        config_json.sglang_config(shape, IDS["sglang"], "bfloat16"),
        config_json.vllm_config(shape, IDS["vllm"], "bfloat16", "", "L")["transformer_layer_config"],
    ):
        assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 100000.0
        assert layer["rope_parameters"]["rope_type"] == kind
        old = {name: value for name, value in layer.items() if name != "rope_parameters"}
        new = {name: value for name, value in layer.items() if name not in ("rope_theta", "rope_scaling")}
        for schema in (layer, old, new):
            rotary = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(schema)))
            cos, sin = rotary(torch.zeros(1), torch.arange(100)[None])
            assert torch.allclose(cos[0], trained_cos_PK[:100], atol=1e-4)
            assert torch.allclose(sin[0, :, half:], trained_sin_PK[:100, half:], atol=1e-4)


def test_fully_named_target_is_written_and_an_empty_one_is_null() -> None:
    """Case 80."""
    for name, written in (("org/model", "org/model"), ("", None)):
        config = config_json.vllm_config(SHAPE, IDS["vllm"], "bfloat16", name, "LlamaForCausalLM")
        assert config["speculators_config"]["verifier"]["name_or_path"] == written


def test_shapes_that_a_server_would_run_differently_are_refused() -> None:
    with pytest.raises(ExportError, match="pass over fc"):
        check.refuse_unservable(replace(SHAPE, num_aux=1), ["vllm"])
    with pytest.raises(ExportError, match="share the target's embedding"):
        check.refuse_unservable(replace(SHAPE, hidden_size=8), ["vllm"])


def test_a_normed_residual_goes_to_vllm_alone() -> None:
    """Case 77: SGLang would run another model."""
    shape = replace(SHAPE, norm_before_residual=True)
    with pytest.raises(ExportError, match="SGLang's residual is the raw hidden state"):
        check.refuse_unservable(shape, ["vllm", "sglang"])
    check.refuse_unservable(shape, ["vllm"])
    config = config_json.vllm_config(shape, IDS["vllm"], "bfloat16", "", "L")
    assert config["norm_before_residual"] is True
    assert list(check.config_problems("vllm", config, shape, IDS["vllm"])) == []
    config["norm_before_residual"] = False
    assert "expected True as trained" in next(check.config_problems("vllm", config, shape, IDS["vllm"]))


def test_weight_missing_from_the_checkpoint_is_refused() -> None:
    whole = random_tensors(SHAPE)
    weights = {name: tensor for name, tensor in whole.weights.items() if name != "norm.weight"} | {
        "extra.bias": torch.zeros(1)
    }
    broken = tensors.DrafterTensors(weights, whole.d2t_W, whole.t2d_V, whole.embedding_VD)
    with pytest.raises(ExportError, match=r"no norm\.weight; unexpected: extra\.bias"):
        tensors.server_tensors("sglang", SHAPE, broken, "bfloat16")


def test_legacy_names_reach_their_parameters() -> None:
    reached = [
        loaders.parameter_of("sglang", name)
        for name in ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
    ]
    assert reached == ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]
    assert loaders.parameter_of("vllm", "midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"


@given(st.sets(st.integers(0, 39), min_size=1, max_size=40), st.integers(0, 39), st.integers(-40, 40))
def test_map_check_accepts_exactly_the_true_maps(ids: set[int], place: int, shift: int) -> None:
    target_ids = torch.tensor(sorted(ids))
    t2d_V = torch.zeros(40, dtype=torch.bool)
    t2d_V[target_ids] = True
    d2t_W = target_ids - torch.arange(len(target_ids))
    assert list(check.map_problems(d2t_W, t2d_V)) == []
    d2t_W[place % len(d2t_W)] += shift
    assert bool(list(check.map_problems(d2t_W, t2d_V))) == (shift != 0)
