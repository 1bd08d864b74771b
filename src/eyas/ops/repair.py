"""``eyas repair``: damaged shards become what they were, intact ones are not touched.

    findings of verify → per shard: DVC's cache | the file that changed places | own blocks, engine → same md5 → rename

A shard is taken from DVC's cache when an intact object lies there under another inode; otherwise the planned batches
that hold damaged samples are captured again, in the same composition, so that the same bytes come out. Blocks of
intact samples are kept as they are stored, and channel scales of a lossy codec come from wherever the set still has
them: a shard with nothing but damaged scales needs no engine. The workspace's file is usually a hard link of the cache's object, which is
damaged with it: both names get the repaired file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas import config, console, fs
from eyas.contracts import CapturePlan, ShardEntry, ShardManifest, TargetIdentity, TokenSample
from eyas.engines.base import Engine
from eyas.engines.registry import make_engine
from eyas.errors import StoreError
from eyas.ops.cache_links import CacheLinks
from eyas.ops.recapture import Recapture
from eyas.ops.verify_journal import Journal
from eyas.ops.verify_states import MANIFEST, PLAN, STATES, TARGET, TOKENS, make_against, verify_states
from eyas.plan.identity import capture_identity
from eyas.shards.account import check_account
from eyas.shards.consistency import INCOHERENT
from eyas.shards.handover import HOME, LOCK_NAME, SPOOL
from eyas.shards.opening import read_header
from eyas.shards.spool import Spool
from eyas.shards.verify import Finding, check_set, check_shard
from eyas.target.locate import ensure
from eyas.tokens.dataset import iter_tokens, read_index

How = Literal["whole", "from the cache", "moved back", "written again", "captured again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What became of one shard. ``md5`` differs from the manifest's of before only for engines without a promise."""

    shard: str
    how: How
    num_captured_samples: int
    md5: str
    is_same: bool
    """The file has the hash of an undamaged run."""


@dataclass(slots=True)
class _Run:
    root: Path
    manifest: ShardManifest
    plan: CapturePlan | None
    tokens: Mapping[str, TokenSample]
    cache: CacheLinks
    recapture: Recapture
    staging: Path


def repair(root: Path, engine: Engine | None = None) -> list[Repaired]:
    """Repair every damaged shard that verify named; runs verify when it left no findings.

    Args:
        root: The repository.
        engine: Captures what must be captured again; by default the one of ``params.yaml``.

    Raises:
        EyasError: An extraction or another repair runs here.
        StoreError: States cannot be captured again here, or come out otherwise than they were.
        CaptureError: The engine gave no usable states.
    """
    manifest = fs.read_record(ShardManifest, root / MANIFEST)
    check_account(manifest)
    with fs.volume_lock(root / HOME / LOCK_NAME, f"repair of {manifest.identity[:16]}"):
        journal = Journal(root, manifest.identity)
        findings = journal.findings() or verify_states(root).findings
        staging = root / HOME / "repair" / manifest.identity
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.ExitStack() as stack:
            plan = _plan(root, manifest)
            tokens = {sample.sample_id: sample for sample in iter_tokens(root / TOKENS)}
            open_engine = _opener(stack, root, manifest, engine)
            run = _Run(
                root=root,
                manifest=manifest,
                plan=plan,
                tokens=tokens,
                cache=CacheLinks(root, STATES),
                recapture=Recapture(root / STATES, root / HOME, staging, manifest, plan, tokens, open_engine),
                staging=staging,
            )
            done = _repair_all(run, findings)
        shutil.rmtree(staging, ignore_errors=True)
        listed = {entry.path for entry in manifest.shards}
        journal.keep([finding for finding in findings if finding.shard not in listed])
    return done


def _plan(root: Path, manifest: ShardManifest) -> CapturePlan | None:
    plan = fs.read_record(CapturePlan, root / PLAN) if (root / PLAN).is_file() else None
    return plan if plan is not None and plan.identity == manifest.identity else None


def _opener(
    stack: contextlib.ExitStack, root: Path, manifest: ShardManifest, given: Engine | None
) -> Callable[[], Engine]:
    """Gives the open engine; it is loaded when the first shard needs it, and closed with ``stack``."""
    opened: list[Engine] = []

    def open_once() -> Engine:
        if not opened:
            engine = given or _engine_of_params(root, manifest)
            facts, capture = engine.describe(), manifest.capture
            if (facts.name, facts.version) != (capture.engine, capture.engine_version):
                raise StoreError(
                    f"the engine here is {facts.name} {facts.version}, the states are of "
                    f"{capture.engine} {capture.engine_version}",
                    "install the packages of requirements/ as of the extraction, or `make extract` anew",
                )
            stack.enter_context(contextlib.closing(engine))
            engine.open()
            opened.append(engine)
        return opened[0]

    return open_once


def _engine_of_params(root: Path, manifest: ShardManifest) -> Engine:
    params = config.load(root / "params.yaml")
    target = fs.read_record(TargetIdentity, root / TARGET)
    tokens_sha256, stored = read_index(root / TOKENS).tokens_sha256, manifest.capture.stored
    capture = capture_identity(params.extract, target, params.target, tokens_sha256, stored)
    if capture.digest != manifest.identity:
        raise StoreError(
            f"params.yaml, target and tokens give the capture {capture.digest}, the states are {manifest.identity}",
            "repair with the parameters of the extraction: `git checkout` its commit, `dvc checkout`",
        )
    return make_engine(
        params.extract.engine,
        target=target,
        folder=None if params.extract.engine == "fake" else ensure(target, params.target),
        boundaries=capture.boundaries,
        dtype=params.target.dtype,
        device=params.target.device,
        options=params.extract.engine_options,
        trust_remote_code=params.target.trust_remote_code,
    )


def _repair_all(run: _Run, findings: Sequence[Finding]) -> list[Repaired]:
    _report_unrepairable(run, findings)
    states = run.root / STATES
    of_set, _ = check_set(states, run.manifest, run.tokens, run.plan)
    against = make_against(run.root, run.manifest, [])
    wanted = [entry for entry in run.manifest.shards if any(f.shard == entry.path for f in (*findings, *of_set))]
    damage: dict[str, tuple[Finding, ...]] = {}
    for entry in wanted:
        fresh = check_shard(states, entry, run.manifest, against).findings
        kept = [f for f in findings if f.shard == entry.path and INCOHERENT in f.problem]
        damage[entry.path] = (*fresh, *(f for f in of_set if f.shard == entry.path), *kept)
    moved = _stage_moved(run, [entry for entry in wanted if damage[entry.path]])
    done = []
    for entry in wanted:
        repaired = _repair_one(run, entry, damage[entry.path], moved.get(entry.path))
        _mend_twin(run, entry)
        console.log(f"repair: {entry.path}: {repaired.how}")
        done.append(repaired)
    return done


def _report_unrepairable(run: _Run, findings: Sequence[Finding]) -> None:
    listed = {entry.path for entry in run.manifest.shards}
    for finding in findings:
        if finding.shard not in listed:
            console.log(f"repair: not a matter of a listed shard, look at it yourself: {finding.problem}")


def _stage_moved(run: _Run, entries: Sequence[ShardEntry]) -> dict[str, Path]:
    """Whole shards that lie in another's place, linked aside under the path that they belong to."""
    by_path, moved = {entry.path: entry for entry in run.manifest.shards}, {}
    for entry in entries:
        path = run.root / STATES / entry.path
        try:
            header, _ = read_header(path, entry.path)
        except StoreError:
            continue
        home = by_path.get(header.facts.shard)
        if home is None or home is entry or not fs.has_md5(path, home.md5):
            continue
        aside = run.staging / "moved" / home.path
        aside.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, aside)
        moved[home.path] = aside
    return moved


def _repair_one(run: _Run, entry: ShardEntry, damage: Sequence[Finding], moved: Path | None) -> Repaired:
    def result(how: How, num_captured: int = 0, md5: str = entry.md5) -> Repaired:
        return Repaired(shard=entry.path, how=how, num_captured_samples=num_captured, md5=md5, is_same=md5 == entry.md5)

    if not damage:
        return result("whole")
    target = run.root / STATES / entry.path
    if not _is_recorded(target, entry):
        _keep_foreign(run, target, entry)
        if run.cache.restore(entry.md5, target):
            return result("from the cache")
        if moved is not None:
            run.cache.place(moved, target, entry)
            return result("moved back")
    written, num_captured = run.recapture.shard(entry, damage)
    if written.md5 != entry.md5:
        _accept_other(run, entry, written, was_recorded=_is_recorded(target, entry))
    run.cache.place(run.staging / entry.path, target, written)
    return result("captured again" if num_captured else "written again", num_captured, written.md5)


def _mend_twin(run: _Run, entry: ShardEntry) -> None:
    """The spool's name of the damaged file: a rerun may know that by its ``stat``, and would publish it again unread."""
    path = run.root / STATES / entry.path
    twin = run.root / HOME / SPOOL / run.manifest.identity / "states" / entry.path
    if not twin.exists() or twin.samefile(path):
        return
    part = twin.with_name(twin.name + fs.PART_SUFFIX)
    part.unlink(missing_ok=True)
    try:
        os.link(path.resolve(), part)
        os.replace(part, twin)
    except OSError as error:
        if error.errno not in fs.NO_HARDLINKS:
            raise
        twin.unlink()
    fs.fsync_dir(twin.parent)


def _is_recorded(path: Path, entry: ShardEntry) -> bool:
    """Whether the damaged file is what the manifest records: then its states were wrong when they were written."""
    return path.is_file() and path.stat().st_size == entry.size_bytes and fs.has_md5(path, entry.md5)


def _keep_foreign(run: _Run, path: Path, entry: ShardEntry) -> None:
    """Move a whole shard of another capture out of the way: it is not ours to overwrite."""
    try:
        header, _ = read_header(path, entry.path)
    except StoreError:
        return
    if header.facts.identity != run.manifest.identity:
        aside = run.root / HOME / "foreign" / header.facts.identity / header.facts.shard
        aside.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, aside)
        console.log(f"repair: {path} is a shard of the capture {header.facts.identity[:16]}; moved to {aside}")


def _accept_other(run: _Run, entry: ShardEntry, written: ShardEntry, was_recorded: bool) -> None:
    """Take states of another hash into the manifest.

    Only what was wrong when it was written, and engines that do not promise equal bytes, may give them.

    Raises:
        StoreError: The manifest's bytes should have come out.
    """
    engine = run.manifest.engine
    if engine.deterministic and not was_recorded:
        raise StoreError(
            f"{entry.path} captured again has md5 {written.md5}, expected {entry.md5}: engine {engine.name} promises "
            "equal bytes; the damaged file is still in place",
            "capture on the machine type and with the thread count of the extraction, or extract anew",
        )
    shards = tuple(written if e.path == entry.path else e for e in run.manifest.shards)
    run.manifest = dataclasses.replace(
        run.manifest, shards=shards, stored_bytes=sum(shard.size_bytes for shard in shards)
    )
    fs.write_record(run.root / MANIFEST, run.manifest)
    Spool(run.root / HOME, run.manifest.capture).amend(written, run.manifest)
    why = "its states were wrong when they were written" if was_recorded else f"{engine.name} promises no equal bytes"
    console.log(
        f"repair: {entry.path} has md5 {written.md5} now, {entry.md5} before: {why}. "
        f"{MANIFEST} says so; `dvc commit extract` records it"
    )
