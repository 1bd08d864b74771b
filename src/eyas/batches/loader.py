"""Reading batches ahead of the trainer.

    shards → reading threads (checksums, codec and check, document by document) → batches in order

Memory is bounded by the batches in flight, ``READ_AHEAD`` of them and the one in use, whatever the number of
threads; the set of states is never held. A document that cannot be read does not stop the batches: it is named
in its batch, and whoever trains decides.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eyas import config
from eyas.batches.order import WINDOW_SHARDS, BatchOrder, Cursor, PlannedBatch, pack_order
from eyas.errors import DataError, EyasError, StoreError

if TYPE_CHECKING:
    from eyas.contracts import StoredSample
    from eyas.shards.reader import StoredStates

READ_AHEAD = 3
LOOK_AHEAD = 32
"""Batches before it is read that a reader hears of one: states that are far away set out."""


class Reader(Protocol):
    """What batches need of a set of shards."""

    @property
    def samples(self) -> Sequence[StoredSample]:
        """Every stored sample."""
        ...

    def shard_of(self, sample_id: str) -> str:
        """Path of the shard that holds a sample; paths sort as the plan made them."""
        ...

    def read(self, sample_id: str) -> StoredStates:
        """States of one sample, checksum verified; called from several threads at once."""
        ...


@dataclass(frozen=True, slots=True)
class Damaged:
    """A sample that cannot be read, and why."""

    sample_id: str
    error: EyasError


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole documents of one pack."""

    documents: tuple[StoredStates, ...]
    damaged: tuple[Damaged, ...]
    """Documents that belong here and cannot be read, in the order of the batch."""
    planned: PlannedBatch


@dataclass(frozen=True, slots=True)
class _Reading:
    """A batch whose documents are being read."""

    documents: tuple[Future[StoredStates | Damaged], ...]
    planned: PlannedBatch

    def finished(self) -> Batch:
        """Wait for every document."""
        found = [document.result() for document in self.documents]
        damaged = tuple(document for document in found if isinstance(document, Damaged))
        return Batch(tuple(d for d in found if not isinstance(d, Damaged)), damaged, self.planned)


def training_samples(reader: Reader) -> list[StoredSample]:
    """Samples of the training split; held-out ones are never read."""
    return [sample for sample in reader.samples if sample.split == "train"]


def num_read_threads() -> int:
    """Reading threads from ``EYAS_READ_THREADS``; the usable cores, at most 8, when it is not set.

    Raises:
        ConfigError: It is no number from 1.
    """
    return config.knob("EYAS_READ_THREADS", min(config.cores(), 8))


def order_of(
    reader: Reader,
    samples: Sequence[StoredSample],
    batch_tokens: int,
    seed: int,
    window_shards: int = WINDOW_SHARDS,
) -> BatchOrder:
    """The order in which some samples of a reader are trained on."""
    ids, lengths = [s.sample_id for s in samples], [s.num_tokens for s in samples]
    return BatchOrder(ids, [reader.shard_of(i) for i in ids], lengths, batch_tokens, seed, window_shards)


def plan_once(
    samples: Sequence[StoredSample], batch_tokens: int, rank: int = 0, num_ranks: int = 1
) -> Iterator[PlannedBatch]:
    """Every sample once, in the given order, cut into packs that are dealt to ranks one after another."""
    lengths = [sample.num_tokens for sample in samples]
    packs = pack_order(range(len(samples)), lengths, batch_tokens)
    for number, indices in enumerate(packs):
        if number % num_ranks == rank:
            yield PlannedBatch(tuple(samples[i].sample_id for i in indices), True, Cursor(0, number + 1))


class BatchLoader:
    """Planned batches, read ahead in threads.

    Args:
        reader: Thread-safe access to the states.
        plan: What to read, with an end or without.
        check: Called with every document in the thread that read it; a ``StoreError`` or ``DataError`` of it means
            that the document is damaged.

    Use as a context manager and iterate inside it: leaving it ends the threads, after the documents they are at.

    Raises:
        ConfigError: ``EYAS_READ_THREADS`` is no number from 1.
    """

    def __init__(
        self, reader: Reader, plan: Iterator[PlannedBatch], check: Callable[[StoredStates], None] | None = None
    ) -> None:
        expect: Callable[[Sequence[str]], None] | None = getattr(reader, "expect", None)
        self._reader, self._check = reader, check
        self._plan = plan if expect is None else _looked_ahead(plan, expect)
        self._pool = ThreadPoolExecutor(num_read_threads(), thread_name_prefix="eyas-read-ahead")

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[Batch]:
        """Batches of the plan in order."""
        reading = deque(self._start(planned) for planned in itertools.islice(self._plan, READ_AHEAD))
        while reading:
            batch = reading.popleft().finished()
            reading.extend(self._start(planned) for planned in itertools.islice(self._plan, 1))  # while others work
            yield batch
            del batch  # or it would stay in memory while the next one is awaited

    def _start(self, planned: PlannedBatch) -> _Reading:
        return _Reading(tuple(self._pool.submit(self._read, name) for name in planned.sample_ids), planned)

    def _read(self, sample_id: str) -> StoredStates | Damaged:
        try:
            states = self._reader.read(sample_id)
            if self._check is not None:
                self._check(states)
        except (StoreError, DataError) as error:
            return Damaged(sample_id, error)
        return states


def _looked_ahead(plan: Iterator[PlannedBatch], expect: Callable[[Sequence[str]], None]) -> Iterator[PlannedBatch]:
    waiting: deque[PlannedBatch] = deque()
    for planned in plan:
        expect(planned.sample_ids)
        waiting.append(planned)
        if len(waiting) > LOOK_AHEAD:
            yield waiting.popleft()
    yield from waiting
