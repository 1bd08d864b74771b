"""``eyas verify``: every artifact read again, its hashes compared and its references followed.

DVC trusts what lies in its cache; this does not. Missing artifacts are said, not counted as damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eyas import console, fs
from eyas.canonical import digest
from eyas.contracts import CapturePlan, CheckpointMeta, ExportMeta, FileDigest, ShardManifest, TargetIdentity
from eyas.errors import EyasError

if TYPE_CHECKING:
    from eyas.ops.verify_states import Extent, StatesReport


MAX_SHOWN = 50
"""Findings in the table; JSON has all."""


@dataclass(frozen=True, slots=True)
class Result:
    """What was found about one artifact; ``note`` says how much was read, or the first faults."""

    artifact: str
    state: Literal["whole", "not there", "out of date", "damaged"]
    note: str


@dataclass(frozen=True, slots=True)
class Stale:
    """Why a whole artifact is not the one that its inputs ask for now: no damage, the next run makes it anew."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """All artifacts, and the details of the states when there are any."""

    artifacts: tuple[Result, ...]
    states: StatesReport | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether anything is."""
        return any(result.state == "damaged" for result in self.artifacts)


def verify_all(root: Path, extent: Extent | None = None) -> Verified:
    """Check every artifact below ``root`` in pipeline order.

    Args:
        root: The repository.
        extent: How much of the states is read, and how fast; all of them by default.
    """
    reports: list[StatesReport] = []
    checks: tuple[tuple[str, Callable[[Path], Iterator[str | Stale]]], ...] = (
        ("models/target.json", _target),
        ("data/tokens", _tokens),
        ("data/plan.json", _plan),
        ("data/hidden_states.json", lambda root: _states(root, extent, reports)),
        ("models/drafter/checkpoint.json", _checkpoint),
        ("models/export/export.json", _export),
    )
    results = [_result(root, name, check) for name, check in checks]
    return Verified(artifacts=tuple(results), states=reports[0] if reports else None)


def _result(root: Path, name: str, check: Callable[[Path], Iterator[str | Stale]]) -> Result:
    if not (root / name).exists():
        return Result(name, "not there", "")
    try:
        found = list(check(root))
    except EyasError as error:
        found = [error.message]
    problems = [problem for problem in found if not isinstance(problem, Stale)]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        return Result(name, "damaged", "; ".join(problems[:3]) + more)
    stale = [problem.reason for problem in found if isinstance(problem, Stale)]
    return Result(name, "out of date", f"{'; '.join(stale)}; `make repro`") if stale else Result(name, "whole", "")


def _target(root: Path) -> Iterator[str]:
    from eyas.target.store import target_dir

    identity = fs.read_record(TargetIdentity, root / "models/target.json")
    folder = root / target_dir(identity)
    if folder.is_dir():
        yield from file_problems(folder, identity.files)


def _tokens(root: Path) -> Iterator[str | Stale]:
    from eyas.tokens.dataset import iter_tokens, tokens_sha256

    num_samples = sum(1 for _ in iter_tokens(root / "data/tokens"))
    if (root / "data/plan.json").is_file():
        plan = fs.read_record(CapturePlan, root / "data/plan.json")
        yield from _stale("tokens", tokens_sha256(root / "data/tokens"), plan.capture.tokens, "the plan's")
        if num_samples != plan.num_samples:
            yield f"{num_samples} samples, expected {plan.num_samples} as planned"


def _plan(root: Path) -> Iterator[str]:
    plan = fs.read_record(CapturePlan, root / "data/plan.json")
    if plan.capture.digest != plan.identity:
        yield f"identity {plan.identity[:16]}, but its capture has {plan.capture.digest[:16]}"
    sums = {
        "payload_bytes": (sum(shard.payload_bytes for shard in plan.shards), plan.payload_bytes),
        "num_samples": (sum(len(shard.samples) for shard in plan.shards), plan.num_samples),
        "num_tokens": (sum(s.num_tokens for shard in plan.shards for s in shard.samples), plan.num_tokens),
    }
    for name, (counted, stated) in sums.items():
        if counted != stated:
            yield f"{name} {stated:,}, but its shards sum to {counted:,}"


def _states(root: Path, extent: Extent | None, reports: list[StatesReport]) -> Iterator[str | Stale]:
    from eyas.ops.verify_states import verify_states

    reports.append(verify_states(root, extent))
    yield from (finding.problem for finding in reports[0].findings)
    if (root / "data/plan.json").is_file():
        plan = fs.read_json(root / "data/plan.json")
        planned = plan.get("identity", "") if isinstance(plan, dict) else ""
        yield from _stale("identity", reports[0].identity, planned, "the plan's")


def _checkpoint(root: Path) -> Iterator[str | Stale]:
    meta = fs.read_record(CheckpointMeta, root / "models/drafter/checkpoint.json")
    yield from file_problems(root / "models/drafter", meta.files)
    if (root / "data/hidden_states.json").is_file():
        manifest = fs.read_record(ShardManifest, root / "data/hidden_states.json")
        yield from _stale("capture identity", meta.capture_identity, manifest.identity, "the manifest's")


def _export(root: Path) -> Iterator[str | Stale]:
    meta = fs.read_record(ExportMeta, root / "models/export/export.json")
    yield from file_problems(root / "models/export", meta.files)
    if (root / "models/drafter/checkpoint.json").is_file():
        checkpoint = fs.read_record(CheckpointMeta, root / "models/drafter/checkpoint.json")
        yield from _stale("drafter", meta.drafter, digest(checkpoint), "the checkpoint's")


def _stale(what: str, value: str, expected: str, whose: str) -> Iterator[Stale]:
    if value != expected:
        yield Stale(f"{what} {value[:16]}, expected {expected[:16]} ({whose})")


def file_problems(folder: Path, files: tuple[FileDigest, ...]) -> Iterator[str]:
    """What is wrong with listed files of a folder: missing, another size, another content."""
    for file in files:
        path = folder / file.path
        if not path.is_file():
            yield f"{file.path} is missing"
        elif path.stat().st_size != file.size_bytes:
            yield f"{file.path}: {path.stat().st_size:,} bytes, expected {file.size_bytes:,}"
        elif (found := fs.hash_file(path)) != file.sha256:
            yield f"{file.path}: SHA-256 {found[:16]}, expected {file.sha256[:16]}"


def verified_text(verified: Verified) -> str:
    """The table, what is wrong with which sample, and what was not looked at."""
    parts = [console.table([(r.artifact, r.state, r.note) for r in verified.artifacts])]
    states = verified.states
    if states is None:
        return parts[0]
    parts.append(console.table(_states_rows(states)))
    if states.findings:
        shown = states.findings[:MAX_SHOWN]
        parts.append(console.table([(f.shard, f.sample_id, f.problem) for f in shown], ("shard", "sample", "problem")))
        if len(states.findings) > MAX_SHOWN:
            parts.append(f"and {len(states.findings) - MAX_SHOWN:,} more: `make verify ARGS=--json` lists all")
    parts += [f"note: {note}" for note in states.notes]
    if any(finding.shard for finding in states.findings):
        parts.append("hint: `make repair` restores or captures again what is damaged, and nothing else")
    return "\n\n".join(parts)


def _states_rows(states: StatesReport) -> list[tuple[str, str]]:
    samples = {(f.shard, f.sample_id) for f in states.findings if f.sample_id}
    speed = states.num_read_bytes / max(states.read_s, 1e-9)
    rows = [
        ("states", f"{states.num_read_shards:,} of {states.num_shards:,} shards, {states.num_samples:,} samples read"),
        ("bytes", f"{console.human_bytes(states.num_read_bytes)}, {console.human_bytes(speed)}/s"),
        ("damaged", f"{len({f.shard for f in states.findings if f.shard}):,} shards, {len(samples):,} samples named"),
    ]
    shares = (("next token", states.next_token_share), ("assistant", states.assistant_share))
    rows += [(name, f"{share:.1%} of rows of last predict it") for name, share in shares if share is not None]
    return rows
