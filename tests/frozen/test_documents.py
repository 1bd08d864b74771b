"""What documents tell people to type exists, and what they point at is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_readme_is_short_and_begins_with_one_command() -> None:
    assert len(README.splitlines()) <= 200
    assert COMMANDS[0] == "make repro"


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_command_can_be_typed(command: str) -> None:
    program, *arguments = command.split()
    assert program == "make"
    assert not arguments or arguments[0] in TARGETS
    done = make("-n", *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_targets_and_links_exist(path: Path) -> None:
    text = path.read_text()
    assert {name for name in re.findall(r"`make ([a-z][a-z-]*)", text) if name not in TARGETS} == set()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_files_exist(path: Path) -> None:
    named = re.findall(r"`((?:src|tests|conf|docs|requirements)/[\w./-]*)`", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_named_commands_of_eyas_exist() -> None:
    from eyas import cli

    named = {verb for path in DOCUMENTS for verb in re.findall(r"`eyas ([a-z][a-z-]+)", path.read_text())}
    assert len(named) > 12
    for verb in named:
        with pytest.raises(SystemExit) as told:
            cli._parser().parse_args([verb, "--help"])
        assert told.value.code == 0, verb


def test_decisions_are_short_and_numbered() -> None:
    paths = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [path.name[:4] for path in paths] == [f"{number:04d}" for number in range(1, len(paths) + 1)]
    assert [path.name for path in paths if len(path.read_text().splitlines()) > 40] == []


@pytest.mark.parametrize("group", ["target", "data", "machine", "drafter"])
def test_readme_lists_the_presets(group: str) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| `{group.upper()}` |"))
    listed = set(re.findall(r"`([a-z0-9_]+)`", row))
    assert listed == {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


def test_help_is_the_default_and_lists_every_documented_target() -> None:
    done = make()
    assert done.returncode == 0
    listed = re.findall(r"^  ([a-z-]+) ", done.stdout, re.MULTILINE)
    assert set(listed) == TARGETS
    assert "Pipeline" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_ci_runs_make_targets_only() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    runs = [step["run"] for step in steps if "run" in step]
    assert {run.split()[0] for run in runs} == {"make"}
    assert {run.split()[1] for run in runs} <= TARGETS
    script = (ROOT / ".ci/run").read_text()
    here = set(re.findall(r"^ *make ([a-z-]+)", script, re.MULTILINE))
    assert here - {"test-sglang-quick"} == {run.split()[1] for run in runs} - {"test-sglang"}  # there the longer one
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=False).returncode == 0


def test_locks_are_complete_and_name_no_host() -> None:
    for name in ("cpu", "dev", "kernels", "ray", "remotes"):
        text = (ROOT / f"requirements/{name}.lock").read_text()
        assert not re.search(r"https?://|--index-url|--find-links", text)
        pins = re.findall(
            r"^[a-z0-9._-]+(?:\[[a-z,]+\])?==.*(?:\n    --hash=sha256:[0-9a-f]{64}.*)+", text, re.MULTILINE
        )
        assert len(pins) == len(re.findall(r"==", re.sub(r" ;.*", "", text)))
    locked = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements/cpu.lock").read_text(), re.MULTILINE))
    assert "torch" not in locked
    assert not [name for name in locked if name.startswith(("nvidia-cu", "triton"))]


def test_every_dependency_is_locked() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements/cpu.lock").read_text(), re.MULTILINE))
    assert set(project["dependencies"]) - locked == {"torch"}
