"""Line charts and interval marks as inline SVG: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 34
MAX_POINTS = 400
"""Points per drawn line: more than pixels carry would only make the page heavy."""


def line_chart(title: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """One chart of named series over optimizer steps, with axes, ticks and a legend."""
    drawn = [(name, kept) for name, points in series if (kept := _thinned(points))]
    if not drawn:
        return f"<p class=muted>{escape(title)}: not measured</p>"
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    x_ticks, y_ticks = nice_ticks(min(xs), max(xs)), nice_ticks(min(ys), max(ys))
    x_low, x_high = min(xs), max(*xs, min(xs) + 1)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_low) / ((y_high - y_low) or 1.0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    marks = []
    for tick in y_ticks:
        _, y = place(x_low, tick)
        marks.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} />")
        marks.append(f"<text x={LEFT - 6} y={y + 4:.1f} text-anchor=end>{tick:g}</text>")
    for tick in (t for t in x_ticks if x_low <= t <= x_high):
        x, _ = place(tick, y_low)
        marks.append(f"<text x={x:.1f} y={HEIGHT - 14} text-anchor=middle>{tick:,.0f}</text>")
    for index, (_, points) in enumerate(drawn):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        marks.append(f'<polyline class="line s{index % 6}" points="{path}" />')
    legend = "".join(
        f'<span class=key><i class="swatch s{index % 6}"></i>{escape(name)} <b>{points[-1][1]:.3g}</b></span>'
        for index, (name, points) in enumerate(drawn)
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{escape(title, quote=True)} over optimizer steps">'
        f"{''.join(marks)}</svg><div class=legend>{legend}</div></figure>"
    )


def interval(low: float, value: float, high: float, start: float, end: float) -> str:
    """A value with its interval on an axis from ``start`` to ``end``."""

    def x(number: float) -> float:
        return 4 + 152 * (min(max(number, start), end) - start) / ((end - start) or 1.0)

    label = f"{value:.3f}, interval {low:.3f} to {high:.3f}, on an axis from {start:g} to {end:g}"
    return (
        f'<svg class=interval viewBox="0 0 160 16" role=img aria-label="{label}">'
        f'<line class=grid x1=4 x2=156 y1=8 y2=8 /><line class="span s0" x1={x(low):.1f} x2={x(high):.1f} y1=8 y2=8 />'
        f"<circle class=dot cx={x(value):.1f} cy=8 r=3 /></svg>"
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that enclose ``low`` to ``high``."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    finite = [point for point in points if all(map(math.isfinite, point))]
    stride = max(1, math.ceil(len(finite) / MAX_POINTS))
    kept = finite[::stride]
    return kept if not finite or kept[-1] == finite[-1] else [*kept, finite[-1]]
