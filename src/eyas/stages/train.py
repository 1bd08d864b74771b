"""Stage train: states and draft vocab → ``models/drafter`` and DVCLive metrics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from eyas import config, console, fs
from eyas.contracts import ShardManifest, TargetIdentity
from eyas.shards.reader import ShardReader
from eyas.stages import common
from eyas.target.locate import ensure
from eyas.train.run import Inputs, train

NAMES = ("TARGET.json", "DRAFT_VOCAB", "STATES", "MANIFEST.json", "DRAFTER", "METRICS")
RUNS_ROOT = Path(".eyas/train")


def main(argv: Sequence[str]) -> None:
    """Train a drafter and print its last metrics."""
    target, draft_vocab, states, manifest_path, output, metrics = common.paths("train", NAMES, argv)
    params = config.load()
    with common.stage_run("train", [target, draft_vocab, manifest_path], [output]) as run:
        identity = fs.read_record(TargetIdentity, target)
        manifest = fs.read_record(ShardManifest, manifest_path)
        inputs = Inputs(
            identity=identity,
            target_folder=ensure(identity, params.target),
            vocab_folder=draft_vocab,
            manifest=manifest,
            reader=ShardReader(states, manifest),
            drafter_config=params.drafter,
            config=params.train,
        )
        meta, outcome = train(inputs, RUNS_ROOT, output, metrics)
        run.num_tokens = outcome.num_tokens
        run.facts = {
            "num_epochs": round(outcome.num_epochs, 2),
            "resumed_at": outcome.resumed_at,
            "num_trained_rows": outcome.num_trained_rows,
            "warm_start": params.train.warm_start,
            "cores": len(os.sched_getaffinity(0)),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        }
    last = fs.read_json(metrics / "metrics.json")
    rows = [
        [f"step {k}", last["loss"][f"step_{k}"], last["accuracy"][f"step_{k}"], last["alpha"][f"step_{k}"]]
        for k in range(meta.ttt_steps)
        if f"step_{k}" in last["loss"]
    ]
    console.emit(console.table(rows, ["TTT", "KL", "accuracy", "alpha"]))
    console.emit(
        f"{meta.num_steps:,} steps, {outcome.num_epochs:.1f} epochs, {meta.num_trained_rows:,} trained rows → {output}"
    )


if __name__ == "__main__":
    console.run_main(main)
