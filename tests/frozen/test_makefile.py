"""How the Makefile behaves under make itself, with programs that do nothing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eyas import cli

ROOT = Path(__file__).parents[2]
DOUBLE = """#!/bin/sh
echo "$1 $2 begins" >> "$DIARY"
sleep 0.1
echo "$1 $2 ends" >> "$DIARY"
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Run make in an image's stead: no venv is made, and dvc and eyas write a diary."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("dvc", "eyas"):
        (tmp_path / name).write_text(DOUBLE)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("DIARY", str(tmp_path / "diary"))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    environment = clean | {"EYAS_IMAGE": "x", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_one_stage_at_a_time_under_j(make, tmp_path):
    """Two of DVC would meet in its locks, and two stages would share the cores."""
    done = make("-j8", "fetch", "ingest", "extract", "train")
    assert done.returncode == 0, done.stderr
    diary = (tmp_path / "diary").read_text().splitlines()
    assert [line.split()[-1] for line in diary] == ["begins", "ends"] * (len(diary) // 2)
    assert len(diary) >= 12


@pytest.mark.parametrize(
    ("version", "right"), [("3.81", False), ("3.82", False), ("4.0", True), ("4.3", True), ("4.4.1", True)]
)
def test_an_old_make_is_refused_with_the_fix(make, version, right):
    done = make(f"MAKE_VERSION={version}", "help")
    assert (done.returncode == 0) is right
    if not right:
        assert f"GNU make {version} is too old, expected 4.0 or newer: `brew install make`" in done.stderr


@pytest.mark.parametrize("word", ["TAGRET=qwen3_8b", "FOO=1", "lr=3"])
def test_a_variable_that_nothing_reads_is_refused(make, tmp_path, word):
    """`make params TAGRET=x` took every default, and the edits in params.yaml were gone."""
    done = make("params", word)
    assert done.returncode == 2
    assert f"{word.split('=')[0]}: no variable of this Makefile, expected some of" in done.stderr
    assert not (tmp_path / "diary").exists()


@pytest.mark.parametrize("goal", ["status", "repro", "extract"])
def test_a_preset_is_refused_where_nothing_composes_it(make, tmp_path, goal):
    """`make repro TARGET=qwen3_8b` ran with the target of params.yaml."""
    done = make(goal, "TARGET=nonsense", "MACHINE=h200")
    assert done.returncode == 2
    hint = f"`make params TARGET=nonsense MACHINE=h200` first, then `make {goal}`"
    assert f"TARGET MACHINE: read by `make params` alone, expected {hint}" in done.stderr
    assert not (tmp_path / "diary").exists()


def test_a_preset_is_composed_before_other_goals_and_goes_into_the_container_with_params_alone(make):
    done = make("-n", "params", "status", "TARGET=qwen3_8b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["eyas", "params", "TARGET=qwen3_8b"]
    lines = make("-n", "params", "status", "TARGET=qwen3_8b", "IN_CONTAINER=1", "EYAS_WATCHDOG_S=9").stdout.splitlines()
    assert [shlex.split(line.partition(" -- ")[2]) for line in lines] == [
        ["make", "params", "EYAS_WATCHDOG_S=9", "TARGET=qwen3_8b"],
        ["make", "status", "EYAS_WATCHDOG_S=9"],
    ]


def names_read() -> set[str]:
    """Variables that a user may give, by how the Makefile reads them: ``NAME ?=`` and three functions."""
    text = (ROOT / "Makefile").read_text()
    ways = (
        r"^([A-Z_]+) \?=",
        r"\$\(call option,[a-z-]+,([A-Z_]+)\)",
        r"\$\(call quoted,([A-Z_]+)\)",
        r"\$\(value ([A-Z_]+)\)",
    )
    return {name for way in ways for name in re.findall(way, text, re.MULTILINE)}


def test_no_variable_that_the_makefile_reads_is_refused(make):
    """Who lets a target read another one and forgets it in VARIABLES would have it refused."""
    assert {"GEN", "FROM", "JSON", "PYTHON", "EYAS_SHARD_CACHE_BYTES"} <= names_read()  # one of each way
    done = make("-n", "help", *(f"{name}=" for name in names_read() - {"EYAS_IMAGE"}))
    assert done.returncode == 0, done.stderr


def described() -> list[tuple[str, str]]:
    """Goals and the variables that `make help` names beside them: ``retire``, ``GEN``."""
    lines = re.findall(r"^([a-z][a-z0-9-]*):.*## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [(goal, name) for goal, said in lines for name in re.findall(r"\b([A-Z_]+)=", said)]


@pytest.mark.parametrize(("goal", "name"), described())
def test_every_goal_takes_the_variables_that_help_names(make, goal, name):
    """In a container too, where they arrive as they were given."""
    odd = {"IMAGE": "cuda", "TORCH": "torch==2.13.0"}.get(name, "it's a b; $HOME")
    assert (done := make("-n", goal, f"{name}={odd}")).returncode == 0, done.stderr
    inside = make("-n", goal, f"{name}={odd}", "IN_CONTAINER=1")
    assert shlex.split(inside.stdout)[-2:] == [goal, f"{name}={odd}"]


def test_variables_of_the_programs_behind_it_pass(make):
    done = make("status", "EYAS_WATCHDOG_S=9", "OMP_NUM_THREADS=1", "ARGS=-k 'a=b FOO=c'")
    assert done.returncode == 0, done.stderr


def test_a_dry_run_shows_commands_and_runs_none(make, tmp_path):
    done = make("-n", "repro", "gc", "CONFIRM=it's")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "diary").exists()
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert {"eyas guard dvc repro", "eyas summary"} <= set(lines)
    assert "eyas gc --confirm 'it'\\''s'" in lines


def test_a_training_reads_from_the_remote_what_the_workspace_lacks(make, tmp_path):
    """And is guarded as ever where the states lie here, or nobody asked for the cache."""

    def commands(*words):
        lines = [" ".join(line.split()) for line in make("-n", *words).stdout.splitlines()]
        return [line for line in lines if line.startswith("eyas")]

    assert commands("train", "EYAS_SHARD_CACHE_BYTES=9") == ["eyas train-far"]
    assert commands("train") == ["eyas guard dvc repro train"]
    assert commands("evaluate", "EYAS_SHARD_CACHE_BYTES=9") == ["eyas guard dvc repro evaluate"]
    (tmp_path / "data/hidden_states").mkdir(parents=True)
    assert commands("train", "EYAS_SHARD_CACHE_BYTES=9") == ["eyas guard dvc repro train"]


def test_help_has_its_sections_in_order(make):
    listed = [line for line in make("help").stdout.splitlines() if line and not line.startswith("  ")]
    named = [line.partition(" (")[0] for line in listed]
    assert named == ["Start", "Pipeline", "Look", "Disk", "Measure", "Container", "Exchange", "Quality"]


WITHOUT = {
    "adopt": "error: the following arguments are required: DIR=, ENGINE=",
    "export-states TO=x": "error: the following arguments are required: FORMAT=",
    "import-states FORMAT=x FROM=y TO=z FINAL_HIDDEN=a": "error: argument FINAL_HIDDEN=: invalid choice: 'a'",
    "serve-bench ARGS=--num-prompts=x": "error: argument --num-prompts: invalid int value: 'x'",
    "serve-bench ARGS=--bogus": "error: unrecognized arguments: --bogus",
}


@pytest.mark.parametrize("words", WITHOUT)
def test_what_make_did_not_get_is_named_by_its_variables(make, tmp_path, words):
    """`make adopt` spoke of --dir and --engine, which nobody types."""
    (tmp_path / "eyas").write_text(f"#!/bin/sh\nPYTHONPATH='{ROOT}/src' exec '{sys.executable}' -m eyas.cli \"$@\"\n")
    done = make(*words.split())
    assert done.returncode == 2
    assert done.stderr.startswith(WITHOUT[words])
    assert "hint: `make` lists the variables" in done.stderr
    assert "usage:" not in done.stderr


def test_an_option_that_was_typed_is_named_as_it_was_typed(monkeypatch, capsys):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["adopt"])
    assert ended.value.code == 2
    assert "the following arguments are required: --dir, --engine" in capsys.readouterr().err


def test_every_option_that_has_a_variable_is_known_by_it():
    calls = re.findall(r"\$\(call option,([a-z-]+),([A-Z_]+)\)", (ROOT / "Makefile").read_text())
    assert dict(calls) == {option: cli.make_variable(option) for option in cli.MAKE_OPTIONS}
