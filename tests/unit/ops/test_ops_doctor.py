"""``eyas doctor`` answers in a second, without torch, and names what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.ops import doctor

ROOT = Path(__file__).parents[3]


def by_name(root: Path) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(root)}


def test_this_machine_is_described() -> None:
    found = by_name(ROOT)
    assert found["python"].state == "found"
    assert found["git"].value.startswith("git version")
    assert found["links to the cache"].state == "found"
    assert not list(ROOT.glob(".probe-*"))


def test_bare_folder_gets_hints(tmp_path: Path) -> None:
    found = by_name(tmp_path)
    assert found["git repository"].state == "not found"
    assert found["dvc"].state == "problem"
    assert found["packages"].state == "not found"
    assert all(finding.hint for finding in (found["git repository"], found["dvc"], found["packages"]))


def test_packages_that_differ_from_the_lock_are_named(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.lock").write_text(
        "numpy==0.0.1 \\\n    --hash=sha256:00\nno-such-package==1.0 \\\n    --hash=sha256:00\n"
        "pywin32==1 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    )
    finding = by_name(tmp_path)["packages"]
    assert finding.state == "problem"
    assert "numpy" in finding.value
    assert "(lock: 0.0.1)" in finding.value
    assert "no-such-package missing" in finding.value
    assert "pywin32" not in finding.value


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second mount")
def test_cache_on_another_mount_is_a_problem(tmp_path: Path) -> None:
    """A real os.link over two file systems; the fix is named."""
    other = Path("/dev/shm") / f"eyas-test-{os.getpid()}"
    other.mkdir()
    try:
        if other.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("one mount")
        (tmp_path / ".dvc").mkdir()
        (tmp_path / ".dvc/config.local").write_text(f"[cache]\n    type = hardlink\n    dir = {other}\n")
        finding = doctor.hardlinks(tmp_path)
    finally:
        shutil.rmtree(other)
    assert finding.state == "problem"
    assert "dvc cache dir --local" in finding.hint


def test_command_imports_no_torch_and_prints_json() -> None:
    code = (
        "import sys, runpy; sys.argv = ['eyas', 'doctor', '--json']\n"
        "try:\n    runpy.run_module('eyas.cli', run_name='__main__')\n"
        "except SystemExit as ended:\n    assert ended.code in (0, 1)\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {finding["name"] for finding in json.loads(done.stdout)} >= {"python", "torch", "disk", "dvc"}


@pytest.mark.parametrize("command", ["params", "doctor", "verify", "summary", "smoke", "reproduce"])
def test_every_command_has_help_and_json(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eyas.cli", command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_the_place_of_dvcs_state_is_judged(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    assert doctor.dvc_state(tmp_path).state == "not found"
    (tmp_path / ".dvc").mkdir()
    ours = f"{tmp_path}/.dvc/tmp/site"
    found = doctor.dvc_state(tmp_path)
    assert (found.state, found.hint) == ("problem", f"dvc config --local core.site_cache_dir {ours}")
    places = {
        "/moved/away/.dvc/tmp/site": "where this repository was before",
        "relative": "is relative",
        "/proc/dvc": "on another volume",
    }
    for place, problem in places.items():
        (tmp_path / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {place}\n")
        if place.startswith("/moved") and Path("/").stat().st_dev != tmp_path.stat().st_dev:
            continue
        found = doctor.dvc_state(tmp_path)
        assert found.state == "problem"
        assert problem in found.value
    (tmp_path / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {ours}\n")
    assert (doctor.dvc_state(tmp_path).state, doctor.dvc_state(tmp_path).value) == ("found", ours)
