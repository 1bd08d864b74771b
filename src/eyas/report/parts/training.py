"""Loss and acceptance over optimizer steps, a line per TTT step."""

from __future__ import annotations

from itertools import groupby

from eyas.report.charts import line_chart
from eyas.report.html import facts, note, nothing, section
from eyas.report.parts.words import count, number
from eyas.report.sources import Curve, Sources

FIRST_GROUPS = ("loss", "accuracy", "alpha", "joint", "tau")
TITLES = {
    "loss": ("Loss", "nats"),
    "accuracy": ("Agrees with the target's argmax", "share"),
    "alpha": ("Agrees, when all steps before did", "share"),
    "joint": ("All steps up to here agree", "share"),
    "lr": ("Learning rate", ""),
    "oov_share": ("Target's choice outside the draft vocab", "share"),
    "tau": ("tau", "tokens per forward"),
}


def training(sources: Sources) -> str:
    """The section."""
    charts = chart_groups(sources.curves)
    checkpoint = sources.checkpoint
    told = (
        ("optimizer steps", count(checkpoint.num_steps) if checkpoint else None),
        ("trained rows", count(checkpoint.num_trained_rows) if checkpoint else None),
        ("TTT steps", count(checkpoint.ttt_steps) if checkpoint else None),
        ("drafter", _shape(sources)),
    )
    return section(
        "training",
        "Training",
        facts(told) if checkpoint else "",
        f'<div class="charts">{charts}</div>' if charts else nothing(),
        note("Of rows that train, on training text: higher than the held-out figures above, and no estimate of them.")
        if charts
        else "",
        lead="A line per step of the training-time test: step 0 sees the target's states, later steps the drafter's own.",
    )


def _shape(sources: Sources) -> str | None:
    if sources.checkpoint is None:
        return None
    shape = sources.checkpoint.shape
    return (
        f"hidden {shape.hidden_size:,}, {shape.num_attention_heads} heads, draft vocab {shape.draft_vocab_size:,} "
        f"of {shape.vocab_size:,}"
    )


def chart_groups(curves: tuple[Curve, ...]) -> str:
    """A chart per metric, loss first; validation apart from training."""
    ordered = sorted(curves, key=lambda curve: (_order(curve.group), curve.name))
    return "".join(
        line_chart(title_of(group)[0], [(curve.label, curve.points) for curve in members], up=title_of(group)[1])
        for group, members in ((g, list(m)) for g, m in groupby(ordered, key=lambda curve: curve.group))
    )


def _order(group: str) -> tuple[int, int, str]:
    leaf = group.rsplit("/", 1)[-1]
    place = next((i for i, first in enumerate(FIRST_GROUPS) if leaf.startswith(first)), len(FIRST_GROUPS))
    return int("/" in group), place, group


def title_of(group: str) -> tuple[str, str]:
    """Title and unit of a metric's chart."""
    *above, leaf = group.split("/")
    title, unit = TITLES.get(leaf, (leaf, ""))
    return (f"{title} ({', '.join(above)})" if above else title), unit


def last_value(curve: Curve) -> str | None:
    """Where a curve ends."""
    return number(curve.points[-1][1]) if curve.points else None
