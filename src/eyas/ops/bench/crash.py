"""``eyas bench crash``: an extraction killed again and again ends with the bytes of an unbroken one.

Real states, the real loop, a real DVC repository for the handover. Half of the kills strike at a random
moment, the other half at a random call that changes the disk, just before or just after it: writing,
fsync, rename, journal, links of the publication, handover. After every kill the outputs are deleted, as
DVC does before it runs a stage again: what is not lost is what the spool kept.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyas import console, fs
from eyas.canonical import digest
from eyas.contracts import TokenSample
from eyas.engines.base import CapturedSample
from eyas.engines.loop import ExtractLimits, extract
from eyas.errors import StoreError
from eyas.ops.bench.replay import ReplayEngine, Source
from eyas.shards.handover import hand_over

CALLS = ("fsync", "replace", "rename", "truncate", "unlink", "rmdir", "mkdir", "link", "write")
OUT, MANIFEST = "data/hidden_states", "data/hidden_states.json"
SHARDS = 12
BEGUN = mmap.mmap(-1, 4)
"""Shards that the present run began to capture; shared with the child."""


@dataclass(slots=True)
class Crashes:
    """What the kills did."""

    kills: int = 0
    identical: int = 0
    """Kills whose run ended with the unbroken run's bytes."""
    most_lost_shards: int = 0
    """Begun in a run and not in the journal after its kill: one at the engine, one at the writer."""
    kinds: dict[str, int] = field(default_factory=dict)


def measure(scratch: Path, source: Source, wanted: int, seed: int) -> dict[str, object]:
    """Kill extractions until ``wanted`` kills have struck.

    Args:
        scratch: Folder for the repositories; removed afterwards.
        source: Real states; a few dozen samples are enough.
        wanted: Number of kills.
        seed: Of the moments.

    Returns:
        ``kills``, ``identical``, ``most_lost_shards`` and kills by kind.
    """
    source = source.planned_as(shard_bytes=source.plan.payload_bytes // SHARDS)
    template = scratch / "template"
    _make_repository(template)
    start_s = time.monotonic()
    whole = _copy(template, scratch / "whole")
    _must_end(_start(whole, source, None))
    duration_s, expected = time.monotonic() - start_s, _hashes(whole)
    calls = _count_calls(_copy(template, scratch / "counted"), source)
    rng, crashes = random.Random(seed), Crashes()  # noqa: S311 - moments, no secret
    progress = console.Progress("bench crash", wanted, unit="kills")
    while crashes.kills < wanted:
        root = _copy(template, scratch / f"run-{crashes.kills}")
        struck = _kill_until_done(root, source, rng, duration_s, calls, crashes)
        crashes.identical += struck if _hashes(root) == expected else 0
        progress.advance(struck)
        shutil.rmtree(root)
    progress.close()
    shutil.rmtree(scratch)
    return {
        "kills": crashes.kills,
        "identical": crashes.identical,
        "most_lost_shards": crashes.most_lost_shards,
        "kinds": crashes.kinds,
    }


def _make_repository(root: Path) -> None:
    root.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], cwd=root, check=True)


def _copy(template: Path, root: Path) -> Path:
    shutil.copytree(template, root)
    return root


def _hashes(root: Path) -> str:
    return digest([fs.tree_digests(root / OUT), fs.hash_file(root / MANIFEST)])


class _CountingEngine(ReplayEngine):
    """Counts the shards that were begun in memory that outlives the process."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._shard_of = {s.sample_id: shard.path for shard in source.plan.shards for s in shard.samples}
        self._begun: set[str] = set()

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        self._begun |= {self._shard_of[sample.sample_id] for sample in batch}
        BEGUN[:4] = len(self._begun).to_bytes(4, "little")
        return super().capture(batch)


def _run(root: Path, source: Source) -> None:
    """What stage ``extract`` does once its inputs are checked."""
    os.chdir(root)
    limits = ExtractLimits(reserve_bytes=0, max_failed_samples=0)
    out, manifest_path = Path(OUT), Path(MANIFEST)
    engine = _CountingEngine(source)
    result = extract(source.plan, source.tokens, engine, limits, out=out, manifest_path=manifest_path)
    hand_over(Path.cwd(), result.manifest, out, manifest_path)


def _start(root: Path, source: Source, arm: Callable[[], None] | None) -> int:
    """Fork a run; gives its pid."""
    BEGUN[:4] = bytes(4)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        if arm is not None:
            arm()
        _run(root, source)
        code = 0
    finally:
        os._exit(code)


def _must_end(pid: int) -> bool:
    """Wait for a run; whether it ended by itself.

    Raises:
        StoreError: It ended with an error.
    """
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code > 0:
        raise StoreError(f"a run after kills ended with {code}, expected 0", "run the bench again with the same seed")
    return code == 0


def _kill_until_done(
    root: Path, source: Source, rng: random.Random, duration_s: float, calls: int, crashes: Crashes
) -> int:
    """Kill runs over one folder until one ends by itself; gives the number of kills."""
    struck = 0
    while True:
        done_before = _journaled(root)
        by_call = rng.random() < 0.5
        if by_call:
            number, before = rng.randrange(1, calls + 1), rng.random() < 0.5
            pid = _start(root, source, lambda: _die_at(number, before))  # noqa: B023 - called at once
        else:
            pid = _start(root, source, None)
            time.sleep(rng.random() * duration_s)
            os.kill(pid, signal.SIGKILL)
        if _must_end(pid):
            return struck
        struck, crashes.kills = struck + 1, crashes.kills + 1
        kind = "call" if by_call else "time"
        crashes.kinds[kind] = crashes.kinds.get(kind, 0) + 1
        lost = int.from_bytes(BEGUN[:4], "little") - (_journaled(root) - done_before)
        crashes.most_lost_shards = max(crashes.most_lost_shards, lost)
        shutil.rmtree(root / OUT, ignore_errors=True)
        (root / MANIFEST).unlink(missing_ok=True)


def _journaled(root: Path) -> int:
    journals = list(root.glob(".eyas/spool/*/journal.jsonl"))
    return sum(len(path.read_bytes().splitlines()) for path in journals)


def _count_calls(root: Path, source: Source) -> int:
    """Calls of an unbroken run that change the disk."""
    path = root / "calls"

    def arm() -> None:
        count = [0]
        _wrap(lambda _before: count.__setitem__(0, count[0] + 1) if _before else path.write_text(str(count[0])))

    _must_end(_start(root, source, arm))
    return int(path.read_text())


def _die_at(number: int, before: bool) -> None:
    """In a child: SIGKILL itself just before or just after its n-th call that changes the disk."""
    count = [0]

    def at(is_before: bool) -> None:
        count[0] += is_before
        if count[0] == number and is_before == before:
            os.kill(os.getpid(), signal.SIGKILL)

    _wrap(at)


def _wrap(at: Callable[[bool], object]) -> None:
    def wrapped(call: Callable) -> Callable:
        def run(*args: object, **kwargs: object) -> object:
            at(True)
            try:
                return call(*args, **kwargs)
            finally:
                at(False)

        return run

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))
