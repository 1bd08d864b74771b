"""Small HTML pieces. Every value is escaped here; only ``Markup`` passes as it is.

What can be scrolled can be reached by keyboard, and has a name for those who do not see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

NOT_MEASURED = "not measured"
HASH_DIGITS = 12


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> str:
    """A value as HTML; ``None`` says that it was not measured."""
    if value is None:
        return f'<span class="muted">{NOT_MEASURED}</span>'
    return str(value) if isinstance(value, Markup) else escape(str(value))


def code(value: object) -> Markup:
    """An identifier, path or hash."""
    return Markup(f"<code>{escape(str(value))}</code>")


def short_hash(value: str) -> Markup:
    """The first digits of a hash; the whole of it is its title."""
    return Markup(f'<code title="{escape(value)}">{escape(value[:HASH_DIGITS])}</code>')


def table(label: str, headers: Sequence[str], rows: Iterable[Sequence[object]], numeric: Iterable[int] = ()) -> str:
    """A table that scrolls in its own box where it is too wide.

    Args:
        label: Names the box for a reader who comes by keyboard.
        headers: One a column.
        rows: Cells; the first of a row names it.
        numeric: Columns set to the right.
    """
    right = set(numeric)

    def cell(tag: str, index: int, value: object) -> str:
        number = ' class="number"' if index in right else ""
        scope = {"th": ' scope="col"', "td": ""}[tag]
        if tag == "td" and index == 0:
            tag, scope = "th", ' scope="row"'
        return f"<{tag}{scope}{number}>{text(value)}</{tag}>"

    def row(tag: str, cells: Sequence[object]) -> str:
        return f"<tr>{''.join(cell(tag, index, value) for index, value in enumerate(cells))}</tr>"

    body = [row("td", cells) for cells in rows if _fits(cells, headers)]
    return scrolled(label, f"<table><thead>{row('th', headers)}</thead><tbody>{''.join(body)}</tbody></table>")


def _fits(cells: Sequence[object], headers: Sequence[str]) -> bool:
    assert len(cells) == len(headers), f"{len(cells)} cells under {headers}"
    return True


def scrolled(label: str, content: str) -> str:
    """A box of its own for what may be wider than the page."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{content}</div>'


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values, one a line."""
    return f"<dl>{''.join(f'<div><dt>{escape(name)}</dt><dd>{text(value)}</dd></div>' for name, value in pairs)}</dl>"


def tiles(entries: Iterable[tuple[str, object, str]]) -> str:
    """Headline figures: label, value, and a note below it that may be empty."""
    return '<div class="tiles">{}</div>'.format(
        "".join(
            f'<div class="tile"><span>{escape(label)}</span><b>{text(value)}</b>'
            f"{f'<small>{text(note)}</small>' if note else ''}</div>"
            for label, value, note in entries
        )
    )


def section(key: str, title: str, *parts: str, lead: str = "") -> str:
    """A titled part of the page; ``key`` is its anchor."""
    opening = f'<p class="lead">{text(lead)}</p>' if lead else ""
    return (
        f'<section id="{escape(key)}" aria-labelledby="{escape(key)}-title">'
        f'<h2 id="{escape(key)}-title">{escape(title)}</h2>{opening}{"".join(parts)}</section>'
    )


def subtitle(title: str) -> str:
    """A heading inside a section."""
    return f"<h3>{escape(title)}</h3>"


def paragraph(content: str, kind: str = "") -> str:
    """A sentence or two."""
    return f'<p class="{kind}">{text(content)}</p>' if kind else f"<p>{text(content)}</p>"


def note(content: str) -> str:
    """How to read what stands above."""
    return paragraph(content, "note")


def nothing(content: str = "Not measured.") -> str:
    """Said in the place of figures that are not there."""
    return paragraph(content, "empty")


def details(summary: str, *parts: str) -> str:
    """What is opened on demand."""
    return f'<details><summary>{text(summary)}</summary><div class="inside">{"".join(parts)}</div></details>'


def badge(content: str, kind: str) -> Markup:
    """A verdict in a word or two; ``kind`` is good, bad or quiet."""
    return Markup(f'<span class="badge {kind}">{text(content)}</span>')
