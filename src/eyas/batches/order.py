"""Which documents make up which batch: decided by sample ids, their shards, lengths and seed alone.

    shards → windows of ``train.shuffle_shards`` → documents shuffled inside each → packed up to ``batch_tokens``

Needs the index only, never the states: 100,000 samples are ordered in a fraction of a second.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WINDOW_SHARDS = 32
"""Shards that are read at a time, unless ``train.shuffle_shards`` says otherwise.

Nothing is held in memory for them, so this bounds only how many files are hot: a volume that fetches or caches
whole files sees each of them once an epoch, and 32 shards of 1 GiB are 32 GiB of page cache, which a host that
trains on a terabyte has. From below it is bounded by the mixture: lengths are alike inside a shard, and a batch
of a dozen documents out of 32 lengths repeats few. A set of 32 shards or fewer (2 GiB of the default size) is
shuffled as a whole.
"""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Place in the data: the next batch of an epoch. Restoring it goes on exactly there."""

    epoch: int = 0
    batch: int = 0


def shuffled(sample_ids: Sequence[str], seed: int, epoch: int) -> list[int]:
    """Indices in the order of one epoch; independent of the stored order and of any library's generator."""
    return sorted(range(len(sample_ids)), key=lambda index: _dice(seed, epoch, sample_ids[index]))


def shuffled_by_shard(
    sample_ids: Sequence[str], shards: Sequence[str], seed: int, epoch: int, window_shards: int = WINDOW_SHARDS
) -> list[int]:
    """Indices in the order of one epoch, which goes through the set window by window.

    Shards lie in the order of their paths by falling length, so every window takes one shard at random out of
    each stretch of neighbours: all windows have the lengths of the whole set. Inside a window documents are
    shuffled; with one window this is ``shuffled``.

    Args:
        sample_ids: Of the documents.
        shards: Path of the shard of each.
        seed: Of the shuffle.
        epoch: Counted from 0.
        window_shards: Most shards of a window.
    """
    window_of = _windows(sorted(set(shards)), seed, epoch, window_shards)
    return sorted(
        range(len(sample_ids)), key=lambda index: (window_of[shards[index]], _dice(seed, epoch, sample_ids[index]))
    )


def _windows(paths: Sequence[str], seed: int, epoch: int, window_shards: int) -> dict[str, int]:
    """Window of each shard: neighbours are dealt to different windows."""
    num_windows = -(-len(paths) // window_shards)
    windows: dict[str, int] = {}
    for start in range(0, len(paths), max(1, num_windows)):
        stretch = paths[start : start + num_windows]
        # the last stretch may be short: which windows go without one is thrown as well
        free = sorted(range(num_windows), key=lambda window: _dice(seed, epoch, f"{start}:{window}"))
        windows.update(zip(stretch, free, strict=False))
    return windows


def _dice(seed: int, epoch: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{epoch}:{name}".encode(), digest_size=16).digest()


def pack_order(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, ...]]:
    """Cut an order into batches of whole documents.

    A batch closes when the next document does not fit; a document longer than ``batch_tokens`` is a
    batch of its own.
    """
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    num_tokens = 0
    for index in order:
        if current and num_tokens + lengths[index] > batch_tokens:
            batches.append(tuple(current))
            current, num_tokens = [], 0
        current.append(index)
        num_tokens += lengths[index]
    if current:
        batches.append(tuple(current))
    return batches


def deal(num_tokens: Sequence[int], num_ranks: int) -> list[int]:
    """Rank of each pack of one optimizer step: the longest first, each to the rank with the fewest tokens so far.

    Every rank gets a pack when there are as many packs as ranks; equal tokens go to the lower rank.
    """
    ranks, loads = [0] * len(num_tokens), [(0, 0, rank) for rank in range(num_ranks)]
    for pack in sorted(range(len(num_tokens)), key=lambda pack: (-num_tokens[pack], pack)):
        tokens, packs, rank = min(loads)
        ranks[pack] = rank
        loads[rank] = (tokens + num_tokens[pack], packs + 1, rank)
    return ranks


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One pack that a rank reads."""

    sample_ids: tuple[str, ...]
    ends_step: bool
    """It is the rank's last pack of its optimizer step."""
    after: Cursor
    """Where the data goes on after that step."""


class BatchOrder:
    """All batches of all epochs, from any cursor on.

    Args:
        sample_ids: Training documents.
        shards: Path of the shard of each.
        lengths: Tokens of each.
        batch_tokens: Most tokens of a batch of several documents.
        seed: Of the shuffle.
        window_shards: Shards whose documents are shuffled together.
    """

    def __init__(
        self,
        sample_ids: Sequence[str],
        shards: Sequence[str],
        lengths: Sequence[int],
        batch_tokens: int,
        seed: int,
        window_shards: int = WINDOW_SHARDS,
    ) -> None:
        self._sample_ids, self._shards, self._lengths = sample_ids, shards, lengths
        self._batch_tokens, self._seed, self._window_shards = batch_tokens, seed, window_shards

    def epoch(self, epoch: int) -> list[tuple[int, ...]]:
        """Batches of one epoch: every document exactly once."""
        order = shuffled_by_shard(self._sample_ids, self._shards, self._seed, epoch, self._window_shards)
        return pack_order(order, self._lengths, self._batch_tokens)

    def shards(self, epoch: int) -> list[frozenset[str]]:
        """Of each batch of an epoch the shards that its documents lie in."""
        return [frozenset(self._shards[index] for index in batch) for batch in self.epoch(epoch)]

    def plan(
        self, cursor: Cursor, packs_per_step: int = 1, rank: int = 0, num_ranks: int = 1
    ) -> Iterator[PlannedBatch]:
        """The packs of one rank without end; ``packs_per_step`` packs in a row make one step of all ranks."""
        packs = self(cursor)
        while True:
            step = list(itertools.islice(packs, packs_per_step))
            ranks = deal([sum(self._lengths[i] for i in indices) for _, indices in step], num_ranks)
            own = [indices for (_, indices), owner in zip(step, ranks, strict=True) if owner == rank]
            for number, indices in enumerate(own):
                yield PlannedBatch(tuple(self._sample_ids[i] for i in indices), number + 1 == len(own), step[-1][0])

    def __call__(self, cursor: Cursor) -> Iterator[tuple[Cursor, tuple[int, ...]]]:
        """(cursor after the batch, document indices) without end."""
        epoch, first = cursor.epoch, cursor.batch
        while True:
            batches = self.epoch(epoch)
            for number in range(first, len(batches)):
                last = number + 1 == len(batches)
                yield Cursor(epoch + 1, 0) if last else Cursor(epoch, number + 1), batches[number]
            epoch, first = epoch + 1, 0
