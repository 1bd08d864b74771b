"""Predicting a run from smaller runs of the same machine, and how far off that is.

A stage takes some seconds to start and then so many tokens a second. One run gives a rate alone; from two of different
sizes both follow (least squares, neither below zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas import fs
from eyas.errors import ConfigError

THROUGHPUT = "throughput.json"
Point = tuple[float, float]
"""Tokens and seconds of one stage of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One stage, predicted and real."""

    stage: str
    num_tokens: int
    predicted_s: float
    real_s: float
    growth: float
    """Tokens by those of the largest run that it was predicted from."""

    @property
    def error(self) -> float:
        """Predicted by real, less one."""
        return self.predicted_s / self.real_s - 1


def read_points(reports: Path) -> dict[str, Point]:
    """Tokens and seconds of each stage of a finished run.

    Args:
        reports: Its ``reports`` folder.

    Raises:
        StoreError: There is no ``throughput.json``.
        ConfigError: It is another thing.
    """
    value = fs.read_json(reports / THROUGHPUT)
    try:
        points = {stage: (float(one["tokens"]), float(one["seconds"])) for stage, one in value.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        points = {}
    if not points or min(min(point) for point in points.values()) <= 0:
        raise ConfigError(f"{reports / THROUGHPUT} holds no stage's tokens and seconds", "`make repro` writes it")
    return points


def line(points: Sequence[Point]) -> tuple[float, float]:
    """(seconds to start, seconds a token) of a stage that took so long with so many tokens."""
    num = len(points)
    mean_tokens, mean_s = (sum(values) / num for values in zip(*points, strict=True))
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in points)
    slope = sum((tokens - mean_tokens) * (s - mean_s) for tokens, s in points) / spread if spread else 0.0
    start_s = mean_s - slope * mean_tokens
    if slope <= 0 or start_s < 0:
        return 0.0, mean_s / mean_tokens
    return start_s, slope


def judge(known: Sequence[Path], real: Path) -> list[Judged]:
    """Predict a run's stages from other runs, and compare.

    Args:
        known: ``reports`` folders to learn from; of stages that one of them has.
        real: ``reports`` folder of the run; its tokens are taken as known, its seconds are not looked at before.

    Raises:
        ConfigError: No stage is in both.
    """
    runs, truth = [read_points(reports) for reports in known], read_points(real)
    judged = []
    for stage, (tokens, real_s) in truth.items():
        points = [run[stage] for run in runs if stage in run]
        if points:
            start_s, slope = line(points)
            judged.append(
                Judged(
                    stage=stage,
                    num_tokens=round(tokens),
                    predicted_s=start_s + slope * tokens,
                    real_s=real_s,
                    growth=tokens / max(known_tokens for known_tokens, _ in points),
                )
            )
    if not judged:
        raise ConfigError(f"{real / THROUGHPUT} has no stage in common with the runs that were given")
    return judged
