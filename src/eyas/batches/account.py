"""The account of a stream: where every planned sample of an epoch went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.contracts import FailedSample

Counts = tuple[int, int]


@dataclass(slots=True)
class EpochAccount:
    """(samples, tokens) of one epoch."""

    epoch: int
    planned: Counts = (0, 0)
    captured: Counts = (0, 0)
    kept: Counts = (0, 0)
    """Of shards that lay in the ring."""
    failed: Counts = (0, 0)
    unneeded: Counts = (0, 0)
    """Of shards that were read to their end before this process began, or that nothing is trained on from."""

    @property
    def left(self) -> Counts:
        """Neither captured nor failed yet."""
        done = (self.captured, self.kept, self.failed, self.unneeded)
        return self.planned[0] - sum(n for n, _ in done), self.planned[1] - sum(n for _, n in done)

    def add(self, name: str, counts: Counts, failed: Sequence[FailedSample] = (), sign: int = 1) -> None:
        """Count a shard's samples under a name, those that failed apart; with ``sign`` -1 no more."""
        lost = (len(failed), sum(sample.num_tokens for sample in failed))
        old = getattr(self, name)
        setattr(self, name, (old[0] + sign * (counts[0] - lost[0]), old[1] + sign * (counts[1] - lost[1])))
        self.failed = (self.failed[0] + sign * lost[0], self.failed[1] + sign * lost[1])

    def line(self) -> str:
        """The account as a sentence."""
        parts = {name: getattr(self, name) for name in ("captured", "kept", "failed", "unneeded", "left")}
        shown = " + ".join(f"{count:,} ({tokens:,}) {name}" for name, (count, tokens) in parts.items())
        return f"stream: epoch {self.epoch}: {self.planned[0]:,} samples ({self.planned[1]:,} tokens) planned = {shown}"
