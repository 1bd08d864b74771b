"""``make image-check`` and ``IN_CONTAINER=1`` with a builder that is none: what each of them refuses, as a user calls it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from eyas.errors import ConfigError, EyasError
from eyas.ops import reproduce
from eyas.ops.image import check as checks
from eyas.ops.image import run as runs
from eyas.ops.image import smoke as smokes
from eyas.ops.image.builder import Image, RunOptions

ROOT = Path(__file__).parents[3]
GOOD = {
    "User": "1000:1000",
    "Labels": {f"org.opencontainers.image.{key}": "x" for key in ("title", "licenses", "version")},
    "Entrypoint": ["tini", "--"],
}


def made(folder: Path, wrong: str = "") -> None:
    """A finished pipeline; one of its artifacts has other bytes."""
    for name in reproduce.ARTIFACTS:
        path = folder / name if "." in name else folder / name / "file"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name + ("!" if name == wrong else ""))


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Instead of minutes of the pipeline outside; gives its commands."""
    seen: list[list[str]] = []

    def run(command: list[str], cwd: Path | None = None, **more: object) -> subprocess.CompletedProcess:
        if "smoke" not in command:
            return real(command, cwd=cwd, **more)  # type: ignore[call-overload]
        seen.append(command)
        made(Path(cwd or ".") / smokes.OUTSIDE)
        return subprocess.CompletedProcess(command, 0)

    real = subprocess.run
    monkeypatch.setattr(smokes.subprocess, "run", run)
    return seen


class Double:
    """Builds nothing; an image's digest is that of the context, times of files included when it is ``careless``."""

    tool = "docker"

    def __init__(self, careless: bool = False, failing: str = "", wrong: str = "") -> None:
        self.careless, self.failing, self.wrong = careless, failing, wrong
        self.digests: dict[str, str] = {}
        self.commands: list[list[str]] = []
        self.anew: list[bool] = []

    def build(self, context: Path, target: str, name: str, bases: object, anew: bool = False) -> None:
        self.anew.append(anew)
        times = [(context / path).stat().st_mtime_ns for path in checks.CONTEXT] if self.careless else []
        content = [(context / path).read_bytes() for path in checks.CONTEXT]
        self.digests[name] = f"sha256:{hash((target, *times, *content)):x}"

    def inspect(self, name: str) -> Image:
        return Image(name, self.digests.get(name, "sha256:0"), 1_000_000, GOOD)

    def forget(self, name: str) -> None:
        del self.digests[name]

    def run(self, name: str, command: list[str], options: RunOptions) -> int:
        self.commands.append(list(command))
        if command[-2:] == ["make", "smoke"]:
            made(options.folder / smokes.INSIDE, self.wrong)
        return int(bool(self.failing) and any(self.failing in word for word in command))


def image_check(tmp_path: Path, double: Double, target: str) -> dict:
    root = tmp_path / "repository"
    for name in checks.CONTEXT:
        shutil.copy2(ROOT / name, root / name) if root.is_dir() else root.mkdir() or shutil.copy2(ROOT / name, root)
        os.utime(root / name, (1, 1))
    for name in ("src", "requirements"):
        (root / name).mkdir()
    return checks.check(root, double, target, "eyas:x", {}, lambda text: None)  # type: ignore[arg-type]


def test_times_of_files_in_an_image_are_found(tmp_path):
    """Case 87: two builds, the second from a copy with other times of files."""
    double = Double()
    assert image_check(tmp_path, double, "cpu")["identical"]
    assert double.anew == [False, True]  # or docker would compare an image with itself
    assert list(double.digests) == ["eyas:x"]
    shutil.rmtree(tmp_path / "repository")
    with pytest.raises(EyasError, match="something of the machine or the time is in it"):
        image_check(tmp_path, Double(careless=True), "cpu")
    assert json.loads((tmp_path / "repository" / checks.REPORT).read_text())["identical"] is False


@pytest.mark.parametrize("threads", ["", "3"])
def test_the_small_pipeline_in_the_image_gives_the_bytes_of_outside(tmp_path, monkeypatch, outside, threads):
    """With as many threads on both sides; it is the report that says so."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    double = Double()
    assert image_check(tmp_path, double, "cpu")["smoke_hashes_equal"] is True
    said = f"OMP_NUM_THREADS={threads or 1}"
    assert [command[:2] for command in (outside[0], double.commands[-1])] == [["env", said]] * 2


def test_an_artifact_of_other_bytes_in_the_image_is_named(tmp_path):
    with pytest.raises(EyasError, match=r"models/drafter: another hash in the image than outside$"):
        image_check(tmp_path, Double(wrong="models/drafter"), "ci")
    report = json.loads((tmp_path / "repository" / checks.REPORT).read_text())
    assert (report["identical"], report["smoke_hashes_equal"]) == (True, False)


def test_an_image_in_which_the_pipeline_fails_is_refused(tmp_path):
    with pytest.raises(EyasError, match="the small pipeline failed in the image: `make smoke IN_CONTAINER=1`"):
        image_check(tmp_path, Double(failing="smoke"), "cpu")


def test_cuda_has_other_packages_and_is_not_compared(tmp_path, outside):
    assert image_check(tmp_path, Double(), "cuda")["smoke_hashes_equal"] is None
    assert outside == []


def test_what_stands_in_the_way_is_told_before_a_build(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_owner", lambda path: os.getuid() + 1)
    double = Double()
    with pytest.raises(ConfigError, match="in the way of a container"):
        image_check(tmp_path, double, "cpu")
    assert double.digests == {}


@pytest.mark.parametrize(("target", "failing"), [("cuda", "eyas.ops.image kernels"), ("cpu", "runs as root")])
def test_an_image_that_fails_its_self_test_is_refused(tmp_path, target, failing):
    """Case 90: the kernel test is run in the cuda image, and its failure is the check's."""
    with pytest.raises(EyasError, match="no compiler is there" if target == "cuda" else "self-test in it failed"):
        image_check(tmp_path, Double(failing=failing), target)


@pytest.mark.parametrize("missing", ["nvcc", "c++", "ninja", ""])
def test_the_kernel_test_needs_every_compiler(tmp_path, missing):
    """Case 90: the script itself, with programs that do nothing; with all of them it comes to the libraries."""
    programs = {"nvcc", "c++", "ninja", "python"} - {missing}
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n" + ("echo looked\n" if name == "python" else ""))
        (tmp_path / name).chmod(0o755)
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run(
        [bash, "-c", checks.KERNEL_TEST], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0, "looked" in done.stdout) == (not missing, not missing)


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "repo/.dvc/cache").mkdir(parents=True)
    return tmp_path / "repo"


def test_nothing_runs_where_something_is_in_the_way(repository):
    """Case 89: the command is not started, so DVC is not; every fault is told."""
    (repository / ".dvc/config").write_text("[cache]\n    dir = /dev/shm\n")
    double = Double()
    with pytest.raises(ConfigError, match=r"in the way of a container:\n.*share no folder below /"):
        runs.run(repository, double, "eyas:cpu", ["dvc", "repro"])  # type: ignore[arg-type]
    assert double.commands == []


def test_root_in_a_users_repository_is_refused(repository, monkeypatch):
    """Case 89: what root writes there the user could neither change nor delete."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(runs, "_owner", lambda path: 1000)
    double = Double()
    with pytest.raises(ConfigError, match="belongs to user 1000, and this is root"):
        runs.run(repository, double, "eyas:cpu", ["dvc", "repro"])  # type: ignore[arg-type]
    assert double.commands == []
