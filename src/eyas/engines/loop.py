"""The extraction loop: plan → engine → checks → one shard after another → publication.

While the engine computes one shard, threads write the ones before it, each a file with its md5 (a file's md5 is one
chain: 0.5 GB/s); in memory are these and no more, whatever the length of the run. A shard is the unit of resumption;
content and order come from the plan alone, so neither arrival order nor the points at which a run was killed show in
the bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import config, console, fs
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
from eyas.engines.batch import capture_batch
from eyas.engines.calibrate import Head, calibrate, stored_calibration
from eyas.engines.checked import Checks
from eyas.errors import CaptureError, StoreError
from eyas.plan.budget import Budget, Done, Need, Ratio, Reclaim, best_ratio
from eyas.plan.remedies import check_fits
from eyas.plan.volume import others, volume
from eyas.plan.watch import Watch
from eyas.shards.calibration import Calibration
from eyas.shards.codecs import make_codec
from eyas.shards.effect import Effect
from eyas.shards.encode import Encoder
from eyas.shards.handover import HOME, LOCK_NAME
from eyas.shards.spool import Spool, check_one_volume, leftovers
from eyas.shards.writer import FinishedShard, ShardAssembly, check_tokens

if TYPE_CHECKING:
    import torch


CORES_PER_WRITER, MAX_WRITERS = 3, 6


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
class _Run:
    """State of one run, in plan order where order matters."""

    plan: CapturePlan
    tokens: Mapping[str, TokenSample]
    engine: Engine
    spool: Spool
    limits: ExtractLimits
    done: dict[str, FinishedShard]
    head: Head | None = None
    probe: Probe | None = None
    calibration: Calibration | None = None
    num_tokens: int = 0
    work_s: float = 0.0
    failed: list[FailedSample] = field(default_factory=list)
    pending: deque[Future[FinishedShard]] = field(default_factory=deque)
    """Shards that are with the writers, the oldest first."""
    journal: threading.Lock = field(default_factory=threading.Lock)

    @property
    def entries(self) -> list[ShardEntry]:
        return [shard.entry for shard in self.done.values() if shard.entry is not None]

    @property
    def left(self) -> list[PlannedShard]:
        return [shard for shard in self.plan.shards if shard.path not in self.done]


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
        run = _Run(plan, tokens, engine, spool, limits, _resume(spool, plan, limits, out, manifest_path), head, probe)
        run.calibration = stored_calibration(plan, spool, run.done)
        num_resumed = len(run.done)
        with _account(run):
            if run.left:
                found = _gate(run)
                _capture_shards(run, Watch(spool.folder, limits.reserve_bytes, found.payload_ratio))
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
    for shard in plan.shards:
        check_tokens(shard, tokens)


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
        console.log(f"extract: {out} holds states of this capture; they are verified and published again")
    spool.prepare()
    done, findings = spool.resume(plan)
    for finding in findings:
        console.log(f"extract: captured again: {finding.problem}")
    if sum(len(shard.failed) for shard in done.values()) > limits.max_failed_samples:
        done = {path: shard for path, shard in done.items() if not shard.failed}
    if done:
        console.log(f"extract: {len(done):,} of {len(plan.shards):,} shards are there and verified")
    return done


@contextlib.contextmanager
def _account(run: _Run) -> Iterator[None]:
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


def _gate(run: _Run) -> Budget:
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


def _capture_shards(run: _Run, watch: Watch) -> None:
    progress = console.Progress("extract", run.plan.num_tokens, sum(entry.num_tokens for entry in run.entries))
    run.failed = [sample for shard in run.done.values() for sample in shard.failed]
    start_s = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(run.engine))
            run.engine.announce([run.tokens[sample.sample_id] for shard in run.left for sample in shard.samples])
            run.engine.open()
            if run.probe is not None:
                run.probe(run.engine)
            run.calibration = run.calibration or calibrate(run.plan, run.tokens, run.engine, run.spool, run.head)
            encoder = stack.enter_context(Encoder(make_codec(run.plan.capture.codec, _scales(run))))
            checks = stack.enter_context(Checks(len(run.plan.capture.boundaries), run.plan.hidden_size))
            num_writers = _num_writers()
            writer = stack.enter_context(ThreadPoolExecutor(num_writers, "shard-writer"))
            for planned in run.left:
                assembly = _capture_shard(run, planned, encoder, checks, watch, progress)
                _wait(run, num_writers - 1)
                watch.hand_over(planned)
                run.pending.append(writer.submit(_store, run, planned.path, assembly, watch))
            _wait(run)
    finally:
        for stored in run.pending:  # after an error; the writers have ended
            if not stored.cancelled() and stored.exception() is None:
                run.done[stored.result().path] = stored.result()
        run.work_s = time.perf_counter() - start_s
        progress.close()


def _scales(run: _Run) -> torch.Tensor | None:
    return run.calibration.scales_ND if run.calibration else None


def _num_writers() -> int:
    """One for every three cores, six at most: each hashes 0.5 GB/s and then waits for its file to be on the disk."""
    return config.knob("EYAS_WRITE_THREADS", min(MAX_WRITERS, max(1, config.cores() // CORES_PER_WRITER)))


def _look(run: _Run, planned: PlannedShard, watch: Watch) -> None:
    """Stop before a batch when a writer failed, or when what is in flight would touch the reserve."""
    while any(stored.done() for stored in run.pending) or (run.pending and not watch.has_room(planned)):
        # What is with the writers is expected to take so much; once it lies there, it is known.
        _wait(run, len(run.pending) - 1)
    watch.check(planned)


def _wait(run: _Run, num_left: int = 0) -> None:
    """Wait until no more than so many shards are being written; an error of one becomes ours."""
    while len(run.pending) > num_left:
        stored = next((s for s in run.pending if s.done()), run.pending[0])
        finished = stored.result()
        run.pending.remove(stored)
        run.done[finished.path] = finished


def _store(run: _Run, path: str, assembly: ShardAssembly, watch: Watch) -> FinishedShard:
    finished = assembly.write(run.spool.states, functools.partial(watch.write, path))
    with run.journal:
        run.spool.append(finished)
    watch.written(path)
    return finished


def _capture_shard(
    run: _Run, planned: PlannedShard, encoder: Encoder, checks: Checks, watch: Watch, progress: console.Progress
) -> ShardAssembly:
    assembly = ShardAssembly(planned, run.plan.capture, run.plan.hidden_size, run.tokens, encoder, _scales(run))
    for batch in planned.batches:
        _look(run, planned, watch)
        samples = [run.tokens[sample.sample_id] for sample in batch]
        capture_batch(run.engine, samples, assembly, checks)
        _check_failures(run, assembly)
        lost = {sample.sample_id for sample in assembly.failed}
        num_tokens = sum(sample.num_tokens for sample in batch if sample.sample_id not in lost)
        run.num_tokens += num_tokens
        progress.advance(num_tokens, _note(run))
    run.failed += assembly.failed
    return assembly


def _note(run: _Run) -> str:
    entries, plan = run.entries, run.plan
    written = sum(entry.size_bytes for entry in entries)
    payload = payload_bytes(sum(entry.num_tokens for entry in entries), plan.hidden_size, plan.num_streams)
    ratio = f" ({written / payload:.2f} of bf16)" if payload else ""
    free = console.human_bytes(fs.free_bytes(run.spool.folder))
    return f"{console.human_bytes(written)} written{ratio}, {free} free"


def _check_failures(run: _Run, assembly: ShardAssembly) -> None:
    failed, limit = [*run.failed, *assembly.failed], run.limits.max_failed_samples
    if len(failed) > limit:
        listed = "\n".join(f"  {sample.reason}" for sample in failed[:20])
        raise CaptureError(
            f"{len(failed):,} samples failed, extract.max_failed_samples allows {limit:,}:\n{listed}",
            "raise extract.max_failed_samples in params.yaml to go on without them; finished shards are kept",
        )


def _manifest(run: _Run, facts: EngineFacts) -> ShardManifest:
    finished = [run.done[shard.path] for shard in run.plan.shards]
    entries = tuple(shard.entry for shard in finished if shard.entry is not None)
    failed = tuple(sample for shard in finished for sample in shard.failed)
    if not entries:
        raise CaptureError(
            f"none of {run.plan.num_samples:,} planned samples is stored; nothing is published",
            "look at the reasons above; `eyas doctor` checks the engine",
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
