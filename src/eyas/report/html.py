"""Small HTML pieces. Every value is escaped here; only ``Markup`` passes as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

NOT_MEASURED = "not measured"


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> str:
    """A value as HTML; ``None`` says that it was not measured."""
    if value is None:
        return f"<span class=muted>{NOT_MEASURED}</span>"
    return str(value) if isinstance(value, Markup) else escape(str(value))


def code(value: object) -> Markup:
    """An identifier, path or hash."""
    return Markup(f"<code>{escape(str(value))}</code>")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], numeric: Iterable[int] = ()) -> str:
    """A table that scrolls sideways where it is too wide; columns in ``numeric`` are set to the right."""
    right = set(numeric)

    def row(tag: str, cells: Sequence[object]) -> str:
        mark = [" class=number" if index in right else "" for index in range(len(cells))]
        return f"<tr>{''.join(f'<{tag}{m}>{text(cell)}</{tag}>' for m, cell in zip(mark, cells, strict=True))}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<div class=scroll><table><thead>{row('th', headers)}</thead><tbody>{body}</tbody></table></div>"


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values, one a line."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{text(value)}</dd>' for name, value in pairs)}</dl>"


def tiles(entries: Iterable[tuple[str, object, str]]) -> str:
    """Headline figures: label, value, CSS class."""
    return "<div class=tiles>{}</div>".format(
        "".join(
            f'<div class="tile {kind}"><span>{escape(label)}</span><b>{text(value)}</b></div>'
            for label, value, kind in entries
        )
    )


def section(title: str, *parts: str) -> str:
    """A titled part of the page."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(content: str, kind: str = "") -> str:
    """A sentence or two."""
    return f'<p class="{kind}">{text(content)}</p>' if kind else f"<p>{text(content)}</p>"
