"""Who has which shard: handed out in the order of the plan, taken back when a worker is lost. No Ray here, no clock.

A shard that was with a lost worker is a suspect: it may be what ended it. It goes out again first, but alone, to a
worker with empty hands, so that the next loss blames nobody else; after ``MAX_LOSSES`` the run ends and names it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from eyas.contracts import PlannedShard
from eyas.errors import CaptureError

MAX_LOSSES = 4
"""Workers that may be lost while they have one shard."""
AHEAD_BYTES = 4 << 30
"""States of shards that lie with a worker and are not begun, one shard at least: an engine is told samples ahead, and runs
dry between small shards otherwise. As much as its shared memory holds."""
LEFT_SHARE = 4
"""Nobody is given a second shard ahead unless four times as many would remain for all: the last ones are shared."""


class Handout:
    """The shards of one run that are left.

    Args:
        shards: In the order of the plan.
    """

    def __init__(self, shards: Iterable[PlannedShard]) -> None:
        self._waiting = deque(shards)
        self._hands: dict[str, dict[str, PlannedShard]] = {}
        self._begun: set[str] = set()
        self._losses: dict[str, list[str]] = {}

    @property
    def num_left(self) -> int:
        """Shards that are not finished."""
        return len(self._waiting) + self.num_out

    @property
    def num_out(self) -> int:
        """Shards that are with workers."""
        return sum(len(hand) for hand in self._hands.values())

    def num_with(self, worker: str) -> int:
        """Shards that are with this worker."""
        return len(self._hands.get(worker, {}))

    def next_for(self, worker: str, num_workers: int = 1) -> PlannedShard | None:
        """What this worker, one of so many, may be given now; it is not given yet."""
        hand = self._hands.get(worker, {})
        if not self._waiting or any(path in self._losses for path in hand):
            return None
        planned = self._waiting[0]
        ahead = [other.payload_bytes for path, other in hand.items() if path not in self._begun]
        is_much = sum(ahead) + planned.payload_bytes > AHEAD_BYTES
        is_unfair = (len(ahead) + 1) * num_workers * LEFT_SHARE > len(self._waiting)
        if ahead and (is_much or is_unfair):
            return None
        if planned.path in self._losses and hand:
            return None
        return planned

    def give(self, worker: str) -> PlannedShard:
        """Give the worker what ``next_for`` named."""
        planned = self._waiting.popleft()
        self._hands.setdefault(worker, {})[planned.path] = planned
        return planned

    def begun(self, worker: str, paths: Iterable[str]) -> None:
        """The worker makes these now."""
        self._begun |= self._hands.get(worker, {}).keys() & set(paths)

    def finished(self, worker: str, path: str) -> PlannedShard | None:
        """The worker's shard is done; None when it was not this worker's any more."""
        planned = self._hands.get(worker, {}).pop(path, None)
        if planned is not None:
            self._begun.discard(path)
            self._losses.pop(path, None)
        return planned

    def refused(self, worker: str, path: str, reason: str) -> None:
        """The worker's shard is no good: it goes out again.

        Raises:
            CaptureError: It was no good too often.
        """
        planned = self._hands.get(worker, {}).pop(path, None)
        if planned is not None:
            self._back([planned], reason)

    def lost(self, worker: str, reason: str) -> list[PlannedShard]:
        """The worker is gone: what it had goes out again; gives it.

        Raises:
            CaptureError: One of its shards was with too many lost workers.
        """
        return self._back(list(self._hands.pop(worker, {}).values()), reason)

    def _back(self, shards: list[PlannedShard], reason: str) -> list[PlannedShard]:
        for planned in shards:
            self._begun.discard(planned.path)
            self._losses.setdefault(planned.path, []).append(reason)
        self._waiting.extendleft(reversed(shards))
        for planned in shards:
            if len(self._losses[planned.path]) >= MAX_LOSSES:
                raise self._poisoned(planned)
        return shards

    def _poisoned(self, planned: PlannedShard) -> CaptureError:
        reasons = self._losses[planned.path]
        first, last, num_samples = planned.samples[0], planned.samples[-1], len(planned.samples)
        listed = "\n".join(f"  {reason}" for reason in reasons)
        return CaptureError(
            f"{planned.path} ({num_samples:,} samples, {first.sample_id} to {last.sample_id}) was handed out "
            f"{len(reasons)} times in vain, but for the first time alone:\n{listed}",
            "one of its samples may end the engine: look at the workers' logs (`ray logs cluster`); finished shards are "
            "kept, the same command goes on from here",
        )
