"""What a finished run leaves until DVC has recorded it: a kill or a failure in between costs seconds."""

import errno
import json
import os
import shutil

import pytest
import train_world as world

from eyas import fs
from eyas.errors import DiskError, StoreError, TrainError
from eyas.train import finished, loop, run
from eyas.train.finished import Finished, settle

VALIDATED = {"validation_share": 0.2, "validate_every": 3, "keep": "best"}


class StoppedError(Exception):
    pass


def never(*_args, **_kwargs):
    raise AssertionError("a step was trained")


def wipe(folder):
    """What DVC does to the outputs of a stage before it runs it."""
    for part in ("drafter", "metrics"):
        shutil.rmtree(folder / part)


def kept_in(folder):
    return list((folder / "runs").glob("*/finished"))


@pytest.mark.parametrize("changes", [{}, VALIDATED], ids=["last", "best"])
@pytest.mark.parametrize("links", [True, False])
def test_a_run_that_dvc_did_not_record_is_published_again_without_training(tmp_path, monkeypatch, changes, links):
    """A kill after the stage's end, before ``dvc.lock``: DVC deletes the outputs and runs the stage again."""
    if not links:
        monkeypatch.setattr(finished.os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EXDEV, "two mounts")))
    meta, outcome = world.run(tmp_path, world.make_inputs(tmp_path, **changes))
    published = world.result_bytes(tmp_path)
    monkeypatch.setattr(loop, "ttt_loss", never)
    for _ in range(2):
        wipe(tmp_path)
        again, told = world.run(tmp_path, world.make_inputs(tmp_path, **changes))
        assert world.result_bytes(tmp_path) == published
        assert again == meta
        assert (told.resumed_at, told.num_tokens, told.is_republished) == (12, 0, True)
        assert (told.num_trained_rows, told.num_epochs) == (outcome.num_trained_rows, outcome.num_epochs)
        assert (told.best and told.best.step) == (outcome.best and outcome.best.step)


def test_what_is_kept_takes_no_disk_while_it_is_published(tmp_path):
    world.run(tmp_path, world.make_inputs(tmp_path))
    (kept,) = kept_in(tmp_path)
    assert (kept / "drafter/drafter.safetensors").samefile(tmp_path / "drafter/drafter.safetensors")
    assert not list((tmp_path / "runs").glob("*/*.safetensors"))


@pytest.mark.parametrize("changes", [{}, VALIDATED], ids=["last", "best"])
@pytest.mark.parametrize("where", ["keep", "publish_drafter"])
def test_a_kill_around_publishing_does_not_train_again(tmp_path, monkeypatch, changes, where):
    """The state of the last step is there until the results are kept."""
    whole = tmp_path / "whole"
    world.run(whole, world.make_inputs(whole, **changes))
    killed = tmp_path / "killed"

    def stop(*_args, **_kwargs):
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(*((Finished, "keep", stop) if where == "keep" else (run, "publish_drafter", stop)))
        with pytest.raises(StoppedError):
            world.run(killed, world.make_inputs(killed, **changes))
    shutil.rmtree(killed / "drafter", ignore_errors=True)
    shutil.rmtree(killed / "metrics")
    monkeypatch.setattr(loop, "ttt_loss", never)
    _, outcome = world.run(killed, world.make_inputs(killed, **changes))
    assert outcome.resumed_at == 12
    assert world.result_bytes(killed) == world.result_bytes(whole)
    assert len(kept_in(killed)) == 1


def test_without_room_to_keep_results_the_state_stays(tmp_path, monkeypatch):
    def full(*_):
        raise DiskError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Finished, "keep", full)
        world.run(tmp_path, world.make_inputs(tmp_path))
    published = world.result_bytes(tmp_path)
    assert len(list((tmp_path / "runs").glob("*/state.json"))) == 1
    wipe(tmp_path)
    monkeypatch.setattr(loop, "ttt_loss", never)
    world.run(tmp_path, world.make_inputs(tmp_path))
    assert world.result_bytes(tmp_path) == published


def test_a_disk_that_fills_while_results_are_kept_costs_nothing(tmp_path, monkeypatch, capsys):
    """The copies of the metrics find no room: the stage ends well and the state stays."""
    copyfile = shutil.copyfile

    def full(source, place, **options):
        if "finished" in str(place):
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        return copyfile(source, place, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        world.run(tmp_path, world.make_inputs(tmp_path))
    assert "train: the state stays in" in capsys.readouterr().err
    assert len(list((tmp_path / "runs").glob("*/state.json"))) == 1
    assert not list((tmp_path / "runs").glob("*/finished*"))


def test_a_run_with_more_damage_than_is_allowed_now_is_not_published_again(tmp_path, monkeypatch):
    """``max_damaged_samples`` does not decide the result, but whether it may be published: also of a whole state."""
    damaged = {f"{i:016x}" for i in (1, 3)}

    class DamagedReader(world.MemoryReader):
        def read(self, sample_id):
            if sample_id in damaged:
                raise StoreError(f"checksum of {sample_id}")
            return super().read(sample_id)

    def run_allowing(count):
        return world.run(tmp_path, world.make_inputs(tmp_path, reader=DamagedReader(), max_damaged_samples=count))

    for patched in ({"keep": lambda *_: (_ for _ in ()).throw(DiskError("no room"))}, {}):
        with monkeypatch.context() as patch:
            for name, value in patched.items():
                patch.setattr(Finished, name, value)
            run_allowing(2)
        wipe(tmp_path)
        with pytest.raises(TrainError, match=r"2 samples are damaged, expected at most train.max_damaged_samples=1"):
            run_allowing(1)
        assert not (tmp_path / "drafter").exists()
    run_allowing(2)
    assert (tmp_path / "drafter").exists()


def test_one_finished_run_is_kept(tmp_path):
    for steps in (6, 7, 8):
        world.run(tmp_path, world.make_inputs(tmp_path, num_steps=steps))
    (kept,) = kept_in(tmp_path)
    assert kept.parent.name == world.make_inputs(tmp_path, num_steps=8).run_key()[:16]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {kept.parent.name, "train.lock"}


@pytest.mark.parametrize(
    "name", ["drafter/drafter.safetensors", "drafter/checkpoint.json", "result.json", "metrics/metrics.json"]
)
def test_damaged_results_are_made_again(tmp_path, capsys, name):
    world.run(tmp_path, world.make_inputs(tmp_path))
    published = world.result_bytes(tmp_path)
    wipe(tmp_path)
    (kept,) = kept_in(tmp_path)
    (kept / name).write_bytes((kept / name).read_bytes()[:-9])
    _, outcome = world.run(tmp_path, world.make_inputs(tmp_path))
    assert outcome.resumed_at == 0
    assert "is of no use" in capsys.readouterr().err
    assert world.result_bytes(tmp_path) == published


def test_results_that_dvc_holds_are_forgotten(tmp_path):
    world.run(tmp_path, world.make_inputs(tmp_path))
    cache = tmp_path / "cache"
    cache.mkdir()
    drafter = {path.name: path for path in (tmp_path / "drafter").iterdir()}
    md5s = {name: fs.hash_file(path, "md5") for name, path in drafter.items()}

    def cached(md5):
        return str(cache / md5)

    def look(locked="list.dir"):
        settle(tmp_path / "runs", locked, cached)
        return len(kept_in(tmp_path))

    assert look(None) == 1
    assert look() == 1, "the cache has no list"
    (cache / "list.dir").write_text(json.dumps([{"relpath": n, "md5": "0" * 32} for n in md5s]))
    assert look() == 1, "the lock names another drafter"
    (cache / "list.dir").write_text(json.dumps([{"relpath": n, "md5": md5} for n, md5 in md5s.items()]))
    assert look() == 1, "the cache has no file of it"
    for name, md5 in md5s.items():
        assert look() == 1
        os.link(drafter[name], cache / md5)
    assert look() == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["train.lock"]


def test_the_weights_of_the_best_step_say_their_own_step(tmp_path):
    """The record names the step whose weights these are, and the rows trained up to there."""
    meta, outcome = world.run(tmp_path, world.make_inputs(tmp_path, **{**VALIDATED, "lr": 0.3}))
    assert outcome.best is not None
    assert meta.num_steps == outcome.best.step < 12
    short, _ = world.run(tmp_path / "short", world.make_inputs(tmp_path, num_steps=12, **{**VALIDATED, "keep": "last"}))
    assert meta.num_trained_rows < outcome.num_trained_rows == short.num_trained_rows
