"""Verifying hidden states at the size of a volume: parallel, at a bounded rate, resumable.

    manifest → headers → shards in threads (md5, checksums, values, tokens, target's head) → findings

Every finished shard is a line of ``.eyas/verify/<identity>.jsonl`` with the file's inode, size and mtime: an
interrupted run goes on there. A finished run removes it; when it found damage, the findings stay in
``<identity>.findings.json`` for ``eyas repair``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import console, fs
from eyas.canonical import digest
from eyas.contracts import CapturePlan, ShardEntry, ShardManifest, TargetIdentity, TokenSample
from eyas.errors import ConfigError, EyasError, StoreError
from eyas.ops.verify_journal import VERIFY, CheckedShard, FileStamp, Journal, stamp_of
from eyas.shards.verify import Against, Finding, check_set, check_shard, incoherent_findings
from eyas.target.load import TensorFiles
from eyas.target.store import target_dir
from eyas.tokens.dataset import iter_tokens

if TYPE_CHECKING:
    import torch

STATES, MANIFEST, PLAN = Path("data/hidden_states"), Path("data/hidden_states.json"), Path("data/plan.json")
TOKENS, TARGET = Path("data/tokens"), Path("models/target.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is read, and how fast.

    ``share`` of the shards, chosen by the hash of their names, so that the same share is the same shards;
    ``max_mb_per_s`` bounds reading, 0 does not.
    """

    share: float = 1.0
    max_mb_per_s: float = 0.0


def make_extent(share: float, max_mb_per_s: float) -> Extent:
    """An extent from a user's numbers.

    Raises:
        ConfigError: One of them is out of range.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"--share: {share}, expected above 0, at most 1", "--share 0.1 reads every tenth shard")
    if not 0 <= max_mb_per_s < math.inf:
        raise ConfigError(f"--max-mb-per-s: {max_mb_per_s}, expected 0 (no limit) or more")
    return Extent(share=share, max_mb_per_s=max_mb_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesReport:
    """What verifying the states gave. ``notes`` say what was not looked at, and why."""

    identity: str
    num_shards: int
    num_read_shards: int
    """Shards whose content is known, those of an interrupted run included."""
    num_resumed_shards: int
    num_samples: int
    """Samples in the shards read."""
    num_read_bytes: int
    read_s: float
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    next_token_share: float | None
    """Of judged rows that prefer the token that follows, see ``shards.consistency``."""
    assistant_share: float | None
    """The same, rows whose next token the assistant wrote."""


@dataclass(slots=True)
class _Run:
    root: Path
    manifest: ShardManifest
    against: Against
    basis: str
    extent: Extent
    notes: list[str] = field(default_factory=list)


def verify_states(root: Path, extent: Extent | None = None) -> StatesReport:
    """Read the states of a repository again and check all of them.

    Raises:
        EyasError: Another verification runs here.
        StoreError: The manifest, the plan or the tokens cannot be read.
    """
    import torch

    extent = extent or Extent()
    manifest = fs.read_record(ShardManifest, root / MANIFEST)
    with fs.volume_lock(root / VERIFY / "lock", f"verify of {manifest.identity[:16]}"):
        run = _prepare(root, manifest, extent)
        plan = _plan(root, run.notes)
        findings, readable = check_set(root / STATES, manifest, run.against.tokens, plan)
        chosen = _choose(readable, manifest.identity, extent.share)
        if len(chosen) < len(readable):
            run.notes.append(
                f"{len(chosen)} of {len(readable)} shards were read (share {extent.share:g}); "
                "of the others only the headers"
            )
        journal = Journal(root, manifest.identity)
        known = journal.known(root / STATES, chosen, run.basis)
        left = [entry for entry in chosen if entry.path not in known]
        threads, start_s = torch.get_num_threads(), time.perf_counter()
        torch.set_num_threads(1)  # one core per shard; the threads are ours
        try:
            checked = _read_all(run, journal, left, known)
        finally:
            torch.set_num_threads(threads)
        shards = [checked[entry.path] for entry in chosen]
        report = _report(run, findings, shards, len(known), time.perf_counter() - start_s)
        journal.finish(report.findings, [entry.path for entry in manifest.shards if entry not in chosen])
    return report


def _prepare(root: Path, manifest: ShardManifest, extent: Extent) -> _Run:
    notes: list[str] = []
    against = make_against(root, manifest, notes)
    tokens = manifest.capture.tokens if against.tokens is not None else ""
    basis = digest([tokens, against.head_VD is not None, against.judged])
    return _Run(root, manifest, against, basis, extent, notes)


def make_against(root: Path, manifest: ShardManifest, notes: list[str]) -> Against:
    """What the states of a repository can be compared with here; ``notes`` is told what is missing."""
    judged = manifest.engine.name != "fake"
    if not judged:
        notes.append("states of the fake engine belong to no model: they are not judged against tokens")
    head_VD = _head(root, manifest, notes) if judged else None
    return Against(tokens=_tokens(root, notes), head_VD=head_VD, judged=judged)


def _plan(root: Path, notes: list[str]) -> CapturePlan | None:
    if not (root / PLAN).is_file():
        return None
    try:
        return fs.read_record(CapturePlan, root / PLAN)
    except StoreError as error:
        notes.append(f"samples were not compared with the plan: {error.message}")
        return None


def _tokens(root: Path, notes: list[str]) -> Mapping[str, TokenSample] | None:
    if not (root / TOKENS).is_dir():
        notes.append(f"{TOKENS} is not here: ids and masks were not compared with it")
        return None
    try:
        return {sample.sample_id: sample for sample in iter_tokens(root / TOKENS)}
    except EyasError as error:
        notes.append(f"ids and masks were not compared with the token dataset: {error.message}")
        return None


def _head(root: Path, manifest: ShardManifest, notes: list[str]) -> torch.Tensor | None:
    """The target's head, when the target that was captured is at hand."""
    skipped = "states were not judged against the next token"
    if not (root / TARGET).is_file():
        notes.append(f"{TARGET} is not here: {skipped}")
        return None
    target = fs.read_record(TargetIdentity, root / TARGET)
    if target.digest != manifest.capture.target:
        notes.append(f"{TARGET} is another target than the states': {skipped}")
        return None
    folder = root / target_dir(target)
    if not folder.is_dir():
        notes.append(
            f"the target's files are not in {target_dir(target)} (`dvc repro -f -s fetch` brings them): {skipped}"
        )
        return None
    files = TensorFiles(folder)
    return files.read("head" if files.has("head") else "embedding")


def _choose(entries: Sequence[ShardEntry], identity: str, share: float) -> list[ShardEntry]:
    """The share's shards in manifest order; at least one."""
    if not entries or share >= 1:
        return list(entries)
    ranked = sorted(entries, key=lambda entry: digest([identity, entry.path]))
    chosen = {entry.path for entry in ranked[: max(1, math.ceil(share * len(entries)))]}
    return [entry for entry in entries if entry.path in chosen]


def _read_all(
    run: _Run, journal: Journal, left: Sequence[ShardEntry], known: Mapping[str, CheckedShard]
) -> dict[str, CheckedShard]:
    """Read shards in threads, one each; every finished one is in the journal before it counts."""
    done_mb = sum(shard.stamp.size_bytes for shard in known.values()) // 1_000_000
    total_mb = done_mb + sum(entry.size_bytes for entry in left) // 1_000_000
    if known:
        console.log(f"verify: {len(known):,} shards were read by a run that was interrupted and are unchanged")
    meter = _Meter(total_mb, done_mb, run.extent.max_mb_per_s)
    checked = dict(known)
    num_threads = max(1, min(len(os.sched_getaffinity(0)), len(left)))
    with ThreadPoolExecutor(num_threads, "verify") as pool:
        futures: list[Future[CheckedShard]] = [pool.submit(_read_one, run, entry, meter) for entry in left]
        try:
            for future in as_completed(futures):
                shard = future.result()
                journal.append(shard)
                checked[shard.path] = shard
        finally:
            meter.stop()
            pool.shutdown(cancel_futures=True)
    return checked


def _read_one(run: _Run, entry: ShardEntry, meter: _Meter) -> CheckedShard:
    stamp = stamp_of(run.root / STATES / entry.path)
    result = check_shard(run.root / STATES, entry, run.manifest, run.against, meter.count)
    return CheckedShard(
        path=entry.path,
        md5=entry.md5,
        stamp=stamp or FileStamp(inode=0, size_bytes=0, mtime_ns=0),
        basis=run.basis,
        findings=result.findings,
        scores=dict(result.scores),
    )


def _report(
    run: _Run, findings: Sequence[Finding], shards: Sequence[CheckedShard], num_resumed: int, read_s: float
) -> StatesReport:
    scores = {name: score for shard in shards for name, score in shard.scores.items()}
    places = {name: shard.path for shard in shards for name in shard.scores}
    found = [*findings, *(finding for shard in shards for finding in shard.findings)]
    found += incoherent_findings(scores, places)
    num_rows, num_assistant = (sum(getattr(s, n) for s in scores.values()) for n in ("num_rows", "num_assistant_rows"))
    if run.against.head_VD is not None and not num_assistant:
        run.notes.append("no assistant token is stored with the state before it: states were judged loosely")
    entries = {entry.path: entry for entry in run.manifest.shards}
    return StatesReport(
        identity=run.manifest.identity,
        num_shards=len(run.manifest.shards),
        num_read_shards=len(shards),
        num_resumed_shards=num_resumed,
        num_samples=sum(entries[shard.path].num_samples for shard in shards),
        num_read_bytes=sum(shard.stamp.size_bytes for shard in shards),
        read_s=round(read_s, 3),
        findings=tuple(sorted(set(found), key=lambda f: (f.shard, f.sample_id, f.problem))),
        notes=tuple(run.notes),
        next_token_share=_share(sum(s.num_next for s in scores.values()), num_rows),
        assistant_share=_share(sum(s.num_assistant_next for s in scores.values()), num_assistant),
    )


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


class _Meter:
    """Counts bytes of all threads: shows progress, keeps the rate, and stops the threads when asked to."""

    def __init__(self, total_mb: int, done_mb: int, max_mb_per_s: float) -> None:
        self._progress = console.Progress("verify", total_mb, done_mb, unit="MB")
        self._max_bytes_per_s = max_mb_per_s * 1e6
        self._lock = threading.Lock()
        self._rest_bytes = 0
        self._free_at_s = time.monotonic()
        self._stopped = threading.Event()

    def count(self, num_bytes: int) -> None:
        """Called by a thread after each chunk; sleeps as long as the rate asks for."""
        with self._lock:
            megabytes, self._rest_bytes = divmod(self._rest_bytes + num_bytes, 1_000_000)
            if megabytes:
                self._progress.advance(megabytes)
            now_s = time.monotonic()
            if self._max_bytes_per_s:
                self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._max_bytes_per_s
            wait_s = self._free_at_s - now_s
        if self._stopped.wait(max(wait_s, 0)) if wait_s > 0 else self._stopped.is_set():
            raise KeyboardInterrupt  # the run is over: whatever this thread has is not needed

    def stop(self) -> None:
        """Let every thread end at its next chunk, and end the progress line."""
        self._stopped.set()
        self._progress.close()
