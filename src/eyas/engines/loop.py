"""The extraction loop: plan → engine → checks → one shard after another → publication.

Who makes the shards is an executor's matter: this process with its one engine, or workers on a cluster. Around it stand
what both share: lock, resumption, the budget's gate, the journal, the account and the publication. A shard is the unit
of resumption; content and order come from the plan alone, so neither arrival order nor the points at which a run was
killed, nor who made which shard, show in the bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import console, fs
from eyas.contracts import (
    CapturePlan,
    EngineFacts,
    FailedSample,
    PlannedShard,
    ShardEntry,
    ShardManifest,
    TokenSample,
    payload_bytes,
)
from eyas.engines.base import Engine
from eyas.engines.calibrate import Head, calibrate, stored_calibration
from eyas.engines.pipeline import Pipeline, Told
from eyas.errors import CaptureError, StoreError
from eyas.plan.budget import Budget, Done, Need, Ratio, Reclaim, best_ratio
from eyas.plan.remedies import check_fits
from eyas.plan.volume import others, volume
from eyas.plan.watch import Watch
from eyas.shards.calibration import Calibration
from eyas.shards.effect import Effect
from eyas.shards.handover import HOME, LOCK_NAME
from eyas.shards.spool import Spool, check_one_volume, leftovers
from eyas.shards.writer import FinishedShard, check_tokens
from eyas.tokens.table import TokenTable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractLimits:
    """When a run stops."""

    reserve_bytes: int
    """Free bytes that must remain on the volume."""
    max_failed_samples: int
    cache_types: tuple[str, ...] = ()
    """DVC's ``cache.type``: a copying cache needs the disk twice."""
    earlier_ratio: Ratio | None = None
    """Of the codec, measured on states of an earlier capture of the same target and streams."""
    reclaim: Callable[[], Reclaim] = Reclaim
    """What could be deleted; asked only when the capture does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractResult:
    """What a run did; ``num_tokens`` and ``work_s`` count this process alone."""

    manifest: ShardManifest
    num_tokens: int
    work_s: float
    num_resumed_shards: int
    effect: Effect | None = None
    """What a lossy codec did to the calibration slice."""


Probe = Callable[[Engine], None]


@dataclass(slots=True)
class Run:
    """State of one run, which its executor brings forward."""

    plan: CapturePlan
    tokens: Mapping[str, TokenSample]
    engine: Engine
    """Not opened: an executor that runs engines elsewhere never opens it."""
    spool: Spool
    limits: ExtractLimits
    done: dict[str, FinishedShard]
    head: Head | None = None
    probe: Probe | None = None
    calibration: Calibration | None = None
    num_tokens: int = 0
    work_s: float = 0.0
    progress: console.Progress = field(init=False)
    _journal: threading.Lock = field(default_factory=threading.Lock)
    _planned: dict[str, PlannedShard] = field(init=False)
    _written: tuple[int, str] = (-1, "")
    """Number of finished shards, and what a note says of them: of 100,000 it is not worked out for every batch."""

    def __post_init__(self) -> None:
        self._planned = {shard.path: shard for shard in self.plan.shards}
        num_done = sum(entry.num_tokens for entry in self.entries)
        self.progress = console.Progress("extract", self.plan.num_tokens, num_done)

    @property
    def entries(self) -> list[ShardEntry]:
        """Of the finished shards that have a file."""
        return [shard.entry for shard in list(self.done.values()) if shard.entry is not None]

    @property
    def failed(self) -> list[FailedSample]:
        """Samples of finished shards that failed."""
        return [sample for shard in list(self.done.values()) for sample in shard.failed]

    @property
    def left(self) -> list[PlannedShard]:
        """Shards to be made, in the order of the plan."""
        return [shard for shard in self.plan.shards if shard.path not in self.done]

    @property
    def scales_ND(self) -> torch.Tensor | None:
        """Channel scales of a lossy codec, once it is calibrated."""
        return self.calibration.scales_ND if self.calibration else None

    def calibrate(self, engine: Engine) -> None:
        """Calibrate a lossy codec with an open engine, unless an earlier run did."""
        self.calibration = self.calibration or calibrate(self.plan, self.tokens, engine, self.spool, self.head)

    def captured(self, num_tokens: int) -> None:
        """So many more tokens are captured."""
        self.num_tokens += num_tokens
        self.progress.advance(num_tokens, self._note())

    def finish(self, finished: FinishedShard) -> None:
        """A shard lies in the spool, whole: it is journaled. From any thread."""
        with self._journal:
            self.spool.append(finished, self._planned[finished.path])
            self.done[finished.path] = finished

    def _note(self) -> str:
        if self._written[0] != len(self.done):
            entries, plan = self.entries, self.plan
            written = sum(entry.size_bytes for entry in entries)
            payload = payload_bytes(sum(entry.num_tokens for entry in entries), plan.hidden_size, plan.num_streams)
            ratio = f" ({written / payload:.2f} of bf16)" if payload else ""
            self._written = len(self.done), f"{console.human_bytes(written)} written{ratio}"
        return f"{self._written[1]}, {console.human_bytes(fs.free_bytes(self.spool.folder))} free"


Executor = Callable[[Run, Watch], None]
"""Makes every shard that is left, and tells the run of each."""


def extract(
    plan: CapturePlan,
    tokens: Mapping[str, TokenSample],
    engine: Engine,
    limits: ExtractLimits,
    *,
    out: Path,
    manifest_path: Path,
    home: Path = HOME,
    head: Head | None = None,
    probe: Probe | None = None,
    executor: Executor | None = None,
) -> ExtractResult:
    """Capture every planned sample into shards and publish them.

    Args:
        plan: Decides content and order of every shard.
        tokens: The token dataset by sample id, at least the planned samples.
        engine: Not opened yet; opened only when something is left to do.
        limits: Disk reserve and number of tolerated failures.
        out: States folder, absent or a former run's.
        manifest_path: Published last.
        home: Working folder on the same volume: lock and spool.
        head: Reads the target's head, for the effect of a lossy codec on its distribution.
        probe: Looks at the open engine before anything is captured for keeps; raises ``CaptureError``.
        executor: Makes the shards; this process does when None.

    Raises:
        EyasError: Another extraction holds the lock.
        StoreError: Something of another capture is in the way; plan, tokens and engine disagree.
        DiskError: The volume is full or down to its reserve; the same command resumes.
        CaptureError: More samples failed than allowed, or none is stored.
    """
    with contextlib.ExitStack() as stack:
        with fs.disk_errors(home / LOCK_NAME):
            stack.enter_context(fs.volume_lock(home / LOCK_NAME, f"extract of {plan.identity[:16]}"))
        facts = engine.describe()
        _check_inputs(plan, tokens, facts)
        check_one_volume(home, out)
        spool = Spool(home, plan.capture)
        stack.callback(spool.drop_if_empty)
        run = Run(plan, tokens, engine, spool, limits, _resume(spool, plan, limits, out, manifest_path), head, probe)
        run.calibration = stored_calibration(plan, spool, run.done)
        num_resumed = len(run.done)
        with _account(run):
            if run.left:
                found = _gate(run)
                _capture_shards(run, Watch(spool.folder, limits.reserve_bytes, found.payload_ratio), executor or here)
            manifest = _manifest(run, facts)
        spool.publish(manifest, out, manifest_path)
        return ExtractResult(
            manifest=manifest,
            num_tokens=run.num_tokens,
            work_s=run.work_s,
            num_resumed_shards=num_resumed,
            effect=run.calibration.effect if run.calibration else None,
        )


def _check_inputs(plan: CapturePlan, tokens: Mapping[str, TokenSample], facts: EngineFacts) -> None:
    capture = plan.capture
    if plan.identity != capture.digest:
        raise StoreError(f"plan identity {plan.identity}, but its capture has {capture.digest}", "run `make plan`")
    found, expected = (facts.name, facts.version), (capture.engine, capture.engine_version)
    if found != expected:
        raise StoreError(
            f"the engine is {' '.join(found)}, the plan was made for {' '.join(expected)}",
            "run `make plan`; states already captured belong to the old engine and are not mixed with new ones",
        )
    is_table = isinstance(tokens, TokenTable)
    lengths = tokens.lengths if is_table else {name: len(sample.input_ids) for name, sample in tokens.items()}
    for shard in plan.shards:
        check_tokens(shard, lengths)


def _resume(
    spool: Spool, plan: CapturePlan, limits: ExtractLimits, out: Path, manifest_path: Path
) -> dict[str, FinishedShard]:
    home = spool.folder.parent.parent
    for identity, num_bytes in leftovers(home, spool.identity):
        console.log(
            f"extract: {spool.folder.parent / identity} is left of another capture: "
            f"{console.human_bytes(num_bytes)}; it is not touched"
        )
    if spool.take_back(plan, out, manifest_path):
        console.log(f"extract: {out} holds states of this capture; they are checked and published again")
    spool.prepare()
    resumed = spool.resume(plan)
    done = resumed.done
    for finding in resumed.findings:
        console.log(f"extract: captured again: {finding.problem}")
    if sum(len(shard.failed) for shard in done.values()) > limits.max_failed_samples:
        done = {path: shard for path, shard in done.items() if not shard.failed}
    if done:
        console.log(
            f"extract: {len(done):,} of {len(plan.shards):,} shards are there, {resumed.num_read:,} of them read through; "
            "the others are the files that were written"
        )
    return done


@contextlib.contextmanager
def _account(run: Run) -> Iterator[None]:
    """Say at the end, whatever it is, where every planned sample and token went."""
    try:
        yield
    finally:
        finished = run.done.values()
        stored = [(s.entry.num_samples, s.entry.num_tokens) for s in finished if s.entry is not None]
        failed = [sample.num_tokens for shard in finished for sample in shard.failed]
        num_stored, stored_tokens = sum(n for n, _ in stored), sum(n for _, n in stored)
        left = run.plan.num_samples - num_stored - len(failed)
        left_tokens = run.plan.num_tokens - stored_tokens - sum(failed)
        console.log(
            f"extract: {run.plan.num_samples:,} samples ({run.plan.num_tokens:,} tokens) planned = "
            f"{num_stored:,} ({stored_tokens:,}) stored + {len(failed):,} ({sum(failed):,}) failed + "
            f"{left:,} ({left_tokens:,}) left"
        )


def _gate(run: Run) -> Budget:
    """Ask before the engine opens whether all of it fits, as ``make budget`` does."""
    need, folder = Need.of(run.plan), run.spool.folder
    done = Done(num_shards=len(run.done), num_bytes=sum(entry.size_bytes for entry in run.entries))
    found = Budget(
        need=need,
        ratio=best_ratio(need, done, sum(entry.num_tokens for entry in run.entries), run.limits.earlier_ratio),
        free_bytes=fs.free_bytes(folder),
        reserve_bytes=run.limits.reserve_bytes,
        done=done,
        cache_types=run.limits.cache_types,
        free_files=volume(folder).free_files,
    )
    if found.fits:
        return found
    return check_fits(dataclasses.replace(found, reclaim=run.limits.reclaim()), others(folder))


def _capture_shards(run: Run, watch: Watch, executor: Executor) -> None:
    start_s = time.perf_counter()
    try:
        executor(run, watch)
    finally:
        run.work_s = time.perf_counter() - start_s
        run.progress.close()


def here(run: Run, watch: Watch) -> None:
    """Make the shards in this process, with its own engine."""
    with contextlib.closing(run.engine) as engine:
        engine.announce([run.tokens[sample.sample_id] for shard in run.left for sample in shard.samples])
        engine.open()
        if run.probe is not None:
            run.probe(engine)
        run.calibrate(engine)
        pipeline = Pipeline(
            run.plan.capture,
            run.plan.hidden_size,
            engine,
            run.spool.states,
            watch,
            Told(captured=run.captured, stored=run.finish),
            scales_ND=run.scales_ND,
            failed=run.failed,
            max_failed_samples=run.limits.max_failed_samples,
        )
        with pipeline:
            pipeline.run([(planned, run.tokens) for planned in run.left])


def _manifest(run: Run, facts: EngineFacts) -> ShardManifest:
    finished = [run.done[shard.path] for shard in run.plan.shards]
    entries = tuple(shard.entry for shard in finished if shard.entry is not None)
    failed = tuple(sample for shard in finished for sample in shard.failed)
    if not entries:
        raise CaptureError(
            f"none of {run.plan.num_samples:,} planned samples is stored; nothing is published",
            "look at the reasons above; `make doctor` checks the engine",
        )
    return ShardManifest(
        identity=run.plan.identity,
        capture=run.plan.capture,
        engine=facts,
        hidden_size=run.plan.hidden_size,
        num_planned_samples=run.plan.num_samples,
        num_planned_tokens=run.plan.num_tokens,
        num_stored_samples=sum(entry.num_samples for entry in entries),
        num_stored_tokens=sum(entry.num_tokens for entry in entries),
        stored_bytes=sum(entry.size_bytes for entry in entries),
        shards=entries,
        failed=failed,
        calibration=run.calibration.digest if run.calibration else "",
    )
