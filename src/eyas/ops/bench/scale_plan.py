"""Seconds and peak memory of what looks at every sample, from a thousand samples to a million.

Each part runs in a process of its own, in a repository made for it (``eyas.ops.bench.scale_world``): ``plan``,
``budget`` and ``generations`` are the commands that a user runs; ``shuffle`` is what a training does before its
first read; ``resume`` is ``extract`` over a spool that was killed when its last shard was journaled; ``again`` is the same
command once more, killed after the publication: the set is taken back and published again. A million samples of one
value a row: what is measured is their number, not their bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas import console
from eyas.ops.bench.gc import MANIFEST, STATES

SIZES = (1_000, 10_000, 100_000, 1_000_000)
STAGE_PATHS = ("models/target.json", "data/tokens", "data/plan.json")
PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


def measure(scratch: Path, params: Path, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Measure every part at every size.

    Args:
        scratch: Folder for the repositories, one at a time; a million samples take 8 GB there.
        params: ``params.yaml`` of this repository.
        sizes: Numbers of samples.

    Returns:
        ``planner``: size → part → ``seconds`` of the process, ``cpu_seconds``, which other work on the
        machine disturbs less, and ``peak_bytes`` of its memory.
    """
    from eyas.ops.bench.scale_world import make_world

    found = {}
    for size in sizes:
        root = scratch / f"{size}"
        shutil.rmtree(root, ignore_errors=True)
        console.log(f"bench: a repository with {size:,} samples")
        make_world(root, params.resolve(), size)
        found[f"{size}"] = {part: _run(root, part) for part in PARTS}
        shutil.rmtree(root)
    return {"planner": found}


def table(figures: dict[str, Any]) -> str:
    """Seconds and peak MiB by part and size."""
    planner = figures["planner"]

    def cell(size: str, part: str) -> str:
        one = planner[size][part]
        return f"{one['seconds']:.1f} s ({one['cpu_seconds']:.1f} CPU-s), {one['peak_bytes'] / 2**20:,.0f} MiB"

    rows = [(f"{int(size):,}", *(cell(size, part) for part in PARTS)) for size in planner]
    return console.table(rows, ("samples", *PARTS))


def _run(root: Path, part: str) -> dict[str, Any]:
    if part == "resume":
        _unpublish(root)
    start_s = time.perf_counter()
    command = [sys.executable, "-m", "eyas.ops.bench.scale_plan", part]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start_s
    if done.returncode != 0:
        raise RuntimeError(f"{part}: {done.stderr}")
    return {"seconds": round(seconds, 2)} | json.loads(done.stdout.splitlines()[-1])


def _unpublish(root: Path) -> None:
    """What a capture leaves that is killed before it publishes: the spool alone."""
    shutil.rmtree(root / STATES)
    for path in (MANIFEST, "dvc.lock"):
        (root / path).unlink()


# ── one part, in a process of its own ─────────────────────────────────────────────────────────


def _module(name: str, *arguments: str) -> Callable[[], None]:
    """What ``python -m`` runs; stages and commands lie above this room and are not imported."""

    def run() -> None:
        sys.argv = [name, *arguments]
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:  # an answer with a code of its own is no measurement
                raise

    return run


def _shuffle() -> None:
    from eyas import fs
    from eyas.batches.loader import order_of
    from eyas.batches.split import split_samples
    from eyas.contracts import ShardManifest
    from eyas.shards.reader import ShardReader

    manifest = fs.read_record(ShardManifest, Path(MANIFEST))
    reader = ShardReader(Path(STATES), manifest)
    training, _ = split_samples(reader.samples, 0.01, 0)
    batches = order_of(reader, training, 8192, 0).epoch(1)
    assert sum(map(len, batches)) == len(training)


_EXTRACT = _module("eyas.stages.extract", *STAGE_PATHS, STATES, MANIFEST)
PARTS: dict[str, Callable[[], None]] = {
    "plan": _module("eyas.stages.plan", *STAGE_PATHS),
    "budget": _module("eyas.cli", "budget", "--json"),
    "generations": _module("eyas.cli", "generations", "--json"),
    "shuffle": _shuffle,
    "resume": _EXTRACT,
    "again": _EXTRACT,
}


def _main(argv: Sequence[str]) -> None:
    if argv[0] not in PARTS:
        params, scratch = Path(argv[0]), Path(argv[1])
        sizes = [int(size) for size in argv[2:]] or SIZES
        figures = measure(scratch, params, sizes)
        console.emit(table(figures))
        console.emit(json.dumps(figures))
        return
    with contextlib.redirect_stdout(io.StringIO()):
        PARTS[argv[0]]()
    found = PEAK.search(Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    console.emit(json.dumps({"peak_bytes": int(found[1]) * 1024, "cpu_seconds": round(time.process_time(), 2)}))


if __name__ == "__main__":
    _main(sys.argv[1:])
