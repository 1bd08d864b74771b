"""Charts as inline SVG: no script, no font, no network. Colour is never the only thing that tells two lines apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from eyas.report.figures import LARGEST

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40
MAX_POINTS = 200
"""Points per drawn line: more than pixels carry would only make the page heavy."""
NUM_STYLES = 8
"""Line styles of the style sheet, each with a colour and a dash of its own."""
Series = tuple[str, Sequence[tuple[float, float]]]


def line_chart(title: str, series: Sequence[Series], *, across: str = "optimizer step", up: str = "") -> str:
    """One chart of named series, with axes, ticks, units and a legend that ends in the last values.

    Args:
        title: What is drawn.
        series: Name and points of each line.
        across: What the horizontal axis counts.
        up: Unit of the vertical one.
    """
    drawn = [(name, kept) for name, points in series if (kept := _thinned(points))]
    if not drawn:
        return f'<p class="empty">{escape(title)}: not measured</p>'
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    y_ticks = nice_ticks(min(ys), max(ys), 4)
    x_low, x_high = min(xs), max(*xs, min(xs) + 1)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        right = (x - x_low) / (x_high - x_low)
        above = (y - y_low) / ((y_high - y_low) or 1.0)
        return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - above * (HEIGHT - TOP - BOTTOM)

    marks = [_axis_up(place(x_low, tick)[1], tick) for tick in y_ticks]
    x_ticks = [tick for tick in nice_ticks(x_low, x_high, 4) if x_low <= tick <= x_high]
    marks += [_axis_across(place(tick, y_low)[0], tick) for tick in x_ticks]
    marks.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>'
    )
    marks += [_line(index, name, [place(*p) for p in points]) for index, (name, points) in enumerate(drawn)]
    last = ", ".join(f"{name} ends at {points[-1][1]:.3g}" for name, points in drawn)
    unit = f'<span class="unit">{escape(up)}</span>' if up else ""
    return (
        f'<figure><figcaption>{escape(title)} {unit}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)} over {escape(across)}: {escape(last)}">{"".join(marks)}</svg>{_legend(drawn)}</figure>'
    )


def _axis_up(y: float, tick: float) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>'
    )


def _axis_across(x: float, tick: float) -> str:
    base = HEIGHT - BOTTOM
    return (
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>'
        f'<text x="{x:.1f}" y="{base + 17}" text-anchor="{"end" if x > WIDTH - RIGHT - 16 else "middle"}">{_tick(tick)}</text>'
    )


def _tick(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"


def _line(index: int, name: str, points: Sequence[tuple[float, float]]) -> str:
    title, style = f"<title>{escape(name)}</title>", f"s{index % NUM_STYLES}"
    if len(points) == 1:
        return f'<circle class="dot {style}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3">{title}</circle>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line {style}" points="{path}">{title}</polyline>'


def _last(points: Sequence[tuple[float, float]]) -> str:
    """Where a line ends; a single point is said as it is."""
    value = f" <b>{points[-1][1]:.3g}</b>"
    return f", last{value}" if len(points) > 1 else value


def _legend(drawn: Sequence[Series]) -> str:
    keys = "".join(
        f'<li><svg class="swatch" viewBox="0 0 22 6" aria-hidden="true"><line class="line s{index % NUM_STYLES}" x1="0" '
        f'x2="22" y1="3" y2="3"/></svg>{escape(name)}{_last(points)}</li>'
        for index, (name, points) in enumerate(drawn)
    )
    return f'<ul class="legend">{keys}</ul>'


def interval(
    low: float, value: float, high: float, start: float, end: float, *, width: int = 160, ticks: bool = False
) -> str:
    """A value with its interval on an axis from ``start`` to ``end``.

    Args:
        low: Where the interval begins.
        value: The dot.
        high: Where it ends.
        start: Left end of the axis.
        end: Its right end.
        width: Of the drawing, in its own units.
        ticks: Write whole numbers below the axis.
    """

    def x(number: float) -> float:
        return 8 + (width - 16) * (min(max(number, start), end) - start) / ((end - start) or 1.0)

    label = f"{value:.3f}, interval {low:.3f} to {high:.3f}, on an axis from {start:g} to {end:g}"
    marks = [
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="4" y2="12"/>'
        f'<text x="{x(tick):.1f}" y="29" text-anchor="middle">{tick}</text>'
        for tick in (range(math.ceil(start), math.floor(end) + 1) if ticks else ())
    ]
    return (
        f'<svg class="interval" viewBox="0 0 {width} {32 if ticks else 16}" role="img" aria-label="{label}">{"".join(marks)}'
        f'<line class="grid" x1="8" x2="{width - 8}" y1="8" y2="8"/>'
        f'<line class="span" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="8" y2="8"/>'
        f'<circle class="dot s0" cx="{x(value):.1f}" cy="8" r="3.5"/></svg>'
    )


def meter(share: float, label: str) -> str:
    """A share of a bound as a bar; more than the whole of it is drawn as the whole."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        f'<svg class="meter" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'<rect class="track" width="100" height="8" rx="2"/><rect class="fill" width="{width:.1f}" height="8" rx="2"/></svg>'
    )


def bars(label: str, entries: Sequence[tuple[str, float, str]]) -> str:
    """Amounts of one unit, one bar each under the other: name, amount, amount in words."""
    largest = max((amount for _, amount, _ in entries), default=0.0) or 1.0
    rows = "".join(
        f'<li><span>{escape(name)}</span><svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="10"/><rect class="fill" width="{100 * max(amount, 0) / largest:.2f}" '
        f'height="10"/></svg><b>{escape(words)}</b></li>'
        for name, amount, words in entries
    )
    return f'<ul class="bars" aria-label="{escape(label)}">{rows}</ul>'


def split_bar(label: str, entries: Sequence[tuple[str, float, str]]) -> str:
    """Parts of a whole side by side: name, amount, amount in words; the legend has all of them."""
    parts = [(index, *entry) for index, entry in enumerate(entries) if entry[1] > 0]
    whole = sum(amount for _, _, amount, _ in parts) or 1.0
    at, rects = 0.0, []
    for index, name, amount, words in parts:
        width = 100 * amount / whole
        rects.append(
            f'<rect class="f{index % NUM_STYLES}" x="{at:.3f}" width="{max(width - 0.25, 0.05):.3f}" height="10">'
            f"<title>{escape(name)}: {escape(words)}</title></rect>"
        )
        at += width
    keys = "".join(
        f'<li><i class="square f{index % NUM_STYLES}"></i>{escape(name)} <b>{escape(words)}</b></li>'
        for index, name, _, words in parts
    )
    said = ", ".join(f"{name} {words}" for _, name, _, words in parts)
    return (
        f'<figure class="split"><figcaption>{escape(label)}</figcaption><svg viewBox="0 0 100 10" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(label)}: {escape(said)}">{"".join(rects)}</svg><ul class="legend">{keys}</ul></figure>'
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that enclose ``low`` to ``high``."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = max((high - low) / count, 1 / LARGEST)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    finite = [point for point in points if all(abs(value) <= LARGEST for value in point)]
    stride = max(1, math.ceil(len(finite) / MAX_POINTS))
    kept = finite[::stride]
    return kept if not finite or kept[-1] == finite[-1] else [*kept, finite[-1]]
