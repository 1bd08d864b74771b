"""Validation, keep best, the average, room on the disk."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import train_world as world
from safetensors.torch import load, load_file
from test_train import StoppedError, stop_at

from eyas import console, fs
from eyas.batches.split import split_samples
from eyas.config.schema import TrainConfig
from eyas.drafter.teacher import TargetHead
from eyas.drafter.ttt import draft_tokens
from eyas.drafter.walk import walk
from eyas.errors import ConfigError, DiskError, TrainError
from eyas.target.load import read_ends
from eyas.train import checkpoint, loop, metrics, validation
from eyas.train.checkpoint import load_drafter
from eyas.train.data import Packer
from eyas.train.tensor_file import read_into, write_tensors

VALIDATED = {"validation_share": 0.25, "validate_every": 3}


def rows_of(folder, name):
    lines = (folder / f"metrics/plots/metrics/validation/{name}.tsv").read_text().splitlines()[1:]
    return {int(line.split("\t")[0]): float(line.split("\t")[1]) for line in lines}


class WatchedReader(world.MemoryReader):
    def __init__(self):
        super().__init__()
        self.reads = []

    def read(self, sample_id):
        self.reads.append(sample_id)
        return super().read(sample_id)


def test_validation_documents_are_judged_and_never_trained_on(tmp_path, monkeypatch):
    reader, trained = WatchedReader(), set()
    real = Packer.__call__

    def watched(packer, documents, *args, **kwargs):
        trained.update(s.sample.sample_id for s in documents)
        return real(packer, documents, *args, **kwargs)

    monkeypatch.setattr("eyas.train.validation.Validator.__call__", lambda *_: ({"validation/tau": 1.0}, {}))
    monkeypatch.setattr(Packer, "__call__", watched)
    world.run(tmp_path, world.make_inputs(tmp_path, reader=reader, **VALIDATED))
    training, validation = split_samples(reader.samples, 0.25, 0)
    assert len(validation) == 5
    assert trained == {s.sample_id for s in training}
    assert not trained & {s.sample_id for s in validation}


def expected_metrics(folder, drafter):
    """Tau and acceptance of the validation documents, token by token and without packs."""
    reader, ends = world.MemoryReader(), read_ends(folder / "target")
    _, validation = split_samples(reader.samples, 0.25, 0)
    S, rounds, emitted = 3, 0, 0
    asked, joint, chained = np.zeros(S), np.zeros(S), np.zeros(S)
    for sample in validation:
        states = reader.read(sample.sample_id)
        packer = Packer(TargetHead(ends.head_VD, torch.device("cpu")), drafter.t2d, ends.embedding_VD)
        pack = packer([states], S, mask_oov=False)
        drafts_TS = torch.full((len(pack.ids_T), S), -1)
        drafts_TS[pack.rows_R] = draft_tokens(drafter, pack)
        ids, T = states.input_ids_T.tolist(), sample.num_tokens
        agree_TS = np.zeros((T, S), dtype=bool)
        for t in range(2, T - 2):  # answers start at token 3: row 2 is the first asked
            before = True
            for k in range(S):
                if t + k + 2 < T:
                    agree_TS[t, k] = ids[t + k + 2] == int(drafts_TS[t, k])
                    asked[k] += 1
                    chained[k] += before
                    before &= bool(agree_TS[t, k])
                    joint[k] += before
        found = walk(agree_TS, 3, T)
        rounds += len(found)
        emitted += sum(one.num_emitted for one in found)
    return emitted / rounds, joint / np.maximum(chained, 1), joint / asked


def test_metrics_are_those_of_a_count_by_hand(tmp_path):
    """Tau, alpha and joint of the published drafter; the last validation is of the last step."""
    world.run(tmp_path, world.make_inputs(tmp_path, num_steps=40, **VALIDATED))
    drafter, _ = load_drafter(tmp_path / "drafter", read_ends(tmp_path / "target").embedding_VD)
    tau, alpha, joint = expected_metrics(tmp_path, drafter)
    assert sorted(rows_of(tmp_path, "tau")) == [*range(3, 40, 3), 40]
    assert rows_of(tmp_path, "tau")[40] == pytest.approx(tau, abs=1e-6)
    for k in range(3):
        assert rows_of(tmp_path, f"alpha/step_{k}")[40] == pytest.approx(alpha[k], abs=1e-6)
        assert rows_of(tmp_path, f"joint/step_{k}")[40] == pytest.approx(joint[k], abs=1e-6)


def test_validation_changes_no_weight(tmp_path):
    """The same split trained with and without looking at the other side."""
    often, once = tmp_path / "often", tmp_path / "once"
    world.run(often, world.make_inputs(often, **(VALIDATED | {"validate_every": 1})))
    world.run(once, world.make_inputs(once, **(VALIDATED | {"validate_every": 1000})))
    name = "drafter/drafter.safetensors"
    assert (often / name).read_bytes() == (once / name).read_bytes()


def test_a_set_that_cannot_be_judged_is_an_error(tmp_path):
    reader = world.MemoryReader()
    _, validation = split_samples(reader.samples, 0.25, 0)
    for sample in validation:
        reader.states[sample.sample_id].loss_mask_T[4:] = 0
    with pytest.raises(TrainError, match="none of 5 validation samples has two assistant tokens in a row"):
        world.run(tmp_path, world.make_inputs(tmp_path, reader=reader, **VALIDATED))
    assert not list((tmp_path / "runs").glob("*/*"))  # told before the first step


def test_one_conversation_cannot_be_split(tmp_path):
    """It trains; that nothing is left to validate with is told before the first step, with a way out."""
    reader = world.MemoryReader(1)
    inputs = world.make_inputs(tmp_path, reader=reader, keep="best", checkpoint_every=1, **VALIDATED)
    with pytest.raises(TrainError, match=r"no conversation is left to validate with[^$]*validation_share to 0"):
        world.run(tmp_path, inputs)
    assert not list((tmp_path / "runs").glob("*/*"))
    way_out = world.make_inputs(tmp_path, reader=reader, **(VALIDATED | {"validation_share": 0.0}))
    assert world.run(tmp_path, way_out)[0].num_steps == 12


def test_a_set_that_is_all_damaged_says_so(tmp_path):
    reader = world.MemoryReader()
    _, validation = split_samples(reader.samples, 0.25, 0)
    for sample in validation:
        reader.states[sample.sample_id].last_TD[5] = torch.nan
    inputs = world.make_inputs(tmp_path, reader=reader, max_damaged_samples=9, **VALIDATED)
    with pytest.raises(TrainError, match=r"5 of them are damaged: sample .* row 5 of last [^$]*make verify"):
        world.run(tmp_path, inputs)


@pytest.mark.parametrize("loss", ["kl", "ce", "lk"])
def test_the_validation_loss_is_the_loss_of_training(tmp_path, loss):
    """Both sides hold the same documents and nothing moves, so both losses are the same number."""
    reader = world.MemoryReader()
    for states in reader.states.values():
        first = reader.states["0000000000000000"]
        for name in ("input_ids_T", "loss_mask_T", "aux_TAD", "last_TD", "has_last_T"):
            object.__setattr__(states, name, getattr(first, name))
        object.__setattr__(states, "num_aux_rows", first.num_aux_rows)
        object.__setattr__(states, "sample", dataclasses.replace(states.sample, num_tokens=first.sample.num_tokens))
    changes = {"lr": 1e-20, "curriculum": [], "num_steps": 1, "log_every": 1, "loss": loss, "top_k": 5 * (loss != "ce")}
    world.run(tmp_path, world.make_inputs(tmp_path, reader=reader, **VALIDATED, **changes))
    metrics = json.loads((tmp_path / "metrics/metrics.json").read_text())
    assert metrics["validation"]["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


# ── keep ──────────────────────────────────────────────────────────────────────────────────────


def told(values):
    """A validator that tells these taus one after another."""
    values = iter(values)
    return lambda *_: ({"validation/tau": next(values)}, {})


def test_the_best_weights_are_published(tmp_path, monkeypatch):
    """Four validations, the second is best: what is published is what a run of six steps had."""
    config = {**VALIDATED, "curriculum": [], "min_lr_share": 1.0, "warmup_steps": 0}
    short, best = tmp_path / "short", tmp_path / "best"
    monkeypatch.setattr("eyas.train.validation.Validator.__call__", told([1.0, 1.0]))
    world.run(short, world.make_inputs(short, num_steps=6, **config))
    monkeypatch.setattr("eyas.train.validation.Validator.__call__", told([1.1, 1.5, 1.5, 1.4]))
    _, outcome = world.run(best, world.make_inputs(best, num_steps=12, keep="best", **config))
    assert (outcome.best.step, outcome.best.tau) == (6, 1.5)
    found, expected = (load((folder / "drafter/drafter.safetensors").read_bytes()) for folder in (best, short))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("stops", [(4,), (7, 4), (11,)])
def test_resumed_runs_keep_the_same_best(tmp_path, monkeypatch, stops):
    """Case 69: crashes between a best validation and the next checkpoint change nothing."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    changes = {**VALIDATED, "keep": "best", "validate_every": 2, "checkpoint_every": 3}
    world.run(whole, world.make_inputs(whole, **changes))
    for stop in stops:
        restore = stop_at(monkeypatch, stop)
        with pytest.raises(StoppedError):
            world.run(broken, world.make_inputs(broken, **changes))
        restore()
    world.run(broken, world.make_inputs(broken, **changes))
    assert world.result_bytes(broken) == world.result_bytes(whole)


def test_ever_better_weights_take_no_more_room_than_was_asked_for(tmp_path, monkeypatch):
    """Twelve validations between two checkpoints, each the best: besides what the state names two files at most."""
    save, found = checkpoint.RunFolder.save_tensors, []

    def counted(run_folder, *args):
        saved = save(run_folder, *args)
        found.append(len(list(run_folder.folder.glob("best-*.safetensors"))))
        return saved

    monkeypatch.setattr(checkpoint.RunFolder, "save_tensors", counted)
    monkeypatch.setattr("eyas.train.validation.Validator.__call__", told(range(12)))
    changes = {"validation_share": 0.2, "validate_every": 1, "checkpoint_every": 100, "keep": "best"}
    _, outcome = world.run(tmp_path, world.make_inputs(tmp_path, **changes))
    assert outcome.best.step == 12
    assert (len(found), max(found)) == (13, 2)


def test_a_better_validation_takes_nothing_from_the_published_state(tmp_path, monkeypatch):
    """Killed at step 6: the state of step 4 names the best of step 4, which steps 5 and 6 were better than."""
    changes = {"validation_share": 0.2, "validate_every": 1, "checkpoint_every": 4, "keep": "best"}
    monkeypatch.setattr("eyas.train.validation.Validator.__call__", told(range(100)))
    restore = stop_at(monkeypatch, 6)
    with pytest.raises(StoppedError):
        world.run(tmp_path, world.make_inputs(tmp_path, **changes))
    restore()
    monkeypatch.setattr("eyas.train.validation.Validator.__call__", told([0.0] * 100))
    _, outcome = world.run(tmp_path, world.make_inputs(tmp_path, **changes))
    assert (outcome.resumed_at, outcome.best.step) == (4, 4)


def test_a_damaged_best_is_refused(tmp_path, monkeypatch):
    changes = {**VALIDATED, "keep": "best"}
    restore = stop_at(monkeypatch, 9)
    with pytest.raises(StoppedError):
        world.run(tmp_path, world.make_inputs(tmp_path, **changes))
    restore()
    (best,) = (tmp_path / "runs").glob("*/best-*.safetensors")
    best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises(TrainError, match=r"best-.*is damaged"):
        world.run(tmp_path, world.make_inputs(tmp_path, **changes))


def test_best_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"train.keep: 'best'"):
        dataclasses.replace(TrainConfig(), keep="best").check()


# ── room ──────────────────────────────────────────────────────────────────────────────────────


def test_a_training_without_room_is_refused_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.fs, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskError, match=r"this training needs 67.\d MB .* 1.0 kB are free: 67.\d MB are missing"):
        world.run(tmp_path, world.make_inputs(tmp_path))


def test_a_full_disk_names_what_other_trainings_left(tmp_path, monkeypatch):
    """Another learning rate is another run, whose state nobody removes: the hint does, and tells how much it frees."""
    restore = stop_at(monkeypatch, 5)
    with pytest.raises(StoppedError):
        world.run(tmp_path, world.make_inputs(tmp_path))
    restore()
    (left,) = {path.parent for path in (tmp_path / "runs").glob("*/state.json")}
    size_bytes = sum(path.stat().st_size for path in left.iterdir())
    monkeypatch.setattr(checkpoint.fs, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskError) as caught:
        world.run(tmp_path, world.make_inputs(tmp_path, lr=1e-4))
    assert f"`rm -r {left}` frees {console.human_bytes(size_bytes)}" in str(caught.value)
    assert "checkpoint is whole" not in str(caught.value)  # there is none
    with pytest.raises(DiskError, match=r"the last checkpoint is whole[^$]*make budget"):
        world.run(tmp_path, world.make_inputs(tmp_path))


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    """Room ends after the first checkpoint; with room again the run ends in the bytes of the unbroken one."""
    whole = tmp_path / "whole"
    world.run(whole, world.make_inputs(whole))
    full, calls = tmp_path / "full", iter([10**12, 10**12])
    monkeypatch.setattr(checkpoint.fs, "free_bytes", lambda _: next(calls, 1000))
    with pytest.raises(DiskError, match=r"the next checkpoint needs .* the last checkpoint is whole"):
        world.run(full, world.make_inputs(full))
    monkeypatch.undo()
    (state,) = (full / "runs").glob("*/state.json")
    assert fs.read_json(state)["step"] == 4
    _, outcome = world.run(full, world.make_inputs(full))
    assert outcome.resumed_at == 4
    assert world.result_bytes(full) == world.result_bytes(whole)


def test_tensor_files_are_safetensors(tmp_path):
    """Read back by the library itself; the digest is the file's."""
    tensors = {
        "a": torch.randn(3, 5),
        "b.c": torch.randn(7).double()[::2],
        "d": torch.randn(2, 2).bfloat16().T,
        "e": torch.zeros(0, 4),
    }
    written = write_tensors(tmp_path / "x.safetensors", list(tensors.items()), tmp_path)
    assert written == fs.file_digest(tmp_path / "x.safetensors", tmp_path)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    place = torch.zeros(3, 5)
    read_into(tmp_path / "x.safetensors", {"a": place})
    assert torch.equal(place, tensors["a"])


def test_a_line_per_log_step_tells_what_matters(tmp_path, capsys):
    world.run(tmp_path, world.make_inputs(tmp_path, **VALIDATED))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train: step")]
    assert len(lines) == 4
    assert all(word in lines[-1] for word in ("12/12", "loss", "alpha", "tok/s", "left"))
    for line, tau in zip(lines, rows_of(tmp_path, "tau").values(), strict=True):
        assert f"tau {tau:.3f}" in line  # of this step's validation
    assert "tok" not in json.dumps(json.loads((tmp_path / "metrics/metrics.json").read_text()))


# ── speed ─────────────────────────────────────────────────────────────────────────────────────


def test_the_speed_is_that_of_training_without_validations(tmp_path, monkeypatch, capsys):
    """A clock that only validations move, 1,000 s each, and log lines, 1 s each."""
    clock = {"now": 0.0}
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock["now"])
    validate, line = validation.Validator.__call__, metrics.Terminal.line

    def slow(self, *args):
        clock["now"] += 1000.0
        return validate(self, *args)

    def later(self, *args):
        clock["now"] += 1.0
        line(self, *args)

    monkeypatch.setattr(validation.Validator, "__call__", slow)
    monkeypatch.setattr(metrics.Terminal, "line", later)
    changes = {**VALIDATED, "num_steps": 6, "log_every": 3, "validate_every": 3}
    _, outcome = world.run(tmp_path, world.make_inputs(tmp_path, **changes))
    assert outcome.seconds == 2.0
    speeds = [
        float(text.split(" tok/s")[0].split()[-1].replace(",", ""))
        for text in capsys.readouterr().err.splitlines()
        if "tok/s" in text
    ]
    assert sum(speeds) == outcome.num_tokens
