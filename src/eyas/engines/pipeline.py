"""Shards out of one open engine: captured one after another, written side by side.

    planned shards ─▶ batches ─▶ engine ─▶ checks ─▶ encoder ─▶ assembly ─▶ writers ─▶ FinishedShard

The local loop runs one; each worker of a cluster runs one. Content and order of a shard come from the plan alone, so
who makes it does not show in its bytes. In memory are the shard in the making and those with the writers.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import config
from eyas.contracts import CaptureIdentity, FailedSample, PlannedShard, TokenSample
from eyas.engines.base import Engine
from eyas.engines.batch import capture_batch
from eyas.engines.checked import Checks
from eyas.errors import CaptureError
from eyas.plan.watch import Watch
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder
from eyas.shards.writer import FinishedShard, ShardAssembly

if TYPE_CHECKING:
    import torch

CORES_PER_WRITER, MAX_WRITERS = 3, 6
Work = tuple[PlannedShard, Mapping[str, TokenSample]]
"""A shard to be made, and its samples by id; there may be more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Whom a pipeline tells what, and in which thread."""

    begun: Callable[[PlannedShard], None] = lambda _: None
    """Before a shard's first batch."""
    looked: Callable[[], None] = lambda: None
    """Before each batch."""
    captured: Callable[[int], None] = lambda _: None
    """Tokens of a batch that are with the assembly."""
    stored: Callable[[FinishedShard], None] = lambda _: None
    """A shard lies there, fsynced; in a writer's thread, several at a time."""


class Pipeline:
    """Makes shards with an open engine. Use as a context manager: leaving it waits for the writers.

    Args:
        capture: Identity of the capture.
        hidden_size: D of the target.
        engine: Open.
        states: Folder that the shards' paths are below.
        watch: Of the volume of ``states``.
        told: Who wants to know.
        scales_ND: Channel scales of a lossy codec.
        failed: Samples that failed before; they count.
        max_failed_samples: More failures than this end the work.
    """

    def __init__(
        self,
        capture: CaptureIdentity,
        hidden_size: int,
        engine: Engine,
        states: Path,
        watch: Watch,
        told: Told,
        *,
        scales_ND: torch.Tensor | None = None,
        failed: Sequence[FailedSample] = (),
        max_failed_samples: int = 0,
    ) -> None:
        self._capture_identity, self._hidden_size, self._engine = capture, hidden_size, engine
        self._states, self._watch, self._told, self._scales_ND = states, watch, told, scales_ND
        self._failed, self._max_failed = list(failed), max_failed_samples
        self._pending: deque[Future[None]] = deque()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pipeline:
        with self._stack as stack:
            self._encoder = stack.enter_context(Encoder(make_codec(self._capture_identity.codec, self._scales_ND)))
            self._checks = stack.enter_context(Checks(len(self._capture_identity.boundaries), self._hidden_size))
            self._num_writers = num_writers()
            self._writer = stack.enter_context(ThreadPoolExecutor(self._num_writers, "shard-writer"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, shards: Iterable[Work]) -> None:
        """Make shards until there are no more, and wait until all of them lie there.

        Raises:
            CaptureError: More samples failed than allowed.
            DiskError: The volume is full or down to its reserve.
        """
        for planned, tokens in shards:
            self._told.begun(planned)
            assembly = self._shard(planned, tokens)
            self._wait(self._num_writers - 1)
            self._watch.hand_over(planned)
            self._pending.append(self._writer.submit(self._store, planned.path, assembly))
        self._wait()

    def _look(self, planned: PlannedShard) -> None:
        """Stop before a batch when a writer failed, or when what is in flight would touch the reserve."""
        self._told.looked()
        while any(stored.done() for stored in self._pending) or (self._pending and not self._watch.has_room(planned)):
            # What is with the writers is expected to take so much; once it lies there, it is known.
            self._wait(len(self._pending) - 1)
        self._watch.check(planned)

    def _wait(self, num_left: int = 0) -> None:
        """Wait until no more than so many shards are being written; an error of one becomes ours."""
        while len(self._pending) > num_left:
            stored = next((s for s in self._pending if s.done()), self._pending[0])
            stored.result()
            self._pending.remove(stored)

    def _store(self, path: str, assembly: ShardAssembly) -> None:
        finished = assembly.write(self._states, functools.partial(self._watch.write, path))
        self._told.stored(finished)
        self._watch.written(path)

    def _shard(self, planned: PlannedShard, tokens: Mapping[str, TokenSample]) -> ShardAssembly:
        assembly = ShardAssembly(
            planned, self._capture_identity, self._hidden_size, tokens, self._encoder, self._scales_ND
        )
        for batch in planned.batches:
            self._look(planned)
            samples = [tokens[sample.sample_id] for sample in batch]
            capture_batch(self._engine, samples, assembly, self._checks)
            check_failures([*self._failed, *assembly.failed], self._max_failed)
            lost = {sample.sample_id for sample in assembly.failed}
            self._told.captured(sum(sample.num_tokens for sample in batch if sample.sample_id not in lost))
        self._failed += assembly.failed
        return assembly


def num_writers() -> int:
    """One for every three cores, six at most: each hashes 0.5 GB/s and then waits for its file to be on the disk."""
    return config.knob("EYAS_WRITE_THREADS", min(MAX_WRITERS, max(1, config.cores() // CORES_PER_WRITER)))


def check_failures(failed: Sequence[FailedSample], limit: int) -> None:
    """Stop when too many samples failed.

    Raises:
        CaptureError: With the first reasons.
    """
    if len(failed) > limit:
        listed = "\n".join(f"  {sample.reason}" for sample in failed[:20])
        raise CaptureError(
            f"{len(failed):,} samples failed, extract.max_failed_samples allows {limit:,}:\n{listed}",
            "raise extract.max_failed_samples in params.yaml to go on without them; finished shards are kept",
        )
