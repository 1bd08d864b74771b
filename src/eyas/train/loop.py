"""The training loop: batches → packs → loss → AdamW, resumable at every checkpoint to the bit.

All that a step depends on is its number (learning rate, TTT steps), the data cursor, the weights and the
moments; there is no other random state. So a killed run that goes on from a checkpoint ends in the same
bytes as one that never stopped, on the same machine with the same number of threads.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas import console
from eyas.batches.loader import Batch, BatchLoader, Reader
from eyas.batches.order import Cursor
from eyas.config.schema import TrainConfig
from eyas.drafter.init import draft_head
from eyas.drafter.loss import Measured, Workspace, ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.precision import matmul_dtype
from eyas.drafter.rows import Pack
from eyas.errors import TrainError
from eyas.train.checkpoint import MetricRow, RunFolder, RunState
from eyas.train.data import Packer
from eyas.train.metrics import MetricLog, Window
from eyas.train.schedule import learning_rate, ttt_steps_at

MEASURE_EVERY = 10
"""Losses and hits are taken at every tenth step; they cost a sixth of a step."""


@dataclass
class Outcome:
    """What a run did."""

    num_trained_rows: int
    """Of the whole run: trained (row, step) pairs."""
    num_tokens: int
    """Tokens of the packs trained in this process."""
    num_epochs: float
    resumed_at: int


class Trainer:
    """One run.

    Args:
        config: ``train`` section.
        drafter: As initialised; trained in place.
        head_VD: The target's head.
        reader: The states.
        run: Where the resumable state lives.
        metrics_folder: DVCLive's folder.
    """

    def __init__(
        self,
        config: TrainConfig,
        drafter: Drafter,
        head_VD: torch.Tensor,
        reader: Reader,
        run: RunFolder,
        metrics_folder: Path,
    ) -> None:
        self.config, self.reader, self.run_folder = config, reader, run
        self.drafter = drafter.to(config.device).train()
        self.drafter.lm_head.weight.requires_grad_(config.train_head)
        head_VD = head_VD.float().to(config.device)
        self._teacher_WD = draft_head(head_VD, drafter.d2t)
        self._packer = Packer(head_VD, drafter.t2d, config.device)
        self._named = [(name, p) for name, p in self.drafter.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for _, p in self._named if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for _, p in self._named if p.ndim == 1], "weight_decay": 0.0},
        ]
        first, second = config.betas
        self._optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), fused=True)
        self._window, self._workspace = Window(), Workspace()
        self._step, self._cursor, self._num_trained_rows = 0, Cursor(), 0
        self._stop_signal = 0
        history = self._restore()
        self._log = MetricLog(metrics_folder, history)

    # ── state ─────────────────────────────────────────────────────────────────────────────────

    def _restore(self) -> list[tuple[int, dict[str, float]]]:
        loaded = self.run_folder.load()
        if loaded is None:
            return []
        state, tensors = loaded
        with torch.no_grad():
            for name, parameter in self._named:
                parameter.copy_(tensors[f"weight.{name}"])
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(state.step), device=parameter.device),
                    "exp_avg": tensors[f"exp_avg.{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(parameter.device),
                }
        self._step, self._cursor, self._num_trained_rows = state.step, state.cursor, state.num_trained_rows
        self._window = Window.from_plain(state.window)
        console.log(f"train: resumed at step {state.step:,} from {self.run_folder.folder}")
        return [(row.step, row.values) for row in state.history]

    def save(self) -> None:
        """Write the resumable state of this moment."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._named:
            moments: dict[str, Any] = self._optimizer.state[parameter]
            tensors[f"weight.{name}"] = parameter.detach().cpu()
            tensors[f"exp_avg.{name}"] = moments["exp_avg"].cpu()
            tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"].cpu()
        self.run_folder.publish(
            RunState(
                run_key=self.run_folder.run_key,
                step=self._step,
                epoch=self._cursor.epoch,
                batch=self._cursor.batch,
                num_trained_rows=self._num_trained_rows,
                history=tuple(MetricRow(step=step, values=values) for step, values in self._log.history),
                window=self._window.to_plain(),
                tensors=self.run_folder.save_tensors(self._step, tensors),
            )
        )

    # ── running ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> Outcome:
        """Train to the last step.

        Raises:
            TrainError: The loss is not finite, or no document of a whole epoch has a trained row.
            KeyboardInterrupt: Ctrl-C or SIGTERM; the state was saved.
        """
        config, resumed_at, num_tokens, note = self.config, self._step, 0, ""
        progress = console.Progress("train", config.num_steps, done=self._step, unit="steps")
        loader = BatchLoader(self.reader, config.batch_tokens, config.seed, self._cursor)
        batches_per_epoch = loader.batches_per_epoch()
        with _threads(), _stop_signals(self), matmul_dtype(config.dtype), loader:
            packs = self._packs(loader)
            while self._step < config.num_steps:
                pack, self._cursor = next(packs)
                measured = self._update(pack)
                num_tokens += len(pack.ids_T)
                note = f"loss {measured.total(config.step_decay):.3f}" if measured else note
                progress.advance(1, note)
                self._after_step()
        progress.close()
        self._log.close()
        epochs = self._cursor.epoch + self._cursor.batch / max(1, batches_per_epoch)
        return Outcome(self._num_trained_rows, num_tokens, epochs, resumed_at)

    def _packs(self, loader: BatchLoader) -> Iterator[tuple[Pack, Cursor]]:
        """Packs with at least one trained row; batches without one are passed over."""
        barren_since: Cursor | None = None
        for batch in loader:
            pack = self._pack(batch)
            if pack.num_trained[0] or any(pack.num_trained):
                barren_since = None
                yield pack, batch.after
            elif barren_since is None:
                barren_since = batch.after
            elif batch.after.epoch > barren_since.epoch + 1:
                raise TrainError(
                    f"no batch of a whole epoch ({loader.num_samples:,} documents) has a row that trains: assistant "
                    "spans of two tokens or more whose target argmax is in the draft vocab are needed",
                    "check the loss mask in reports/tokens.json and tokenize.draft_vocab_size",
                )

    def _pack(self, batch: Batch) -> Pack:
        config = self.config
        steps = ttt_steps_at(self._step, config.num_steps, config.ttt_steps, config.curriculum)
        return self._packer(batch.documents, steps)

    def _update(self, pack: Pack) -> Measured | None:
        config = self.config
        rate = learning_rate(self._step, config.num_steps, config.lr, config.warmup_steps, config.min_lr_share)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        measure = self._measures(self._step)
        loss, measured = ttt_loss(
            self.drafter, pack, self._teacher_WD, config.step_decay, measure=measure, workspace=self._workspace
        )
        self._optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_([p for _, p in self._named], config.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainError(
                f"loss and gradient of step {self._step} are not finite (norm {norm})",
                "lower train.lr or train.max_grad_norm, or check the states with `eyas verify`",
            )
        self._optimizer.step()
        self._step += 1
        self._num_trained_rows += sum(pack.num_trained)
        if measured:
            self._window.add(measured, pack.num_oov)
        return measured

    def _measures(self, step: int) -> bool:
        """Whether losses and hits of a step are taken: every tenth, and at least one per log line."""
        every = min(MEASURE_EVERY, self.config.log_every)
        return step % every == every - 1 or step == self.config.num_steps - 1

    def _after_step(self) -> None:
        config = self.config
        last = self._step == config.num_steps
        if self._step % config.log_every == 0 or last:
            rate = learning_rate(self._step - 1, config.num_steps, config.lr, config.warmup_steps, config.min_lr_share)
            self._log.log(self._step, {**self._window.values(), "lr": rate})
            self._window = Window()
        if self._step % config.checkpoint_every == 0 or last or self._stop_signal:
            self.save()
        if self._stop_signal:
            console.log(f"train: stopped by a signal; step {self._step:,} of {config.num_steps:,} is saved")
            raise KeyboardInterrupt

    def request_stop(self, signal_number: int, _: object) -> None:
        """Signal handler: stop after this step; a second signal stops at once."""
        if self._stop_signal:
            raise KeyboardInterrupt
        self._stop_signal = signal_number


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """All cores this process may use, unless OMP_NUM_THREADS says otherwise.

    The number enters the run record, because the order of sums depends on it.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _stop_signals(trainer: Trainer) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, trainer.request_stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
