"""Metrics of a run: averages between two log steps, kept whole, written through DVCLive.

A resumed run writes its history again from the start, so that its files equal the unbroken run's to the
byte. Nothing here depends on time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas.drafter.loss import Measured

DIGITS = 6


SUMS = ("losses", "trained", "hits", "chained", "chain_hits")


class Window:
    """Row-weighted sums per TTT step since the last log step."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = {name: {} for name in SUMS}
        self._sums["pairs"] = {"oov": 0, "all": 0}

    def add(self, measured: Measured, num_oov: int) -> None:
        """Count one measured step."""
        trained = measured.num_trained_S.tolist()
        values = (
            [loss * count for loss, count in zip(measured.losses_S.tolist(), trained, strict=True)],
            trained,
            measured.num_hits_S.tolist(),
            measured.num_chained_S.tolist(),
            measured.num_chain_hits_S.tolist(),
        )
        for name, per_step in zip(SUMS, values, strict=True):
            for k, value in enumerate(per_step):
                self._sums[name][str(k)] = self._sums[name].get(str(k), 0) + value
        self._sums["pairs"]["oov"] += num_oov
        self._sums["pairs"]["all"] += num_oov + sum(trained)

    def values(self) -> dict[str, float]:
        """Mean loss, accuracy and conditional acceptance per step; share of OOV pairs."""
        sums, values = self._sums, {}
        for k in sums["losses"]:
            values[f"loss/step_{k}"] = sums["losses"][k] / max(1, sums["trained"][k])
            values[f"accuracy/step_{k}"] = sums["hits"][k] / max(1, sums["trained"][k])
            values[f"alpha/step_{k}"] = sums["chain_hits"][k] / max(1, sums["chained"][k])
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
        folder: DVCLive's folder (``reports/train``); emptied, then filled from ``history``.
        history: (step, values) of the run so far.
    """

    def __init__(self, folder: Path, history: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        from dvclive.live import Live

        shutil.rmtree(folder, ignore_errors=True)
        self.history: list[tuple[int, dict[str, float]]] = []
        self._live = Live(str(folder), resume=True, dvcyaml=None, save_dvc_exp=False, report=None)
        for step, values in history:
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row to every metric's file and renew the summary."""
        self.history.append((step, dict(values)))
        self._live.step = step
        for name, value in sorted(values.items()):
            self._live.log_metric(name, value)
        self._live.make_summary()

    def close(self) -> None:
        """Write what is left."""
        self._live.end()
