"""Starting from an existing drafter: what is refused, and by which name."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from warm_world import FORMS, edit_config, edit_tensors, inputs_from, start, with_layers

from eyas.config.schema import DrafterConfig, TrainConfig
from eyas.drafter.foreign import content_hash, read_checkpoint
from eyas.errors import ConfigError, EyasError, StoreError, TrainError
from eyas.target.load import read_ends

# ── what is refused ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (
            {"intermediate_size": 40},
            [
                "drafter.intermediate_size: 40, the checkpoint has 24: set that",
                "midlayer.mlp.gate_proj.weight: [40, 16], the checkpoint has [24, 16]",
                "midlayer.mlp.down_proj.weight: [16, 40], the checkpoint has [16, 24]",
            ],
        ),
        (
            {"head_dim": 6, "fc_norm": True},
            [
                "drafter.head_dim: 6, the checkpoint has 4: set that",
                "drafter.fc_norm: True, the checkpoint has False: set that",
                "midlayer.self_attn.o_proj.weight: [16, 24], the checkpoint has [16, 16]",
                "midlayer.self_attn.k_proj.weight: [12, 32], the checkpoint has [8, 32]",
            ],
        ),
        ({"norm_output": True}, ["drafter.norm_output: True, the checkpoint has False: set that"]),
    ],
)
def test_another_shape_is_named_key_by_key_and_tensor_by_tensor(place, options, messages):
    with pytest.raises(TrainError) as caught:
        start(inputs_from(place, "sglang", drafter=DrafterConfig(**options)))
    assert all(message in str(caught.value) for message in messages)


def test_another_number_of_streams_is_refused(place):
    edit_config(place / "sglang", eagle_config__eagle_aux_hidden_state_layer_ids=[0, 1], num_aux_hidden_states=3)
    inputs = with_layers(inputs_from(place, "sglang"), 8, boundaries=(1, 2))
    with pytest.raises(TrainError, match="boundaries: 2 of them, the checkpoint reads 3"):
        start(inputs)


def test_another_targets_vocab_is_refused(place):
    edit_config(place / "sglang", vocab_size=61)
    edit_tensors(place / "sglang", lambda t: t.__setitem__("t2d", torch.cat([t["t2d"], torch.tensor([False])])))
    with pytest.raises(TrainError, match="the target's vocab is 60, the checkpoint's 61"):
        start(inputs_from(place, "sglang"))


def pop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("form", "edit", "message"),
    [
        ("sglang", pop("fc.weight"), r"fc.weight: missing, expected \[16, 48\]"),
        ("sglang", pop("d2t"), "d2t: missing"),
        ("sglang", put("fc.bias", torch.zeros(16)), r"fc.bias: unknown, \[16\]"),
        ("sglang", put("input_norm.weight", torch.ones(48)), "input_norm.weight: unknown"),
        ("sglang", put("norm.weight", torch.ones(8)), r"norm.weight: \[8\], its config says \[16\]"),
        ("sglang", put("norm.weight", torch.full((16,), float("nan"))), "norm.weight: torch.float32 with values"),
        ("sglang", put("d2t", torch.full((24,), 50)), "d2t: names target ids 50 to 73"),
        ("sglang", put("d2t", -torch.arange(24)), "expected 24 different"),
        ("sglang", put("t2d", torch.ones(60, dtype=torch.bool)), "t2d: .* does not mark the ids"),
        ("sglang", put("layers.0.mlp.gate_proj.weight", torch.ones(24, 16)), "two tensors are midlayer.mlp.gate_proj"),
        ("speculators", put("layers.0.self_attn.q_norm.weight", torch.ones(4)), "self_attn.q_norm.weight: unknown"),
        ("speculators", put("embed_tokens.weight", torch.ones(50, 16)), r"embed_tokens.weight: \[50, 16\], its config"),
        ("speculators", put("embed_tokens.weight", torch.randn(60, 16)), "is a drafter of another model"),
    ],
)
def test_each_wrong_tensor_is_named(place, form, edit, message):
    edit_tensors(place / form, edit)
    with pytest.raises(TrainError, match=message):
        start(inputs_from(place, form))


def test_all_faults_are_listed_at_once(place):
    def edit(tensors):
        tensors.pop("fc.weight")
        tensors["odd.weight"] = torch.zeros(2)
        tensors["norm.weight"] = torch.ones(3)

    edit_tensors(place / "sglang", edit)
    with pytest.raises(TrainError) as caught:
        read_checkpoint(place / "sglang")
    assert all(name in str(caught.value) for name in ("fc.weight", "odd.weight", "norm.weight"))


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("sglang", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "expected an EAGLE-3 drafter of Llama type"),
        ("sglang", {"draft_vocab_size": KeyError}, "expected an EAGLE-3 drafter of Llama type"),
        ("sglang", {"num_hidden_layers": 2}, "num_hidden_layers: 2, expected 1"),
        ("sglang", {"tie_word_embeddings": True}, "tie_word_embeddings: True, expected False"),
        ("sglang", {"hidden_act": "gelu"}, "hidden_act: 'gelu', expected 'silu'"),
        ("sglang", {"eagle_config__norm_before_fc": True}, "norm_before_fc: true, expected false"),
        ("sglang", {"eagle_config__use_aux_hidden_state": False}, "use_aux_hidden_state: false"),
        ("sglang", {"target_hidden_size": 32}, "target_hidden_size: 32, expected the drafter's own 16"),
        ("sglang", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic', expected one of"),
        ("sglang", {"hidden_size": KeyError}, "hidden_size: missing"),
        (
            "sglang",
            {"norm_before_residual": True},
            "drafter.norm_before_residual: False, the checkpoint has True: set that",
        ),
        ("sglang", {"vocab_size": 61}, "t2d"),
        (
            "speculators",
            {"norm_before_residual": True},
            "drafter.norm_before_residual: False, the checkpoint has True: set that",
        ),
        ("speculators", {"speculators_model_type": "dflash"}, "'dflash', expected 'eagle3'"),
        ("speculators", {"norm_before_fc": True}, "norm_before_fc: true, expected false"),
        ("speculators", {"transformer_layer_config__num_hidden_layers": 2}, "num_hidden_layers: 2, expected 1"),
    ],
)
def test_each_other_kind_of_drafter_is_refused(place, form, changes, message):
    edit_config(place / form, **changes)
    with pytest.raises(TrainError, match=message):
        start(inputs_from(place, form))


def test_an_embedding_that_was_trained_along_is_said_and_passed_over(place, capsys):
    edit_tensors(place / "speculators", lambda t: t["embed_tokens.weight"].mul_(1.1))
    edit_config(place / "speculators", embed_requires_grad=True)
    drafter = start(inputs_from(place, "speculators"))
    assert torch.equal(drafter.embed_tokens.weight, read_ends(place / "target").embedding_VD)
    assert "differs from the target's by 0.1 of its norm (embed_requires_grad" in capsys.readouterr().err


# ── files ─────────────────────────────────────────────────────────────────────────────────────


def test_names_of_older_files_are_read(made, place):
    """SGLang's legacy stream norms, the module prefix, and the target's copies that old trainers saved."""
    config = DrafterConfig(fc_norm=True)
    edit_config(place / "speculators", fc_norm=True)

    def edit(tensors):
        for stream, legacy in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            tensors[f"{legacy}.weight"] = torch.full((16,), 1.0 + stream)
        tensors["model.norm.weight"] = tensors.pop("norm.weight")
        tensors["verifier_lm_head.weight"] = torch.zeros(24, 16)
        tensors["verifier_norm.weight"] = torch.zeros(16)

    edit_tensors(place / "speculators", edit)
    drafter = start(inputs_from(place, "speculators", drafter=config))
    assert [norm.weight[0].item() for norm in drafter.fc_norm] == [1.0, 2.0, 3.0]
    assert torch.equal(drafter.norm.weight, made[1].norm.weight)


def to_pickle(folder, value=None):
    weights = folder / "model.safetensors"
    torch.save(load_file(weights) if value is None else value, folder / "pytorch_model.bin")
    weights.unlink()


def test_a_bin_is_read_as_tensors_alone(made, place):
    to_pickle(place / "sglang")
    assert torch.equal(start(inputs_from(place, "sglang")).fc.weight, made[1].fc.weight)


class Harm:
    def __reduce__(self):
        return (open, ("harm", "w"))


def test_a_bin_that_would_run_code_is_refused(place):
    with open(place / "sglang/pytorch_model.bin", "wb") as handle:
        pickle.dump({"fc.weight": Harm()}, handle)
    (place / "sglang/model.safetensors").unlink()
    with pytest.raises(StoreError, match="is no file of tensors alone"):
        start(inputs_from(place, "sglang"))
    assert not (place / "harm").exists()


def test_a_bin_of_other_things_is_refused(place):
    to_pickle(place / "sglang", {"fc.weight": [1, 2]})
    with pytest.raises(StoreError, match="other things than tensors by name"):
        start(inputs_from(place, "sglang"))


def test_weights_in_several_files_are_read_through_their_index(made, place):
    folder = place / "sglang"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for part in (0, 1):
        file = f"model-0000{part}-of-2.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, folder / file)
        weight_map |= dict.fromkeys(names[part::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(start(inputs_from(place, "sglang")).fc.weight, made[1].fc.weight)
    inputs = inputs_from(place, "sglang")
    (folder / "model-00001-of-2.safetensors").unlink()
    with pytest.raises(StoreError, match="model-00001-of-2"):
        start(inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("harm", ["cut", "empty", "gone", "no config", "config no json"])
def test_damaged_folders_are_user_errors(place, form, harm):
    inputs = inputs_from(place, form)
    folder = place / form
    weights = next(folder.glob("*.safetensors"))
    config = folder / ("checkpoint.json" if form == "eyas" else "config.json")
    if harm in ("cut", "empty"):
        weights.write_bytes(weights.read_bytes()[: 1000 if harm == "cut" else 0])
    else:
        {"gone": weights.unlink, "no config": config.unlink}.get(harm, lambda: config.write_text("{"))()
    with pytest.raises(EyasError):
        start(inputs)
    with pytest.raises((StoreError, TrainError)):
        read_checkpoint(folder)


# ── params.yaml ───────────────────────────────────────────────────────────────────────────────


def test_the_content_must_be_what_params_say(place):
    """dvc status sees params.yaml, not the folder: so the folder's content stands there."""
    found = content_hash(place / "sglang")
    for stated in ("", "0" * 64):
        with pytest.raises(ConfigError, match=rf"the content of sglang is {found}") as caught:
            start(inputs_from(place, "sglang", warm_start_sha256=stated))
        assert f"set train.warm_start_sha256 to {found}" in caught.value.hint
    inputs = inputs_from(place, "sglang")
    edit_tensors(place / "sglang", lambda tensors: tensors["fc.weight"].neg_())
    with pytest.raises(ConfigError, match=r"train\.warm_start_sha256"):
        start(inputs)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"warm_start": "/models/public", "warm_start_sha256": "0" * 64}, "train.warm_start:"),
        ({"warm_start": "~/public"}, "train.warm_start:"),
        ({"warm_start": "models/../../public"}, "train.warm_start:"),
        ({"warm_start": "./models/drafter/"}, "train.warm_start: .* a copy of it: DVC empties models/drafter"),
        ({"warm_start": "models/public", "warm_start_sha256": "abc"}, "train.warm_start_sha256"),
        ({"warm_start_sha256": "0" * 64}, "train.warm_start_sha256"),
    ],
)
def test_places_outside_and_half_hashes_are_config_errors(values, key):
    with pytest.raises(ConfigError, match=key):
        TrainConfig(**values).check()
    TrainConfig(warm_start="models/public", warm_start_sha256="0" * 64).check()
