"""Figures that two runs have in common, which way is better, and whether their difference says anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from eyas.report.figures import Figures
from eyas.report.sources import Sources

Verdict = Literal["better", "worse", "other", "same"]
Kind = Literal["figure", "share", "count", "bytes", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of both runs; ``None`` where it was not measured."""

    name: str
    here: float | None
    there: float | None
    kind: Kind = "figure"
    more_is: Literal["better", "worse", "other"] = "other"
    overlaps: bool = False
    """Whether the intervals of both overlap, so that the difference shows nothing."""

    def told(self, value: float | None) -> str:
        """A value as the table writes it."""
        if value is None:
            return "not measured"
        forms = {"figure": "{:.4g}", "share": "{:.1%}", "count": "{:,.0f}", "bytes": "{:,.0f}", "seconds": "{:,.1f}"}
        return ("{:.3f}" if self.name.startswith("tau") else forms[self.kind]).format(value)

    @property
    def change(self) -> str:
        """This run's less the other's."""
        if self.here is None or self.there is None:
            return ""
        if self.here == self.there:
            return "the same"
        difference = self.here - self.there
        told = f"{difference * 100:+.1f} points" if self.kind == "share" else f"{difference:+,.4g}"
        relative = f" ({difference / self.there:+.1%})" if self.there and self.kind != "share" else ""
        return f"{told}{relative}{', intervals overlap' if self.overlaps else ''}"

    @property
    def verdict(self) -> Verdict:
        """Which run it speaks for; none where intervals overlap."""
        if self.here is None or self.there is None or self.here == self.there:
            return "same"
        if self.overlaps or self.more_is == "other":
            return "other"
        is_more = self.here > self.there
        return "better" if is_more == (self.more_is == "better") else "worse"


def differences(here: Sources, there: Sources) -> list[Measure]:
    """Every figure that one of both runs has."""
    found = [*_acceptance(here, there), *_curves(here, there), *_data(here, there), *_speed(here, there)]
    return [measure for measure in found if measure.here is not None or measure.there is not None]


def _acceptance(here: Sources, there: Sources) -> Iterator[Measure]:
    mine, other = (sources.acceptance or Figures({}) for sources in (here, there))
    sets, others = mine.groups("sets"), other.groups("sets")
    for name in dict.fromkeys([*sets, *others]):
        a, b = sets.get(name, Figures({})), others.get(name, Figures({}))
        yield _pair(f"tau, {name}", a, b, "tau", more_is="better", overlaps=_overlap(a, b))
        yield _pair(f"tau without loops, {name}", a, b, "tau_loop_free", more_is="better")
    yield _pair("tau, untrained", mine, other, "tau_untrained")
    alphas = mine.numbers("alpha"), other.numbers("alpha")
    for k in range(max(map(len, alphas))):
        a, b = (values[k] if k < len(values) else None for values in alphas)
        yield Measure(name=f"alpha {k + 1}", here=a, there=b, kind="share", more_is="better")
    yield _pair("loop share", mine, other, "loop_share", kind="share")


def _pair(name: str, mine: Figures, other: Figures, key: str, **options: object) -> Measure:
    return Measure(name=name, here=mine.number(key), there=other.number(key), **options)  # pyright: ignore[reportArgumentType]


def _overlap(mine: Figures, other: Figures) -> bool:
    limits = [entry.number(name) for entry in (mine, other) for name in ("tau_low", "tau_high")]
    if None in limits:
        return False
    low, high, other_low, other_high = (limit for limit in limits if limit is not None)
    return low <= other_high and other_low <= high


def _curves(here: Sources, there: Sources) -> Iterator[Measure]:
    ends = [{curve.name: curve.points[-1][1] for curve in s.curves if curve.points} for s in (here, there)]
    for name in sorted(ends[0] | ends[1]):
        leaf = name.split("/")[-2] if "/" in name else name
        more_is = {"loss": "worse", "alpha": "better", "accuracy": "better", "joint": "better"}.get(leaf, "other")
        yield Measure(name=name, here=ends[0].get(name), there=ends[1].get(name), more_is=more_is)  # pyright: ignore[reportArgumentType]


def _data(here: Sources, there: Sources) -> Iterator[Measure]:
    tokens = [Figures.of(sources.tokens) for sources in (here, there)]
    manifests = [Figures.of(sources.manifest) for sources in (here, there)]
    yield _pair("samples", *tokens, "num_samples", kind="count")
    yield _pair("tokens", *tokens, "num_tokens", kind="count")
    yield _pair("bytes stored", *manifests, "stored_bytes", kind="bytes")


def _speed(here: Sources, there: Sources) -> Iterator[Measure]:
    for stage in here.runs:
        mine, other = (Figures.of(sources.runs.get(stage)) for sources in (here, there))
        yield _pair(f"{stage}, CPU seconds", mine, other, "cpu_s", kind="seconds")
    for stage in here.throughput:
        mine, other = (Figures.of(sources.throughput.get(stage)) for sources in (here, there))
        yield _pair(f"{stage}, tokens / CPU-s", mine, other, "tokens_per_cpu_second", kind="count", more_is="better")
