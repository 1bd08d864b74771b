"""What every stage does around its room: parse paths, time the work, leave a run record.

``reports/runs/<stage>.json`` says what a run was (commit, argv, versions, hardware, times, hashes).
It stands beside the DVC outs and is never an input of a stage. ``reports/throughput.json`` gathers
tokens and seconds of all stages from those records.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.canonical import digest
from eyas.config import images
from eyas.errors import ConfigError, EyasError, StoreError

RUNS = Path("reports/runs")
THROUGHPUT = Path("reports/throughput.json")
LOCK = Path("requirements/cpu.lock")
"""Outside containers its hash is the environment's identity; torch and Python stand beside it."""
IMPORTS = "imports"
"""Below it each imported set lies in a folder of its own, with what was trained from it."""
PACKAGES = ("eyas", "torch", "transformers", "tokenizers", "datasets", "safetensors", "dvc", "hydra-core")
HASHED_TREE_BYTES = 2 << 30
"""Larger folders are recorded by their manifest alone: a terabyte is not read again for a note."""


@dataclass
class StageRun:
    """Counts and facts that a stage adds to its own record."""

    num_tokens: int = 0
    """Tokens worked on in this process; resumed work is not counted twice."""
    work_s: float | None = None
    """Seconds of the counted work alone; the stage's whole wall time when it says nothing."""
    facts: dict[str, Any] = field(default_factory=dict)
    nothing_worked_on: bool = False
    """What an earlier run made was published again: that run's record stays, when it is there."""


def paths(stage: str, names: Sequence[str], argv: Sequence[str]) -> list[Path]:
    """The stage's paths from argv.

    Raises:
        ConfigError: Another number of paths was given.
    """
    if len(argv) != len(names):
        usage = f"python -m eyas.stages.{stage} {' '.join(names)}"
        raise ConfigError(f"{stage}: {len(argv)} paths, expected {len(names)}", usage)
    return [Path(arg) for arg in argv]


@contextlib.contextmanager
def stage_run(stage: str, reads: Sequence[Path], writes: Sequence[Path]) -> Iterator[StageRun]:
    """Time a stage and write its run record when it ends without an error."""
    run, start_s, start_cpu_s = StageRun(), time.perf_counter(), _cpu_s()
    yield run
    wall_s, cpu_s = time.perf_counter() - start_s, _cpu_s() - start_cpu_s
    work_s = wall_s if run.work_s is None else run.work_s
    record = {
        "stage": stage,
        "argv": sys.argv[1:],
        "git": git_state(),
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": config.machine(),
        "environment": config.settings(),
        "image": os.environ.get(images.VARIABLE, ""),
        "lock_sha256": content_hash(LOCK),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - wall_s)),
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "work_s": round(work_s, 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "num_tokens": run.num_tokens,
        "reads": {str(path): content_hash(path) for path in reads},
        "writes": {str(path): content_hash(path) for path in writes},
        "facts": run.facts,
    }
    runs = runs_folder(writes)
    try:
        if not (run.nothing_worked_on and _says_the_same(runs / f"{stage}.json", record)):
            fs.write_record(runs / f"{stage}.json", record)
        _gather_throughput(runs)
    except EyasError as error:  # a note: the work is published, and failing now would make DVC remove it
        console.log(f"{stage}: the work is done, but its run record is not written: {error}")
    per_s, per_cpu_s = (run.num_tokens / max(seconds, 1e-9) for seconds in (work_s, cpu_s))
    rate = f", {per_s:,.0f} tok/s, {per_cpu_s:,.0f} tok/CPU-s" if run.num_tokens else ""
    console.log(f"{stage}: done in {console.human_seconds(wall_s)} ({cpu_s:,.0f} CPU-s{rate})")


def _says_the_same(path: Path, record: dict[str, Any]) -> bool:
    """Whether a record is there that is of the same bytes read and written."""
    if not path.is_file():
        return False
    try:
        before = read_run(path)
    except StoreError:
        return False
    return all(before.get(key) == record[key] for key in ("reads", "writes"))


def _cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def runs_folder(writes: Sequence[Path]) -> Path:
    """Where a stage's record belongs: an imported set below ``imports/`` keeps the records of its own stages."""
    first = writes[0].parts if writes else ()
    return Path(*first[:2], RUNS) if len(first) > 2 and first[0] == IMPORTS else RUNS


def _gather_throughput(runs: Path) -> None:
    gathered, throughput = {}, runs.parent / THROUGHPUT.name
    for path in sorted(runs.glob("*.json")):
        try:
            record = read_run(path)
        except StoreError:
            console.log(f"{path} is no run record; left out of {throughput}")
            continue
        if record["num_tokens"]:
            gathered[path.stem] = _throughput(record)
    fs.write_record(throughput, gathered)


def _throughput(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens": record["num_tokens"],
        "seconds": record["work_s"],
        "cpu_seconds": record["cpu_s"],
        "tokens_per_second": round(record["num_tokens"] / max(record["work_s"], 1e-9), 1),
        "tokens_per_cpu_second": round(record["num_tokens"] / max(record["cpu_s"], 1e-9), 1),
    }


RUN_NUMBERS = ("num_tokens", "work_s", "cpu_s")


def read_run(path: Path) -> dict[str, Any]:
    """A run record as ``stage_run`` wrote it.

    Raises:
        StoreError: It is missing, or another thing.
    """
    record = fs.read_json(path)
    if not isinstance(record, dict) or not all(isinstance(record.get(key), (int, float)) for key in RUN_NUMBERS):
        raise StoreError(f"{path} is no run record", f"remove it, the stage's next run writes it: rm {path}")
    return record


def content_hash(path: Path) -> str | None:
    """SHA-256 of a file, or of a folder's (path, size, hash) list; None when large or missing."""
    if path.is_file():
        return fs.hash_file(path)
    if not path.is_dir():
        return None
    num_bytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return digest(fs.tree_digests(path)) if num_bytes <= HASHED_TREE_BYTES else None


def git_state() -> dict[str, Any]:
    """Commit and dirty flag of the working tree; empty outside git."""
    commit = _git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))} if commit else {}


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
