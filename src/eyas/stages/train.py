"""Stage train: states and draft vocab → ``models/drafter`` and DVCLive metrics."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.batches.stream import StreamReader
from eyas.batches.streamed_set import stored_ratio, streamed_set
from eyas.config import Params
from eyas.config.images import check_image
from eyas.config.schema import TrainConfig
from eyas.contracts import CheckpointMeta, ShardManifest, TargetIdentity
from eyas.errors import TrainError
from eyas.evaluate.report import held_out
from eyas.plan.identity import STORED
from eyas.shards.reader import ShardReader
from eyas.shards.shard_cache import shard_cache
from eyas.stages import common
from eyas.target.load import require_device
from eyas.target.locate import ensure
from eyas.train.distributed import World, open_world, same_on_all, told_once
from eyas.train.loop import Outcome
from eyas.train.run import Inputs, train
from eyas.train.streaming import open_stream

NAMES = ("TARGET.json", "DRAFT_VOCAB", "STATES", "MANIFEST.json", "DRAFTER", "METRICS")
RUNS_ROOT = Path(".eyas/train")


def main(argv: Sequence[str]) -> None:
    """Train a drafter and print its last metrics; one of several processes when ``torchrun`` started them."""
    with told_once():
        _main(argv)


def _main(argv: Sequence[str]) -> None:
    with same_on_all():
        target, draft_vocab, states, manifest_path, output, metrics = common.paths("train", NAMES, argv)
        params = config.load()
        check_image("train.image", params.train.image)
        require_device("train.device", params.train.device)
        identity = fs.read_record(TargetIdentity, target)
        manifest = fs.read_record(ShardManifest, manifest_path)
        reader = ShardReader(states, manifest, shard_cache(Path.cwd(), manifest))
        held_out(reader.samples)  # a drafter that nothing could judge is refused before it is trained
        _check_stored(manifest, params.train.source)
    with open_world(params.train.device, params.train.packs_per_step) as world:
        world.on_first(lambda: ensure(identity, params.target) and None)
        inputs = Inputs(
            identity=identity,
            target_folder=ensure(identity, params.target),
            vocab_folder=draft_vocab,
            manifest=manifest,
            reader=reader,
            drafter_config=params.drafter,
            config=params.train,
            stream=_stream(params, target, manifest_path, manifest) if params.train.source == "stream" else None,
        )
        if not world.is_first:
            train(inputs, RUNS_ROOT, output, metrics, world)
            return
        with common.stage_run("train", [target, draft_vocab, manifest_path], [output]) as run:
            meta, outcome = train(inputs, RUNS_ROOT, output, metrics, world)
            run.num_tokens, run.work_s = outcome.num_tokens, outcome.seconds
            run.facts = _facts(outcome, world.size, params.train)
            run.nothing_worked_on = outcome.is_republished
    _show(meta, outcome, metrics, output, params.train)


def _check_stored(manifest: ShardManifest, source: str) -> None:
    """Refuse to train on the few samples that a streamed run keeps for its evaluation, or to stream beside a whole set.

    Raises:
        TrainError: What is stored is not what this source has.
    """
    expected, found = STORED[source], manifest.capture.stored
    if found != expected:
        raise TrainError(
            f"train.source is {source}, whose states are stored: {expected}; these are of stored: {found}",
            "`make plan` and `make extract` with these parameters, or set train.source to what was captured",
        )


def _stream(
    params: Params, target: Path, manifest_path: Path, manifest: ShardManifest
) -> Callable[[World], AbstractContextManager[StreamReader]]:
    """The tokens lie beside the manifest, whose capture names them by their hash."""
    tokens = manifest_path.with_name("tokens")
    ratio = stored_ratio(manifest)
    streamed = streamed_set(tokens, manifest.capture, manifest.hidden_size, params.train, ratio)
    command = [sys.executable, "-m", "eyas.engines.streamed", str(target), str(tokens), str(manifest_path)]
    return lambda world: open_stream(streamed, command, world)


def _facts(outcome: Outcome, num_processes: int, settings: TrainConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "num_epochs": round(outcome.num_epochs, 2),
        "resumed_at": outcome.resumed_at,
        "num_trained_rows": outcome.num_trained_rows,
        "damaged_samples": outcome.damaged,
        "warm_start": settings.warm_start,
        "num_processes": num_processes,
        "cores": len(os.sched_getaffinity(0)),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
    if outcome.stream:
        facts["stream"] = outcome.stream
    if outcome.best is not None:
        facts["best"] = {"step": outcome.best.step, "validation_tau": outcome.best.tau}
    return facts


def _show(meta: CheckpointMeta, outcome: Outcome, metrics: Path, output: Path, settings: TrainConfig) -> None:
    last = fs.read_json(metrics / "metrics.json")
    rows = [
        [f"step {k}", last["loss"][f"step_{k}"], last["accuracy"][f"step_{k}"], last["alpha"][f"step_{k}"]]
        for k in range(meta.ttt_steps)
        if f"step_{k}" in last["loss"]
    ]
    console.emit(console.table(rows, ["TTT", settings.loss.upper(), "accuracy", "alpha"]))
    if "validation" in last:
        console.emit(f"validation: tau {last['validation']['tau']}")
    if outcome.best is not None:
        console.emit(f"published: the weights of step {outcome.best.step:,}, tau {outcome.best.tau}")
    console.emit(
        f"{settings.num_steps:,} steps, {outcome.num_epochs:.1f} epochs, {outcome.num_trained_rows:,} trained rows → {output}"
    )


if __name__ == "__main__":
    console.run_main(main)
