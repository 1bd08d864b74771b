"""DVC's own commands over the reports of two revisions: tables that people can read."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas import fs

ROOT = Path(__file__).parents[3]
MAX_COLUMNS = 20
EXPERIMENTS = "dvc exp show --only-changed"
pytestmark = pytest.mark.slow


class Repository:
    """The pipeline's own report stage and plots over records that lie there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        pipeline = yaml.safe_load((ROOT / "dvc.yaml").read_text())
        kept = {"stages": {"report": pipeline["stages"]["report"]}, "plots": pipeline["plots"]}
        (root / "dvc.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))
        (root / "dvc.lock").unlink()
        (root / ".gitignore").write_text((ROOT / ".gitignore").read_text())
        for name in ("loss", "alpha"):
            for step in (0, 1):
                rows = "".join(f"{at}\t{(step + 1) / at}\n" for at in range(1, 9))
                fs.write_text(
                    root / f"reports/train/plots/metrics/{name}/step_{step}.tsv", f"step\tstep_{step}\n{rows}"
                )
        fs.write_record(root / "reports/train/metrics.json", {"step": 8})
        self.ok("git", "init", "-q", "-b", "main")
        self.ok("dvc", "init", "-q")
        (root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {root}/.dvc/tmp/site\n")
        self.repro("the first run")

    def ok(self, *command: str) -> str:
        programs = os.pathsep.join((os.fspath(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        who = {f"GIT_{role}_{what}": "a" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        names = {"PATH": programs, "PYTHONPATH": f"{ROOT}/src", "DVC_NO_ANALYTICS": "1", "COLUMNS": "400"}
        done = subprocess.run(command, cwd=self.root, env=os.environ | who | names, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "failed" not in done.stderr, done.stderr
        return done.stdout

    def repro(self, message: str) -> None:
        self.ok("dvc", "repro", "-q")
        self.ok("git", "add", "-A")
        self.ok("git", "commit", "-qm", message)

    def json(self, *command: str) -> Any:
        return json.loads(self.ok(*command, "--json"))


@pytest.fixture
def repository(finished: Path) -> Repository:
    return Repository(finished)


def test_dvc_tells_two_runs_apart(repository: Repository) -> None:
    root = repository.root
    first = (root / "reports/metrics.json").read_bytes()
    assert "reports/metrics.json" in repository.ok("git", "ls-files", "reports").split()
    assert "reports/index.html" not in repository.ok("git", "ls-files", "reports").split()

    record = fs.read_json(root / "reports/acceptance.json")
    record["sets"]["chatterbot"]["tau"] = record["tau"] = 1.9049
    fs.write_record(root / "reports/acceptance.json", record)
    fs.write_text(root / "reports/train/plots/metrics/loss/step_0.tsv", "step\tstep_0\n1\t0.5\n2\t0.25\n")
    fs.write_text(root / "params.yaml", (root / "params.yaml").read_text().replace("\n  lr: ", "\n  lr: 1", 1))
    repository.ok("dvc", "repro", "-q")

    shown = repository.json("dvc", "metrics", "show")[""]["data"]
    assert list(shown) == ["reports/metrics.json"]  # one file, so that no column needs a path before its name
    columns = shown["reports/metrics.json"]["data"]
    assert columns["tau"] == 1.9049
    assert len(columns) <= MAX_COLUMNS
    changed = repository.json("dvc", "metrics", "diff")["reports/metrics.json"]
    assert changed["tau"] == pytest.approx({"old": 1.8049, "new": 1.9049, "diff": 0.1})
    assert set(changed) == {"tau", "loss"} | (set(changed) & {"tau_low", "tau_high"})
    assert first != (root / "reports/metrics.json").read_bytes()

    header, *rows = list(csv.reader(repository.ok(*EXPERIMENTS.split(), "--csv").splitlines()))
    assert {"tau", "train.lr"} <= set(header)  # figures and parameters that differ
    assert {"samples", "train.seed"} & set(header) == set()  # and no others
    assert len(header) <= MAX_COLUMNS
    assert [row[header.index("tau")] for row in rows] == ["1.9049", "1.8049"]  # the workspace, then main

    plots = repository.json("dvc", "plots", "diff")
    assert plots.get("errors", []) == []
    assert sorted(plots["data"]) == ["alpha", "loss"]
    points = plots["data"]["loss"][0]["content"]["data"]["values"]
    assert {point["rev"] for point in points} == {"HEAD", "workspace"}
    assert {point["filename::field"] for point in points} == {"step_0.tsv::step_0", "step_1.tsv::step_1"}
    assert sorted(repository.json("dvc", "plots", "show")["data"]) == ["alpha", "loss"]


def test_make_experiments_is_the_command_above() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\nexperiments:")[1].split("\n\n")[0]
    assert f"\t{EXPERIMENTS} $(ARGS)" in recipe


def test_a_forced_second_run_leaves_the_lock_and_git_as_they_are(repository: Repository) -> None:
    """The page and the figures come out the same to the byte, so DVC sees no change."""
    lock = (repository.root / "dvc.lock").read_bytes()
    page = (repository.root / "reports/index.html").read_bytes()
    repository.ok("dvc", "repro", "-q", "-f")
    assert (repository.root / "dvc.lock").read_bytes() == lock
    assert (repository.root / "reports/index.html").read_bytes() == page
    assert repository.ok("git", "status", "--porcelain") == ""
