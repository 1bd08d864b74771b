"""``eyas bench train-quality``: who makes the better drafter of the same states, our trainer or the peers'.

    a finished run → ours, each seed alone → each peer's speed, alone → all drafters of the peers → one judge

Two budgets. ``steps``: as many optimizer steps as ours, on the same packs. ``time``: as many as the peer makes, by
its speed measured alone on the machine and without its compilation, in the median seconds of ours (whose first
weights and publishing are counted).
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas import config, console, fs
from eyas.ops.bench.quality_ours import Setup
from eyas.ops.bench.quality_peers import Peer, PeerRun, train_all, variants

OURS = "eyas"


def measure(
    root: Path, scratch: Path, pythons: Mapping[str, str], num_seeds: int, jobs: int, report: Path
) -> dict[str, Any]:
    """Train and judge everything.

    Args:
        root: A repository with a finished run; its ``train`` section is what ours does.
        scratch: States, jobs and drafters go below it.
        pythons: Peer -> interpreter that imports it; a peer left out is not run.
        num_seeds: Seeds 0, 1, … of every trainer.
        jobs: Processes of the peers side by side; none of them is timed.
        report: Written again after every drafter, so that a peer's failure loses nothing of the others.

    Returns:
        The figures.

    Raises:
        StoreError: There are no states.
        EyasError: A peer's process failed.
    """
    setup, seeds = Setup(root.resolve()), range(num_seeds)
    rows = _ours(setup, seeds, scratch / OURS)
    seconds = statistics.median(row["seconds"] for row in rows)
    peers = {name: Peer(name, python, setup, seeds, scratch) for name, python in pythons.items()}
    runs, speeds = _plan(setup, peers, seeds, seconds)
    figures = _write(report, _figures(setup, rows, seconds))
    for peer_run, drafter, facts in train_all(peers, runs, jobs):
        rows.append(
            {
                "trainer": peer_run.variant.peer,
                "variant": peer_run.variant.name,
                "budget": peer_run.budget,
                "seed": peer_run.seed,
                "num_steps": peer_run.num_steps,
                "seconds_per_step": speeds[peer_run.variant.peer, peer_run.variant.name],
                "losses": facts["losses"],
                "package": facts["package"],
                "settings": facts["settings"],
                **setup.judge(drafter),
            }
        )
        figures = _write(report, _figures(setup, rows, seconds))
    return figures


def _write(report: Path, figures: dict[str, Any]) -> dict[str, Any]:
    fs.write_text(report, json.dumps(figures, indent=2, sort_keys=True) + "\n")
    return figures


def _ours(setup: Setup, seeds: Sequence[int], scratch: Path) -> list[dict[str, Any]]:
    setup.warm_up(scratch)
    rows = []
    for seed in seeds:
        train_config = dataclasses.replace(setup.params.train, seed=seed)
        trained = setup.train(train_config, setup.params.drafter, scratch)
        row = {
            "trainer": OURS,
            "variant": "params.yaml",
            "budget": "steps",
            "seed": seed,
            "num_steps": trained.num_steps,
            "seconds": trained.seconds,
            **setup.judge(trained.drafter),
        }
        console.log(f"bench: eyas, seed {seed}: {trained.seconds:.1f} s, tau {row['tau']:.3f}")
        rows.append(row)
    return rows


def _plan(
    setup: Setup, peers: Mapping[str, Peer], seeds: Sequence[int], seconds: float
) -> tuple[list[PeerRun], dict[tuple[str, str], float]]:
    """Every run of the peers, after measuring each variant's speed alone."""
    runs, speeds = [], {}
    asked = variants(setup.params.train)
    for name, peer in peers.items():
        own = [variant for variant in asked if variant.peer == name]
        for variant_name, speed in peer.seconds_per_step(own, seeds[0]).items():
            console.log(f"bench: {name}, {variant_name}: {speed * 1000:.1f} ms per step")
            speeds[name, variant_name] = speed
        for variant in own:
            num_in_time = max(1, int(seconds / speeds[name, variant.name]))
            runs += [
                PeerRun(variant=variant, budget=budget, seed=seed, num_steps=num_steps)
                for budget, num_steps in (("steps", setup.params.train.num_steps), ("time", num_in_time))
                for seed in seeds
            ]
    return runs, speeds


def _figures(setup: Setup, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    taus: dict[str, dict[str, float]] = {}
    for row in rows:
        taus.setdefault(f"{row['trainer']}, {row['variant']}, {row['budget']}", {})[str(row["seed"])] = row["tau"]
    device = setup.params.train.device
    return {
        "tau": taus,
        "rows": rows,
        "ours_seconds": seconds,
        "train": dict(vars(setup.params.train)),
        "drafter": dict(vars(setup.params.drafter)),
        "capture_identity": setup.manifest.identity,
        "num_train_tokens": sum(s.num_tokens for s in setup.reader.samples if s.split == "train"),
        "machine": config.machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def table(figures: Mapping[str, Any]) -> str:
    """Mean, spread and steps of every trainer for people."""
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in figures["rows"]:
        grouped.setdefault((row["trainer"], row["variant"], row["budget"]), []).append(row)
    lines = [(*key, str(rows[0]["num_steps"]), *_spread([row["tau"] for row in rows])) for key, rows in grouped.items()]
    return console.table(lines, ("trainer", "as", "same", "steps", "tau", "lowest", "highest", "sd", "seeds"))


def _spread(taus: Sequence[float]) -> tuple[str, ...]:
    sd = f"{statistics.stdev(taus):.3f}" if len(taus) > 1 else "-"
    return f"{statistics.mean(taus):.3f}", f"{min(taus):.3f}", f"{max(taus):.3f}", sd, str(len(taus))
