"""Several processes train as one does: real processes over gloo."""

import json
import signal
from itertools import accumulate, pairwise
from types import SimpleNamespace

import processes
import pytest
import torch
import train_world as world
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from eyas import fs
from eyas.errors import ConfigError, StoreError
from eyas.train.distributed import ToldElsewhereError, World, open_world
from eyas.train.optimizer import segments_of
from eyas.train.parts import EqualParts, WholeMatrices, dealt

CHANGES = {"packs_per_step": 4, "batch_tokens": 40, "validation_share": 0.2, "validate_every": 6}


def losses(folder):
    return {
        path.stem: [float(line.split("\t")[1]) for line in path.read_text().splitlines()[1:]]
        for path in sorted((folder / "metrics/plots/metrics").rglob("*.tsv"))
        if "loss" in str(path)
    }


def weights(folder):
    return load((folder / "drafter/drafter.safetensors").read_bytes())


def assert_same_training(found, expected):
    """Losses to 1e-6 and weights to what the order of sums explains."""
    assert losses(found).keys() == losses(expected).keys()
    for name, values in losses(expected).items():
        assert losses(found)[name] == pytest.approx(values, rel=2e-6, abs=1e-6)
    for name, tensor in weights(expected).items():
        assert torch.allclose(weights(found)[name].double(), tensor.double(), rtol=1e-4, atol=2e-6), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    world.run(folder, world.make_inputs(folder, **CHANGES))
    return folder


@pytest.mark.parametrize(("size", "shard"), [(2, "0"), (2, "1"), (3, "1")])
def test_many_processes_equal_one(tmp_path, alone, size, shard):
    """Case 71: packs of unequal lengths; the mean is over the rows of all ranks, with sharded moments too."""
    started = processes.start(tmp_path, size, environment={"EYAS_TRAIN_SHARD": shard}, **CHANGES)
    assert processes.finish(started) == [0] * size, processes.errors(tmp_path)
    assert_same_training(tmp_path, alone)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two processes with Muon, each updating everything."""
    folder = tmp_path_factory.mktemp("pair")
    started = processes.start(folder, 2, optimizer="muon", **CHANGES)
    assert processes.finish(started) == [0, 0], processes.errors(folder)
    return folder


@pytest.mark.parametrize("train_head", [False, True])
def test_muon_on_matrices_dealt_to_two_processes_gives_the_same_bytes(tmp_path, pair, train_head):
    """Case 71: two gradients have one sum, so nothing but who works differs."""
    changes, whole = {**CHANGES, "optimizer": "muon", "train_head": train_head}, pair
    if train_head:
        whole = tmp_path / "whole"
        assert processes.finish(processes.start(whole, 2, **changes)) == [0, 0]
    shared = tmp_path / "shared"
    started = processes.start(shared, 2, environment={"EYAS_TRAIN_SHARD": "1"}, **changes)
    assert processes.finish(started) == [0, 0], processes.errors(shared)
    assert world.result_bytes(shared) == world.result_bytes(whole)


def test_muon_goes_on_with_another_number_of_processes(tmp_path, pair):
    """Momentum of dealt matrices is gathered and dealt anew; the order of sums is all that differs."""
    changes = {**CHANGES, "optimizer": "muon", "checkpoint_every": 2}
    shard = {"EYAS_TRAIN_SHARD": "1"}
    assert set(processes.finish(processes.start(tmp_path, 2, stopping_reader, shard, **changes))) == {2}
    assert processes.finish(processes.start(tmp_path, 3, None, shard, **changes)) == [0, 0, 0], processes.errors(
        tmp_path
    )
    for name, values in losses(pair).items():
        assert losses(tmp_path)[name] == pytest.approx(values, rel=0.02)
    for name, tensor in weights(pair).items():
        off = (weights(tmp_path)[name].double() - tensor.double()).norm()
        assert off <= 0.01 * tensor.double().norm(), name


@pytest.mark.parametrize("size", [1, 2])
def test_packs_of_one_step_equal_one_large_pack(tmp_path, size):
    """Case 71: documents of unequal lengths, each a pack; the mean is over all their rows and not over packs."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    world.run(whole, world.make_inputs(whole, batch_tokens=10_000, packs_per_step=1))
    assert processes.finish(processes.start(parts, size, batch_tokens=1, packs_per_step=20)) == [0] * size
    assert_same_training(parts, whole)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, alone, sizes):
    for size, limit in zip(sizes, (40, 60), strict=True):
        changes = {**CHANGES, "checkpoint_every": 2}
        reader = stopping_reader if limit == 40 else None
        started = processes.start(tmp_path, size, reader, {"EYAS_TRAIN_SHARD": "1"}, **changes)
        codes = processes.finish(started)
        if reader:
            assert set(codes) == {2}
            (state,) = (tmp_path / "runs").glob("*/state.json")
            assert 2 <= fs.read_json(state)["step"] < 12
    assert codes == [0] * sizes[1]
    assert_same_training(tmp_path, alone)


class StoppingReader(world.MemoryReader):
    """Fails for good after some reads."""

    def __init__(self):
        super().__init__()
        self.left = 75

    def read(self, sample_id):
        self.left -= 1
        if self.left < 0:
            raise StoreError(f"sample {sample_id} went away")
        return super().read(sample_id)


def stopping_reader():
    return StoppingReader()


class OneDamagedReader(world.MemoryReader):
    def read(self, sample_id):
        if sample_id == f"{7:016x}":
            raise StoreError(f"sample {sample_id} is damaged")
        return super().read(sample_id)


def test_an_error_of_one_rank_ends_all_with_its_message(tmp_path):
    """One sample is damaged, so one rank alone meets it."""
    started = processes.start(tmp_path, 2, OneDamagedReader, **CHANGES)
    assert processes.finish(started) == [2, 2]
    told = processes.errors(tmp_path)
    assert set(told) == {0, 1}
    assert all(f"sample {7:016x} is damaged" in text for text in told.values())
    assert sum(text.startswith("ToldElsewhere: rank ") for text in told.values()) == 1


def test_damage_counts_the_same_on_any_number_of_processes(tmp_path):
    """Case 70: the sample is left out on both, and the rest is as it was."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, size in ((one, 1), (two, 2)):
        assert processes.finish(processes.start(folder, size, OneDamagedReader, max_damaged_samples=1, **CHANGES)) == (
            [0] * size
        )
    assert_same_training(two, one)


def slow_reader():
    return SlowReader()


class SlowReader(world.MemoryReader):
    def read(self, sample_id):
        import time

        time.sleep(0.02)
        return super().read(sample_id)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_does_not_leave_the_other_hanging(tmp_path, killed):
    started = processes.start(tmp_path, 2, slow_reader, num_steps=2000, packs_per_step=2)
    processes.until(lambda: list((tmp_path / "runs").glob("*/state.json")))
    started[killed].kill()
    codes = processes.finish(started, 30)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 2
    assert f"rank {1 - killed} of 2 lost another rank" in processes.errors(tmp_path)[1 - killed]


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, signalled):
    started = processes.start(tmp_path, 2, slow_reader, num_steps=2000, packs_per_step=2, checkpoint_every=3)
    processes.until(lambda: list((tmp_path / "runs").glob("*/state.json")))
    started[signalled].terminate()
    assert processes.finish(started, 30) == [130, 130]
    (state,) = (tmp_path / "runs").glob("*/state.json")
    assert 3 <= fs.read_json(state)["step"] < 2000


def test_more_processes_than_packs_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"train.packs_per_step: 2, expected at least .* 4"), open_world("cpu", 2):
        pass
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ToldElsewhereError), open_world("cpu", 2):
        pass


def test_what_the_first_rank_alone_meets_it_alone_tells(tmp_path):
    """A damaged state: the first rank reads it, the others are told and say nothing themselves."""
    started = processes.start(tmp_path, 2, stopping_reader, {"EYAS_TRAIN_SHARD": "1"}, **CHANGES, checkpoint_every=2)
    assert set(processes.finish(started)) == {2}
    (state,) = (tmp_path / "runs").glob("*/state.json")
    state.write_text("{}")
    for path in tmp_path.glob("error-*"):
        path.unlink()
    assert processes.finish(processes.start(tmp_path, 2, **CHANGES, checkpoint_every=2)) == [2, 2]
    told = processes.errors(tmp_path)
    assert "cannot be resumed" in told[0]
    assert told[1].startswith("ToldElsewhere: rank 0: ")


def test_a_world_of_one_needs_no_group():
    alone = World(0, 1, torch.device("cpu"))
    tensor = torch.ones(3)
    alone.sum_(tensor)
    assert tensor.tolist() == [1, 1, 1]
    assert alone.gather("x") == ["x"]
    assert alone.on_first(lambda: 5) == 5


@pytest.mark.parametrize("num_values", [10, 13, 64])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_parts_cover_every_value_once_but_for_the_rest(num_values, num_parts):
    """The rest is updated by every rank alike; gains never decay."""
    seen = torch.zeros(num_values)
    decays = torch.full((num_values,), -1.0)
    for rank in range(num_parts):
        parts = EqualParts(SimpleNamespace(rank=rank, size=num_parts), num_values).slices
        own_size = sum(part.stop - part.start for part in parts)
        taken = torch.zeros(own_size)
        for segment in segments_of(parts, 7, 0.1):
            seen[segment.whole] += 1
            taken[segment.own] += 1
            decays[segment.whole] = segment.weight_decay
        assert taken.tolist() == [1] * own_size
    rest = num_values % num_parts
    assert seen.tolist() == [1] * (num_values - rest) + [num_parts] * rest
    assert decays.tolist() == pytest.approx([0.1] * 7 + [0.0] * (num_values - 7))


@given(st.lists(st.integers(1, 50), max_size=9), st.integers(1, 10), st.integers(0, 5), st.integers(0, 5))
def test_matrices_are_dealt_whole_and_evenly(sizes, num_ranks, before, after):
    """Every value is one rank's, or everybody's; no rank has more than the least one and one matrix."""
    ends = [before, *(before + total for total in accumulate(sizes))]
    matrices = [slice(start, stop) for start, stop in pairwise(ends)]
    owned = torch.zeros(num_ranks, ends[-1] + after, dtype=torch.int64)
    for rank in range(num_ranks):
        parts = WholeMatrices(SimpleNamespace(rank=rank, size=num_ranks), owned.shape[1], matrices).slices
        assert parts == sorted(parts, key=lambda part: part.start)
        for part in parts:
            owned[rank, part] += 1
    expected = torch.full((owned.shape[1],), num_ranks)
    expected[before : ends[-1]] = 1
    assert owned.sum(0).tolist() == expected.tolist()
    loads = owned[:, before : ends[-1]].sum(1)
    assert loads.max() - loads.min() <= max(sizes, default=0)
    assert sorted((m.start, m.stop) for m, _ in dealt(matrices, num_ranks)) == [(m.start, m.stop) for m in matrices]


def test_losses_are_the_same_files(tmp_path, alone):
    """What is compared above is there."""
    assert json.loads((alone / "metrics/metrics.json").read_text())["validation"]["tau"] >= 1
    assert losses(alone)["step_0"]
