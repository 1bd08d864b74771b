"""``eyas bench``: measure the store on this repository's own states and keep the figures for machines.

One JSON file per bench below ``reports/bench/``. A figure is a ratio within one run wherever that is
possible; the machine it ran on stands beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.contracts import CapturePlan, TargetIdentity
from eyas.shards.reader import ShardReader

REPORTS = Path("reports/bench")
SCRATCH = Path(".eyas/bench")
PEERS = "peers"
"""Environments of other trainers below ``SCRATCH``, kept between runs."""
STORE_BYTES = 4_000_000_000
"""bf16 bytes that go through the writer."""
DVC_BYTES = 2_000_000_000
NUM_KILLS = 200
NUM_FLIPS = 1000
CRASH_SAMPLES = 60
SEED = 0


def run(root: Path, name: str, **options: Any) -> dict[str, Any]:
    """Run one bench and write its report.

    Args:
        root: The repository; must hold published states, but for ``gc`` and ``faults``.
        name: ``store``, ``crash``, ``corruption``, ``faults``, ``gc``, ``train`` or ``train-quality``.
        options: Of ``train``: ``peers``, ``num_rounds``, ``device`` and ``share``; of ``train-quality``: ``peers``, ``num_seeds`` and ``jobs``.

    Returns:
        The figures.

    Raises:
        StoreError: There are no states, or they are not fit for it.
    """
    scratch = (root / SCRATCH / name).resolve()
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    figures = BENCHES[name](root, scratch, **options)
    shutil.rmtree(scratch, ignore_errors=True)
    _write(report_path(root, name), figures)
    return figures


def _write(path: Path, figures: dict[str, Any]) -> None:
    fs.write_text(path, json.dumps(figures, indent=2, sort_keys=True) + "\n")


def report_path(root: Path, name: str) -> Path:
    """Where a bench's figures go."""
    return root / REPORTS / f"{name.replace('-', '_')}.json"


def _store(root: Path, scratch: Path) -> dict[str, Any]:
    from eyas.ops.bench import dvc as bench_dvc
    from eyas.ops.bench import int8 as bench_int8
    from eyas.ops.bench import replay
    from eyas.ops.bench import store as bench_store
    from eyas.target.load import read_ends
    from eyas.target.store import target_dir

    source = replay.load(root)
    console.log("bench: the writer and its parts")
    figures = bench_store.measure(scratch, source, STORE_BYTES)
    console.log("bench: int8 on the target's distribution")
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    reader = ShardReader(root / "data/hidden_states", replay.manifest(root))
    head_VD = read_ends(root / target_dir(target)).head_VD
    figures |= bench_int8.measure(reader, fs.read_record(CapturePlan, root / "data/plan.json"), head_VD)
    console.log("bench: what a commit reads, with and without the handover")
    return figures | bench_dvc.measure(scratch, DVC_BYTES) | {"machine": config.machine()}


def _crash(root: Path, scratch: Path) -> dict[str, Any]:
    from eyas.ops.bench import crash as bench_crash
    from eyas.ops.bench import replay

    return bench_crash.measure(scratch / "crash", replay.load(root, CRASH_SAMPLES), NUM_KILLS, SEED)


def _corruption(root: Path, scratch: Path) -> dict[str, Any]:
    from eyas.ops.bench import corruption as bench_corruption

    return bench_corruption.measure(root, SEED, NUM_FLIPS)


def _gc(root: Path, scratch: Path) -> dict[str, Any]:
    from eyas.ops.bench import gc as bench_gc

    # The count of random histories is a test's: kept as it was noted last.
    path = root / REPORTS / "gc.json"
    noted = fs.read_json(path).get("histories_tried", 0) if path.exists() else 0
    return bench_gc.measure(scratch) | {"histories_tried": noted, "machine": config.machine()}


def _train(
    root: Path, scratch: Path, *, peers: str, num_rounds: int, device: str, share: float = 0.0
) -> dict[str, Any]:
    from eyas.ops.bench import train as bench_train
    from eyas.ops.bench import train_device

    named, environments, path = bench_train.parse_peers(peers), root / SCRATCH / PEERS, report_path(root, "train")

    def merged(found: dict[str, Any]) -> dict[str, Any]:
        """A record per device: what another machine measured stays."""
        return (fs.read_json(path) if path.exists() else {}) | {device: found}

    if device == "cuda":
        return merged(train_device.measure(scratch, environments, named, num_rounds, lambda f: _write(path, merged(f))))
    found = bench_train.measure(root, scratch, environments, named, num_rounds, share)
    return merged(found | {"machine": config.machine()})


def _train_quality(root: Path, scratch: Path, *, peers: str, num_seeds: int, jobs: int) -> dict[str, Any]:
    from eyas.ops.bench import quality
    from eyas.ops.bench.train import parse_peers
    from eyas.ops.bench.trainers import peer_python

    pythons = {name: str(peer_python(name, root / SCRATCH / PEERS)) for name in parse_peers(peers)}
    return quality.measure(root, scratch, pythons, num_seeds, jobs, report_path(root, "train-quality"))


def _faults(root: Path, scratch: Path) -> dict[str, Any]:
    from eyas.ops.bench import faults as bench_faults

    return bench_faults.measure(root)


BENCHES: dict[str, Callable[..., dict[str, Any]]] = {
    "store": _store,
    "crash": _crash,
    "corruption": _corruption,
    "faults": _faults,
    "gc": _gc,
    "train": _train,
    "train-quality": _train_quality,
}


def table(name: str, figures: dict[str, Any]) -> str:
    """The figures for people; of ``train`` those of every device."""
    if name == "train":
        from eyas.ops.bench import train as bench_train
        from eyas.ops.bench import train_device

        tables = {"cpu": bench_train.table, "cuda": train_device.table}
        return "\n\n".join(tables[device](figures[device]) for device in tables if device in figures)
    if name == "train-quality":
        from eyas.ops.bench import quality

        return quality.table(figures)
    if name == "faults":
        figures = figures["faults"]
    rows = [(key, _shown(value)) for key, value in sorted(figures.items()) if key != "machine"]
    return console.table(rows, (f"bench {name}", ""))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(f"{k} {_shown(v)}" for k, v in value.items()) if isinstance(value, dict) else str(value)
