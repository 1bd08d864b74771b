"""Starting from an existing drafter: what is taken, and what the run says of it."""

import pytest
import torch
import train_world as world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_train import StoppedError, stop_at
from warm_world import FORMS, edit_config, edit_tensors, inputs_from, start, with_layers, write_vocab

from eyas.config.schema import DrafterConfig, ExportConfig
from eyas.drafter.foreign import content_hash, read_checkpoint
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.ttt import unroll
from eyas.drafter.warm_start import load_weights
from eyas.errors import TrainError
from eyas.export.compare import sample_logits
from eyas.export.write import export
from eyas.target.load import read_ends
from eyas.train.checkpoint import load_drafter
from eyas.train.run import target_ends

PEER = world.Path(__file__).parents[2] / "golden/eagle3_speculators"


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


def test_a_broken_run_goes_on_from_its_state_and_not_from_the_start(made, place, monkeypatch):
    """Case 69 with a warm start, whose folder lies elsewhere by then."""
    changes = {"num_steps": 8, "checkpoint_every": 3, "anchors": 4}
    whole, broken = place / "whole", place / "broken"
    for folder in (whole, broken):
        world.make_inputs(folder)
    inputs = inputs_from(place, "sglang", **changes)
    world.run(whole, inputs)
    restore = stop_at(monkeypatch, 5)
    with pytest.raises(StoppedError):
        world.run(broken, inputs)
    restore()
    (place / "sglang").rename(place / "moved")
    inputs.config.warm_start = "moved"
    _, outcome = world.run(broken, inputs)
    assert outcome.resumed_at == 3
    assert world.result_bytes(broken) == world.result_bytes(whole)


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


# ── a peer's own files ────────────────────────────────────────────────────────────────────────


def test_the_peers_own_file_gives_the_peers_own_logits(place):
    """Saved by speculators 0.9.0 itself (random weights, llama3 positions), with its forward over three TTT steps.

    Its row j reads token j, ours the token behind row j; its rows go on past the end of the text with padding.
    """
    for file in PEER.iterdir():
        if file.name != "forward.safetensors":
            (place / "peer").mkdir(exist_ok=True)
            (place / "peer" / file.name).write_bytes(file.read_bytes())
    checkpoint = read_checkpoint(place / "peer")
    assert checkpoint.facts.layer_ids == (1, 2, 3)
    assert dict(checkpoint.shape.rope_scaling)["rope_type"] == "llama3"
    drafter = Drafter(checkpoint.shape)
    drafter.set_target(checkpoint.embedding_VE.float(), torch.arange(24), torch.zeros(60, dtype=torch.bool))
    assert load_weights(drafter, checkpoint) == 24
    case = load_file(PEER / "forward.safetensors")
    T = len(case["input_ids_T"])
    ids_T = torch.cat([torch.zeros(1, dtype=torch.int64), case["input_ids_T"]])
    aux_TAD = torch.cat([case["aux_TAD"], torch.zeros(1, 3, 16)])
    pack = pack_documents([Document(ids_T, torch.ones_like(ids_T), aux_TAD, torch.zeros(T + 1, 16))], 3)
    for k, normed_RE in enumerate(unroll(drafter, pack)):
        rows_R = pack.rows_R[: len(normed_RE)]
        assert len(rows_R) >= T - k - 1
        assert torch.allclose(drafter.logits(normed_RE), case["logits_STW"][k, rows_R], atol=1e-5)
