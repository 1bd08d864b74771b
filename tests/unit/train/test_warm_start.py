"""Starting from an existing drafter: what is taken, what is refused, and what the run says of it."""

import dataclasses
import json
import pickle

import pytest
import torch
import train_world as world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eyas.config.schema import DrafterConfig, ExportConfig, TrainConfig
from eyas.drafter.foreign import content_hash, read_checkpoint
from eyas.errors import ConfigError, EyasError, StoreError, TrainError
from eyas.export.compare import sample_logits
from eyas.export.write import export
from eyas.target.load import read_ends
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.checkpoint import load_drafter
from eyas.train.run import new_drafter, target_ends

FORMS = {"eyas": "drafter", "sglang": "export/sglang", "speculators": "export/vllm"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trained drafter with a head of its own, and its export: (folder, drafter)."""
    folder = tmp_path_factory.mktemp("made")
    world.run(folder, world.make_inputs(folder, train_head=True, lr=0.05))
    drafter, meta = load_drafter(folder / "drafter", read_ends(folder / "target").embedding_VD)
    export(drafter, meta, world.make_identity(), ExportConfig(dtype="float32"), folder / "export")
    return folder, drafter


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A repository that holds a copy of the drafter in every form."""
    for form, path in FORMS.items():
        (tmp_path / form).mkdir()
        for file in (made[0] / path).iterdir():
            (tmp_path / form / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def inputs_from(place, form, drafter=None, **changes):
    changes = {"warm_start": form, "warm_start_sha256": content_hash(place / form)} | changes
    return world.make_inputs(place, drafter=drafter, **changes)


def start(inputs):
    return new_drafter(inputs, target_ends(inputs), DraftVocab.read(inputs.vocab_folder))


def write_vocab(place, ids):
    t2d = torch.zeros(world.V, dtype=torch.bool)
    t2d[ids] = True
    (place / "vocab").mkdir(exist_ok=True)
    DraftVocab(d2t_W=torch.tensor(sorted(ids)) - torch.arange(len(ids)), t2d_V=t2d).write(place / "vocab")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        part = config
        for name in outer:
            part = part[name]
        part[last] = value
        if value is KeyError:
            del part[last]
    path.write_text(json.dumps(config))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)


# ── what is taken ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", FORMS)
def test_an_export_read_back_is_the_drafter(made, place, form):
    """Round trip: identical weights, identical logits of every step."""
    drafter = start(inputs_from(place, form))
    assert dict(drafter.named_parameters()).keys() == dict(made[1].named_parameters()).keys()
    for name, parameter in made[1].named_parameters():
        assert torch.equal(drafter.get_parameter(name), parameter), name
    assert drafter.shape == made[1].shape
    for found, expected in zip(sample_logits(drafter), sample_logits(made[1]), strict=True):
        assert torch.equal(found, expected)
    cold = start(world.make_inputs(place))
    assert not any(torch.equal(cold.get_parameter(name), p) for name, p in made[1].named_parameters())


@pytest.mark.parametrize("options", [{"fc_norm": True, "norm_output": True}, {"head_dim": 6, "num_key_value_heads": 4}])
@pytest.mark.parametrize("form", FORMS)
def test_every_shape_goes_round(tmp_path, monkeypatch, options, form):
    monkeypatch.chdir(tmp_path)
    config = DrafterConfig(**options)
    world.run(tmp_path, world.make_inputs(tmp_path, drafter=config, num_steps=2))
    drafter, meta = load_drafter(tmp_path / "drafter", read_ends(tmp_path / "target").embedding_VD)
    export(drafter, meta, world.make_identity(), ExportConfig(dtype="float32"), tmp_path / "export")
    again = start(inputs_from(tmp_path, FORMS[form], drafter=config))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), drafter.parameters(), strict=True))


def test_a_run_goes_on_from_it_and_says_so(made, place):
    """The record holds the content hash; the same start gives the same bytes; another start, others."""
    inputs = inputs_from(place, "sglang", num_steps=2)
    meta, _ = world.run(place, inputs)
    assert meta.warm_start == content_hash(place / "sglang")
    first = world.result_bytes(place)
    world.run(place, inputs)
    assert world.result_bytes(place) == first
    cold, _ = world.run(place, world.make_inputs(place, num_steps=2))
    assert cold.warm_start == ""
    assert world.result_bytes(place)["drafter/drafter.safetensors"] != first["drafter/drafter.safetensors"]


def test_a_frozen_head_keeps_the_checkpoints_rows(made, place):
    """train_head: false freezes the rows it starts with, not the target's."""
    world.run(place, inputs_from(place, "sglang", num_steps=3, train_head=False))
    trained = load_file(place / "drafter/drafter.safetensors")
    assert torch.equal(trained["lm_head.weight"], made[1].lm_head.weight)
    assert not torch.equal(trained["fc.weight"], made[1].fc.weight)


def test_the_place_does_not_decide_and_the_content_does(place):
    one = inputs_from(place, "sglang")
    (place / "sglang").rename(place / "moved")
    two = inputs_from(place, "moved")
    assert one.run_key() == two.run_key()
    (place / "moved/README.md").write_text("nothing that is read\n")
    assert inputs_from(place, "moved").run_key() == one.run_key()
    edit_tensors(place / "moved", lambda tensors: tensors["fc.weight"].neg_())
    assert inputs_from(place, "moved").run_key() != one.run_key()


# ── the draft vocab ───────────────────────────────────────────────────────────────────────────


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.sets(st.integers(0, world.V - 1), min_size=1))
def test_head_rows_follow_their_target_ids(made, place, ids):
    """The checkpoint says even ids below 48; whatever ours says, each id finds its own row or the target's."""
    write_vocab(place, sorted(ids))
    inputs = inputs_from(place, "sglang")
    drafter, head_VD = start(inputs), target_ends(inputs).head_VD
    own_row = {2 * row: made[1].lm_head.weight[row] for row in range(world.W)}
    for row, target_id in enumerate(sorted(ids)):
        expected = own_row.get(target_id, head_VD[target_id].float())
        assert torch.equal(drafter.lm_head.weight[row], expected)
    assert torch.equal(drafter.t2d.nonzero()[:, 0], torch.tensor(sorted(ids)))


def test_from_a_reduced_vocab_to_the_whole_and_back(made, place):
    write_vocab(place, list(range(world.V)))
    world.run(place, inputs_from(place, "sglang", num_steps=1, lr=1e-9))
    whole, meta = load_drafter(place / "drafter", read_ends(place / "target").embedding_VD)
    export(whole, meta, world.make_identity(), ExportConfig(dtype="float32"), place / "whole")
    assert "d2t" not in load_file(place / "whole/sglang/model.safetensors")
    write_vocab(place, [2 * i for i in range(world.W)])
    for form in ("whole/sglang", "whole/vllm", "drafter"):
        assert torch.equal(start(inputs_from(place, form)).lm_head.weight, made[1].lm_head.weight)


def test_a_form_without_a_head_starts_from_the_targets(made, place):
    """draft_vocab_size null: SGLang loads the target's head, so nothing of it is in the file."""
    edit_config(place / "sglang", draft_vocab_size=None)
    edit_tensors(place / "sglang", lambda tensors: [tensors.pop(name) for name in ("lm_head.weight", "d2t", "t2d")])
    inputs = inputs_from(place, "sglang")
    drafter = start(inputs)
    assert torch.equal(drafter.lm_head.weight, target_ends(inputs).head_VD[::2][: world.W].float())
    assert torch.equal(drafter.fc.weight, made[1].fc.weight)


# ── rotary positions and epsilon ──────────────────────────────────────────────────────────────


def test_positions_and_epsilon_come_with_the_weights(made, place, capsys):
    """They were trained under them; the target's own would make every key wrong."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    edit_config(place / "sglang", rope_theta=7e5, rope_scaling=scaling, rope_parameters=KeyError, rms_norm_eps=1e-3)
    shape = start(inputs_from(place, "sglang")).shape
    assert (shape.rope_theta, shape.rms_norm_eps) == (7e5, 1e-3)
    assert dict(shape.rope_scaling) == scaling
    said = capsys.readouterr().err
    assert "rope_theta 700000.0 as in the checkpoint, the target has 1000.0" in said
    assert "rms_norm_eps 0.001" in said


# ── layer ids ─────────────────────────────────────────────────────────────────────────────────


def with_layers(inputs, num_layers, model_type="llama", boundaries=(1, 2, 3)):
    identity = dataclasses.replace(inputs.identity, num_layers=num_layers, model_type=model_type)
    capture = dataclasses.replace(inputs.manifest.capture, boundaries=boundaries)
    manifest = dataclasses.replace(inputs.manifest, capture=capture)
    return dataclasses.replace(inputs, identity=identity, manifest=manifest)


@pytest.mark.parametrize(
    ("form", "changes", "model_type", "expected"),
    [
        ("sglang", {"eagle_config__eagle_aux_hidden_state_layer_ids": [3, 7, 9]}, "llama", (4, 8, 10)),
        ("sglang", {"eagle_config__eagle_aux_hidden_state_layer_ids": [3, 7, 9]}, "kimi_k2", (3, 7, 9)),
        ("sglang", {"eagle_config__eagle_aux_hidden_state_layer_ids": [1, 7, 9]}, "deepseek_v3", (2, 8, 10)),
        ("sglang", {"eagle_config": KeyError}, "llama", (2, 10, 17)),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [3, 7, 20]}, "llama", (3, 7, 20)),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": KeyError}, "llama", (2, 10, 17)),
        # trainers before 0.5 read the outputs of layers 2, n//2, n-3; a converted file is not theirs
        (
            "speculators",
            {"eagle_aux_hidden_state_layer_ids": None, "speculators_version": "0.3.0"},
            "llama",
            (3, 11, 18),
        ),
        (
            "speculators",
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "speculators_version": "0.3.0",
                "architectures": ["Eagle3Speculator"],
            },
            "llama",
            (2, 10, 17),
        ),
    ],
)
def test_layer_ids_become_boundaries(place, capsys, form, changes, model_type, expected):
    """A wrong layer trains as noise: the right list passes, the list one layer off is refused with both."""
    edit_config(place / form, **changes)
    inputs = inputs_from(place, form)
    start(with_layers(inputs, 20, model_type, expected))
    named = "default" not in capsys.readouterr().err
    assert named == all(value not in (KeyError, None) for value in list(changes.values())[:1])
    shifted = tuple(b + 1 for b in expected)
    with pytest.raises(TrainError) as caught:
        start(with_layers(inputs, 20, model_type, shifted))
    assert f"boundaries {list(expected)}" in str(caught.value)
    assert f"the states hold {list(shifted)}" in str(caught.value)


def test_an_own_checkpoint_names_boundaries(place):
    with pytest.raises(TrainError, match=r"boundaries \[1, 2, 3\] .* the states hold \[2, 3, 4\]"):
        start(with_layers(inputs_from(place, "eyas"), 8, boundaries=(2, 3, 4)))


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
        ({"warm_start": "models/public", "warm_start_sha256": "abc"}, "train.warm_start_sha256"),
        ({"warm_start_sha256": "0" * 64}, "train.warm_start_sha256"),
    ],
)
def test_places_outside_and_half_hashes_are_config_errors(values, key):
    with pytest.raises(ConfigError, match=key):
        TrainConfig(**values).check()
    TrainConfig(warm_start="models/public", warm_start_sha256="0" * 64).check()
