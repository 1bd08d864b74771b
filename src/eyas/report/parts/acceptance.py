"""How much of what is drafted is accepted: per prompt set, per position, and where it goes worst."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.report.charts import interval, line_chart, split_bar
from eyas.report.figures import Figures, flat, leaf
from eyas.report.html import Markup, details, note, paragraph, section, subtitle, table
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
        *_elsewhere(found),
        _sets(found),
        note(
            "tau is the exact walk over the target's own greedy text; its interval is a bootstrap over conversations. "
            "Real decoding runs both models. Text that repeats itself inflates tau: loop-free counts documents with "
            "a loop share under 5 %."
        ),
        _positions(found),
        _rounds(found),
        *_sampled(found),
        *_modes(found, Figures.of(sources.runs.get("evaluate"))),
        *_served(sources.serve),
        *worst(found),
        details("Every figure of reports/acceptance.json", _everything(found)),
    )


def _elsewhere(found: Figures) -> Iterator[str]:
    if found.values.get("capture_identity") == "":
        yield paragraph(
            "This drafter was imported: it was not trained on these states. What it was trained on is not known, and texts "
            "that are held out here may be among it."
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


def _rounds(found: Figures) -> str:
    """By chain length, by place in the answer, and rounds by what they accepted: where the report has them."""
    sets = found.groups("sets")
    by_chain = [
        (name, _by_key({k: c.number("tau") for k, c in entry.groups("chains").items()})) for name, entry in sets.items()
    ]
    places = {name: entry.group("tau_by_place") for name, entry in sets.items()}
    by_place = [(name, _by_key({k: group.number(k) for k in group.values})) for name, group in places.items()]
    charts = [
        line_chart(title, series, across=across, up="tokens per forward")
        for title, series, across in (
            ("tau by chain length", by_chain, "draft tokens a round"),
            ("tau by place in the answer", by_place, "first token of the round"),
        )
        if any(points for _, points in series)
    ]
    histograms = [
        split_bar(f"{name}: rounds by accepted draft tokens", _parts(counts))
        for name, entry in sets.items()
        if sum(counts := entry.numbers("accepted"))
    ]
    drawn = "".join(f'<div class="charts">{"".join(group)}</div>' for group in (charts, histograms) if group)
    return subtitle("By length and place") + drawn if drawn else ""


def _parts(counts: tuple[float, ...]) -> list[tuple[str, float, str]]:
    return [(str(k), value, f"{value / sum(counts):.1%}") for k, value in enumerate(counts)]


def _by_key(values: dict[str, float | None]) -> list[tuple[float, float]]:
    return sorted((float(key), value) for key, value in values.items() if key.isdecimal() and value is not None)


def _sampled(found: Figures) -> Iterator[str]:
    """What to expect when drafter and target sample: what sampled text gave, then the rule along the greedy text."""
    drawn, foretold = list(_drawn(found)), list(_foretold(found))
    if not drawn and not foretold:
        return
    yield subtitle("When sampling")
    total = found.number("tau_sampled")
    if total is not None:
        yield paragraph(f"tau of sampled text, all sets trained on: {number(total)}.")
    if drawn:
        headers = (
            "prompt set",
            "how it was drafted",
            "temperature",
            "tau",
            "95 % interval",
            "foretold on it",
            "prompts",
            "tokens",
        )
        yield table("tau of sampled text", headers, drawn, numeric=range(2, 8))
    if foretold:
        yield paragraph("Foretold along greedy text:")
        headers = ("prompt set", "temperature", "tau", "95 % interval", "greedy drafts", "mass in draft vocab")
        yield table("Foretold along greedy text", headers, foretold, numeric=range(1, 6))
        yield note(
            "Greedy text is easier to foretell than text that is sampled: a server at this temperature sees the tau of "
            "sampled text; the figures along greedy text are no forecast of it."
        )


def _drawn(found: Figures) -> Iterator[tuple[object, ...]]:
    """Of prompts that were really decoded at the temperature."""
    for name, modes in found.groups("modes").items():
        for mode, check in ((key, Figures.of(value)) for key, value in sorted(modes.values.items())):
            if check.number("temperature"):
                yield (
                    name,
                    _way(mode),
                    number(check.number("temperature"), 2),
                    number(check.number("tau")),
                    _interval(check),
                    number(check.number("tau_expected")),
                    count(check.number("num_prompts")),
                    count(check.number("num_tokens")),
                )


def _foretold(found: Figures) -> Iterator[tuple[object, ...]]:
    for name, entry in ((key, value.group("sampled")) for key, value in found.groups("sets").items()):
        if entry.values:
            yield (
                name,
                number(entry.number("temperature"), 2),
                number(entry.number("tau")),
                span(entry),
                number(entry.number("tau_greedy_drafts")),
                share(entry.number("covered_mass")),
            )


WAYS = {"chain": "greedy chain", "sampled": "sampled chain", "tree": "greedy tree"}
ONE_BY_ONE = "_single"


def _way(mode: str) -> str:
    """A way of decoding in words; one that the page does not know by its own name."""
    way = mode.removesuffix(ONE_BY_ONE)
    return f"{WAYS.get(way, way.replace('_', ' '))}{', one prompt at a time' if mode.endswith(ONE_BY_ONE) else ''}"


def _modes(found: Figures, evaluate: Figures) -> Iterator[str]:
    """Every way of decoding that was run, and its speed beside plain decoding in the same run."""
    speeds = evaluate.group("facts").group("modes")
    rows = [
        (name, _way(mode), *_mode(check, _speed_of(speeds, mode)))
        for name, modes in found.groups("modes").items()
        for mode, check in ((key, Figures.of(value)) for key, value in sorted(modes.values.items()))
    ]
    if rows:
        headers = (
            "prompt set",
            "how it was drafted",
            "tau",
            "95 % interval",
            "prompts",
            "at a time",
            "same text as plain",
        )
        more = ("near ties", "p of sampling", "speed-up", "speed-up foretold")
        yield subtitle("Ways of decoding")
        yield paragraph(
            "Real decoding of a few prompts of each set, once in every way in which a server can use the drafter. Greedy chain: "
            "the drafter's likeliest tokens one after the other, kept while the target would have written them. Greedy tree: "
            "several likely tokens at each step, of which the target keeps the branch that it would have written. Sampled chain: "
            "tokens drawn at the temperature, kept by a rule that leaves the text a sample of the target's own. One prompt at a "
            "time: as a server with a single user; the other rows decode several prompts together."
        )
        yield table("Ways of decoding", (*headers, *more), rows, numeric=range(2, 11))
        yield note(
            "Same text as plain: prompts whose text is, token for token, what the target writes without a drafter; others part "
            "from it at a near tie, a token that one forward ranks first and another second, within the rounding of the dtype "
            "(counted in tokens). p of sampling: the chi-square test that sampled tokens are the target's samples; a small one "
            "says that they are not. Speed-up: over plain decoding in the same run, all sets together; below 1 the drafter "
            "costs more than it saves on this machine. Foretold: from the measured costs of a draft step and of a check."
        )


def _interval(check: Figures) -> str:
    return span(check) or ("one prompt" if check.number("num_prompts") == 1 else "")


def _speed_of(speeds: Figures, mode: str) -> Figures:
    return speeds.group("single" if mode.endswith(ONE_BY_ONE) else "batch").group(mode)


def _mode(check: Figures, speed: Figures) -> tuple[object, ...]:
    speedup, predicted = (speed.number(name) for name in ("speedup", "predicted_speedup"))
    is_greedy = check.number("temperature") == 0
    p_value = check.number("p_value")
    return (
        number(check.number("tau")),
        _interval(check),
        count(check.number("num_prompts")),
        count(check.number("batch_size")),
        count(check.number("num_identical")) if is_greedy else "",
        count(check.number("num_ties")) if is_greedy else "",
        "" if p_value is None else f"{p_value:.2g}",
        "" if speedup is None else f"{speedup:.2f} x",
        "" if predicted is None else f"{predicted:.2f} x",
    )


def _served(serve: Figures) -> Iterator[str]:
    """What a real server counted, beside what was foretold."""
    if serve.number("tau_server") is None:
        return
    rows = [
        (
            size,
            number(batch.number("tau_server")),
            number(batch.number("tokens_per_s_plain"), 1),
            number(batch.number("tokens_per_s_drafted"), 1),
            number(batch.number("speedup"), 2),
            *_equal(batch),
        )
        for size, batch in sorted(serve.groups("batches").items(), key=lambda entry: (len(entry[0]), entry[0]))
    ]
    told = (serve.words("server"), f"server tau {number(serve.number('tau_server'))}")
    offline = serve.number("tau_offline")
    yield subtitle("On a real server")
    yield paragraph(
        ", ".join(word for word in (*told, f"offline tau {number(offline)}" if offline else "") if word) + "."
    )
    if rows:
        headers = ("batch", "server tau", "tokens / s, plain", "tokens / s, drafted", "speed-up")
        more = ("as plain", "near ties", "faults")
        yield table("Served, by batch size", (*headers, *more), rows, numeric=range(1, 8))
    yield from _served_sets(serve)


def _served_sets(serve: Figures) -> Iterator[str]:
    """What the server counted on each set, beside the walk over the same texts."""
    rows = [
        (
            name,
            number(entry.number("tau_server")),
            number(entry.number("tau_offline")),
            count(entry.number("num_same_rounds")),
            count(entry.number("num_prompts")),
            count(entry.number("num_tokens")),
            share(entry.number("loop_share")),
        )
        for name, entry in serve.groups("sets").items()
    ]
    if rows:
        headers = ("prompt set", "server tau", "offline tau", "same rounds", "of prompts", "tokens", "loops")
        yield table("Served, by prompt set", headers, rows, numeric=range(1, 7))


def _equal(batch: Figures) -> tuple[str | None, ...]:
    """Answers that are the plain server's, of how many; and what the target says of the others."""
    equality, differing = batch.group("equality"), batch.group("differing")
    same, of = (count(equality.number(name)) for name in ("num_identical", "num_answers"))
    looked_at = (count(differing.number(name)) for name in ("num_ties", "num_faults"))
    return (same if of is None or same is None else f"{same} of {of}", *looked_at)


def _everything(found: Figures) -> str:
    left_out = ("worst", "schema_version")
    values = {name: value for name, value in found.values.items() if name not in left_out}
    rows = [(name, leaf(value, ".6g")) for name, value in flat(values)]
    return table("Every figure of acceptance", ("name", "value"), rows)
