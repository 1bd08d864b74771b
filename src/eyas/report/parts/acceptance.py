"""How much of what is drafted is accepted: per prompt set, per position, and where it goes worst."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.report.charts import interval, line_chart, split_bar
from eyas.report.figures import Figures, flat
from eyas.report.html import Markup, details, note, section, subtitle, table
from eyas.report.parts.words import count, number, share, span
from eyas.report.parts.worst import worst
from eyas.report.sources import Sources


def acceptance(sources: Sources) -> Iterator[str]:
    """The section, where acceptance was measured."""
    found = sources.acceptance
    if found is None:
        return
    yield section(
        "acceptance",
        "Acceptance",
        _sets(found),
        note(
            "tau is the exact walk over the target's own greedy text; its interval is a bootstrap over documents. "
            "Real decoding runs both models. Text that repeats itself inflates tau: loop-free counts documents with "
            "a loop share under 5 %."
        ),
        _positions(found),
        *_histograms(found),
        *_served(sources.serve),
        *worst(found),
        details("Every figure of reports/acceptance.json", _everything(found)),
    )


def _sets(found: Figures) -> str:
    end = (found.number("chain_length") or 0) + 1.0
    rows = []
    for name, entry in found.groups("sets").items():
        decode = found.group("decode").group(name)
        low, tau, high = entry.number("tau_low"), entry.number("tau"), entry.number("tau_high")
        drawn = None if low is None or tau is None or high is None else Markup(interval(low, tau, high, 1.0, end))
        rows.append(
            (
                name,
                number(tau),
                drawn,
                span(entry),
                number(entry.number("tau_loop_free")),
                number(decode.number("tau")),
                share(entry.number("loop_share")),
                share(entry.number("coverage")),
                share(entry.number("oov_share")),
                count(entry.number("num_documents")),
                count(entry.number("num_rounds")),
            )
        )
    headers = ("prompt set", "tau", f"1 to {end:g}", "95 % interval", "loop-free", "real decoding", "loops")
    more = ("greedy text", "outside vocab", "documents", "rounds")
    return table("tau by prompt set", (*headers, *more), rows, numeric=(1, 3, *range(4, 11)))


def _positions(found: Figures) -> str:
    sets = found.groups("sets")
    length = max((len(entry.numbers("alpha")) for entry in sets.values()), default=0)
    conditional = [(name, _counted(entry.numbers("alpha"))) for name, entry in sets.items()]
    marginal = [(name, _counted(entry.numbers("step_accuracy"))) for name, entry in sets.items()]
    charts = (
        line_chart("alpha: accepted when all before were", conditional, across="draft token", up="share"),
        line_chart("Each draft token alone, full vocab", marginal, across="draft token", up="share"),
    )
    rows = [(k + 1, *(_at(entry.numbers("alpha"), k) for entry in sets.values())) for k in range(length)]
    values = table("alpha by draft token", ("alpha of draft token", *sets), rows, range(1, len(sets) + 1))
    return subtitle("By position in the draft") + f'<div class="charts">{"".join(charts)}{values}</div>'


def _counted(values: tuple[float, ...]) -> list[tuple[float, float]]:
    return [(k, value) for k, value in enumerate(values, start=1)]


def _at(values: tuple[float, ...], place: int) -> str | None:
    return number(values[place]) if place < len(values) else None


def _histograms(found: Figures) -> Iterator[str]:
    """Rounds by how many draft tokens they accepted, where the report has them."""
    drawn = []
    for name, entry in found.groups("sets").items():
        counts = entry.numbers("accepted_counts") or entry.numbers("histogram")
        whole = sum(counts)
        if whole:
            parts = [(f"{k} accepted", value, f"{value / whole:.1%}") for k, value in enumerate(counts)]
            drawn.append(split_bar(f"{name}: rounds by accepted draft tokens", parts))
    if drawn:
        yield f'<div class="charts">{"".join(drawn)}</div>'


def _served(serve: Figures) -> Iterator[str]:
    """What a server counted, beside what was foretold."""
    if serve.number("tau_server") is None:
        return
    yield subtitle("On a real server")
    rows = [("tau, by the server's counters", number(serve.number("tau_server")))]
    rows.append(("tau, offline", number(serve.number("tau_offline"))))
    speedups = serve.group("speedup")
    rows += [
        (f"speed-up at batch {size}", f"{value:.2f} x")
        for size in sorted(speedups.values, key=lambda name: (len(name), name))
        if (value := speedups.number(size)) is not None
    ]
    yield table("Served", ("figure", "value"), rows, numeric=(1,))


def _everything(found: Figures) -> str:
    left_out = ("worst", "schema_version")
    values = {name: value for name, value in found.values.items() if name not in left_out}
    rows = [(name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in flat(values)]
    return table("Every figure of acceptance", ("name", "value"), rows)
