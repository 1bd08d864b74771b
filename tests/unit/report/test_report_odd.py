"""Reports that hold what nobody expects, and other runs that are damaged: shown, left out or named, never a traceback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_report_compare import git, put, repository  # noqa: F401 - a fixture
from test_report_page import assert_well_formed

from eyas import fs
from eyas.canonical import canonical_json
from eyas.errors import StoreError
from eyas.report.compare import as_text, compare
from eyas.report.metrics import headline
from eyas.report.page import render
from eyas.report.sources import gather

CHAIN = {"tau": 1.2, "tau_low": 1.1, "tau_high": 1.3, "alpha": [0.2], "accepted": [1, 2], "num_rounds": 3}
CHECK = {"temperature": 1.0, "tau": 1.2, "num_prompts": 1, "num_tokens": 3, "p_value": 0.5, "tau_expected": 1.3}
ROUND = {"accepted": "a draft", "bonus": " and more"}
NEWER = {
    "modes": {"chatterbot": {"sampled": CHECK, "chain": CHECK | {"temperature": 0.0, "num_ties": 1}}},
    "worst": [{"tau": 1.0, "source": "x", "prompt": "<b>", "first": "A", "loop_share": 0.1, "rounds": [ROUND]}],
    "sets": {
        "chatterbot": {
            **CHAIN,
            "chains": {"1": CHAIN},
            "tau_by_place": {"0": 1.2, "32": 1.4},
            "sampled": CHAIN | {"temperature": 1.0, "tau_greedy_drafts": 1.3, "covered_mass": 0.9},
            "loop_share": 0.1,
        }
    },
}
BATCH = {"tau_server": 1.5, "speedup": 1.1, "equality": {"num_identical": 3, "num_answers": 4}}
SERVED = {
    "tau_server": 1.5,
    "server": "x",
    "batches": {"1": BATCH},
    "sets": {"a": {"tau_server": 1.5, "loop_share": 0}},
}


ODD = (None, True, float("nan"), float("-inf"), -1e308, 10**400, -3, "", "<script>", "half \ud800", [], {}, [None])
ODD_KEYS: tuple[Any, ...] = ({"\u00b2": 1.0, "": 4, "-1": 2.0}, {"\u00b2": {"tau": 1.0, "temperature": 1}})
"""A superscript two is a digit and no number."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def changed(whole: Any, place: Sequence[Any], odd: Any) -> Any:
    """A record of which one place holds something else."""
    if not place:
        return odd
    copied = json.loads(json.dumps(whole))
    at = copied
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = odd
    return copied


@pytest.mark.parametrize("odd", [*ODD, *ODD_KEYS], ids=lambda odd: repr(odd)[:12])
@pytest.mark.parametrize("name", ["acceptance", "serve"])
def test_what_is_only_shown_never_stops_the_page(kept: Path, tmp_path: Path, name: str, odd: Any) -> None:
    """Every place of a report of any version holds something else once: shown where it means something, else left out."""
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"reports/{name}.json"
    whole = SERVED if name == "serve" else fs.read_json(path) | NEWER
    for place in places(whole):
        path.write_text(json.dumps(changed(whole, place, odd)))
        is_none = not place or (place == ("tau",) and odd != -3)
        if name == "acceptance" and is_none:  # -3 is the one number among them
            with pytest.raises(StoreError, match="it has no tau"):
                gather(tmp_path)
            continue
        sources = gather(tmp_path)
        page = render(sources)
        page.encode()
        figures = page.split("Every figure of reports/")[0]
        assert "<script" not in page
        assert not re.search(r"\b(nan|inf|None)\b", figures), (place, odd)
        canonical_json(headline(sources))


@pytest.mark.parametrize("odd", ["half \ud800", 10**400, -(2**63) - 1], ids=["half", "huge", "below"])
@pytest.mark.parametrize(
    "name", ["models/target", "models/drafter/checkpoint", "models/export/export", "reports/tokens", "data/plan"]
)
def test_records_with_half_characters_or_endless_numbers_are_named(
    kept: Path, tmp_path: Path, name: str, odd: Any
) -> None:
    """They ended in the page's own code: hashing a record, writing a size."""
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"{name}.json"
    whole = fs.read_json(path)
    for place in places(whole):
        if place:
            path.write_text(json.dumps(changed(whole, place, odd)))
            with pytest.raises(StoreError, match=f"{name}.json is no "):
                gather(tmp_path)


def test_a_plan_of_a_codec_that_is_not_known_is_named(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "data/plan.json"
    path.write_text(
        path.read_text().replace('"codec":"raw"', '"codec":"zip"').replace('"codec":"blosc2"', '"codec":"zip"')
    )
    with pytest.raises(StoreError, match=r"codec 'zip', expected one of"):
        render(gather(tmp_path))


def test_a_curve_that_ends_in_nan_is_no_metric(finished: Path) -> None:
    path = finished / "reports/train/plots/metrics/loss/step_0.tsv"
    path.write_text(path.read_text() + "3000\tnan\n")
    assert "loss" not in headline(gather(finished))


@pytest.mark.parametrize("values", [(-1e308, 1e308), (0.0, 5e-324), (1e300, 1e300)])
def test_curves_of_any_size_are_drawn(finished: Path, values: tuple[float, float]) -> None:
    (finished / "reports/train/plots/metrics/odd.tsv").write_text(f"step\todd\n0\t{values[0]}\n1\t{values[1]}\n")
    assert_well_formed(render(gather(finished)))


def commit_lock(root: Path, lock: str) -> None:
    whole = (root / "dvc.lock").read_text()
    (root / "dvc.lock").write_text(lock)
    git(root, "commit", "-qam", "damaged")
    (root / "dvc.lock").write_text(whole)


ODD_LOCKS = (
    "stages: {a: null}",
    "stages: {a: [1]}",
    "stages: {a: {outs: null}}",
    "stages: {a: {outs: [null]}}",
    "stages: {a: {outs: {b: 1}}}",
    "stages: {train: {outs: [{path: models/drafter, md5: 4, size: 2}]}}",
)


@pytest.mark.parametrize("lock", ODD_LOCKS)
def test_entries_that_name_nothing_of_the_other_run_are_passed_over(repository: Path, lock: str) -> None:  # noqa: F811
    commit_lock(repository, lock)
    assert "tau" in as_text(compare(repository, "HEAD"))


@pytest.mark.parametrize("lock", ["stages: {train: {outs: [{path: 3, size: x}]}}", "stages: 3", "a: b: c", "[]"])
def test_a_lock_of_the_other_run_that_is_none_is_named_by_its_revision(repository: Path, lock: str) -> None:  # noqa: F811
    """By no folder of ours that is gone by then, and with no command that would change this run's own."""
    commit_lock(repository, lock)
    with pytest.raises(StoreError, match=r"^HEAD \([0-9a-f]{10}\): dvc\.lock ") as error:
        compare(repository, "HEAD")
    assert "git checkout" not in str(error.value)


@pytest.mark.parametrize("listed", [b"3", b"[3]", b"[{}]", b"{}", b"\xff"])
def test_a_folder_whose_list_is_none_counts_as_not_here(repository: Path, listed: bytes) -> None:  # noqa: F811
    lock = repository / "dvc.lock"
    own = lock.read_text().split("models/drafter, md5: ")[1].split(",")[0]
    lock.write_text(lock.read_text().replace(own, put(repository, listed, ".dir")))
    git(repository, "commit", "-qam", "damaged")
    found = compare(repository, "HEAD")
    assert found.there.checkpoint is None
    assert found.missing == (() if listed == b"{}" else ("models/drafter",))
