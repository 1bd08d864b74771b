"""A gc that was killed does not stand in an extraction's way, and finishing it later harms nothing that was made since."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from dvc_repository import MANIFEST, STATES, DvcRepository

KILLED = """
import os, sys
from pathlib import Path
from eyas.ops.gc.collect import collect
left = int(sys.argv[2])
def hook(event, arguments):
    global left
    if event == "os.remove" and "hidden_states" in str(arguments[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(hook)
collect(Path(), sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4])
def test_extract_then_finish(tmp_path, number):
    """Killed before the first, second or fourth of the workspace's names went: manifest, then shards."""
    repository = DvcRepository(tmp_path / "repo")

    def eyas(*words: str):
        return repository.run(sys.executable, "-m", "eyas.cli", *words)

    repository.made()
    expected = repository.hashes()
    repository.ok("git", "add", "-A")
    repository.ok("git", "commit", "-qm", "states")
    (generation,) = json.loads(eyas("generations", "--json").stdout)
    assert eyas("retire", generation["hash"][:10]).returncode == 0
    repository.ok("git", "commit", "-qam", "retire")
    plan = json.loads(eyas("gc-plan", "--json").stdout)
    assert plan["plan_id"], plan
    killed = repository.run(sys.executable, "-c", KILLED, plan["plan_id"], str(number))
    assert killed.returncode == -9, killed.stderr
    assert len(list((repository.root / STATES).rglob("*.safetensors"))) == len(expected) - 1 - max(number - 2, 0)

    said = repository.made()
    assert f"make gc CONFIRM={plan['plan_id']}" in said
    assert repository.hashes() == expected
    done = eyas("gc", "--confirm", plan["plan_id"])
    assert done.returncode == 2
    assert "not committed: dvc.lock" in done.stderr

    repository.ok("git", "commit", "-qam", "states again")
    done = eyas("gc", "--confirm", plan["plan_id"], "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kept_again"] == [generation["hash"]]
    assert repository.hashes() == expected
    shutil.rmtree(repository.root / STATES)
    (repository.root / MANIFEST).unlink()
    repository.ok("dvc", "checkout", "-q", "--force", "extract")
    assert repository.hashes() == expected, "the cache has all of it"
