"""Checkpoints: the resumable state of a run, and the published drafter.

    .eyas/train/<run key>/step-00000500.safetensors   float32 weights, both moments, RNG state
    .eyas/train/<run key>/state.json                  written last: step, cursor, history, SHA-256 of the file
    models/drafter/drafter.safetensors                float32 weights, d2t, t2d; no embedding
    models/drafter/checkpoint.json                    CheckpointMeta, written last

The resumable state lies outside DVC's outs, because DVC empties those before a run. Its folder is named by
the run key (all that decides the result), so a state of other data or parameters is never found. A tensor
file that no ``state.json`` names is a left-over of a crash and is ignored.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save

from eyas import fs
from eyas.batches.order import Cursor
from eyas.contracts import CheckpointMeta, FileDigest
from eyas.drafter.model import Drafter
from eyas.errors import StoreError, TrainError

WEIGHTS_NAME, META_NAME, STATE_NAME = "drafter.safetensors", "checkpoint.json", "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """Values logged at one step."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """``state.json``: where a run stopped."""

    run_key: str
    step: int
    """Optimizer steps done."""
    epoch: int
    batch: int
    num_trained_rows: int
    history: tuple[MetricRow, ...]
    window: dict[str, dict[str, float]]
    """Sums of the metric window that is not yet logged."""
    tensors: FileDigest

    @property
    def cursor(self) -> Cursor:
        """Where the data goes on."""
        return Cursor(self.epoch, self.batch)


class RunFolder:
    """The resumable state of one run.

    Args:
        root: ``.eyas/train``.
        run_key: Digest of all that decides the result.
    """

    def __init__(self, root: Path, run_key: str) -> None:
        self.run_key, self.folder = run_key, root / run_key[:16]

    def load(self) -> tuple[RunState, dict[str, torch.Tensor]] | None:
        """The newest state, or None when there is none.

        Raises:
            TrainError: The state is damaged, or of another run.
        """
        path = self.folder / STATE_NAME
        if not path.is_file():
            return None
        hint = f"remove it to train from the start: `rm -r {self.folder}`"
        try:
            state = fs.read_record(RunState, path)
        except StoreError as error:
            raise TrainError(f"{path} cannot be resumed: {error.message}", hint) from None
        if state.run_key != self.run_key:
            raise TrainError(f"{path} is of run {state.run_key}, expected {self.run_key}", hint)
        tensors = self.folder / state.tensors.path
        found = fs.hash_file(tensors) if tensors.is_file() else "no file"
        if found != state.tensors.sha256:
            raise TrainError(f"{tensors} is damaged: SHA-256 {found}, expected {state.tensors.sha256}", hint)
        return state, load_file(tensors)

    def tensors_path(self, step: int) -> Path:
        """File of the tensors after ``step`` optimizer steps."""
        return self.folder / f"step-{step:08d}.safetensors"

    def save_tensors(self, step: int, tensors: dict[str, torch.Tensor]) -> FileDigest:
        """Write the tensors; not yet part of the state until ``publish``."""
        path = self.tensors_path(step)
        fs.write_bytes(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        return fs.file_digest(path, self.folder)

    def publish(self, state: RunState) -> None:
        """Make a state the one to resume from; older tensors go."""
        fs.write_record(self.folder / STATE_NAME, state)
        for path in self.folder.glob("step-*.safetensors"):
            if path.name != state.tensors.path:
                path.unlink()

    def remove(self) -> None:
        """Forget the run: ``state.json`` first, so that a crash in between leaves nothing to resume."""
        (self.folder / STATE_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def publish_drafter(folder: Path, drafter: Drafter, meta: CheckpointMeta) -> CheckpointMeta:
    """Write ``models/drafter`` as a whole; returns the record with the files' digests."""
    with fs.atomic_dir(folder) as part:
        fs.write_bytes(part / WEIGHTS_NAME, save(drafter_tensors(drafter)))
        fields = {name: getattr(meta, name) for name in CheckpointMeta.__dataclass_fields__}
        meta = CheckpointMeta(**{**fields, "files": (fs.file_digest(part / WEIGHTS_NAME, part),)})
        fs.write_record(part / META_NAME, meta)
    return meta


def drafter_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Weights by export name, ``d2t`` and ``t2d``; no embedding."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}


def load_drafter(folder: Path, embedding_VD: torch.Tensor) -> tuple[Drafter, CheckpointMeta]:
    """Read a published drafter and give it the target's embedding.

    Raises:
        StoreError: The record or the weights are missing, damaged, or do not fit each other.
    """
    meta = fs.read_record(CheckpointMeta, folder / META_NAME)
    if [file.path for file in meta.files] != [WEIGHTS_NAME]:
        raise StoreError(f"{folder / META_NAME} does not list {WEIGHTS_NAME} alone", "run `dvc repro -f -s train`")
    for expected in meta.files:
        path = folder / expected.path
        if not path.is_file() or fs.hash_file(path) != expected.sha256:
            raise StoreError(f"{path} is missing or is not the file its record names", "run `dvc repro train`")
    try:
        tensors = load((folder / WEIGHTS_NAME).read_bytes())
    except SafetensorError as error:
        raise StoreError(f"{folder / WEIGHTS_NAME} is no safetensors file: {error}", "run `dvc repro train`") from None
    drafter = Drafter(meta.shape)
    try:
        drafter.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise StoreError(f"{folder} does not fit its own record: {error}", "run `dvc repro train`") from None
    if embedding_VD.shape != (meta.shape.vocab_size, meta.shape.hidden_size):
        raise StoreError(
            f"embedding {tuple(embedding_VD.shape)}, expected {(meta.shape.vocab_size, meta.shape.hidden_size)}: "
            "the drafter is of another target",
            "run `dvc repro train`",
        )
    drafter.set_target(embedding_VD.to(torch.bfloat16), tensors["d2t"], tensors["t2d"])
    return drafter.eval(), meta
