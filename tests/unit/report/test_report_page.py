"""The page holds the figures of its records, works without them, and needs nothing from outside."""

from __future__ import annotations

import math
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
from eyas.report.metrics import headline
from eyas.report.page import render
from eyas.report.sources import gather, read_curves
from eyas.report.summary import summary_text, summary_values
from eyas.stages import report

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
        # 110,592,000 + 120,000 of ids + 1,024 + 4,096 of headers were budgeted: 110,717,120
        "110,712,345 bytes in 1 shard, 1.001 of those before the codec, as budgeted",
        "2, 15, 27",
        "for 74 of 74 prompts",
        "de-quantised from the Q4_1 file",
        "5,120",  # tokens per second
        "40,000,000",  # dvc.lock
        "98% of 2 cores",  # 590 CPU-s in 301.5 s on 2 cores
    ):
        assert figure in shown, figure
    assert "NOT lossless" not in shown
    assert len(re.findall("<polyline", page)) == 4 + 4  # curves; alpha and step accuracy of two sets


def test_page_loads_nothing(finished: Path) -> None:
    page = render(gather(finished))
    assert not assert_well_formed(page).seen & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(|@import|src=", page)


def test_the_stage_gives_the_same_bytes_when_it_runs_again(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own last run, nor what DVC recorded of that, nor the disk's free space is on the page."""
    monkeypatch.chdir(finished)
    report.main(["reports/index.html", "reports/metrics.json"])
    first = [(finished / name).read_bytes() for name in ("reports/index.html", "reports/metrics.json")]
    own = fs.read_json(finished / "reports/runs/report.json")
    fs.write_record(finished / "reports/runs/report.json", own | {"wall_s": 77.7, "started_at": "2031-01-01T00:00:00Z"})
    lock = finished / "dvc.lock"
    lock.write_text(
        lock.read_text() + "  report:\n    cmd: y\n    outs:\n    - {path: reports/index.html, md5: 0e0e, size: 7}\n"
    )
    monkeypatch.setattr(fs, "free_bytes", lambda _: 12345)
    report.main(["reports/index.html", "reports/metrics.json"])
    assert [(finished / name).read_bytes() for name in ("reports/index.html", "reports/metrics.json")] == first


def test_values_are_escaped(finished: Path) -> None:
    page = render(gather(finished))
    assert "A <fast> processor" not in page
    assert "A &lt;fast&gt; processor" in page
    assert "no &lt;assistant&gt; token: 3" in page


def test_a_lossy_run_is_said_loudly(finished: Path, make_acceptance: Callable[..., AcceptanceReport]) -> None:
    fs.write_record(finished / "reports/acceptance.json", make_acceptance(lossless=False))
    shown = words(render(gather(finished)))
    assert "NOT lossless Speculative decoding gave exactly the tokens of plain greedy decoding for 73 of 74" in shown
    assert "DIFFERS FROM plain greedy output" in summary_text(finished)


def test_acceptance_of_another_version_is_shown_as_far_as_it_is_known(finished: Path) -> None:
    path = finished / "reports/acceptance.json"
    known = fs.read_json(path)
    first = {key: known["sets"]["chatterbot"][key] for key in ("tau", "alpha")}
    fs.write_record(path, {"tau": 1.8049, "sets": {"chatterbot": first, "odd": 3}, "modes": {"tree": {"tau": 2.125}}})
    page = render(gather(finished))
    assert_well_formed(page)
    shown = words(page)
    assert "1.805" in shown
    assert "modes.tree.tau 2.125" in shown  # no part of the page knows it; the list of every figure has it
    fs.write_record(path, {"sets": {}})
    with pytest.raises(StoreError, match=r"acceptance\.json is no AcceptanceReport: it has no tau"):
        gather(finished)


def test_a_drafter_that_was_trained_elsewhere_is_said_to_be(finished: Path) -> None:
    """Nobody knows whether what is held out here trained it."""
    path, sentence = finished / "reports/acceptance.json", "it was not trained on these states"
    assert sentence not in words(render(gather(finished)))
    fs.write_record(path, fs.read_json(path) | {"capture_identity": ""})
    assert sentence in words(render(gather(finished)))


def test_what_newer_reports_measure_is_shown(finished: Path) -> None:
    """Chains of every length, sampling, ways of decoding with their speed, and a real server."""
    path, run = finished / "reports/acceptance.json", finished / "reports/runs/evaluate.json"
    record = fs.read_json(path)
    chains = {str(length): {"tau": 1 + length / 8} for length in range(1, 8)}
    more = {"accepted": [50, 30, 20], "chains": chains, "tau_by_place": {"0": 1.5, "32": 1.75}}
    more["sampled"] = {"temperature": 0.75, "tau": 1.613, "tau_low": 1.5, "tau_high": 1.7}
    record["sets"]["chatterbot"] |= more
    record["modes"] = {"chatterbot": {"tree": {"temperature": 0, "tau": 2.031, "batch_size": 8, "num_identical": 7}}}
    drawn = {"temperature": 0.75, "tau": 1.371, "tau_low": 1.2, "tau_high": 1.5, "tau_expected": 1.361}
    record["modes"]["chatterbot"]["sampled"] = drawn | {"num_prompts": 8, "num_tokens": 412, "p_value": 0.4261}
    record["modes"]["chatterbot"]["chain_single"] = {"temperature": 0, "tau": 1.5, "tau_low": None, "num_prompts": 1}
    record["tau_sampled"] = 1.361
    fs.write_record(path, record)
    train = fs.read_json(finished / "reports/runs/train.json")
    fs.write_record(run, train | {"stage": "evaluate", "facts": {"modes": {"batch": {"tree": {"speedup": 1.257}}}}})
    batch = {"tau_server": 1.789, "tokens_per_s_plain": 41.0, "tokens_per_s_drafted": 61.5, "speedup": 1.5}
    batch |= {"equality": {"num_identical": 30, "num_answers": 32}, "differing": {"num_ties": 3, "num_faults": 0}}
    served = {"tau_server": 1.789, "tau_offline": 1.801, "server": "sglang <x>", "batches": {"16": batch, "8": batch}}
    fs.write_record(finished / "reports/serve.json", served)
    page = render(gather(finished))
    assert_well_formed(page)
    shown = words(page)
    assert "tau by chain length over draft tokens a round: chatterbot ends at 1.88" in page  # 1 + 7/8
    assert "0 50.0% 1 30.0% 2 20.0%" in shown
    assert "tau of sampled text, all sets trained on: 1.361." in shown
    assert "chatterbot sampled chain 0.75 1.371 1.200 to 1.500 1.361 8 412" in shown
    greedy = shown.index("chatterbot 0.75 1.613 1.500 to 1.700")
    assert shown.index("Foretold along greedy text") < greedy < shown.index("are no forecast of it")
    at = shown.index(
        "prompt set how it was drafted tau 95 % interval prompts at a time same text as plain near ties p of"
    )
    assert "chatterbot greedy tree 2.031 not measured 8 7 not measured 1.26 x" in shown[at:]
    assert "chatterbot sampled chain 1.371 1.200 to 1.500 8 not measured 0.43" in shown[at:]
    assert "chatterbot greedy chain, one prompt at a time 1.500 one prompt 1 not measured " in shown[at:]
    for way in ("Greedy chain:", "Greedy tree:", "Sampled chain:", "One prompt at a time:", "Same text as plain:"):
        assert way in shown
    assert "sglang &lt;x&gt;, server tau 1.789, offline tau 1.801." in shown
    assert "8 1.789 41.0 61.5 1.50 30 of 32 3 0 16 1.789" in shown  # smaller batches first


def test_the_budget_that_extract_noted_is_the_one_shown(finished: Path) -> None:
    train = fs.read_json(finished / "reports/runs/train.json")
    before = {"expected_bytes": 100_000_000, "free_bytes": 4 * 10**11, "volume_bytes": 10**12, "reserve_bytes": 10**10}
    fs.write_record(finished / "reports/runs/extract.json", train | {"stage": "extract", "facts": {"budget": before}})
    shown = words(render(gather(finished)))
    assert "budget, after the codec 100.0 MB" in shown
    assert "10.7% over the budget" in shown  # 110,712,345 bytes
    assert "400.0 GB of 1,000.0 GB (40.0%) when the extraction began; 10.0 GB in reserve" in shown


WORST = {
    "sample_id": "0a1b",
    "source": "chatterbot",
    "tau": 1.25,
    "num_rounds": 4,
    "loop_share": 0.0,
    "prompt": "Who <are> you?",
    "first": "I",
    "rounds": [
        {"accepted": "", "bonus": " am"},
        {"accepted": " a <b>", "bonus": "\n"},
    ],
}


def test_worst_documents_show_who_wrote_what(finished: Path) -> None:
    path = finished / "reports/acceptance.json"
    fs.write_record(path, fs.read_json(path) | {"worst": [WORST]})
    page = render(gather(finished))
    assert_well_formed(page)
    assert (
        '<span class="target">I</span><span class="target"> am</span>'
        '<mark class="accepted"> a &lt;b&gt;</mark><span class="target">↵\n</span>'
    ) in page
    assert "tau 1.250 · chatterbot · 4 rounds" in page
    assert "Who &lt;are&gt; you?" in page


def test_metrics_are_few_and_short(finished: Path) -> None:
    """A table of DVC's has a column each; times would make every run another one."""
    found = headline(gather(finished))
    assert found["tau"] == 1.8049
    assert found["tau_low"] == 1.701
    assert found["tau_human_eval"] == 1.5
    assert found["loss"] == pytest.approx(5.0 * math.exp(-2950 / 1500))
    assert found["stored_gb"] == 0.111
    assert len(found) <= 20
    assert max(map(len, found)) <= 16
    assert not [name for name, value in found.items() if isinstance(value, str)]


def test_the_headline_knows_its_sets_by_name(finished: Path) -> None:
    """Another set of the very same tau lends it no interval and stays another set; an older report has no interval."""
    path = finished / "reports/acceptance.json"
    record = fs.read_json(path)
    record["sets"]["another"] = record["sets"]["human_eval"] | {"tau": 1.8049}
    record["sets"] = {name: record["sets"][name] for name in ("another", "chatterbot", "human_eval")}
    fs.write_record(path, record)
    shown = words(render(gather(finished)))
    assert "1.701 to 1.922. Tokens per forward" in shown.replace("95 % interval ", "")
    found = headline(gather(finished))
    assert (found["tau_low"], found["tau_another"], found["tau_human_eval"]) == (1.701, 1.8049, 1.5)
    fs.write_record(path, {k: v for k, v in record.items() if k not in ("tau_low", "tau_high", "headline_sets")})
    assert "tau_low" not in headline(gather(finished))
    assert "95 % interval 1.701" not in words(render(gather(finished)))


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
