"""Which shard an order of batches needs when: from its first batch to its last, epoch after epoch.

Batches are counted from 0 at the cursor where a run starts, through all epochs. A stream captures shards in the
order in which they are first needed and lets each go after its last batch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from eyas.batches.order import Cursor


class Order(Protocol):
    """What is asked of an order."""

    def shards(self, epoch: int) -> list[frozenset[str]]:
        """Of each batch of an epoch the shards that it reads."""
        ...


@dataclass(frozen=True, slots=True)
class Use:
    """One shard in one epoch."""

    shard: str
    epoch: int
    first: int
    """Batch, counted from the run's start, that reads it first."""
    last: int
    """Batch that reads it last."""


class Demand:
    """Uses of all shards from a cursor on.

    Args:
        order: Of the batches.
        start: Where the run starts.
    """

    def __init__(self, order: Order, start: Cursor) -> None:
        self.start_epoch = start.epoch
        self._shards = lru_cache(maxsize=3)(order.shards)
        self._begins, self._lock = [-start.batch], threading.Lock()
        self.uses = lru_cache(maxsize=3)(self._uses)

    def __iter__(self) -> Iterator[Use]:
        """Uses by first need, without end."""
        for epoch in itertools.count(self.start_epoch):
            yield from self.uses(epoch).values()

    def number(self, cursor: Cursor) -> int:
        """The batch at a cursor, counted from the start."""
        return self.begin(cursor.epoch) + cursor.batch

    def begin(self, epoch: int) -> int:
        """Number of an epoch's batch 0."""
        with self._lock:
            while len(self._begins) <= epoch - self.start_epoch:
                latest = self.start_epoch + len(self._begins) - 1
                self._begins.append(self._begins[-1] + len(self._shards(latest)))
            return self._begins[epoch - self.start_epoch]

    def _uses(self, epoch: int) -> dict[str, Use]:
        """Uses of an epoch by shard, in the order of first need."""
        begin = self.begin(epoch)
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for batch, shards in enumerate(self._shards(epoch)):
            if begin + batch >= 0:
                for shard in sorted(shards):
                    first.setdefault(shard, begin + batch)
                    last[shard] = begin + batch
        return {shard: Use(shard, epoch, first[shard], last[shard]) for shard in first}

    def peak_bytes(self, sizes: Mapping[str, int], packs_per_step: int, num_batches: int) -> int:
        """What the shards that one optimizer step and those around it need take at once, at most over a run.

        Args:
            sizes: Bytes of each shard.
            packs_per_step: Batches that are read before anything they need is let go.
            num_batches: Of the run.
        """
        changes: dict[int, int] = {}
        for use in itertools.takewhile(lambda use: use.first < num_batches, self):
            begin, end = use.first // packs_per_step, use.last // packs_per_step + 1
            changes[begin] = changes.get(begin, 0) + sizes[use.shard]
            changes[end] = changes.get(end, 0) - sizes[use.shard]
        peak = live = 0
        for step in sorted(changes):
            live += changes[step]
            peak = max(peak, live)
        return peak
