"""What is missing is told before DVC runs anything: real make, real dvc, the repository's own pipeline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import PlanError
from eyas.ops import guard

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
MISSING = "error: data.path: data/raw is missing\n\nhint: put your data there; see data/raw/README.md"


class Project:
    """A clone in which nothing has run; ``make`` runs in it as in an image, so that it makes no venv."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("Makefile", "params.yaml", "dvc.yaml"):
            shutil.copy(ROOT / name, root)
        shutil.copytree(ROOT / "conf", root / "conf")
        (root / "data/raw").mkdir(parents=True)
        own = ("MAKE", "MFLAGS", "EYAS_SGLANG", "EYAS_VLLM")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(own)} | {
            "EYAS_IMAGE": "x",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}/src",
        }
        assert self.run("dvc", "init", "-q", "--no-scm").returncode == 0

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=self.root, env=self.environment, capture_output=True, text=True)

    def refused(self, *goals: str) -> str:
        """What make says; no stage has begun."""
        done = self.run("make", *goals)
        assert done.returncode == 2
        assert "Running stage" not in done.stdout + done.stderr
        assert not list((self.root / "models").glob("*"))
        return done.stderr


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.mark.parametrize("goal", ["ingest", "plan", "repro", "train"])
def test_data_that_is_not_there_is_named_before_anything_runs(project, goal):
    """`make ingest` showed an errno of DVC's; `make repro` fetched the target first."""
    (project.root / "data/raw").rmdir()
    said = project.refused(goal)
    assert said.startswith(MISSING)
    assert "ERROR" not in said


def test_data_that_dvc_brings_is_named_once_dvc_has_failed(project):
    (project.root / "data/raw").rmdir()
    (project.root / "data/raw.dvc").write_text("outs: [{md5: 764efa883dda1e11db47671c4a3bbd9e.dir, path: raw}]\n")
    done = project.run("make", "ingest")
    assert done.returncode == 2
    assert "ERROR: " in done.stderr
    assert MISSING in done.stderr


@pytest.mark.parametrize(
    ("machine", "goal", "engine"),
    [("MACHINE=h200", "repro", "sglang"), ("MACHINE=h200", "respond", "sglang"), ("", "extract", "vllm")],
)
def test_an_engine_that_is_not_installed_is_named_before_anything_runs(project, machine, goal, engine):
    """It came out after the target was fetched and the conversations were read."""
    assert project.run("make", "params", *filter(None, [machine])).returncode == 0
    if not machine:
        path = project.root / "params.yaml"
        path.write_text(path.read_text().replace("  engine: hf\n  executor", f"  engine: {engine}\n  executor"))
    said = project.refused(goal)
    assert said.startswith(f"error: engine {engine}: neither this python nor .venv-{engine}/bin/python has {engine}")
    assert f"hint: `make setup-{engine}`" in said


def test_an_engine_of_another_version_is_named_before_anything_runs(project):
    shutil.copytree(TESTS / "sglang_double", project.root / "other")
    info = project.root / "other/sglang-0.5.23.dist-info"
    info = info.rename(info.with_name("sglang-0.4.1.dist-info"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.1\n")
    project.environment |= {"EYAS_SGLANG_PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}/src:{project.root}/other"}
    assert project.run("make", "params", "MACHINE=h200").returncode == 0
    assert "sglang 0.4.1 is installed, expected one of 0.5.14, 0.5.23" in project.refused("repro")


@pytest.mark.parametrize(("goal", "dvc_says", "states", "is_refused"), [
    ("ingest", "", "empty", False), ("respond", "{}", "empty", False), ("plan", '{"ingest": [{}]}', "current", True),
    ("train", "{}", "current", False), ("train", "{}", "empty", True), ("extract", "{}", "resume", True),
])  # fmt: skip
def test_what_calls_for_no_engine_needs_none(project, monkeypatch, goal, dvc_says, states, is_refused):
    """States that are up to date are trained from where no SGLang is; a plan may be, and its states not."""
    assert project.run("make", "params", "MACHINE=h200").returncode == 0
    monkeypatch.chdir(project.root)
    monkeypatch.delenv("EYAS_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, dvc_says, ""))
    monkeypatch.setattr(guard, "look", lambda root, force: guard.Verdict(state=states, note=""))
    monkeypatch.setattr(guard, "settle", lambda root: [])
    if is_refused:
        with pytest.raises(PlanError) as caught:
            guard.run(project.root, ["dvc", "repro", goal], force=False)
        assert "make setup-sglang" in caught.value.hint
    else:
        assert guard.run(project.root, ["dvc", "repro", goal], force=False) == 0
