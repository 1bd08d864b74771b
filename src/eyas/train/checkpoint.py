"""Checkpoints: the resumable state of a run, and the published drafter.

    .eyas/train/<run key>/step-00000500.safetensors   float32 weights and moments: one entry per parameter
    .eyas/train/<run key>/best-00000400.safetensors   the weights of the best validation, with ``keep: best``
    .eyas/train/<run key>/state.json                  written last: step, cursor, history, SHA-256 of the files
    .eyas/train/<run key>/finished/                   results that DVC has not recorded yet, see ``finished``
    models/drafter/drafter.safetensors                float32 weights, d2t, t2d; no embedding
    models/drafter/checkpoint.json                    CheckpointMeta, written last

The resumable state lies outside DVC's outs, because DVC empties those before a run. Its folder is named by
the run key (all that decides the result), so a state of other data or parameters is never found. A tensor
file that no ``state.json`` names is a left-over of a crash and is ignored. Nothing in it knows how many processes
wrote it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from eyas import console, fs
from eyas.batches.order import Cursor
from eyas.contracts import CheckpointMeta, FileDigest
from eyas.drafter.model import Drafter
from eyas.errors import DiskError, StoreError, TrainError
from eyas.train.finished import BestStep
from eyas.train.tensor_file import write_tensors

WEIGHTS_NAME, META_NAME, STATE_NAME = "drafter.safetensors", "checkpoint.json", "state.json"
RESERVE_BYTES = 64 << 20
"""Beside a checkpoint: records, metrics, and what others write meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """Values logged at one step."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best(BestStep):
    """The best validation so far and its weights."""

    tensors: FileDigest


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
    best: Best | None = None
    damaged: dict[str, str] = field(default_factory=dict)
    """Samples left out up to here, and why."""

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
        self._named: set[str] = set()
        """Files that ``state.json`` names."""

    def load(self) -> RunState | None:
        """The newest state, its files verified, or None when there is none.

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
        for tensors in [state.tensors] + ([state.best.tensors] if state.best else []):
            place = self.folder / tensors.path
            found = fs.hash_file(place) if place.is_file() else "no file"
            if found != tensors.sha256:
                raise TrainError(f"{place} is damaged: SHA-256 {found}, expected {tensors.sha256}", hint)
        self._named = _names(state)
        return state

    def save_tensors(self, name: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> FileDigest:
        """Write tensors under a name; not yet part of the state until ``publish``.

        Args:
            name: ``step-00000500`` or ``best-00000400``.
            tensors: (name, tensor), on any device.

        Raises:
            DiskError: There is no room; what was saved before stays.
        """
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        self.need_room(num_bytes, "the next checkpoint")
        path = self.folder / f"{name}.safetensors"
        return write_tensors(path, tensors, self.folder)

    def need_room(self, num_bytes: int, what: str) -> None:
        """Refuse to go on without room.

        Raises:
            DiskError: Tells what is missing.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        free, needed = fs.free_bytes(self.folder), num_bytes + RESERVE_BYTES
        if free < needed:
            kept = "the last checkpoint is whole" if (self.folder / STATE_NAME).is_file() else "no checkpoint is lost"
            raise DiskError(
                f"{what} needs {console.human_bytes(needed)} in {self.folder}, {console.human_bytes(free)} are free: "
                f"{console.human_bytes(needed - free)} are missing; {kept}",
                f"{self._room()}the same command goes on from what is saved",
            )

    def _room(self) -> str:
        """A command that frees what trainings of other parameters left, or one that shows what else could go."""
        others = sorted(
            path.parent for path in self.folder.parent.glob(f"*/{STATE_NAME}") if path.parent != self.folder
        )
        if not others:
            return "`make budget` shows what could go; "
        size_bytes = sum(path.stat().st_size for folder in others for path in folder.iterdir() if path.is_file())
        command = f"rm -r {shlex.join(map(str, others))}"
        return f"`{command}` frees {console.human_bytes(size_bytes)} of trainings that did not end; "

    def publish(self, state: RunState) -> None:
        """Make a state the one to resume from; files that it does not name go."""
        fs.write_record(self.folder / STATE_NAME, state)
        self._named = _names(state)
        for path in self.folder.glob("*.safetensors"):
            if path.name not in self._named:
                path.unlink()

    def drop(self, tensors: FileDigest) -> None:
        """Remove tensors that this run needs no more, unless the published state names them."""
        if tensors.path not in self._named:
            (self.folder / tensors.path).unlink(missing_ok=True)

    def remove(self) -> None:
        """Forget the state: ``state.json`` first, so that a crash in between leaves nothing to resume."""
        (self.folder / STATE_NAME).unlink(missing_ok=True)
        for path in self.folder.glob("*.safetensors*"):
            path.unlink()


def _names(state: RunState) -> set[str]:
    return {state.tensors.path} | ({state.best.tensors.path} if state.best else set())


def by_parameter(flat: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """(``kind.parameter``, values) of flat tensors; what fills them up between parameters is left out.

    Args:
        flat: Tensor [P] by kind.
        views: A flat tensor's parameters, by name.
    """
    return [
        (f"{kind}.{name}", flat_P[view.storage_offset() :][: view.numel()].view(view.shape))
        for kind, flat_P in flat.items()
        for name, view in views.items()
    ]


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
            raise StoreError(
                f"{path} is missing or is not the file its record names",
                f"`dvc checkout --force {folder}` brings it back from DVC's cache; `dvc repro train` trains it again",
            )
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
