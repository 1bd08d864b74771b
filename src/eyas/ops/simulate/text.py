"""A prediction as people and machines read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from eyas.console import human_bytes, human_seconds, table
from eyas.ops.simulate.description import Description
from eyas.ops.simulate.predict import Prediction
from eyas.ops.simulate.runs import Judged


def as_json(found: Prediction) -> dict[str, Any]:
    """Every figure, seconds and bytes."""
    return dataclasses.asdict(found) | {"seconds": found.seconds, "fits": found.fits}


def as_text(given: Description, found: Prediction) -> str:
    """The table of stages, then disk and cost."""
    rows = [
        (
            stage.name,
            f"{stage.num_tokens:,}",
            human_seconds(stage.seconds),
            human_bytes(stage.num_bytes),
            stage.bound,
            ", ".join(f"{part} {human_seconds(seconds)}" for part, seconds in stage.parts_s.items()),
        )
        for stage in found.stages
    ]
    verdict = "fit" if found.fits else "do NOT fit: train while capturing, or more disk"
    disks = "shared" if given.disk.shared else f"{given.nodes:,} nodes"
    return "\n".join(
        [
            table(rows, ("stage", "tokens", "time", "bytes", "bound", "alone")),
            "",
            f"in all {human_seconds(found.seconds)} on {given.num_gpus:,} GPUs, {found.gpu_hours:,.0f} GPU-hours",
            f"states {human_bytes(found.stored_bytes)}; disk {human_bytes(found.disk_bytes)} ({disks}): they {verdict}",
        ]
    )


def judged_json(judged: Sequence[Judged]) -> dict[str, Any]:
    """Stage → predicted and real seconds, the error as a share, and how many times more tokens it had."""
    return {
        one.stage: {
            "num_tokens": one.num_tokens,
            "predicted_s": round(one.predicted_s, 2),
            "real_s": one.real_s,
            "error": round(one.error, 4),
            "growth": round(one.growth, 2),
        }
        for one in judged
    }


def judged_text(judged: Sequence[Judged]) -> str:
    """The same for people."""
    rows = [
        (
            one.stage,
            f"{one.num_tokens:,}",
            f"{one.growth:.1f} times",
            f"{one.predicted_s:.1f} s",
            f"{one.real_s:.1f} s",
            f"{one.error:+.0%}",
        )
        for one in judged
    ]
    return table(rows, ("stage", "tokens", "than known", "predicted", "real", "error"))
