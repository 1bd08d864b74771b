"""Figures that two runs have in common, and whether their difference says anything.

Only tau is judged, by its interval. Figures without one are told and not judged: training text, seeds and machines
differ for reasons of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
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
    group: str
    overlaps: bool | None = None
    """Whether the intervals of both overlap, so that the difference shows nothing; ``None`` without intervals."""

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
        """Whether this run is the better one by it."""
        if self.here is None or self.there is None or self.here == self.there:
            return "same"
        if self.overlaps is not False:
            return "other"
        return "better" if self.here > self.there else "worse"


def differences(here: Sources, there: Sources) -> list[Measure]:
    """Every figure that one of both runs has."""
    found = [*_acceptance(here, there), *_curves(here, there), *_data(here, there), *_speed(here, there)]
    return [measure for measure in found if measure.here is not None or measure.there is not None]


def _acceptance(here: Sources, there: Sources) -> Iterator[Measure]:
    mine, other = (sources.acceptance or Figures({}) for sources in (here, there))
    sets, others = mine.groups("sets"), other.groups("sets")
    pair = _pairs("Acceptance")
    for name in dict.fromkeys([*sets, *others]):
        a, b = sets.get(name, Figures({})), others.get(name, Figures({}))
        tau = pair(f"tau, {name}", a, b, "tau")
        yield dataclasses.replace(tau, overlaps=_overlap(a, b))
        yield pair(f"tau without loops, {name}", a, b, "tau_loop_free")
    yield pair("tau, untrained", mine, other, "tau_untrained")
    alphas = mine.numbers("alpha"), other.numbers("alpha")
    for k in range(max(map(len, alphas))):
        a, b = (values[k] if k < len(values) else None for values in alphas)
        yield Measure(name=f"alpha {k + 1}", here=a, there=b, kind="share", group="Acceptance")
    yield pair("loop share", mine, other, "loop_share", "share")


def _pairs(group: str) -> Callable[..., Measure]:
    def pair(name: str, mine: Figures, other: Figures, key: str, kind: Kind = "figure") -> Measure:
        return Measure(name=name, here=mine.number(key), there=other.number(key), kind=kind, group=group)

    return pair


def _overlap(mine: Figures, other: Figures) -> bool | None:
    limits = [
        limit
        for entry in (mine, other)
        for name in ("tau_low", "tau_high")
        if (limit := entry.number(name)) is not None
    ]
    if len(limits) < 4:
        return None
    low, high, other_low, other_high = limits
    return low <= other_high and other_low <= high


def _curves(here: Sources, there: Sources) -> Iterator[Measure]:
    ends = [{curve.name: curve.points[-1][1] for curve in s.curves if curve.points} for s in (here, there)]
    for name in sorted(ends[0] | ends[1]):
        yield Measure(name=name, here=ends[0].get(name), there=ends[1].get(name), group="Training, last values")


def _data(here: Sources, there: Sources) -> Iterator[Measure]:
    tokens = [Figures.of(sources.tokens) for sources in (here, there)]
    manifests = [Figures.of(sources.manifest) for sources in (here, there)]
    pair = _pairs("Data")
    yield pair("samples", *tokens, "num_samples", "count")
    yield pair("tokens", *tokens, "num_tokens", "count")
    yield pair("bytes stored", *manifests, "stored_bytes", "bytes")


def _speed(here: Sources, there: Sources) -> Iterator[Measure]:
    for stage in here.runs:
        mine, other = (Figures.of(sources.runs.get(stage)) for sources in (here, there))
        yield _pairs("CPU seconds")(stage, mine, other, "cpu_s", "seconds")
    for stage in (stage for stage in here.runs if stage in here.throughput):
        mine, other = (Figures.of(sources.throughput.get(stage)) for sources in (here, there))
        yield _pairs("Tokens per CPU second")(stage, mine, other, "tokens_per_cpu_second", "count")
