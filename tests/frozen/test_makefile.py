"""How the Makefile behaves under make itself, with programs that do nothing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

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
