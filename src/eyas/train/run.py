"""One training run from published inputs to a published drafter: what the stage calls."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from eyas import console
from eyas.batches.loader import Reader
from eyas.batches.stream import StreamReader
from eyas.canonical import digest
from eyas.config.schema import DrafterConfig, TrainConfig
from eyas.contracts import CheckpointMeta, DrafterShape, ShardManifest, TargetIdentity
from eyas.drafter.init import init_drafter, resolve_shape
from eyas.drafter.model import Drafter
from eyas.drafter.warm_start import adopt_shape, load_weights
from eyas.errors import DiskError, TrainError
from eyas.fs import disk_errors, hash_file, volume_lock
from eyas.target.load import TargetEnds, read_ends
from eyas.tokens.draft_vocab import FILE_NAME, DraftVocab
from eyas.train.checkpoint import RunFolder, publish_drafter
from eyas.train.data import calibration_slice
from eyas.train.distributed import World, same_on_all
from eyas.train.finished import BestStep, Finished, FinishedRun
from eyas.train.loop import Outcome, Trainer
from eyas.train.packs import check_damage
from eyas.train.streaming import stream_facts
from eyas.train.warm_start import read_warm_start

LOCK_NAME = "train.lock"
NOT_DECIDING = ("source", "checkpoint_every", "max_damaged_samples", "warm_start")
"""Keys of ``train`` that cannot change the result: a warm start counts by its content, not by its place, a stream by
the part of it that is stored."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run is made of."""

    identity: TargetIdentity
    target_folder: Path
    vocab_folder: Path
    manifest: ShardManifest
    reader: Reader
    drafter_config: DrafterConfig
    config: TrainConfig
    stream: Callable[[World], AbstractContextManager[StreamReader]] | None = None
    """Opens what is read instead of ``reader``, when states are captured while training goes on."""

    def run_key(self) -> str:
        """Digest of all that decides the trained bytes."""
        settings = {k: v for k, v in vars(self.config).items() if k not in NOT_DECIDING}
        return digest(
            {
                "target": self.identity.digest,
                "states": digest(self.manifest),
                "draft_vocab": hash_file(self.vocab_folder / FILE_NAME),
                "drafter": vars(self.drafter_config),
                "train": settings,
            }
        )


def new_drafter(inputs: Inputs, ends: TargetEnds, vocab: DraftVocab) -> Drafter:
    """The drafter before its first step, the same for the same inputs."""
    boundaries, W = inputs.manifest.boundaries, vocab.draft_vocab_size
    shape = resolve_shape(inputs.drafter_config, inputs.identity, inputs.target_folder, len(boundaries), W)
    checkpoint = read_warm_start(inputs.config, inputs.identity, boundaries)
    shape = shape if checkpoint is None else adopt_shape(shape, checkpoint)
    calibration_TAD, seed = calibration_slice(inputs.reader), inputs.config.seed
    drafter = init_drafter(shape, ends, vocab.d2t_W, vocab.t2d_V, calibration_TAD, seed)
    if checkpoint is not None:
        known = load_weights(drafter, checkpoint)
        console.log(
            f"warm start from {inputs.config.warm_start} ({checkpoint.facts.form}): {known:,} of {W:,} head rows are "
            f"its own, {W - known:,} the target's"
        )
    return drafter


def target_ends(inputs: Inputs) -> TargetEnds:
    """The target's first and last tensors; the norm's scale as it multiplies (Gemma types store it less one)."""
    ends = read_ends(inputs.target_folder)
    scale_D = ends.final_norm_D.float() + inputs.identity.final_norm.weight_offset
    return TargetEnds(embedding_VD=ends.embedding_VD, head_VD=ends.head_VD, final_norm_D=scale_D)


def train(
    inputs: Inputs, runs_root: Path, output: Path, metrics_folder: Path, world: World
) -> tuple[CheckpointMeta, Outcome]:
    """Train, publish the drafter, forget the resumable state; publish again what is finished and not recorded yet.

    Args:
        inputs: Target, states and parameters; the same on every rank.
        runs_root: ``.eyas/train``: resumable states.
        output: ``models/drafter``.
        metrics_folder: ``reports/train``.
        world: The processes of the run; the first of them writes.

    Raises:
        ConfigError: This machine has no such device.
        TrainError: Nothing to train on, a foreign or damaged checkpoint, a loss that is not finite; the states
            are of another target.
        DiskError: There is no room for a checkpoint.
        EyasError: Another training holds the lock.
        KeyboardInterrupt: Stopped by a signal; the same call goes on from there.
    """
    with same_on_all():
        vocab, ends = _checked_vocab(inputs), target_ends(inputs)
    run_key = inputs.run_key()
    run, finished = RunFolder(runs_root, run_key), Finished(runs_root, run_key)
    with contextlib.ExitStack() as held:
        held.enter_context(disk_errors(runs_root))
        world.on_first(lambda: held.enter_context(volume_lock(runs_root / LOCK_NAME, "train")) and None)
        kept = world.on_first(lambda: _publish_again(finished, inputs.config, output, metrics_folder))
        if kept is not None:
            world.on_first(run.remove)
            if world.is_first:
                console.log("train: this run is finished already; its drafter and metrics are published again")
            meta, result = kept
            num_steps = inputs.config.num_steps
            return meta, Outcome(
                result.num_trained_rows,
                num_tokens=0,
                num_epochs=result.num_epochs,
                resumed_at=num_steps,
                damaged=result.damaged,
                best=result.best,
                seconds=0.0,
                is_republished=True,
            )
        if inputs.stream is not None:
            inputs = dataclasses.replace(inputs, reader=held.enter_context(inputs.stream(world)))
        with same_on_all():
            drafter = new_drafter(inputs, ends, vocab)
        trainer = Trainer(inputs.config, drafter, ends.head_VD, inputs.reader, run, metrics_folder, world)
        outcome = trainer.run()
        trainer.settle_on_published()
        meta = world.on_first(lambda: publish_drafter(output, drafter, _meta(inputs, drafter.shape, outcome)))
        world.on_first(lambda: _keep(run, finished, outcome, output, metrics_folder))
        if isinstance(inputs.reader, StreamReader):
            inputs.reader.give_back()
            outcome.stream = stream_facts(inputs.reader)
    return meta, outcome


def _publish_again(
    finished: Finished, config: TrainConfig, output: Path, metrics_folder: Path
) -> tuple[CheckpointMeta, FinishedRun] | None:
    """Publish what is finished and kept; None when nothing is."""
    kept = finished.read()
    if kept is not None:
        check_damage(kept[1].damaged, config.max_damaged_samples)  # the limit may be another than it trained under
        finished.publish(output, metrics_folder)
    return kept


def _keep(run: RunFolder, finished: Finished, outcome: Outcome, output: Path, metrics_folder: Path) -> None:
    """Keep the results instead of the state; without room for that the state stays, which gives them too."""
    best = outcome.best
    result = FinishedRun(
        run_key=run.run_key,
        num_epochs=outcome.num_epochs,
        num_trained_rows=outcome.num_trained_rows,
        damaged=outcome.damaged,
        best=None if best is None else BestStep(step=best.step, num_trained_rows=best.num_trained_rows, tau=best.tau),
    )
    try:
        finished.keep(result, output, metrics_folder)
    except DiskError as error:
        console.log(f"train: the state stays in {run.folder}: {error.message}")
        return
    run.remove()


def _checked_vocab(inputs: Inputs) -> DraftVocab:
    """The draft vocab; it and the states are of this target."""
    if inputs.manifest.capture.target != inputs.identity.digest:
        raise TrainError(
            f"the states are of target {inputs.manifest.capture.target[:16]}, expected {inputs.identity.digest[:16]}",
            "`dvc repro train` makes what is out of date first",
        )
    vocab = DraftVocab.read(inputs.vocab_folder)
    if vocab.vocab_size != inputs.identity.vocab_size:
        raise TrainError(
            f"the draft vocab maps {vocab.vocab_size:,} target ids, expected {inputs.identity.vocab_size:,}",
            "make it again: `dvc repro tokenize`",
        )
    return vocab


def _meta(inputs: Inputs, shape: DrafterShape, outcome: Outcome) -> CheckpointMeta:
    return CheckpointMeta(
        shape=shape,
        boundaries=inputs.manifest.boundaries,
        capture_identity=inputs.manifest.identity,
        target=inputs.identity.digest,
        tokens=inputs.manifest.capture.tokens,
        num_steps=outcome.best.step if outcome.best else inputs.config.num_steps,
        num_trained_rows=outcome.best.num_trained_rows if outcome.best else outcome.num_trained_rows,
        ttt_steps=inputs.config.ttt_steps,
        seed=inputs.config.seed,
        revision=inputs.config.revision,
        files=(),
        warm_start=inputs.config.warm_start_sha256,
    )
