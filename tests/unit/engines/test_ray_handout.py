"""Who gets which shard, when workers come and go: no cluster, no clock."""

import dataclasses
import random

import pytest

from eyas.contracts import PlannedSample, PlannedShard
from eyas.engines.ray.handout import MAX_LOSSES, Handout
from eyas.errors import CaptureError


def make_shards(num: int) -> list[PlannedShard]:
    return [
        PlannedShard(path=f"000/shard-{n:05d}.safetensors", payload_bytes=1, batches=((PlannedSample(sample_id=f"s{n}", num_tokens=1),),))
        for n in range(num)
    ]  # fmt: skip


def give_all(handout: Handout, worker: str, num_workers: int = 1) -> list[str]:
    given = []
    while handout.next_for(worker, num_workers) is not None:
        given.append(handout.give(worker).path)
    return given


def test_a_worker_has_one_shard_at_work_and_one_waiting():
    shards = make_shards(4)
    handout = Handout(shards)
    assert give_all(handout, "a") == [shards[0].path]
    handout.begun("a", [shards[0].path])
    assert give_all(handout, "a") == [shards[1].path]
    assert give_all(handout, "b") == [shards[2].path]
    handout.finished("a", shards[0].path)
    assert give_all(handout, "a") == []
    handout.begun("a", [shards[1].path])
    assert give_all(handout, "a") == [shards[3].path]


def test_many_small_shards_lie_ahead_and_the_last_ones_are_shared():
    """100 shards, two workers: n + 1 more for each of two, four times as many left (arithmetic); or 4 GiB of states."""
    handout = Handout(make_shards(100))
    assert len(give_all(handout, "a", num_workers=2)) == 11  # with 11 given 89 are left: 12 x 2 x 4 is more
    assert len(give_all(handout, "b", num_workers=2)) == 10  # 79 are left, 11 x 2 x 4 is more
    large = [dataclasses.replace(shard, payload_bytes=3 << 29) for shard in make_shards(100)]
    assert len(give_all(Handout(large), "a", num_workers=2)) == 2  # a third would be 4.5 GiB


def test_lost_shards_go_out_first_and_alone():
    shards = make_shards(5)
    handout = Handout(shards)
    handout.give("a")
    handout.begun("a", [shards[0].path])
    handout.give("a")
    handout.give("b")
    handout.begun("b", [shards[2].path])
    assert [shard.path for shard in handout.lost("a", "killed")] == [shards[0].path, shards[1].path]
    assert handout.next_for("b") is None  # its hands are not empty
    assert give_all(handout, "c") == [shards[0].path]
    handout.begun("c", [shards[0].path])
    assert handout.next_for("c") is None  # a suspect has nothing beside it
    handout.finished("c", shards[0].path)
    assert give_all(handout, "c") == [shards[1].path]


def test_a_shard_that_ends_every_worker_ends_the_run_by_its_name_and_no_other_is_blamed():
    shards, done = make_shards(6), []
    handout = Handout(shards)

    def work(worker: str) -> None:
        while (planned := handout.next_for(worker)) is not None:
            handout.give(worker)
            handout.begun(worker, [planned.path])
            if planned is shards[2]:
                if handout.next_for(worker) is not None:
                    handout.give(worker)
                handout.lost(worker, f"{worker}: died")
                return
            assert handout.finished(worker, planned.path) is planned
            done.append(planned.path)

    for number in range(MAX_LOSSES - 1):
        work(f"w{number}")
    with pytest.raises(CaptureError) as caught:
        work("last")
    assert shards[2].path in caught.value.message
    assert caught.value.message.count("died") == MAX_LOSSES
    assert "s2" in caught.value.message
    assert not [path for path in done if path == shards[2].path]


def test_what_a_lost_worker_still_says_counts_for_nobody():
    shards = make_shards(1)
    handout = Handout(shards)
    handout.give("a")
    handout.lost("a", "gone")
    assert handout.finished("a", shards[0].path) is None
    assert handout.num_left == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_shard_is_finished_once(seed):
    dice, shards, finished = random.Random(seed), make_shards(30), []
    handout, workers, next_name = Handout(shards), ["w0", "w1", "w2"], 3
    hands: dict[str, list[str]] = {name: [] for name in workers}
    losses = dict.fromkeys([shard.path for shard in shards], 0)
    for _ in range(10_000):
        if not handout.num_left:
            break
        name = dice.choice(workers)
        if handout.next_for(name) is not None:
            hands[name].append(handout.give(name).path)
        elif hands[name] and dice.random() < 0.8:
            path = hands[name].pop(0)
            handout.begun(name, [path])
            assert handout.finished(name, path) is not None
            finished.append(path)
        elif all(losses[path] < MAX_LOSSES - 1 for path in hands[name]):
            for path in hands.pop(name):
                losses[path] += 1
            handout.lost(name, "gone")
            workers[workers.index(name)] = f"w{next_name}"
            hands[f"w{next_name}"] = []
            next_name += 1
    assert sorted(finished) == [shard.path for shard in shards]
