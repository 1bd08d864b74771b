"""When an order needs which shard: against a plain count over every batch."""

from __future__ import annotations

import itertools

import pytest

from eyas.batches.demand import Demand
from eyas.batches.order import BatchOrder, Cursor

SHARDS = [f"000/shard-{i // 6:05d}.safetensors" for i in range(100)]


def make_order(window_shards: int) -> BatchOrder:
    return BatchOrder([f"s{i}" for i in range(100)], SHARDS, [3 + i % 5 for i in range(100)], 20, 7, window_shards)


@pytest.mark.parametrize(("window_shards", "batch"), [(1, 0), (3, 5), (32, 11)])
def test_uses_are_first_and_last_batch_of_every_shard_epoch_by_epoch(window_shards: int, batch: int) -> None:
    order = make_order(window_shards)
    start = Cursor(2, batch)
    demand = Demand(order, start)
    batches = [(epoch, shards) for epoch in (2, 3) for shards in order.shards(epoch)][batch:]
    expected = []
    for epoch in (2, 3):
        for shard in dict.fromkeys(s for e, shards in batches if e == epoch for s in sorted(shards)):
            at = [number for number, (e, shards) in enumerate(batches) if e == epoch and shard in shards]
            expected.append((shard, epoch, at[0], at[-1]))
    found = [(u.shard, u.epoch, u.first, u.last) for u in itertools.islice(demand, len(expected))]
    assert found == expected
    assert [use.first for use in itertools.islice(demand, len(expected))] == sorted(first for *_, first, _ in expected)
    assert demand.number(start) == 0
    assert demand.number(Cursor(3, 4)) == len(order.shards(2)) - batch + 4


@pytest.mark.parametrize(("window_shards", "packs_per_step"), [(1, 1), (3, 1), (3, 4), (32, 2)])
def test_the_peak_is_that_of_the_worst_step_and_windows_bound_it(window_shards: int, packs_per_step: int) -> None:
    order = make_order(window_shards)
    sizes = {shard: 10 + number for number, shard in enumerate(sorted(set(SHARDS)))}
    num_batches = len(order.shards(0)) + len(order.shards(1))
    demand = Demand(order, Cursor())
    uses = [use for use in itertools.islice(demand, 3 * len(sizes)) if use.first < num_batches]
    live = [
        sum(sizes[u.shard] for u in uses if u.first // packs_per_step <= step <= u.last // packs_per_step)
        for step in range(num_batches)
    ]
    found = demand.peak_bytes(sizes, packs_per_step, num_batches)
    assert found == max(live)
    if window_shards == 3 and packs_per_step == 1:
        assert found <= 2 * 3 * max(sizes.values()), "more than two windows at once"


def test_a_window_of_the_default_size_changes_nothing() -> None:
    """What trainings from stored states always had."""
    ids, lengths = [f"s{i}" for i in range(100)], [3 + i % 5 for i in range(100)]
    assert BatchOrder(ids, SHARDS, lengths, 20, 7).epoch(1) == make_order(32).epoch(1) != make_order(3).epoch(1)
