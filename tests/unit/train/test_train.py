"""Runs end to end on a tiny target: determinism, exact resume, crashes, refusals."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import train_world as world
from safetensors.torch import load

from eyas import fs
from eyas.config.schema import DrafterConfig
from eyas.contracts import CheckpointMeta
from eyas.drafter.init import stream_rms
from eyas.errors import ConfigError, EyasError, StoreError, TrainError
from eyas.target.load import read_ends
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train import loop
from eyas.train.checkpoint import RunFolder, load_drafter
from eyas.train.run import new_drafter, target_ends

WORLD = Path(world.__file__)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    meta, outcome = world.run(folder, world.make_inputs(folder))
    return world.result_bytes(folder), meta, outcome


class StoppedError(Exception):
    pass


def stop_at(monkeypatch, step):
    """Crash without any clean-up right before optimizer step ``step``."""
    real = loop.ttt_loss
    calls = {"left": step}

    def crashing(*args, **kwargs):
        if calls["left"] == 0:
            raise StoppedError
        calls["left"] -= 1
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "ttt_loss", crashing)
    return lambda: monkeypatch.setattr(loop, "ttt_loss", real)


def test_two_runs_give_the_same_bytes_and_forget_their_state(tmp_path, unbroken):
    world.run(tmp_path, world.make_inputs(tmp_path))
    assert world.result_bytes(tmp_path) == unbroken[0]
    left = {path.name for path in (tmp_path / "runs").glob("*/*")}
    assert left == {"finished"}


def test_the_loss_falls(tmp_path):
    world.run(tmp_path, world.make_inputs(tmp_path, num_steps=60, log_every=10, curriculum=[], ttt_steps=1))
    lines = (tmp_path / "metrics/plots/metrics/loss/step_0.tsv").read_text().splitlines()
    losses = [float(line.split("\t")[1]) for line in lines[1:]]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("stops", [(5,), (4,), (2, 6), (11,)])
def test_a_run_resumed_at_any_step_ends_in_the_same_bytes(tmp_path, unbroken, monkeypatch, stops):
    """Case 69: weights, moments, learning rate, data cursor and metrics are restored."""
    for stop in stops:
        restore = stop_at(monkeypatch, stop)
        with pytest.raises(StoppedError):
            world.run(tmp_path, world.make_inputs(tmp_path))
        restore()
    _, outcome = world.run(tmp_path, world.make_inputs(tmp_path))
    assert outcome.resumed_at == {(5,): 4, (4,): 4, (2, 6): 4, (11,): 8}[stops]
    assert world.result_bytes(tmp_path) == unbroken[0]


def test_checkpoints_at_other_steps_change_nothing(tmp_path, unbroken):
    world.run(tmp_path, world.make_inputs(tmp_path, checkpoint_every=5))
    assert world.result_bytes(tmp_path) == unbroken[0]


def spawn(folder, steps):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORLD), str(folder), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True)


def wait_for_state(folder, process, minimum):
    """Until the run has saved ``minimum`` steps, or ended."""
    while process.poll() is None:
        states = list((folder / "runs").glob("*/state.json"))
        if states and fs.read_json(states[0])["step"] >= minimum:
            return
        time.sleep(0.02)


@pytest.mark.slow
def test_sigkill_at_random_points_gives_the_same_bytes(tmp_path):
    """Case 69, on the real process."""
    steps, dice = 150, random.Random(0)
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    assert spawn(clean, steps).wait() == 0
    for target in (5, 60):
        process = spawn(killed, steps)
        wait_for_state(killed, process, target)
        time.sleep(dice.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert spawn(killed, steps).wait() == 0
    assert world.result_bytes(killed) == world.result_bytes(clean)


@pytest.mark.slow
def test_sigterm_saves_and_leaves_with_130(tmp_path):
    process = spawn(tmp_path, 4000)
    wait_for_state(tmp_path, process, 5)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert "is saved" in stderr
    (state,) = (tmp_path / "runs").glob("*/state.json")
    assert f"step {fs.read_json(state)['step']:,} of 4,000 is saved" in stderr
    assert not (tmp_path / "drafter").exists()


def test_a_damaged_state_is_refused_with_a_way_out(tmp_path, monkeypatch):
    restore = stop_at(monkeypatch, 5)
    with pytest.raises(StoppedError):
        world.run(tmp_path, world.make_inputs(tmp_path))
    restore()
    (tensors,) = (tmp_path / "runs").glob("*/step-*.safetensors")
    raw = bytearray(tensors.read_bytes())
    raw[-3] ^= 1
    tensors.write_bytes(raw)
    with pytest.raises(TrainError, match="is damaged") as caught:
        world.run(tmp_path, world.make_inputs(tmp_path))
    assert "rm -r" in str(caught.value)


def test_a_half_written_state_is_ignored(tmp_path, unbroken, monkeypatch):
    """Tensors without the record that names them are a left-over of a crash."""
    inputs = world.make_inputs(tmp_path)
    folder = RunFolder(tmp_path / "runs", inputs.run_key())
    folder.save_tensors("step-00000007", [("x", torch.zeros(3))])
    (folder.folder / "step-00000007.safetensors.part").write_bytes(b"cut")
    _, outcome = world.run(tmp_path, inputs)
    assert outcome.resumed_at == 0
    assert world.result_bytes(tmp_path) == unbroken[0]


def test_a_state_of_another_run_is_refused(tmp_path, monkeypatch):
    restore = stop_at(monkeypatch, 5)
    with pytest.raises(StoppedError):
        world.run(tmp_path, world.make_inputs(tmp_path))
    restore()
    (state,) = (tmp_path / "runs").glob("*/state.json")
    record = json.loads(state.read_text())
    state.write_text(json.dumps({**record, "run_key": "f" * 64}))
    with pytest.raises(TrainError, match="is of run ffff"):
        world.run(tmp_path, world.make_inputs(tmp_path))


def test_other_parameters_or_data_are_another_run(tmp_path):
    base = world.make_inputs(tmp_path).run_key()
    assert world.make_inputs(tmp_path, checkpoint_every=9).run_key() == base
    assert world.make_inputs(tmp_path, lr=1e-4).run_key() != base
    assert world.make_inputs(tmp_path, drafter=DrafterConfig(fc_norm=True)).run_key() != base


def test_a_loss_that_is_not_finite_names_the_step(tmp_path):
    with pytest.raises(TrainError, match=r"loss and gradient of step 1 are not finite"):
        world.run(tmp_path, world.make_inputs(tmp_path, lr=1e38, warmup_steps=0))
    assert not (tmp_path / "drafter").exists()


def test_data_without_a_trained_row_is_an_error(tmp_path):
    """Case 70: every sample of every batch invalid."""
    inputs = world.make_inputs(tmp_path, reader=world.MemoryReader(mask_value=0))
    with pytest.raises(TrainError, match="none of 20 training samples has a row that trains"):
        world.run(tmp_path, inputs)


def test_data_whose_teachers_are_all_outside_the_draft_vocab_is_an_error(tmp_path):
    """Every state is the embedding of an odd token many times over, so its argmax is odd; the vocab holds even ones."""
    reader, inputs = world.MemoryReader(), world.make_inputs(tmp_path)
    odd_D = read_ends(tmp_path / "target").embedding_VD[1]
    for states in reader.states.values():
        states.last_TD[:] = 100 * odd_D
    with pytest.raises(TrainError, match="no batch of a whole epoch"):
        world.run(tmp_path, dataclasses.replace(inputs, reader=reader))


def test_batches_without_a_trained_row_are_passed_over(tmp_path):
    """Case 70: some invalid samples neither stop the run nor make a step of nothing."""
    reader = world.MemoryReader()
    for index, states in enumerate(reader.states.values()):
        if index % 2:
            states.loss_mask_T.zero_()
    meta, _ = world.run(tmp_path, world.make_inputs(tmp_path, reader=reader, batch_tokens=1))
    assert meta.num_steps == 12


def test_no_training_sample_is_an_error(tmp_path):
    reader = world.MemoryReader(6)
    for sample_id in list(reader.states)[:5]:
        del reader.states[sample_id]
    with pytest.raises(TrainError, match="training split"):
        world.run(tmp_path, world.make_inputs(tmp_path, reader=reader))


@pytest.mark.parametrize("options", [{"fc_norm": True, "norm_output": True}, {"head_dim": 6, "intermediate_size": 8}])
def test_every_drafter_option_trains(tmp_path, options):
    inputs = world.make_inputs(tmp_path, drafter=DrafterConfig(**options), train_head=True, weight_decay=0.01)
    meta, _ = world.run(tmp_path, inputs)
    for name, value in options.items():
        assert getattr(meta.shape, name) == value


# ── the published drafter ─────────────────────────────────────────────────────────────────────


def test_with_the_full_vocab_no_choice_is_outside(tmp_path, unbroken):
    whole = DraftVocab(d2t_W=torch.zeros(world.V, dtype=torch.int64), t2d_V=torch.ones(world.V, dtype=torch.bool))
    whole.write(tmp_path / "vocab")
    meta, _ = world.run(tmp_path, world.make_inputs(tmp_path))
    assert meta.shape.draft_vocab_size == world.V
    shares = [
        json.loads(metrics)["oov_share"]
        for metrics in ((tmp_path / "metrics/metrics.json").read_bytes(), unbroken[0]["metrics/metrics.json"])
    ]
    assert shares[0] == 0 < shares[1]


def test_the_published_drafter_loads_back(tmp_path, unbroken):
    world.run(tmp_path, world.make_inputs(tmp_path))
    embedding_VD = read_ends(tmp_path / "target").embedding_VD
    drafter, meta = load_drafter(tmp_path / "drafter", embedding_VD)
    assert meta == fs.read_record(CheckpointMeta, tmp_path / "drafter/checkpoint.json") == unbroken[1]
    assert (meta.num_steps, meta.ttt_steps, meta.boundaries) == (12, 3, (1, 2, 3))
    assert torch.equal(drafter.embed_tokens.weight, embedding_VD)
    assert int(drafter.t2d.sum()) == world.W
    names = set(drafter.state_dict())
    assert "embed_tokens.weight" not in names
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names


def test_a_damaged_or_foreign_drafter_is_refused(tmp_path):
    world.run(tmp_path, world.make_inputs(tmp_path))
    with pytest.raises(StoreError, match="of another target"):
        load_drafter(tmp_path / "drafter", torch.zeros(5, world.D))
    weights = tmp_path / "drafter/drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(StoreError, match="is missing or is not the file") as caught:
        load_drafter(tmp_path / "drafter", torch.zeros(world.V, world.D))
    # seconds, where a training is a night
    assert f"dvc checkout --force {tmp_path / 'drafter'}" in str(caught.value.hint)


# ── first weights ─────────────────────────────────────────────────────────────────────────────


def test_first_weights_are_the_target_where_they_can_be(tmp_path):
    inputs = world.make_inputs(tmp_path)
    ends, vocab = target_ends(inputs), DraftVocab.read(inputs.vocab_folder)
    drafter = new_drafter(inputs, ends, vocab)
    assert torch.equal(drafter.lm_head.weight, ends.head_VD[vocab.target_ids_W].float())
    assert torch.equal(drafter.norm.weight, ends.final_norm_D)
    again = new_drafter(inputs, ends, vocab)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


def test_streams_enter_fc_at_equal_size(tmp_path):
    """Streams of rms 1, 3 and 9: their columns are divided by that, so each adds about as much."""
    inputs = world.make_inputs(tmp_path)
    drafter = new_drafter(inputs, target_ends(inputs), DraftVocab.read(inputs.vocab_folder))
    columns_EAD = drafter.fc.weight.detach().view(world.D, world.A, world.D).clone()
    columns_EAD[:, -1] -= 0.05 * torch.eye(world.D)
    sizes_A = columns_EAD.square().mean((0, 2)).sqrt()
    assert torch.allclose(sizes_A / sizes_A[0], torch.tensor([1, 1 / 3, 1 / 9]), rtol=0.2)
    assert stream_rms(torch.ones(4, 2, 8) * torch.tensor([1.0, 5.0])[:, None]).tolist() == [1.0, 5.0]


def test_the_norm_scale_counts_its_offset(tmp_path):
    inputs = world.make_inputs(tmp_path)
    shifted = target_ends(
        world.Inputs(**{**{f: getattr(inputs, f) for f in inputs.__slots__}, "identity": world.make_identity(1.0)})
    )
    assert torch.allclose(shifted.final_norm_D, target_ends(inputs).final_norm_D + 1)


@pytest.mark.parametrize(
    ("facts", "options", "message"),
    [
        ({"kv_lora_rank": 512}, {}, r"drafter.num_attention_heads: 0, expected a size.*latent attention"),
        ({}, {"hidden_size": 8}, r"drafter.hidden_size: 8, expected the target's 16"),
        ({}, {"num_key_value_heads": 3}, r"expected a divisor"),
        ({}, {"head_dim": 5}, r"even number"),
        ({"intermediate_size": None}, {}, r"drafter.intermediate_size: 0, expected a size"),
    ],
)
def test_shapes_that_cannot_be_are_config_errors(tmp_path, facts, options, message):
    inputs = world.make_inputs(tmp_path, drafter=DrafterConfig(**options))
    path = tmp_path / "target/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    with pytest.raises(ConfigError, match=message):
        new_drafter(inputs, target_ends(inputs), DraftVocab.read(inputs.vocab_folder))


# ── revision ──────────────────────────────────────────────────────────────────────────────────


def test_trained_numbers_are_those_of_their_revision(unbroken):
    """Stage train does not depend on source files; this pins what its revision stands for.

    Bytes differ between processor types in the last bit, so losses and weight norms are compared instead.
    """
    found = golden_numbers(unbroken)
    path = WORLD.parents[2] / "golden" / f"train_revision_{world.make_config().revision}.json"
    expected = json.loads(path.read_text())
    assert found == pytest.approx(expected, rel=1e-3), (
        "training gives other numbers than its revision stands for: undo that, or raise the default of "
        f"train.revision (config/training.py, params.yaml) and write {path.parent}/train_revision_<n>.json"
    )


def golden_numbers(run):
    files = run[0]
    metrics = json.loads(files["metrics/metrics.json"])
    tensors = load(files["drafter/drafter.safetensors"])
    numbers = {f"loss {name}": value for name, value in metrics["loss"].items()}
    numbers |= {f"norm {name}": float(t.norm()) for name, t in tensors.items() if t.is_floating_point()}
    return numbers


def test_states_of_another_target_are_refused(tmp_path):
    inputs = world.make_inputs(tmp_path)
    foreign = dataclasses.replace(inputs, identity=world.make_identity(weight_offset=1.0))
    with pytest.raises(TrainError, match="the states are of target"):
        world.run(tmp_path, foreign)


def test_a_repository_without_a_commit_is_told_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = ["git init -q .", "dvc init -q"]
    hint = "git add -A && git -c user.name=a -c user.email=a@b.c commit -q -m start"
    for command in commands:
        subprocess.run(command, shell=True, check=True)
    inputs = world.make_inputs(tmp_path, num_steps=2)
    with pytest.raises(TrainError, match="which commit is trained") as caught:
        world.run(tmp_path, inputs)
    assert "git add -A && git commit -m start" in str(caught.value)
    subprocess.run(hint, shell=True, check=True)
    assert world.run(tmp_path, inputs)[0].num_steps == 2


def test_metrics_that_cannot_be_removed_are_not_added_to(tmp_path):
    """A link is not emptied: rows of an earlier run stay there, and none of this run come behind them."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/old.tsv").write_text("old")
    (tmp_path / "metrics").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        world.run(tmp_path, world.make_inputs(tmp_path))
    assert [path.name for path in (tmp_path / "elsewhere").rglob("*")] == ["old.tsv"]


def test_a_second_training_at_once_is_refused(tmp_path):
    with fs.volume_lock(tmp_path / "runs/train.lock", "train"), pytest.raises(EyasError, match="is locked by train"):
        world.run(tmp_path, world.make_inputs(tmp_path))


def test_a_record_that_lists_no_weights_is_refused(tmp_path):
    world.run(tmp_path, world.make_inputs(tmp_path, num_steps=2))
    record = tmp_path / "drafter/checkpoint.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"files": []}))
    with pytest.raises(StoreError, match="does not list"):
        load_drafter(tmp_path / "drafter", torch.zeros(1, 1))
