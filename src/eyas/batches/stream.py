"""States out of a ring as a training reads them: the same interface as a stored set, waiting for what is on its way.

    sample → its shard by the plan → wait for it → blocks, each against its checksum → damaged: captured once more, once

Any number of threads and processes read; one of them has the feed and tells it how far all have read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eyas.batches.demand import Demand, Order
from eyas.batches.feed import Feed
from eyas.batches.order import Cursor
from eyas.contracts import CapturePlan, StoredSample
from eyas.errors import DataError, EyasError, StoreError, TrainError
from eyas.shards.codecs import Codec
from eyas.shards.format import ShardHeader
from eyas.shards.opening import check_identity, open_shard, read_header
from eyas.shards.reader import StoredStates, read_sample, shard_codec
from eyas.shards.ring import Kind, Ring, RingRecord

POLL_S = 0.005
MAX_POLL_S = 0.2
CACHED_HEADERS = 256


class StoppedError(TrainError):
    """A signal came while the next step's states were awaited."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A shard whose header was read."""

    serial: int
    header: ShardHeader
    places: Mapping[str, int]
    codec: Codec


class StreamReader:
    """All samples of a plan, read from a ring.

    Args:
        ring: Where shards come and go.
        plan: Of the whole set.
        samples: Every sample of the plan, in any order.
        pinned: Samples that stay in the ring, by the shard that the plan has them in.
        feed: Fills the ring, in the one process that does.
    """

    def __init__(
        self,
        ring: Ring,
        plan: CapturePlan,
        samples: Sequence[StoredSample],
        pinned: Mapping[str, frozenset[str]],
        feed: Feed | None,
    ) -> None:
        self._ring, self.feed = ring, feed
        by_id = {sample.sample_id: sample for sample in samples}
        self._shard_of = {sample.sample_id: shard.path for shard in plan.shards for sample in shard.samples}
        self._samples = tuple(by_id[sample_id] for sample_id in self._shard_of)
        self._pinned = {sample_id for some in pinned.values() for sample_id in some}
        self._opened: OrderedDict[tuple[Kind, str], _Open] = OrderedDict()
        self._lock = threading.Lock()
        self._left_out: dict[str, str] = {}
        self._demand: Demand | None = None
        self._is_over = False
        self.is_stopping: Callable[[], bool] = lambda: False
        """Whether this process was told to stop."""
        self.wait_s = 0.0
        """That reading threads waited for shards, together."""

    @property
    def samples(self) -> tuple[StoredSample, ...]:
        """All samples, as a stored set of this plan lists them."""
        return self._samples

    def shard_of(self, sample_id: str) -> str:
        """Path of the shard that the plan has a sample in."""
        return self._shard_of[sample_id]

    # ── the training tells ────────────────────────────────────────────────────────────────────

    def follow(self, order: Order, start: Cursor, packs_per_step: int, num_steps: int) -> None:
        """Batches are going to be read in this order, from here, for so many steps."""
        if self.feed is not None:
            self._demand = Demand(order, start)
            self.feed.follow(self._demand, packs_per_step, num_steps)

    def read_up_to(self, cursor: Cursor, num_steps: int) -> None:
        """All processes have read what comes before, and so many steps are left."""
        if self.feed is not None and self._demand is not None:
            self.feed.read_up_to(self._demand.number(cursor), num_steps)

    def leave_out(self, damaged: Mapping[str, str]) -> None:
        """Samples that the run so far could not read; they stay left out, as those of a stored set do."""
        self._left_out.update(damaged)

    def give_back(self) -> None:
        """The training is done: the ring is needed no more."""
        self.end()
        if self.feed is not None:
            self._ring.remove()

    def end(self) -> None:
        """Whoever waits is told that nothing comes."""
        self._is_over = True
        if self.feed is not None:
            self.feed.stop()

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(self, sample_id: str) -> StoredStates:
        """One sample with its states, every block checked; waits until its shard is there.

        Raises:
            StoreError: The engine could not capture it, or it is damaged a second time.
            TrainError: Nothing comes any more.
        """
        if sample_id in self._left_out:
            raise StoreError(f"sample {sample_id}: {self._left_out[sample_id]}")
        kind: Kind = "pinned" if sample_id in self._pinned else "states"
        path, serial = self._shard_of[sample_id], 0
        while True:
            record = self._await(kind, path, serial)
            failed = next((one for one in record.failed if one.sample_id == sample_id), None)
            if failed is not None:
                raise StoreError(failed.reason)
            try:
                return self._read(record, sample_id)
            except StoreError:
                now = self._ring.record(kind, path)
                if now is None or now.serial != record.serial:
                    continue  # it was let go, or written anew, meanwhile
                if serial:
                    raise
                serial = record.serial
                self._ring.ask_again(record)

    def _await(self, kind: Kind, path: str, after: int) -> RingRecord:
        """The shard's record, of a later serial than ``after``."""
        poll_s, begin_s = POLL_S, time.monotonic()
        while True:
            record = self._ring.record(kind, path)
            if record is not None and record.serial > after:
                with self._lock:
                    self.wait_s += time.monotonic() - begin_s
                return record
            self._check()
            time.sleep(poll_s)
            poll_s = min(MAX_POLL_S, poll_s * 1.5)

    def _check(self) -> None:
        """Refuse to wait for what never comes."""
        if self.is_stopping():
            raise StoppedError("stopped by a signal while states were awaited")
        error: EyasError | None = None if self.feed is None else self.feed.error
        if isinstance(error, (StoreError, DataError)):  # no matter of one sample
            error = TrainError(error.message, error.hint)
        if error is not None:
            raise error
        told = self._ring.ended() if self.feed is None else None
        if told is not None:
            raise TrainError(told.message, told.hint or None)
        if self._is_over:
            raise StoppedError("the training has ended")

    def _read(self, record: RingRecord, sample_id: str) -> StoredStates:
        opened = self._open(record)
        path = record.path
        if sample_id not in opened.places:
            raise StoreError(f"{path}: sample {sample_id} is neither there nor listed as failed")
        with open_shard(self._ring.shard(record.kind, path), path) as fd:
            return read_sample(fd.number, opened.header, opened.places[sample_id], opened.codec)

    def _open(self, record: RingRecord) -> _Open:
        key = (record.kind, record.path)
        with self._lock:
            opened = self._opened.get(key)
        if opened is not None and opened.serial == record.serial:
            return opened
        place = self._ring.shard(*key)
        header, _ = read_header(place, record.path)
        check_identity(header, self._ring.identity, record.path)
        with open_shard(place, record.path) as fd:
            codec = shard_codec(fd.number, header)
        places = {sample.sample_id: index for index, sample in enumerate(header.samples)}
        opened = _Open(record.serial, header, places, codec)
        with self._lock:
            self._opened[key] = opened
            while len(self._opened) > CACHED_HEADERS:
                self._opened.popitem(last=False)
        return opened
