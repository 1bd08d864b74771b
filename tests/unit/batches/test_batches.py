"""Order, packing and reading ahead: every training document once an epoch, resumable anywhere."""

import itertools
import statistics
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.batches.loader import READ_AHEAD, BatchLoader, num_read_threads, order_of, plan_once, training_samples
from eyas.batches.order import WINDOW_SHARDS, BatchOrder, Cursor, deal, pack_order, shuffled, shuffled_by_shard
from eyas.batches.split import split_samples
from eyas.contracts import StoredSample
from eyas.errors import ConfigError, StoreError
from eyas.shards.reader import StoredStates


def stored(index, num_tokens=5, split="train"):
    return StoredSample(
        sample_id=f"{index:016x}",
        num_tokens=num_tokens,
        conversation_id=f"c{index}",
        source="s",
        split=split,
        variant="greedy",
    )


class MemoryReader:
    """States of nothing; ``delay_s`` of a sample's read, by its number."""

    def __init__(self, samples, broken=(), delay_s=lambda index: 0.0):
        self.samples, self.broken, self.delay_s, self.reads = tuple(samples), set(broken), delay_s, []

    def shard_of(self, sample_id):
        return "000/shard-00000.safetensors"

    def read(self, sample_id):
        self.reads.append(sample_id)
        time.sleep(self.delay_s(int(sample_id, 16)))
        if sample_id in self.broken:
            raise StoreError(f"sample {sample_id} is damaged")
        sample = self.samples[int(sample_id, 16)]
        T = sample.num_tokens
        empty, ids_T, mask_T = torch.zeros(T, 1), torch.zeros(T, dtype=torch.int32), torch.ones(T, dtype=torch.uint8)
        return StoredStates(sample, ids_T, mask_T, empty, empty, T, mask_T.bool())


def make_loader(reader, batch_tokens, seed, **plan):
    return BatchLoader(reader, order_of(reader, training_samples(reader), batch_tokens, seed).plan(Cursor(), **plan))


def take(loader, count):
    with loader:
        return list(itertools.islice(iter(loader), count))


def ids_of(batches):
    return [d.sample.sample_id for b in batches for d in b.documents]


def reading_threads():
    return [t for t in threading.enumerate() if t.name.startswith("eyas-read-ahead")]


def within(seconds, work):
    """Run ``work`` in a thread that must end in time: a deadlock is a failure, not a hanging suite."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not finished after {seconds} s"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 40))
def test_batches_hold_every_document_once_and_keep_the_limit(lengths, batch_tokens):
    batches = pack_order(range(len(lengths)), lengths, batch_tokens)
    assert [i for batch in batches for i in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= batch_tokens


def test_a_document_longer_than_a_batch_is_its_own_batch():
    assert pack_order([0, 1, 2], [3, 50, 4], 10) == [(0,), (1,), (2,)]


def test_the_shuffle_depends_on_seed_and_epoch_but_not_on_the_stored_order():
    ids = [f"{i:016x}" for i in range(50)]
    first = [ids[i] for i in shuffled(ids, 0, 0)]
    assert first != [ids[i] for i in shuffled(ids, 0, 1)]
    assert first != [ids[i] for i in shuffled(ids, 1, 0)]
    back = ids[::-1]
    assert first == [back[i] for i in shuffled(back, 0, 0)]
    assert sorted(first) == ids


def planned(num_shards, per_shard):
    """A plan's ids, shard paths and lengths: neighbours of equal length, falling from shard to shard."""
    ids = [f"{i:016x}" for i in range(num_shards * per_shard)]
    shards = [f"{i // per_shard // 64:03d}/shard-{i // per_shard:05d}.safetensors" for i in range(len(ids))]
    return ids, shards, [10 * (num_shards - i // per_shard) for i in range(len(ids))]


def windows_of(order, shards, num_windows):
    """The sets of shards met one after another; fails when a shard is met in two windows."""
    met = [shards[i] for i in order]
    first, last = {s: met.index(s) for s in set(met)}, {s: len(met) - met[::-1].index(s) for s in set(met)}
    edges, end = [], 0
    for shard in sorted(first, key=lambda s: first[s]):
        if first[shard] >= end:
            edges.append(set())
        edges[-1].add(shard)
        end = max(end, last[shard])
    assert len(edges) == num_windows
    return edges


@pytest.mark.parametrize("num_shards", [1, 8, WINDOW_SHARDS])
@pytest.mark.parametrize("epoch", [0, 3])
def test_a_set_of_few_shards_is_shuffled_as_a_whole(num_shards, epoch):
    ids, shards, _ = planned(num_shards, 7)
    assert shuffled_by_shard(ids, shards, 5, epoch) == shuffled(ids, 5, epoch)


@pytest.mark.parametrize("num_shards", [WINDOW_SHARDS + 1, 2 * WINDOW_SHARDS, 100])
def test_a_large_set_is_read_window_by_window_and_every_window_has_all_lengths(num_shards):
    """A shard is hot in one window only; the mean length of a window is the set's within 5 %."""
    ids, shards, lengths = planned(num_shards, 20)
    order = shuffled_by_shard(ids, shards, 5, 1)
    assert sorted(order) == list(range(len(ids)))
    windows = windows_of(order, shards, -(-num_shards // WINDOW_SHARDS))
    assert all(num_shards // len(windows) <= len(window) <= WINDOW_SHARDS for window in windows)
    length_of = dict(zip(shards, lengths, strict=True))
    for window in windows:
        mean = statistics.mean(length_of[s] for s in window)
        assert mean == pytest.approx(statistics.mean(lengths), rel=0.05)
    met = [lengths[i] for i in order]
    for start in range(0, len(met), 100):  # a hundred documents in a row: no stretch of long or short ones
        assert statistics.mean(met[start : start + 100]) == pytest.approx(statistics.mean(lengths), rel=0.25)


def test_windows_depend_on_seed_and_epoch_but_not_on_the_stored_order():
    ids, shards, _ = planned(70, 3)
    first = [ids[i] for i in shuffled_by_shard(ids, shards, 0, 0)]
    back, shards_back = ids[::-1], shards[::-1]
    assert first == [back[i] for i in shuffled_by_shard(back, shards_back, 0, 0)]
    seen = {tuple(sorted(windows_of(shuffled_by_shard(ids, shards, s, e), shards, 3)[0])) for s, e in [(0, 0), (0, 1)]}
    assert len(seen) == 2
    assert first != [ids[i] for i in shuffled_by_shard(ids, shards, 1, 0)]


@given(st.integers(1, 90), st.integers(1, 4), st.integers(0, 9), st.integers(0, 3))
def test_every_document_comes_once_an_epoch_from_any_number_of_shards(num_shards, per_shard, seed, epoch):
    ids, shards, _ = planned(num_shards, per_shard)
    order = shuffled_by_shard(ids, shards, seed, epoch)
    assert sorted(order) == list(range(len(ids)))


@given(st.integers(0, 60), st.sampled_from([1, 23]))
def test_any_cursor_goes_on_exactly_there(position, per_shard):
    """Case 69: the data cursor, in a set of one window and in one of two."""
    ids, shards, _ = planned(46 // per_shard, per_shard)
    order = BatchOrder(ids, shards, [1 + i % 7 for i in range(46)], 9, 3)
    whole = list(itertools.islice(order(Cursor()), position + 5))
    cursor = whole[position - 1][0] if position else Cursor()
    assert list(itertools.islice(order(cursor), 5)) == whole[position:]


def test_held_out_documents_are_never_read():
    reader = MemoryReader([stored(i, split="held_out" if i % 3 == 0 else "train") for i in range(12)])
    batches = take(make_loader(reader, 10, 0), 8)
    assert {s.split for b in batches for s in (d.sample for d in b.documents)} == {"train"}
    assert not set(reader.reads) & {stored(i).sample_id for i in range(0, 12, 3)}


def test_an_epoch_reads_every_training_document_once():
    reader = MemoryReader([stored(i, num_tokens=1 + i % 4) for i in range(20)])
    num_batches = len(order_of(reader, reader.samples, 7, 5).epoch(0))
    batches = take(make_loader(reader, 7, 5), num_batches)
    assert sorted(ids_of(batches)) == [s.sample_id for s in reader.samples]
    assert batches[-1].planned.after == Cursor(1, 0)


@pytest.mark.parametrize("num_threads", [1, 8])
def test_reading_ahead_is_bounded_and_ends_with_the_context(monkeypatch, num_threads):
    """Case 72: memory is bounded by the batches in flight, not by the set nor by the threads."""
    monkeypatch.setenv("EYAS_READ_THREADS", str(num_threads))
    reader = MemoryReader([stored(i) for i in range(100)])
    with make_loader(reader, 5, 0) as loader:
        batches = iter(loader)
        for taken in (1, 2):
            next(batches)
            deadline = time.monotonic() + 5
            while len(reader.reads) < READ_AHEAD + taken and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            assert len(reader.reads) == READ_AHEAD + taken
        assert reading_threads()
    assert not reading_threads()


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_documents_come_in_order_however_long_each_takes(monkeypatch, num_threads):
    """The same batches and cursors for any number of threads; later documents finish first."""
    samples = [stored(i, num_tokens=1 + i % 3) for i in range(40)]
    expected = BatchOrder([s.sample_id for s in samples], ["s"] * 40, [s.num_tokens for s in samples], 6, 2)
    wanted = list(itertools.islice(expected(Cursor()), 12))
    place = {i: n for n, i in enumerate(i for _, indices in wanted for i in indices)}
    monkeypatch.setenv("EYAS_READ_THREADS", str(num_threads))
    reader = MemoryReader(samples, delay_s=lambda i: 0.004 * ((7 * place.get(i, 0)) % 5))
    batches = take(make_loader(reader, 6, 2), 12)
    assert ids_of(batches) == [samples[i].sample_id for _, indices in wanted for i in indices]
    assert [b.planned.after for b in batches] == [after for after, _ in wanted]


def test_documents_are_read_side_by_side(monkeypatch):
    """Four threads meet inside ``read``: one after another they would wait for each other in vain."""
    monkeypatch.setenv("EYAS_READ_THREADS", "4")
    meeting = threading.Barrier(4, timeout=20)
    reader = MemoryReader([stored(i) for i in range(4)], delay_s=lambda i: meeting.wait() * 0)
    assert len(take(make_loader(reader, 20, 0), 1)[0].documents) == 4


@pytest.mark.parametrize("num_threads", [1, 4])
def test_damaged_samples_are_named_in_their_own_batch_and_the_rest_keeps_its_order(monkeypatch, num_threads):
    """Two are damaged and the later one is read at once: every batch is where it was, less these two."""
    monkeypatch.setenv("EYAS_READ_THREADS", str(num_threads))
    samples = [stored(i) for i in range(12)]
    order = shuffled([s.sample_id for s in samples], 0, 0)
    first, second = order[5], order[6]
    broken = [samples[first].sample_id, samples[second].sample_id]
    reader = MemoryReader(samples, broken, delay_s=lambda i: 0.1 if i == first else 0.0)
    batches = take(make_loader(reader, 10, 0), 6)
    assert [[d.sample_id for d in batch.damaged] for batch in batches] == [[], [], broken[:1], broken[1:], [], []]
    assert ids_of(batches) == [samples[i].sample_id for i in order if i not in (first, second)]
    assert broken[0] in batches[2].damaged[0].error.message
    assert not reading_threads()


def test_what_a_check_refuses_is_damaged():
    def check(states):
        if states.sample.num_tokens == 3:
            raise StoreError("three tokens")

    reader = MemoryReader([stored(i, num_tokens=3 if i == 4 else 5) for i in range(8)])
    plan = order_of(reader, reader.samples, 100, 0).plan(Cursor())
    (batch,) = take(BatchLoader(reader, plan, check), 1)
    assert [d.sample_id for d in batch.damaged] == [f"{4:016x}"]
    assert len(batch.documents) == 7


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=40), st.integers(1, 8))
def test_dealt_packs_are_even(num_tokens, num_ranks):
    """Case 71: no rank has more tokens than the lightest one and one pack; every rank has work when there is enough."""
    ranks = deal(num_tokens, num_ranks)
    loads = [sum(t for t, r in zip(num_tokens, ranks, strict=True) if r == rank) for rank in range(num_ranks)]
    assert sum(loads) == sum(num_tokens)
    assert max(loads) <= min(loads) + max(num_tokens)
    assert len(set(ranks)) == min(num_ranks, len(num_tokens))


@pytest.mark.parametrize(("packs_per_step", "num_ranks"), [(1, 1), (3, 1), (4, 2), (5, 3)])
def test_ranks_read_disjoint_packs_that_make_the_same_steps(packs_per_step, num_ranks):
    """Whatever the number of ranks, step n holds the same documents and the same cursor follows it."""
    reader = MemoryReader([stored(i, num_tokens=1 + i % 7) for i in range(30)])
    order = order_of(reader, reader.samples, 9, 2)
    whole = [indices for _, indices in itertools.islice(order(Cursor()), packs_per_step * 6)]
    expected = [
        sorted(f"{i:016x}" for pack in whole[n * packs_per_step :][:packs_per_step] for i in pack) for n in range(6)
    ]
    steps, cursors = [[] for _ in range(6)], []
    for rank in range(num_ranks):
        plan, seen = order.plan(Cursor(), packs_per_step, rank, num_ranks), []
        for step in steps:
            for planned in plan:
                step.extend(planned.sample_ids)
                if planned.ends_step:
                    break
            seen.append(planned.after)
        cursors.append(seen)
    assert [sorted(step) for step in steps] == expected
    assert all(seen == cursors[0] for seen in cursors)


def test_a_plan_of_one_pass_reads_every_sample_once_over_all_ranks():
    samples = [stored(i, num_tokens=1 + i % 5) for i in range(23)]
    names = [name for rank in range(3) for b in plan_once(samples, 8, rank, 3) for name in b.sample_ids]
    assert sorted(names) == [s.sample_id for s in samples]


# ── validation split ──────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.floats(0, 0.99), st.integers(0, 3))
def test_the_split_is_by_conversation_disjoint_and_complete(conversations, share, seed):
    samples = [
        StoredSample(
            sample_id=f"{i:016x}", num_tokens=5, conversation_id=f"c{name}", source="s",
            split="held_out" if name % 5 == 4 else "train", variant="greedy",
        )
        for i, name in enumerate(conversations)
    ]  # fmt: skip
    training, validation = split_samples(samples, share, seed)
    ids = {s.sample_id for s in samples if s.split == "train"}
    assert {s.sample_id for s in training} | {s.sample_id for s in validation} == ids
    assert len(training) + len(validation) == len(ids)
    left, right = ({s.conversation_id for s in side} for side in (training, validation))
    assert not left & right
    if share == 0:
        assert not right
    elif len(left | right) > 1:
        assert left
        assert len(right) == min(max(1, round(share * len(left | right))), len(left | right) - 1)


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("num_threads", [1, 8])
def test_a_consumer_that_stops_early_leaves_no_thread_and_no_deadlock(monkeypatch, taken, num_threads):
    monkeypatch.setenv("EYAS_READ_THREADS", str(num_threads))
    reader = MemoryReader([stored(i) for i in range(200)], delay_s=lambda i: 0.002)
    within(20, lambda: take(make_loader(reader, 40, 0), taken))
    assert not reading_threads()
    assert len(reader.reads) <= 8 * (taken + READ_AHEAD)


@pytest.mark.parametrize("value", ["0", "many", "-1", "1.5"])
def test_a_number_of_threads_that_is_none_is_a_user_error(monkeypatch, value):
    monkeypatch.setenv("EYAS_READ_THREADS", value)
    with pytest.raises(ConfigError, match="EYAS_READ_THREADS"):
        num_read_threads()


def test_a_hundred_thousand_samples_start_within_seconds():
    """Case 72: the first batch needs the index and one read, not a scan."""
    reader = MemoryReader([stored(i) for i in range(100_000)])
    start = time.perf_counter()
    batch = take(make_loader(reader, 64, 0), 1)[0]
    assert len(batch.documents) == 12
    assert time.perf_counter() - start < 5
    assert len(reader.reads) <= 12 * (READ_AHEAD + 2)
