"""The stage map is identity: dvc.yaml, Makefile, README and stages/ say the same, in the same order.

A failure here means that one of the four was changed alone. Renaming a stage, its command or a path reruns it
and everything after it: with a terabyte of states that must be meant.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas import config
from eyas.config.structure import dotted_names
from eyas.report.sources import STAGES as REPORTED

ROOT = Path(__file__).parents[2]
STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
NAMES = ["fetch", "ingest", "respond", "tokenize", "plan", "extract", "train", "evaluate", "export", "report"]


def outputs(stage: dict[str, Any]) -> list[str]:
    entries = [*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])]
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def test_names_and_order_are_frozen_everywhere() -> None:
    assert list(STAGES) == NAMES
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^PIPELINE := (.*)$", makefile, re.MULTILINE)[1].split() == NAMES  # type: ignore[index]
    section = makefile.split("##@ Pipeline")[1].split("##@")[0]
    assert re.findall(r"^([a-z]+):.* ## ", section, re.MULTILINE) == NAMES
    table = (ROOT / "README.md").read_text().split("| stage | writes |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE) == NAMES
    assert list(REPORTED) == NAMES


def test_there_is_one_stage_file_per_stage() -> None:
    files = {path.stem for path in (ROOT / "src/eyas/stages").glob("*.py")} - {"__init__", "common"}
    assert files == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_command_is_the_stage_with_its_paths(name: str) -> None:
    """Inputs first, then outputs; no values, no decoration."""
    stage = STAGES[name]
    program, *paths = stage["cmd"].split(" ")[2:]
    assert stage["cmd"].split(" ")[:2] == ["python", "-m"]
    assert program == f"eyas.stages.{name}"
    assert not [path for path in paths if "=" in path or path.startswith("-")]
    for output in outputs(stage):
        assert any(output == path or output.startswith(f"{path}/") for path in paths), output
    if name != "report":  # it reads whatever is there
        assert [path for path in paths if path in stage.get("deps", [])] == stage.get("deps", [])


def test_paths_are_frozen() -> None:
    """These names stand in every dvc.lock; a change makes DVC forget what it has."""
    assert {output for stage in STAGES.values() for output in outputs(stage)} == {
        "models/target.json",
        "data/conversations",
        "data/responses",
        "data/tokens",
        "data/draft_vocab",
        "reports/tokens.json",
        "data/plan.json",
        "data/hidden_states",
        "data/hidden_states.json",
        "models/drafter",
        "reports/train/metrics.json",
        "reports/train/plots/metrics",
        "reports/acceptance.json",
        "models/export",
        "reports/index.html",
        "reports/metrics.json",
    }


def test_no_stage_depends_on_source_files() -> None:
    """A comment must not cost a terabyte; `revision` in params.yaml says when bytes change on purpose."""
    for name, stage in STAGES.items():
        for path in stage.get("deps", []):
            assert not path.startswith(("src", "tests", "pyproject", "requirements")), f"{name} depends on {path}"


def test_run_records_and_throughput_are_no_input() -> None:
    for stage in STAGES.values():
        assert not [path for path in stage.get("deps", []) if path.startswith(("reports/runs", "reports/throughput"))]


@pytest.mark.parametrize("name", NAMES)
def test_stage_tracks_exactly_the_sections_it_reads(name: str) -> None:
    """An untracked section that is read makes stale results; a tracked one that is not read, needless work."""
    source = (ROOT / "src/eyas/stages" / f"{name}.py").read_text()
    tracked = {key.split(".")[0] for key in STAGES[name].get("params", [])}
    assert sections_read(source) == tracked


@pytest.mark.parametrize("name", ["plan", "extract"])
def test_what_decides_no_byte_of_a_capture_is_not_tracked(name: str) -> None:
    """Every other key of ``extract`` is, by its name: DVC compares a section as a whole."""
    of_extract = [key for key in STAGES[name]["params"] if key.startswith("extract")]
    assert of_extract == config.tracked_extract_keys()
    assert {f"extract.{key}" for key in ("executor",)} == {
        key for key in dotted_names() if key.startswith("extract.")
    } - set(of_extract)


@pytest.mark.parametrize(
    ("section", "rerun"),
    [
        ("train.lr", ["train", "evaluate", "export", "report"]),
        ("train.source", ["plan", "extract", "train", "evaluate", "export", "report"]),
        ("drafter", ["train", "evaluate", "export", "report"]),
        ("evaluate", ["evaluate", "export", "report"]),  # the model cards hold its numbers
        ("export", ["export", "report"]),
        ("extract", ["tokenize", "plan", "extract", "train", "evaluate", "export", "report"]),
        ("data", NAMES[1:]),
        ("target", [name for name in NAMES if name != "ingest"]),
    ],
)
def test_a_changed_section_reruns_what_follows_and_nothing_above(section: str, rerun: list[str]) -> None:
    """``train.lr`` must not cost an extraction."""
    changed: set[str] = set()
    stale = []
    for name, stage in STAGES.items():
        keys = stage.get("params", [])
        tracked = {key.split(".")[0] for key in keys} if "." not in section else {*keys}
        if {section, section.split(".")[0]} & tracked or changed & set(stage.get("deps", [])):
            stale.append(name)
            changed |= set(outputs(stage))
    assert stale == rerun


def sections_read(source: str) -> set[str]:
    """Sections accessed on the value of ``config.load()`` or on parameters annotated ``Params``."""
    tree = ast.parse(source)
    holders = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_load(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    holders |= {
        argument.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument in node.args.args
        if argument.annotation is not None and ast.unparse(argument.annotation).endswith("Params")
    }
    read = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if is_load(node.value) or (isinstance(node.value, ast.Name) and node.value.id in holders):
            read.add(node.attr)
    return read & set(config.SECTIONS)


def is_load(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("config.load", "load")


def test_the_reader_of_sections_sees_what_it_must() -> None:
    source = (
        "def f(params: Params): params.train\np = config.load()\np.data.path\nconfig.load().export\nother.respond\n"
    )
    assert sections_read(source) == {"train", "data", "export"}
