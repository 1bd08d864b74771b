"""Two runs beside each other: figures, curves, parameters and hashes; ``reports/against.html``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.errors import StoreError
from eyas.report import revision as revisions
from eyas.report.charts import line_chart
from eyas.report.html import Markup, badge, code, details, note, nothing, section, short_hash, subtitle, table, text
from eyas.report.measures import Measure, differences
from eyas.report.page import document
from eyas.report.parts.provenance import parameters
from eyas.report.parts.training import title_of
from eyas.report.sources import Curve, Sources, gather

PAGE = Path("reports/against.html")
HERE = "this run"
CONTENTS = (("figures", "Figures"), ("curves", "Curves"), ("parameters", "Parameters"), ("artifacts", "Artifacts"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """This run and another one."""

    here: Sources
    there: Sources
    revision: revisions.Revision
    missing: tuple[str, ...]
    """Records of the other one that are neither in git nor in DVC's cache."""

    @property
    def measures(self) -> list[Measure]:
        """Every figure that one of both has."""
        return differences(self.here, self.there)


def compare(root: Path, name: str) -> Comparison:
    """Read both runs and write the page.

    Args:
        root: The repository; its workspace is this run.
        name: Branch, tag, commit or experiment of the other.

    Raises:
        StoreError: There is no such revision, or a record of either run is damaged.
    """
    revision = revisions.find(root, name)
    here = gather(root)
    with tempfile.TemporaryDirectory(prefix="eyas-") as scratch:
        try:
            missing = revisions.lay_out(root, revision, Path(scratch))
            there = gather(Path(scratch))
        except StoreError as error:
            told = error.message.replace(f"{scratch}/", "")
            raise StoreError(f"{revision.label}: {told}", "name another revision: `git log --oneline`") from None
    found = Comparison(here=here, there=there, revision=revision, missing=missing)
    fs.write_text(root / PAGE, render(found))
    return found


def values(found: Comparison) -> dict[str, Any]:
    """The figures for JSON."""
    return {
        "against": found.revision.commit,
        "figures": [{"group": m.group, "name": m.name, "here": m.here, "there": m.there} for m in found.measures],
        "missing": list(found.missing),
    }


def as_text(found: Comparison) -> str:
    """The figures as a table."""
    rows = [(m.group, m.name, m.told(m.here), m.told(m.there), m.change) for m in found.measures]
    parts = [
        console.table(rows, ("", "", HERE, found.revision.label, "change")) if rows else "neither run was measured"
    ]
    parts += [f"not here: {', '.join(found.missing)} (`dvc fetch` may bring them)"] if found.missing else []
    return "\n".join([*parts, f"page: {PAGE}"])


def render(found: Comparison) -> str:
    """The page; the same two runs give the same bytes."""
    label = found.revision.label
    name = found.here.params.target.name if found.here.params else "target"
    head = (
        f'<header class="top"><p class="brand">eyas</p><h1>Drafter for {text(name)}, two runs</h1>'
        f'<p class="muted">This workspace against {text(label)}: {text(found.revision.subject)}</p></header>'
    )
    body = (head, *_missing(found), _figures(found), _curves(found), _parameters(found), _artifacts(found))
    return document(f"eyas: this run against {label}", CONTENTS, body)


def _missing(found: Comparison) -> Iterator[str]:
    if found.missing:
        yield nothing(f"Of the other run, neither git nor DVC's cache has here: {', '.join(found.missing)}.")


def _figures(found: Comparison) -> str:
    groups = [(name, list(members)) for name, members in groupby(found.measures, key=lambda measure: measure.group)]
    if not groups:
        return section("figures", "Figures", nothing())
    tables = [
        subtitle(group)
        + table(
            f"{group} of both runs",
            ("figure", HERE, found.revision.label, "change"),
            [(m.name, m.told(m.here), m.told(m.there), _change(m)) for m in members],
            numeric=(1, 2, 3),
        )
        for group, members in groups
    ]
    remark = note(
        "Coloured is a tau whose 95 % interval lies apart from the other's; where they overlap, these runs do not show "
        "which drafter is better. What has no interval is told and not judged."
    )
    return section("figures", "Figures", remark, *tables)


def _change(measure: Measure) -> object:
    kind = {"better": "good", "worse": "bad"}.get(measure.verdict)
    return badge(measure.change, kind) if kind else measure.change


def _curves(found: Comparison) -> str:
    there = {curve.name: curve for curve in found.there.curves}
    both = [(curve, there[curve.name]) for curve in found.here.curves if curve.name in there]
    charts = "".join(_chart(mine, other, found.revision.label) for mine, other in sorted(both, key=_order))
    return section(
        "curves", "Curves", f'<div class="charts">{charts}</div>' if charts else nothing("No curve is in both runs.")
    )


def _order(pair: tuple[Curve, Curve]) -> tuple[bool, bool, str]:
    name = pair[0].name
    return "/" not in name, not name.startswith("loss"), name


def _chart(mine: Curve, other: Curve, label: str) -> str:
    title, unit = title_of(mine.group)
    step = f", {mine.label}" if mine.label != mine.name else ""
    return line_chart(f"{title}{step}", [(HERE, mine.points), (label, other.points)], up=unit)


def _parameters(found: Comparison) -> str:
    here, there = parameters(found.here), parameters(found.there)
    names = sorted(name for name in here | there if here.get(name) != there.get(name))
    if not here or not there:
        return section("parameters", "Parameters", nothing("The parameters of one run could not be read."))
    if not names:
        return section("parameters", "Parameters", nothing("Every parameter is the same."))
    rows = [(code(name), _parameter(here, name), _parameter(there, name)) for name in names]
    return section(
        "parameters",
        "Parameters that differ",
        table("Parameters that differ", ("name", HERE, found.revision.label), rows),
    )


def _parameter(found: dict[str, str], name: str) -> object:
    return code(found[name]) if found.get(name) else ("empty" if name in found else "not there")


def _artifacts(found: Comparison) -> str:
    here, there = ({out.path: out for out in sources.outputs} for sources in (found.here, found.there))
    rows = []
    for path in dict.fromkeys([*here, *there]):
        mine, other = here.get(path), there.get(path)
        is_same = mine is not None and other is not None and mine.md5 == other.md5
        hashes = [short_hash(out.md5) if out else Markup("") for out in (mine, other)]
        rows.append((code(path), badge("the same", "good") if is_same else badge("differs", "quiet"), *hashes))
    if not rows:
        return section("artifacts", "Artifacts", nothing("Neither run has a dvc.lock."))
    headers = ("artifact", "", f"MD5, {HERE}", f"MD5, {found.revision.label}")
    same = sum("the same" in str(row[1]) for row in rows)
    return section(
        "artifacts",
        "Artifacts",
        subtitle(f"{same} of {len(rows)} are the same to the byte"),
        details("Every artifact, by its hash in dvc.lock", table("Artifacts of both runs", headers, rows)),
    )
