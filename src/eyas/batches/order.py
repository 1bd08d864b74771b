"""Which documents make up which batch: decided by sample ids, lengths and seed alone.

    (sample ids, lengths, seed, epoch) → shuffled documents → whole documents packed up to ``batch_tokens``

Needs the index only, never the states: 100,000 samples are ordered in a fraction of a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """Place in the data: the next batch of an epoch. Restoring it goes on exactly there."""

    epoch: int = 0
    batch: int = 0


def shuffled(sample_ids: Sequence[str], seed: int, epoch: int) -> list[int]:
    """Indices in the order of one epoch; independent of the stored order and of any library's generator."""

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}:{epoch}:{sample_ids[index]}".encode(), digest_size=16).digest()

    return sorted(range(len(sample_ids)), key=key)


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


class BatchOrder:
    """All batches of all epochs, from any cursor on.

    Args:
        sample_ids: Training documents.
        lengths: Tokens of each.
        batch_tokens: Most tokens of a batch of several documents.
        seed: Of the shuffle.
    """

    def __init__(self, sample_ids: Sequence[str], lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        self._sample_ids, self._lengths = sample_ids, lengths
        self._batch_tokens, self._seed = batch_tokens, seed

    def epoch(self, epoch: int) -> list[tuple[int, ...]]:
        """Batches of one epoch: every document exactly once."""
        return pack_order(shuffled(self._sample_ids, self._seed, epoch), self._lengths, self._batch_tokens)

    def __call__(self, cursor: Cursor) -> Iterator[tuple[Cursor, tuple[int, ...]]]:
        """(cursor after the batch, document indices) without end."""
        epoch, first = cursor.epoch, cursor.batch
        while True:
            batches = self.epoch(epoch)
            for number in range(first, len(batches)):
                last = number + 1 == len(batches)
                yield Cursor(epoch + 1, 0) if last else Cursor(epoch, number + 1), batches[number]
            epoch, first = epoch + 1, 0
