"""The documents with the lowest tau, their answers coloured by who wrote what: drafter or target."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from eyas.report.figures import Figures
from eyas.report.html import note, subtitle
from eyas.report.parts.words import count, number, share

VISIBLE = {"\n": "↵\n", "\t": "⇥\t"}


def worst(acceptance: Figures) -> Iterator[str]:
    """Nothing where the report names none."""
    documents = acceptance.listed("worst")
    if not documents:
        return
    yield subtitle("Where it goes worst")
    yield note(
        "The documents with the lowest tau. Underlined and tinted: draft tokens that were accepted. Plain: what the target "
        "had to add itself, one token a round."
    )
    yield (
        '<p class="legend"><span><span class="accepted">accepted draft</span></span><span><span class="target">token of the '
        "target</span></span></p>"
    )
    yield "".join(_document(document, is_open=index < 2) for index, document in enumerate(documents))


def _document(document: Figures, *, is_open: bool) -> str:
    told = (
        f"tau {number(document.number('tau'))}",
        document.words("source"),
        f"{count(document.number('num_rounds'))} rounds",
        f"loops {share(document.number('loop_share'))}",
        document.words("sample_id"),
    )
    head = escape(" · ".join(word for word in told if word and "None" not in word))
    prompt = document.words("prompt")
    asked = f'<p class="prompt"><span class="eyebrow">prompt</span>{escape(prompt)}</p>' if prompt else ""
    answer = "".join(_round(entry) for entry in document.listed("rounds"))
    first = f'<span class="target">{_shown(document.words("first"))}</span>' if document.words("first") else ""
    return (
        f'<details{" open" if is_open else ""}><summary>{head}</summary><div class="inside">{asked}'
        f'<p class="answer"><span class="eyebrow">answer</span>{first}{answer}</p></div></details>'
    )


def _round(entry: Figures) -> str:
    accepted, bonus = entry.words("accepted"), entry.words("bonus")
    drafted = f'<mark class="accepted">{_shown(accepted)}</mark>' if accepted else ""
    return drafted + (f'<span class="target">{_shown(bonus)}</span>' if bonus else "")


def _shown(words: str) -> str:
    """Line ends are seen: they are tokens as others are."""
    for hidden, visible in VISIBLE.items():
        words = words.replace(hidden, visible)
    return escape(words)
