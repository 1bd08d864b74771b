"""Which rows of the states a training reads: those that ``last_rows: trained`` stores, and no other."""

import dataclasses

import pytest
import torch
import train_world as world

from eyas.errors import StoreError


def with_spans():
    """States whose masks have two spans, a span that opens the document, none that trains, tokens behind the last."""
    reader = world.MemoryReader()
    for index, states in enumerate(reader.states.values()):
        mask_T = states.loss_mask_T
        if index % 4 == 1:
            mask_T[6], mask_T[-2:] = 0, 0
        elif index % 4 == 2:
            mask_T[:3], mask_T[-3:] = 1, 0
        elif index % 4 == 3:
            mask_T[:], mask_T[5] = 0, 1
    return reader


class ChangedReader:
    """A reader with every sample's states changed on the way."""

    def __init__(self, reader, change):
        self._reader, self._change = reader, change
        self.samples, self.shard_of = reader.samples, reader.shard_of

    def read(self, sample_id):
        return self._change(self._reader.read(sample_id))


@pytest.fixture(scope="module")
def trained_on_all(tmp_path_factory):
    """Bytes of a run on states with every row, and a reader of the same states with trained rows only."""
    folder = tmp_path_factory.mktemp("all")
    whole = world.write_shards(folder / "whole", with_spans(), "raw", "all")
    world.run(folder, world.make_inputs(folder, reader=whole))
    return world.result_bytes(folder), world.write_shards(folder / "some", with_spans(), "blosc2", "trained")


def test_trained_rows_alone_give_the_same_weights_and_metrics(tmp_path, trained_on_all):
    """To the bit, though rows are missing: what is not stored is NaN and would not pass unseen."""
    expected, reader = trained_on_all
    stored = [reader.read(s.sample_id) for s in reader.samples]
    assert sum(int(s.has_last_T.sum()) for s in stored) < 0.6 * sum(s.sample.num_tokens for s in stored)
    assert all(bool(s.last_TD[~s.has_last_T].isnan().all()) for s in stored)
    world.run(tmp_path, world.make_inputs(tmp_path, reader=reader))
    assert world.result_bytes(tmp_path) == expected


def test_nothing_depends_on_aux_rows_that_are_not_stored(tmp_path, trained_on_all):
    """The reader gives zeros there; other finite values change not a bit of what is trained."""
    expected, reader = trained_on_all

    def poisoned(states):
        tail_XAD = states.aux_TAD[states.num_aux_rows :]
        assert not tail_XAD.any()
        tail_XAD.copy_(torch.randn(tail_XAD.shape, generator=torch.Generator().manual_seed(0)) * 100)
        return states

    world.run(tmp_path, world.make_inputs(tmp_path, reader=ChangedReader(reader, poisoned)))
    assert world.result_bytes(tmp_path) == expected


def shifted(tensor_TX, rows):
    return torch.roll(tensor_TX, rows, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: dataclasses.replace(s, last_TD=shifted(s.last_TD, 1)),
        lambda s: dataclasses.replace(s, last_TD=shifted(s.last_TD, -1)),
        lambda s: dataclasses.replace(s, has_last_T=shifted(s.has_last_T, 1)),
        lambda s: dataclasses.replace(s, loss_mask_T=shifted(s.loss_mask_T, 1)),
    ],
    ids=["states down", "states up", "what is there", "mask"],
)
def test_rows_shifted_by_one_are_refused(tmp_path, trained_on_all, change):
    """The negative control: rows that train are asked for by place, and a missing one names sample and row."""
    reader = ChangedReader(trained_on_all[1], change)
    with pytest.raises(StoreError, match=r"^sample [0-9a-f]{16}: row \d+ of (last|aux) is not stored, expected"):
        world.run(tmp_path, world.make_inputs(tmp_path, reader=reader))


def test_an_aux_row_that_is_not_stored_is_named(tmp_path, trained_on_all):
    reader = trained_on_all[1]
    short = ChangedReader(reader, lambda s: dataclasses.replace(s, num_aux_rows=max(0, s.num_aux_rows - 1)))
    first = min(s.sample_id for s in reader.samples)
    row = reader.read(first).num_aux_rows - 1
    with pytest.raises(StoreError, match=rf"^sample {first}: row {row} of aux is not stored"):
        world.run(tmp_path, world.make_inputs(tmp_path, reader=short))
