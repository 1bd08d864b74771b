"""``reports/index.html``: one page about one run, whole in itself: no network, no script.

It opens with the figure that matters (tau, bonus included) and what it must be compared with, then shows where
it comes from: acceptance by position, curves, stages and their bounds, disk, data, and the hash of every artifact.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from eyas.report.html import text
from eyas.report.parts.acceptance import acceptance
from eyas.report.parts.data import data
from eyas.report.parts.disk import disk
from eyas.report.parts.opening import opening
from eyas.report.parts.pipeline import pipeline
from eyas.report.parts.provenance import provenance
from eyas.report.parts.training import training
from eyas.report.sources import Sources

CONTENTS = (
    ("acceptance", "Acceptance"),
    ("training", "Training"),
    ("pipeline", "Pipeline"),
    ("disk", "Disk"),
    ("data", "Data"),
    ("provenance", "Provenance"),
)


def render(sources: Sources) -> str:
    """The whole page. The same sources give the same bytes."""
    name = sources.params.target.name if sources.params else "target"
    body = (
        *opening(sources),
        *acceptance(sources),
        training(sources),
        pipeline(sources),
        disk(sources),
        data(sources),
        provenance(sources),
    )
    shown = [entry for entry in CONTENTS if entry[0] != "acceptance" or sources.acceptance]
    return document(f"eyas: drafter for {name}", shown, body)


def document(title: str, contents: Iterable[tuple[str, str]], body: Iterable[str]) -> str:
    """A page around its sections.

    Args:
        title: Of the window.
        contents: Anchor and name of each section.
        body: HTML.
    """
    style = resources.files("eyas.report").joinpath("style.css").read_text()
    links = "".join(f'<li><a href="#{key}">{text(label)}</a></li>' for key, label in contents)
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the report</a>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main id="main" tabindex="-1">\n'
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )
    return page.encode("utf-8", "replace").decode()  # a JSON file can hold half a character
