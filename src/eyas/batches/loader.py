"""Reading batches ahead of the trainer.

    shards → one reading thread (checksums, at most ``READ_AHEAD`` batches in memory) → batches in order

Memory is bounded by the batches in flight; the set of states is never held.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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

    def read(self, sample_id: str) -> StoredStates:
        """States of one sample, checksum verified."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole documents and the cursor that goes on after them."""

    documents: tuple[StoredStates, ...]
    after: Cursor


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


def training_samples(reader: Reader) -> list[StoredSample]:
    """Samples of the training split; held-out ones are never read."""
    return [sample for sample in reader.samples if sample.split == "train"]


class BatchLoader:
    """Batches of the training split without end, read ahead in a thread.

    Args:
        reader: Thread-safe access to the states.
        batch_tokens: Most tokens of a batch of several documents.
        seed: Of the order.
        cursor: Where to start.

    Use as a context manager: leaving it ends the thread.
    """

    def __init__(self, reader: Reader, batch_tokens: int, seed: int, cursor: Cursor = Cursor()) -> None:  # noqa: B008 - frozen
        self._reader = reader
        self._samples = training_samples(reader)
        ids, lengths = [s.sample_id for s in self._samples], [s.num_tokens for s in self._samples]
        self._order = BatchOrder(ids, lengths, batch_tokens, seed)
        self._cursor = cursor
        self._ready: queue.Queue[Batch | _Failure] = queue.Queue(READ_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="eyas-read-ahead", daemon=True)

    @property
    def num_samples(self) -> int:
        """Training documents."""
        return len(self._samples)

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """Batches of one epoch; epochs differ a little, because packing follows the shuffle."""
        return len(self._order.epoch(epoch))

    def __enter__(self) -> BatchLoader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        while self._thread.is_alive():  # a full queue holds the thread: empty it
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.05)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            item = self._ready.get()
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def _read(self) -> None:
        try:
            for after, indices in self._order(self._cursor):
                documents = tuple(self._reader.read(self._samples[i].sample_id) for i in indices)
                self._put(Batch(documents, after))
                if self._stopped.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._put(_Failure(error))

    def _put(self, item: Batch | _Failure) -> None:
        while not self._stopped.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
        return None
