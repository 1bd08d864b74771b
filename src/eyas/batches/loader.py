"""Reading batches ahead of the trainer.

    shards → reading threads (checksums and codec, document by document) → batches in order

Memory is bounded by the batches in flight, ``READ_AHEAD`` of them and the one in use, whatever the number of
threads; the set of states is never held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eyas import config
from eyas.batches.order import BatchOrder, Cursor

if TYPE_CHECKING:
    from eyas.contracts import StoredSample
    from eyas.shards.reader import StoredStates

READ_AHEAD = 3


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
class Batch:
    """Whole documents and the cursor that goes on after them."""

    documents: tuple[StoredStates, ...]
    after: Cursor


@dataclass(frozen=True, slots=True)
class _Reading:
    """A batch whose documents are being read."""

    documents: tuple[Future[StoredStates], ...]
    after: Cursor

    def finished(self) -> Batch:
        """Wait for every document; the first that failed, in the batch's order, raises its error."""
        return Batch(tuple(document.result() for document in self.documents), self.after)


def training_samples(reader: Reader) -> list[StoredSample]:
    """Samples of the training split; held-out ones are never read."""
    return [sample for sample in reader.samples if sample.split == "train"]


def num_read_threads() -> int:
    """Reading threads from ``EYAS_READ_THREADS``; the usable cores, at most 8, when it is not set.

    Raises:
        ConfigError: It is no number from 1.
    """
    return config.knob("EYAS_READ_THREADS", min(config.cores(), 8))


class BatchLoader:
    """Batches of the training split without end, read ahead in threads.

    Args:
        reader: Thread-safe access to the states.
        batch_tokens: Most tokens of a batch of several documents.
        seed: Of the order.
        cursor: Where to start.

    Use as a context manager and iterate inside it: leaving it ends the threads, after the documents they are at.

    Raises:
        ConfigError: ``EYAS_READ_THREADS`` is no number from 1.
    """

    def __init__(self, reader: Reader, batch_tokens: int, seed: int, cursor: Cursor = Cursor()) -> None:  # noqa: B008 - frozen
        self._reader = reader
        self._samples = training_samples(reader)
        ids, lengths = [s.sample_id for s in self._samples], [s.num_tokens for s in self._samples]
        self._order = BatchOrder(ids, [reader.shard_of(i) for i in ids], lengths, batch_tokens, seed)
        self._cursor = cursor
        self._pool = ThreadPoolExecutor(num_read_threads(), thread_name_prefix="eyas-read-ahead")

    @property
    def num_samples(self) -> int:
        """Training documents."""
        return len(self._samples)

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """Batches of one epoch; epochs differ a little, because packing follows the shuffle."""
        return len(self._order.epoch(epoch))

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the cursor on; an error of a document is raised at the batch it belongs to."""
        plan = self._order(self._cursor)
        reading = deque(self._start(*next(plan)) for _ in range(READ_AHEAD))
        while True:
            batch = reading.popleft().finished()
            reading.append(self._start(*next(plan)))  # read while the trainer works
            yield batch
            del batch  # or it would stay in memory while the next one is awaited

    def _start(self, after: Cursor, indices: Sequence[int]) -> _Reading:
        ids = [self._samples[i].sample_id for i in indices]
        return _Reading(tuple(self._pool.submit(self._reader.read, sample_id) for sample_id in ids), after)
