"""Packs made ahead, damaged samples, memory of the way from disk to step."""

import dataclasses
import gc
import threading
import time
import weakref

import pytest
import torch
import train_world as world
from test_train import StoppedError, stop_at
from test_train_distributed import assert_same_training

from eyas import fs
from eyas.batches.loader import READ_AHEAD
from eyas.errors import DataError, StoreError, TrainError
from eyas.train import loop
from eyas.train.data import check_states
from eyas.train.packs import made_ahead


class DamagedReader(world.MemoryReader):
    """Some samples cannot be read, or hold what is no number."""

    def __init__(self, broken=(), nan=(), short=()):
        super().__init__()
        self.broken, self.nan, self.short = broken, nan, short

    def read(self, sample_id):
        number, states = int(sample_id, 16), super().read(sample_id)
        if number in self.broken:
            raise StoreError(f"sample {sample_id}: checksum 1, expected 2")
        if number in self.nan:
            aux_TAD = states.aux_TAD.clone()
            aux_TAD[4, 1, 3] = float("nan")
            return dataclasses.replace(states, aux_TAD=aux_TAD)
        if number in self.short:
            return dataclasses.replace(states, num_aux_rows=3)
        return states


class LessReader(world.MemoryReader):
    """Samples whose mask trains nothing: they are read and leave no trace."""

    def __init__(self, without):
        super().__init__()
        for number in without:
            self.states[f"{number:016x}"].loss_mask_T.zero_()


DAMAGE = {"broken": (3, 8), "nan": (12,), "short": (1,)}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [({"broken": (3,)}, "checksum 1, expected 2"), ({"nan": (3,)}, "row 4 of aux holds NaN"), ({"short": (3,)}, "row 3 of aux is not stored")],
)  # fmt: skip
def test_one_damaged_sample_is_fatal_unless_allowed(tmp_path, damage, reason):
    with pytest.raises(StoreError, match=f"sample {3:016x}: {reason}"):
        world.run(tmp_path, world.make_inputs(tmp_path, reader=DamagedReader(**damage)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -float("nan")])
@pytest.mark.parametrize("name", ["aux_TAD", "last_TD"])
def test_what_is_no_number_is_found_and_large_numbers_are_not(value, name):
    states = world.MemoryReader().read(f"{0:016x}")
    tensor = getattr(states, name).clone()
    tensor[5] = torch.finfo(torch.bfloat16).max
    tensor[6], tensor[7] = -torch.finfo(torch.bfloat16).max, -0.0
    check_states(dataclasses.replace(states, **{name: tensor}))
    tensor[4, ..., 2] = value
    with pytest.raises(StoreError, match=f"row 4 of {name.split('_')[0]} holds NaN or infinity"):
        check_states(dataclasses.replace(states, **{name: tensor}))


def test_damaged_samples_are_left_out_named_and_change_nothing_else(tmp_path, capsys):
    """Case 70: what is left is trained on in the order it had: as if those samples trained nothing."""
    damaged, less = tmp_path / "damaged", tmp_path / "less"
    _, outcome = world.run(damaged, world.make_inputs(damaged, reader=DamagedReader(**DAMAGE), max_damaged_samples=4))
    world.run(less, world.make_inputs(less, reader=LessReader((1, 3, 8, 12)), max_damaged_samples=4))
    assert_same_training(damaged, less)  # not to the bit: documents beside others share the blocks of a product
    assert {int(name, 16) for name in outcome.damaged} == {1, 3, 8, 12}
    assert "checksum 1" in outcome.damaged[f"{3:016x}"]
    assert capsys.readouterr().err.count("train: left out sample") == 4


def test_one_more_than_allowed_is_an_error_and_a_higher_limit_goes_on(tmp_path):
    few = world.make_inputs(tmp_path, reader=DamagedReader(**DAMAGE), max_damaged_samples=3, checkpoint_every=1)
    with pytest.raises(TrainError, match=r"4 samples are damaged, expected at most train.max_damaged_samples=3"):
        world.run(tmp_path, few)
    more = world.make_inputs(tmp_path, reader=DamagedReader(**DAMAGE), max_damaged_samples=4, checkpoint_every=1)
    _, outcome = world.run(tmp_path, more)
    assert outcome.resumed_at > 0
    assert len(outcome.damaged) == 4


@pytest.mark.parametrize("stop", [3, 7, 11])
def test_a_resumed_run_counts_damage_as_the_unbroken_one(tmp_path, monkeypatch, stop):
    """Case 69 with case 70: bytes, names and their order."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    _, expected = world.run(whole, world.make_inputs(whole, reader=DamagedReader(**DAMAGE), max_damaged_samples=4))

    def inputs():
        return world.make_inputs(broken, reader=DamagedReader(**DAMAGE), max_damaged_samples=4, checkpoint_every=2)

    restore = stop_at(monkeypatch, stop)
    with pytest.raises(StoppedError):
        world.run(broken, inputs())
    restore()
    (state,) = (broken / "runs").glob("*/state.json")
    counted = fs.read_json(state)["damaged"]
    assert counted.items() <= expected.damaged.items()
    _, outcome = world.run(broken, inputs())
    assert outcome.damaged == expected.damaged
    assert world.result_bytes(broken) == world.result_bytes(whole)


def test_when_every_sample_is_damaged_the_first_one_is_told(tmp_path):
    reader = DamagedReader(broken=range(24))
    with pytest.raises(StoreError, match=f"sample {0:016x}: checksum"):
        world.run(tmp_path, world.make_inputs(tmp_path, reader=reader, max_damaged_samples=100))


# ── made ahead ────────────────────────────────────────────────────────────────────────────────


def in_thread(monkeypatch):
    monkeypatch.setattr(loop, "made_ahead", lambda items, in_thread: made_ahead(items, True))


def test_packs_made_in_a_thread_give_the_same_bytes_also_after_a_crash(tmp_path, monkeypatch):
    """What was made ahead at a checkpoint is made again: the cursor is that of the last step."""
    plain, ahead = tmp_path / "plain", tmp_path / "ahead"
    changes = {"packs_per_step": 2, "validation_share": 0.2, "validate_every": 5}
    world.run(plain, world.make_inputs(plain, **changes))
    in_thread(monkeypatch)
    restore = stop_at(monkeypatch, 13)
    with pytest.raises(StoppedError):
        world.run(ahead, world.make_inputs(ahead, **changes))
    restore()
    _, outcome = world.run(ahead, world.make_inputs(ahead, **changes))
    assert outcome.resumed_at == 4
    assert world.result_bytes(ahead) == world.result_bytes(plain)
    assert not [t for t in threading.enumerate() if t.name.startswith("eyas-pack")]


def test_one_item_is_made_ahead_and_no_more():
    made = []

    def items():
        for number in range(6):
            made.append(number)
            yield number

    stream = made_ahead(items(), in_thread=True)
    for number in range(4):
        assert next(stream) == number
        deadline = time.monotonic() + 5
        while len(made) < number + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.02)
        assert made == list(range(number + 2))
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("eyas-pack")]


@pytest.mark.parametrize("in_thread", [True, False])
def test_an_error_comes_at_its_items_place(in_thread):
    def items():
        yield 1
        yield 2
        raise DataError("here")

    stream = made_ahead(items(), in_thread)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(DataError, match="here"):
        next(stream)


# ── a large set ───────────────────────────────────────────────────────────────────────────────


class LargeReader(world.MemoryReader):
    """100,000 samples whose states are made when they are read; counts those that live."""

    def __init__(self, num_samples=100_000):
        super().__init__(24)
        self._samples = tuple(
            dataclasses.replace(self.states[f"{i % 24:016x}"].sample, sample_id=f"{i:016x}", conversation_id=f"c{i}")
            for i in range(num_samples)
        )
        self.living, self.most = set(), 0
        self.lock = threading.Lock()

    @property
    def samples(self):
        return self._samples

    def read(self, sample_id):
        states = self.states[f"{int(sample_id, 16) % 24:016x}"]
        own = dataclasses.replace(states, sample=self._samples[int(sample_id, 16)], aux_TAD=states.aux_TAD.clone())
        with self.lock:
            key = object()
            self.living.add(key)
            self.most = max(self.most, len(self.living))
            weakref.finalize(own.aux_TAD, self.living.discard, key)
        return own


@pytest.mark.parametrize("threaded", [False, True])
def test_a_hundred_thousand_samples_start_in_seconds_and_never_lie_in_memory(tmp_path, monkeypatch, threaded):
    """Case 72: the first step needs the index and its own documents; memory is bounded by what is in flight."""
    if threaded:
        in_thread(monkeypatch)
    gc.collect()
    reader, first = LargeReader(), {}
    real = loop.ttt_loss

    def timed(*args, **kwargs):
        first.setdefault("s", time.perf_counter() - start)
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "ttt_loss", timed)
    inputs = world.make_inputs(tmp_path, reader=reader, validation_share=0.0001, num_steps=40, packs_per_step=2)
    start = time.perf_counter()
    world.run(tmp_path, inputs)
    assert first["s"] < 10
    # calibration lets its documents go; then packs read ahead, one in use, and the documents that become packs
    longest_pack = 40 // 9
    packs = READ_AHEAD + 1 + 2
    calibration = 4096 // 9 + 1
    assert reader.most <= max(packs * longest_pack, calibration)
