"""Order, packing and reading ahead: every training document once an epoch, resumable anywhere."""

import itertools
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.batches.loader import READ_AHEAD, BatchLoader
from eyas.batches.order import BatchOrder, Cursor, pack_order, shuffled
from eyas.contracts import StoredSample
from eyas.errors import StoreError
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
    def __init__(self, samples, broken=()):
        self.samples, self.broken, self.reads = tuple(samples), set(broken), []

    def read(self, sample_id):
        self.reads.append(sample_id)
        if sample_id in self.broken:
            raise StoreError(f"sample {sample_id} is damaged")
        sample = self.samples[int(sample_id, 16)]
        T = sample.num_tokens
        empty, ids_T, mask_T = torch.zeros(T, 1), torch.zeros(T, dtype=torch.int32), torch.ones(T, dtype=torch.uint8)
        return StoredStates(sample, ids_T, mask_T, empty, empty, T, mask_T.bool())


def take(loader, count):
    with loader:
        return list(itertools.islice(iter(loader), count))


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


@given(st.integers(0, 60))
def test_any_cursor_goes_on_exactly_there(position):
    """Case 69: the data cursor."""
    order = BatchOrder([f"{i:016x}" for i in range(23)], [1 + i % 7 for i in range(23)], 9, 3)
    whole = list(itertools.islice(order(Cursor()), position + 5))
    cursor = whole[position - 1][0] if position else Cursor()
    assert list(itertools.islice(order(cursor), 5)) == whole[position:]


def test_held_out_documents_are_never_read():
    reader = MemoryReader([stored(i, split="held_out" if i % 3 == 0 else "train") for i in range(12)])
    batches = take(BatchLoader(reader, 10, 0), 8)
    assert {s.split for b in batches for s in (d.sample for d in b.documents)} == {"train"}
    assert not set(reader.reads) & {stored(i).sample_id for i in range(0, 12, 3)}


def test_an_epoch_reads_every_training_document_once():
    reader = MemoryReader([stored(i, num_tokens=1 + i % 4) for i in range(20)])
    loader = BatchLoader(reader, 7, 5)
    batches = take(loader, loader.batches_per_epoch())
    assert sorted(d.sample.sample_id for b in batches for d in b.documents) == [s.sample_id for s in reader.samples]
    assert batches[-1].after == Cursor(1, 0)


def test_reading_ahead_is_bounded_and_ends_with_the_context():
    """Case 72: memory is bounded by the batches in flight, not by the set."""
    reader = MemoryReader([stored(i) for i in range(100)])
    with BatchLoader(reader, 5, 0) as loader:
        next(iter(loader))
        deadline = time.monotonic() + 5
        while len(reader.reads) < READ_AHEAD + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(reader.reads) <= READ_AHEAD + 2
    assert not [t for t in threading.enumerate() if t.name == "eyas-read-ahead"]


def test_a_damaged_sample_stops_the_consumer_with_its_own_error():
    reader = MemoryReader([stored(i) for i in range(6)], broken=[stored(4).sample_id])
    with pytest.raises(StoreError, match=stored(4).sample_id):
        take(BatchLoader(reader, 5, 0), 6)


def test_a_hundred_thousand_samples_start_within_seconds():
    """Case 72: the first batch needs the index and one read, not a scan."""
    reader = MemoryReader([stored(i) for i in range(100_000)])
    start = time.perf_counter()
    batch = take(BatchLoader(reader, 64, 0), 1)[0]
    assert len(batch.documents) == 12
    assert time.perf_counter() - start < 5
    assert len(reader.reads) <= 12 * (READ_AHEAD + 2)
