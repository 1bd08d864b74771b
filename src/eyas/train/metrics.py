"""Metrics of a run: averages between two log steps, kept whole, written through DVCLive.

A resumed run writes its history again from the start, so that its files equal the unbroken run's to the
byte. Nothing here depends on time.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas import console
from eyas.drafter.loss import Measured
from eyas.errors import TrainError

DIGITS = 6
SUMS = ("losses", "trained", "hits", "chained", "chain_hits")
StepSums = dict[str, list[float]]
"""Per name of ``SUMS`` one value per TTT step, of one optimizer step."""
Pairs = tuple[int, int]
"""(row, step) pairs of one optimizer step that are out of vocab, and all that lie in a span."""


class Pending:
    """Measured packs of this rank whose values are still on the device: reading them would make the host wait."""

    def __init__(self) -> None:
        self._steps: list[tuple[list[Measured], Pairs]] = []

    def add(self, measured: list[Measured], pairs: Pairs) -> None:
        """Keep the packs of one measured step; ``pairs`` are of all ranks."""
        self._steps.append((measured, pairs))

    def take(self) -> list[tuple[StepSums, Pairs]]:
        """Sums of every step kept, in order; then none is kept."""
        steps, self._steps = self._steps, []
        return [(_sums_of(packs), pairs) for packs, pairs in steps]


def _sums_of(packs: Sequence[Measured]) -> StepSums:
    sums: StepSums = {name: [] for name in SUMS}
    for measured in packs:
        trained = measured.num_trained_S.tolist()
        values = (
            [loss * count for loss, count in zip(measured.losses_S.tolist(), trained, strict=True)],
            trained,
            measured.num_hits_S.tolist(),
            measured.num_chained_S.tolist(),
            measured.num_chain_hits_S.tolist(),
        )
        for name, per_step in zip(SUMS, values, strict=True):
            sums[name] = _added(sums[name], per_step)
    return sums


def _added(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x + y for x, y in itertools.zip_longest(a, b, fillvalue=0)]


class Window:
    """Row-weighted sums per TTT step since the last log step, of all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = {name: {} for name in SUMS}
        self._sums["pairs"] = {"oov": 0, "all": 0}

    def add(self, ranks: Sequence[StepSums], pairs: Pairs) -> None:
        """Count one measured step: what each rank has of it, in the order of ranks."""
        whole: StepSums = {name: [] for name in SUMS}
        for sums in ranks:
            whole = {name: _added(whole[name], sums[name]) for name in SUMS}
        for name in SUMS:
            for k, value in enumerate(whole[name]):
                self._sums[name][str(k)] = self._sums[name].get(str(k), 0) + value
        self._sums["pairs"]["oov"] += pairs[0]
        self._sums["pairs"]["all"] += pairs[1]

    def values(self) -> dict[str, float]:
        """Mean loss, accuracy, conditional and joint acceptance per step; share of OOV pairs."""
        sums, values = self._sums, {}
        for k in sums["losses"]:
            values[f"loss/step_{k}"] = sums["losses"][k] / max(1, sums["trained"][k])
            values[f"accuracy/step_{k}"] = sums["hits"][k] / max(1, sums["trained"][k])
            values[f"alpha/step_{k}"] = sums["chain_hits"][k] / max(1, sums["chained"][k])
            values[f"joint/step_{k}"] = sums["chain_hits"][k] / max(1, sums["trained"][k])
        values["oov_share"] = sums["pairs"]["oov"] / max(1, sums["pairs"]["all"])
        return {name: round(value, DIGITS) for name, value in values.items()}

    def to_plain(self) -> dict[str, dict[str, float]]:
        """The sums, for a checkpoint."""
        return {name: dict(sums) for name, sums in self._sums.items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Mapping[str, float]]) -> Window:
        """A window as ``to_plain`` gave it."""
        window = cls()
        window._sums = {name: dict(sums) for name, sums in plain.items()}
        return window


class MetricLog:
    """The history of a run and its DVCLive folder.

    Args:
        folder: DVCLive's folder (``reports/train``); emptied, then filled from ``history``. None writes nothing: one
            process of a run writes.
        history: (step, values) of the run so far.

    Raises:
        TrainError: The repository around it has no commit.
    """

    def __init__(self, folder: Path | None, history: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        self.history: list[tuple[int, dict[str, float]]] = []
        self._live = None
        if folder is not None:
            from dvclive.live import Live
            from scmrepo.exceptions import SCMError

            if folder.is_dir():
                shutil.rmtree(folder)  # what stayed behind an error would stand among this run's rows
            try:
                self._live = Live(str(folder), resume=True, dvcyaml=None, save_dvc_exp=False, report=None)
            except SCMError as error:
                raise TrainError(
                    f"DVCLive asks git which commit is trained, and git says: {error}",
                    "make the first commit: `git add -A && git commit -m start`",
                ) from None
        for step, values in history:
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row to every metric's file and renew the summary."""
        self.history.append((step, dict(values)))
        if self._live is not None:
            self._live.step = step
            for name, value in sorted(values.items()):
                self._live.log_metric(name, value)
            self._live.make_summary()

    def close(self) -> None:
        """Write what is left."""
        if self._live is not None:
            self._live.end()


class Terminal:
    """One line on stderr per log step; rates and times are for the reader alone and stand in no file.

    Args:
        num_steps: Of the run.
        step: Steps done before this process.
        quiet: Say nothing.
    """

    def __init__(self, num_steps: int, step: int, quiet: bool) -> None:
        self._num_steps, self._quiet = num_steps, quiet
        self._first = self._last = (step, 0, time.monotonic())
        self._tau, self._validation_s = "", 0.0

    def validated(self, values: Mapping[str, float], seconds: float) -> None:
        """Show this validation from now on; its seconds are no time of training."""
        self._validation_s += seconds
        self._tau = f"  tau {values['validation/tau']:.3f}"

    def line(self, step: int, num_tokens: int, values: Mapping[str, float]) -> None:
        """Print step, loss, alpha per step, tau, tokens/s of training and time left, validations included.

        Args:
            step: Steps done.
            num_tokens: Tokens trained on in this process.
            values: Of the window.
        """
        now = time.monotonic()
        (last_step, last_tokens, last_s), self._last = self._last, (step, num_tokens, now)
        per_s = (num_tokens - last_tokens) / max(now - last_s - self._validation_s, 1e-9)
        self._validation_s = 0.0
        left_s = (now - self._first[2]) / max(1, step - self._first[0]) * (self._num_steps - step)
        loss, alpha = _shown(values, "loss"), _shown(values, "alpha")
        if not self._quiet and step > last_step:
            console.log(
                f"train: step {step:,}/{self._num_steps:,}  loss {loss}  alpha {alpha}{self._tau}  "
                f"{per_s:,.0f} tok/s  {console.human_seconds(left_s)} left"
            )


def _shown(values: Mapping[str, float], what: str) -> str:
    per_step = sorted(name for name in values if name.startswith(f"{what}/step_"))
    return " ".join(f"{values[name]:.3f}" for name in per_step) or "-"
