"""The disk story: what was budgeted, what was stored, and which versions there are."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.plan.budget import stored_bytes
from eyas.report.charts import bars
from eyas.report.figures import Figures
from eyas.report.html import badge, code, facts, note, nothing, section, subtitle, table
from eyas.report.parts.words import count, share, size
from eyas.report.sources import Sources


def disk(sources: Sources) -> str:
    """The section."""
    if sources.plan is None and sources.manifest is None:
        return section("disk", "Disk", nothing())
    return section(
        "disk",
        "Disk",
        bars("Bytes of the hidden states", list(_amounts(sources))),
        facts(_facts(sources)),
        *_generations(sources),
        lead="The budget before the extraction, the bytes after it, and every version of the hidden states.",
    )


def budget_before(sources: Sources) -> Figures:
    """What ``extract`` judged by when it began."""
    return Figures.of(sources.runs.get("extract")).group("facts").group("budget")


def _expected(sources: Sources) -> float | None:
    """At the ratio that was known then; where nobody noted it, at the codec's documented one."""
    noted = budget_before(sources).number("expected_bytes")
    return stored_bytes(sources.plan) if noted is None and sources.plan else noted


def _amounts(sources: Sources) -> Iterator[tuple[str, float, str]]:
    """Free space is a fact below, not a bar: it dwarfs a small capture."""
    if sources.plan:
        yield "planned, before the codec", sources.plan.payload_bytes, size(sources.plan.payload_bytes) or ""
    expected = _expected(sources)
    if expected is not None:
        yield "budget, after the codec", expected, size(expected) or ""
    if sources.manifest:
        yield "stored", sources.manifest.stored_bytes, size(sources.manifest.stored_bytes) or ""


def _facts(sources: Sources) -> Iterator[tuple[str, object]]:
    plan, manifest, expected = sources.plan, sources.manifest, _expected(sources)
    before = budget_before(sources)
    if plan:
        streams = f"{plan.num_tokens:,} tokens x {plan.num_streams} streams x {plan.hidden_size:,} x 2 bytes"
        yield "planned", f"{plan.payload_bytes:,} bytes of states: {streams}"
    if manifest and plan:
        shards = f"{len(manifest.shards):,} {'shard' if len(manifest.shards) == 1 else 'shards'}"
        ratio = manifest.stored_bytes / plan.payload_bytes
        against = _against_budget(manifest.stored_bytes / expected - 1) if expected else ""
        yield "stored", f"{manifest.stored_bytes:,} bytes in {shards}, {ratio:.3f} of those before the codec{against}"
    if manifest:
        failed = sum(sample.num_tokens for sample in manifest.failed)
        yield "codec", manifest.capture.codec
        yield (
            "account",
            (
                f"{manifest.num_planned_tokens:,} tokens planned = {manifest.num_stored_tokens:,} stored + {failed:,} failed; "
                f"{manifest.num_stored_samples:,} of {manifest.num_planned_samples:,} samples"
            ),
        )
    yield "free before", _free(before)


def _against_budget(off: float) -> str:
    return f", {abs(off):.1%} {'over' if off > 0 else 'under'} the budget" if abs(off) >= 0.0005 else ", as budgeted"


def _free(before: Figures) -> str | None:
    free, whole, reserve = (before.number(f"{name}_bytes") for name in ("free", "volume", "reserve"))
    if free is None or not whole:
        return None
    kept = f"; {size(reserve)} in reserve" if reserve is not None else ""
    return f"{size(free)} of {size(whole)} ({share(free / whole)}) when the extraction began{kept}"


def _generations(sources: Sources) -> Iterator[str]:
    if not sources.generations:
        return
    rows = [
        (
            code(one.name),
            badge("this run's", "good") if one.is_current else badge(one.kind, "quiet"),
            one.engine or None,
            count(one.num_samples) if one.num_samples else None,
            count(one.num_tokens) if one.num_tokens else None,
            size(one.stored_bytes),
            "whole" if one.is_whole else badge("objects missing", "bad"),
        )
        for one in sources.generations
    ]
    yield subtitle("Generations")
    headers = ("generation", "", "engine", "samples", "tokens", "stored", "in DVC's cache")
    yield table("Generations of the hidden states", headers, rows, numeric=(3, 4, 5))
    yield note(
        "Versions of the hidden states that this repository names or holds. make generations says more; only make gc deletes."
    )
