"""The training loop: packs → loss → gradients of all ranks → optimizer, resumable at every checkpoint to the bit.

All that a step depends on is its number (learning rate, TTT steps), the data cursor, the weights and the
moments; there is no other random state. So a killed run that goes on from a checkpoint ends in the same
bytes as one that never stopped, on the same machine with the same number of threads. The number of processes
changes nothing but the order of sums.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas import console
from eyas.batches.loader import BatchLoader, Reader, order_of
from eyas.batches.order import BatchOrder, Cursor
from eyas.batches.split import split_samples
from eyas.batches.stream import StreamReader
from eyas.config.schema import TrainConfig
from eyas.drafter.init import draft_head
from eyas.drafter.loss import Measured, Workspace, ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.objective import Objective
from eyas.drafter.precision import matmul_dtype, product_dtype
from eyas.drafter.rows import Pack
from eyas.drafter.teacher import TargetHead
from eyas.drafter.weights import FlatWeights
from eyas.train.checkpoint import Best, MetricRow, RunFolder, RunState, by_parameter
from eyas.train.data import Packer, check_states
from eyas.train.distributed import World
from eyas.train.finished import BestStep
from eyas.train.metrics import MetricLog, Pending, Terminal, Window
from eyas.train.optimizer import Optimizer
from eyas.train.packs import Placer, StepData, StepSource, check_damage, made_ahead, named
from eyas.train.schedule import learning_rate, ttt_steps_at
from eyas.train.streaming import following
from eyas.train.tensor_file import read_into
from eyas.train.threads import all_threads
from eyas.train.validation import Validator

MEASURE_EVERY = 10
"""Losses and hits are taken at every tenth step; they cost a sixth of a step."""
VALUE_BYTES = 4


@dataclass
class Outcome:
    """What a run did."""

    num_trained_rows: int
    """Of the whole run: trained (row, step) pairs."""
    num_tokens: int
    """Tokens of the packs trained since this process started, of all ranks."""
    num_epochs: float
    resumed_at: int
    damaged: dict[str, str]
    """Samples left out, and why."""
    best: BestStep | None
    """The validation whose weights are published, with ``keep: best``."""
    seconds: float
    """Of this process, without validations."""
    is_republished: bool = False
    """Nothing was trained: what a finished run left was published again."""
    stream: dict[str, Any] = field(default_factory=dict)
    """What a streamed training captured, in the process that feeds it."""


class Trainer:
    """One run.

    Args:
        config: ``train`` section.
        drafter: As initialised; trained in place.
        head_VD: The target's head.
        reader: The states.
        run: Where the resumable state lives.
        metrics_folder: DVCLive's folder.
        world: The processes of the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        drafter: Drafter,
        head_VD: torch.Tensor,
        reader: Reader,
        run: RunFolder,
        metrics_folder: Path,
        world: World,
    ) -> None:
        self.config, self.reader, self.run_folder, self.world = config, reader, run, world
        self._stream = reader if isinstance(reader, StreamReader) else None
        self._training, validation = split_samples(reader.samples, config.validation_share, config.seed)
        self.drafter = drafter.train()
        self.drafter.lm_head.weight.requires_grad_(config.train_head)
        # what is frozen, embedding and head, stays in host memory: products have a copy, packs carry what they need
        self.weights = FlatWeights(self.drafter, product_dtype(world.device, config.dtype), world.device)
        world.send_(self.weights.master_P, 0)
        self._teacher_WD = teacher_of(self.drafter, self.weights, head_VD)
        self._optimizer = Optimizer(self.weights, config, world)
        self._packer = Packer(
            TargetHead(head_VD, world.device),
            drafter.t2d,
            drafter.embed_tokens.weight,  # type: ignore[arg-type]
            config.anchors,
            config.seed,
        )
        self._objective = Objective(config.loss, config.top_k)
        self._placer, self._workspace = Placer(world.device), Workspace()
        self._window, self._pending = Window(), Pending()
        self._step, self._cursor, self._num_trained_rows, self._num_tokens = 0, Cursor(), 0, 0
        self._damaged: dict[str, str] = {}
        self._validation_s = 0.0
        self._best: Best | None = None
        self._stop_signal = 0
        self._validator = None
        if config.validation_share > 0:
            self._validator = Validator(
                validation,
                reader,
                config.batch_tokens,
                config.ttt_steps,
                self._packer,
                self._teacher_WD,
                world,
                self._objective,
            )
        history = self._restore()
        self._log = MetricLog(metrics_folder if world.is_first else None, history)
        self._terminal = Terminal(config.num_steps, self._step, quiet=not world.is_first)

    # ── state ─────────────────────────────────────────────────────────────────────────────────

    def _restore(self) -> list[tuple[int, dict[str, float]]]:
        state = self.world.on_first(self._load)
        if state is None:
            self.weights.refresh()
            return []
        self._read(state.tensors.path, "weight", self.weights.master_P)
        whole_P = torch.zeros_like(self.weights.master_P)
        for kind in self._optimizer.state_names:
            self._read(state.tensors.path, kind, whole_P)
            self._optimizer.restore(kind, whole_P)
        self.weights.refresh()
        self._step, self._cursor, self._num_trained_rows = state.step, state.cursor, state.num_trained_rows
        self._window, self._damaged, self._best = Window.from_plain(state.window), dict(state.damaged), state.best
        if self.world.is_first:
            console.log(f"train: resumed at step {state.step:,} from {self.run_folder.folder}")
        return [(row.step, row.values) for row in state.history]

    def _load(self) -> RunState | None:
        """The state, and a look whether there is room for what this run will write."""
        state = self.run_folder.load()
        if state is not None:
            check_damage(state.damaged, self.config.max_damaged_samples)
        weights_bytes = len(self.weights.master_P) * VALUE_BYTES
        state_bytes = weights_bytes * (1 + len(self._optimizer.state_names))
        num_weights = 2 if self.config.keep == "best" else 1
        self.run_folder.need_room(state_bytes * (1 if state else 2) + weights_bytes * num_weights, "this training")
        return state

    @torch.no_grad()
    def _read(self, path: str, kind: str, whole_P: torch.Tensor) -> None:
        """Fill a flat tensor with one kind of a file's values on every rank."""
        places = dict(by_parameter({kind: whole_P}, self.weights.views))
        self.world.on_first(lambda: read_into(self.run_folder.folder / path, places))
        self.world.send_(whole_P, 0)

    def save(self) -> None:
        """Write the resumable state of this moment."""
        self._optimizer.settle()
        self._flush()
        flat = {"weight": self.weights.master_P, **self._optimizer.state()}
        self.world.on_first(lambda: self._write(flat))

    def _write(self, flat: dict[str, torch.Tensor]) -> None:
        tensors = by_parameter(flat, self.weights.views)
        self.run_folder.publish(
            RunState(
                run_key=self.run_folder.run_key,
                step=self._step,
                epoch=self._cursor.epoch,
                batch=self._cursor.batch,
                num_trained_rows=self._num_trained_rows,
                history=tuple(MetricRow(step=step, values=values) for step, values in self._log.history),
                window=self._window.to_plain(),
                tensors=self.run_folder.save_tensors(f"step-{self._step:08d}", tensors),
                best=self._best,
                damaged=self._damaged,
            )
        )

    def settle_on_published(self) -> None:
        """Put the weights that are published into the drafter: the best, or the last."""
        if self._best is not None:
            self._read(self._best.tensors.path, "weight", self.weights.master_P)
        self.weights.refresh()

    # ── running ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> Outcome:
        """Train to the last step.

        Raises:
            StoreError, DataError: A sample is damaged and none may be.
            TrainError: The loss is not finite, too many samples are damaged, no document of a whole epoch has a
                trained row, or another rank failed.
            DiskError: There is no room for a checkpoint.
            KeyboardInterrupt: Ctrl-C or SIGTERM; the state was saved.
        """
        config, world, resumed_at, begin_s = self.config, self.world, self._step, time.monotonic()
        order = order_of(self.reader, self._training, config.batch_tokens, config.seed, config.shuffle_shards)
        packs_per_epoch = max(1, len(order.epoch(0)))
        loader = BatchLoader(
            self.reader, order.plan(self._cursor, config.packs_per_step, world.rank, world.size), check_states
        )
        with all_threads(), _stop_signals(self), matmul_dtype(config.dtype), loader, self._following(order):
            steps = made_ahead(iter(self._source(loader)), in_thread=world.device.type == "cuda")
            with contextlib.closing(steps):
                for data in steps:
                    self._train(data)
                    self._after_step(data)
                    del data  # or its packs would stay in memory while the next step is awaited
            self._optimizer.settle()
        self._log.close()
        epochs = self._cursor.epoch + self._cursor.batch / packs_per_epoch
        damaged = dict(sorted(self._damaged.items()))
        seconds = time.monotonic() - begin_s - self._validation_s
        return Outcome(self._num_trained_rows, self._num_tokens, epochs, resumed_at, damaged, self._best, seconds)

    def _following(self, order: BatchOrder) -> contextlib.AbstractContextManager[None]:
        stop = (lambda: bool(self._stop_signal)) if self.world.size == 1 else None
        left = self.config.num_steps - self._step
        self._leave_out(self._damaged)
        return following(self._stream, order, self._cursor, self.config.packs_per_step, left, stop, self._save_stopped)

    def _leave_out(self, damaged: dict[str, str]) -> None:
        if self._stream is not None:
            self._stream.leave_out(damaged)

    def _source(self, loader: BatchLoader) -> StepSource:
        config = self.config
        return StepSource(
            loader,
            self._packer,
            self._placer,
            self.world,
            steps=(self._step, config.num_steps),
            ttt_steps=lambda step: ttt_steps_at(step, config.num_steps, config.ttt_steps, config.curriculum),
            damaged=self._damaged,
            max_damaged=config.max_damaged_samples,
            stop=lambda: bool(self._stop_signal),
            agreed=lambda cursor, left: None if self._stream is None else self._stream.read_up_to(cursor, left),
        )

    def _train(self, data: StepData) -> None:
        """One optimizer step."""
        measure = self._measures(self._step)
        self.weights.zero_grad()
        measured: list[Measured] = []
        coming = data.first
        for number in range(len(data.packs)):
            assert coming is not None
            pack = coming.take()
            coming = self._placer(data.packs[number + 1]) if number + 1 < len(data.packs) else None
            values = self._add_gradients(pack, data.num_trained_S, measure)
            del pack  # or it would stay on the device beside the next one's activations
            measured += [values] if values else []
        self._optimizer.step(self._step, self._rate(self._step))
        if measure:
            self._pending.add(measured, (data.num_oov, data.num_in_span))
        self._step += 1
        self._cursor = data.after
        self._num_trained_rows += sum(data.num_trained_S)
        self._num_tokens += data.num_tokens
        self._count_damage(dict(data.damaged))

    def _add_gradients(self, pack: Pack, num_trained_S: tuple[int, ...], measure: bool) -> Measured | None:
        """Forward and backward of one pack; nothing of its graph lives on."""
        total, values = ttt_loss(
            self.drafter,
            pack,
            self._teacher_WD,
            self.config.step_decay,
            weights=self.weights,
            num_trained_S=num_trained_S,
            measure=measure,
            workspace=self._workspace,
            objective=self._objective,
        )
        total.backward()
        return values

    def _rate(self, step: int) -> float:
        config = self.config
        return learning_rate(step, config.num_steps, config.lr, config.warmup_steps, config.min_lr_share)

    def _measures(self, step: int) -> bool:
        """Whether losses and hits of a step are taken: every tenth, and at least one per log line."""
        every = min(MEASURE_EVERY, self.config.log_every)
        return step % every == every - 1 or step == self.config.num_steps - 1

    def _after_step(self, data: StepData) -> None:
        config = self.config
        last = self._step == config.num_steps
        stop = data.is_last or (self.world.size == 1 and bool(self._stop_signal))
        if self._validator is not None and (self._step % config.validate_every == 0 or last):
            self._validate(self._validator)
        if self._step % config.log_every == 0 or last:
            self._log_window()  # after the validation: the line shows its tau
        if stop:
            self._save_stopped()
        if self._step % config.checkpoint_every == 0 or last:
            self.save()

    def _save_stopped(self) -> None:
        self.save()
        if self.world.is_first:
            console.log(f"train: stopped by a signal; step {self._step:,} of {self.config.num_steps:,} is saved")
        raise KeyboardInterrupt

    def _log_window(self) -> None:
        self._flush()
        values = {**self._window.values(), "lr": self._rate(self._step - 1)}
        self._log.log(self._step, values)
        self._window = Window()
        self._terminal.line(self._step, self._num_tokens, values)

    def _flush(self) -> None:
        """Bring what ranks measured since the last time into the window, step by step and rank by rank."""
        for ranks in zip(*self.world.gather(self._pending.take()), strict=True):
            self._window.add([sums for sums, _ in ranks], ranks[0][1])

    def _validate(self, validator: Validator) -> None:
        """Judge the weights; keep them when none were better."""
        self._optimizer.settle()
        begin_s = time.monotonic()
        values, damaged = validator(self.drafter, self.weights)
        seconds = time.monotonic() - begin_s
        self._validation_s += seconds
        self._count_damage(damaged)
        self._log.log(self._step, values)
        self._terminal.validated(values, seconds)
        tau = values["validation/tau"]
        if self.config.keep == "best" and (self._best is None or tau > self._best.tau):
            flat = {"weight": self.weights.master_P}
            name, views = f"best-{self._step:08d}", self.weights.views
            tensors = self.world.on_first(lambda: self.run_folder.save_tensors(name, by_parameter(flat, views)))
            rows = self._num_trained_rows
            if self._best is not None and self.world.is_first:
                self.run_folder.drop(self._best.tensors)
            self._best = Best(step=self._step, num_trained_rows=rows, tau=tau, tensors=tensors)

    def _count_damage(self, damaged: dict[str, str]) -> None:
        for sample_id, reason in damaged.items():
            if sample_id not in self._damaged:
                self._damaged[sample_id] = reason
                self._leave_out({sample_id: reason})
                check_damage(self._damaged, self.config.max_damaged_samples)
                if self.world.is_first:
                    console.log(f"train: left out {named(sample_id, reason)}")

    def request_stop(self, signal_number: int, _: object) -> None:
        """Signal handler: stop after a step that all ranks agree on; a second signal stops at once."""
        if self._stop_signal:
            raise KeyboardInterrupt
        self._stop_signal = signal_number


def teacher_of(drafter: Drafter, weights: FlatWeights, head_VD: torch.Tensor) -> torch.Tensor:
    """The target head's rows of the draft vocab where products read them: the frozen head itself when it holds them."""
    rows_WD, head = draft_head(head_VD, drafter.d2t.cpu()), weights.products().head
    own_WE = drafter.lm_head.weight
    if head.sink is None and torch.equal(own_WE, rows_WD.to(own_WE.device)):
        return head.value
    return rows_WD.to(head.value.device, head.value.dtype)


@contextlib.contextmanager
def _stop_signals(trainer: Trainer) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, trainer.request_stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
