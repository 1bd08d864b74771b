"""A gc that is killed anywhere is finished by the same command, and never harms what is in use."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gc_cases import MANIFEST, STATES, Project, environment

SIZES = tuple(3000 + index for index in range(150))


def prepared(root: Path) -> tuple[Project, str, dict[str, bytes]]:
    """One generation that goes with its workspace and a spool twin, one that a branch keeps; contents of what stays."""
    project = Project(root)
    kept = project.generation(2, *SIZES, shared=50)
    project.ok("git", "branch", "keeps")
    gone = project.generation(1, *SIZES, shared=50)
    spool = root / ".eyas/spool" / json.loads((root / MANIFEST).read_text())["identity"]
    for path in sorted((root / STATES).rglob("*.safetensors")):
        twin = spool / "states" / path.relative_to(root / STATES)
        twin.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, twin)
    shutil.copy(root / MANIFEST, spool / "manifest.json")
    project.retire_all()
    assert kept != gone
    return project, gone, in_use(project, kept)


def in_use(project: Project, name: str) -> dict[str, bytes]:
    """Objects that DVC's own list of a generation names."""
    base = project.root / ".dvc/cache/files/md5"
    listed = json.loads((base / name[:2] / name[2:]).read_text())
    return {md5: (base / md5[:2] / md5[2:]).read_bytes() for md5 in (name, *(entry["md5"] for entry in listed))}


def unharmed(project: Project, kept: dict[str, bytes]) -> bool:
    base = project.root / ".dvc/cache/files/md5"
    return all((base / md5[:2] / md5[2:]).read_bytes() == data for md5, data in kept.items())


def start(project: Project, plan_id: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "eyas.cli", "gc", "--confirm", plan_id],
        cwd=project.root,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes], *, with_dvc: bool) -> bool:
    """SIGKILL, to DVC too or not; gives whether it struck."""
    if process.poll() is not None:
        return False
    if with_dvc:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    return process.wait() == -signal.SIGKILL


def finish(project: Project, plan_id: str) -> None:
    """The same command until it gets through: an orphaned DVC still holds the lock for a moment."""
    for _ in range(60):
        done = project.eyas("gc", "--confirm", plan_id)
        if done.returncode == 0:
            return
        assert "locked by gc" in done.stderr, done.stderr
        time.sleep(0.2)
    raise AssertionError(done.stderr)


def check_end(project: Project, gone: str, kept: dict[str, bytes], promised: int) -> None:
    assert unharmed(project, kept)
    left = project.objects
    assert set(kept) <= left
    assert gone not in left
    assert not (project.root / STATES).exists()
    assert not (project.root / MANIFEST).exists()
    assert not list((project.root / ".eyas/spool").glob("*"))
    assert not (project.root / ".eyas/gc/intent.json").exists()
    assert not list((project.root / ".eyas/retired").glob("*"))
    (event,) = [event for event in project.ledger if event["event"] == "gc"]
    assert [one["hash"] for one in event["generations"]] == [gone]
    assert event["promised_bytes"] == event["expected_bytes"] == promised


def run_kills(tmp_path: Path, wanted: int, seed: int) -> tuple[int, int]:
    """Kills that struck, and how many of them while something was being deleted."""
    project, gone, kept = prepared(tmp_path / "template")
    shutil.rmtree(tmp_path / "template/.dvc/tmp/site", ignore_errors=True)
    rng, struck, begun = random.Random(seed), 0, 0
    duration_s = 4.0
    while struck < wanted:
        # Same bytes, hard links and all; inodes are new, so the plan is made here.
        root = tmp_path / f"run-{struck}"
        subprocess.run(["cp", "-a", project.root, root], check=True)
        (root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {root}/.dvc/tmp/site\n")
        copy = Project.__new__(Project)
        copy.root = root
        plan = copy.plan()
        for _ in range(rng.randrange(1, 8)):
            began = time.monotonic()
            process = start(copy, plan["plan_id"])
            try:
                process.wait(rng.uniform(0.05, duration_s))
            except subprocess.TimeoutExpired:
                hit = kill(process, with_dvc=rng.random() < 0.7)
                struck += hit
                begun += hit and (root / ".eyas/gc/intent.json").exists()
            else:
                duration_s = 0.8 * duration_s + 0.2 * (time.monotonic() - began)
            assert unharmed(copy, kept)
        finish(copy, plan["plan_id"])
        check_end(copy, gone, kept, plan["freed_bytes"])
        shutil.rmtree(root)
    return struck, begun


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_a_hundred_moments(tmp_path):
    """SIGKILL at random moments, often several times in one gc, with DVC or leaving it orphaned."""
    struck, begun = run_kills(tmp_path, 100, seed=0)
    assert struck >= 100
    assert begun >= 20
