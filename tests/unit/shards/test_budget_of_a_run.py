"""``eyas budget`` beside real git and dvc: before a run, after it, and when the engine's states change."""

import json
import re
import sys

import pytest
from dvc_repository import EXTRACT, DvcRepository

from eyas import fs
from eyas.plan.cache import hashes, locked_stage


@pytest.fixture
def repository(tmp_path):
    return DvcRepository(tmp_path / "repository")


def budget(repository: DvcRepository) -> dict:
    return json.loads(repository.ok(sys.executable, "-m", "eyas.cli", "budget", "--json"))


def commit(repository: DvcRepository) -> None:
    repository.ok("git", "add", "-A")
    repository.ok("git", "commit", "-qm", "a run")


@pytest.mark.slow
def test_budget_and_gate_tell_the_same_of_states_that_are_in_the_way(repository):
    """Cases 18, 86: the parameters switch; the old states are named, sized, and not deleted."""
    repository.set(codec="blosc2")
    repository.made()
    commit(repository)
    after = budget(repository)
    manifest = fs.read_json(repository.root / "data/hidden_states.json")
    assert (after["done_bytes"], after["needed_bytes"]) == (manifest["stored_bytes"], 0)
    assert after["stored_bytes"] == manifest["stored_bytes"]
    old = hashes(locked_stage(repository.root, "extract"), "outs")["data/hidden_states"]

    repository.set(batch_tokens=77, reserve_bytes=10**15)
    repository.ok("dvc", "repro", "plan")
    now = budget(repository)
    assert (now["fits"], now["done_bytes"], now["reclaimable_bytes"]) == (False, 0, now["reclaimable_bytes"])
    assert now["ratio"] == after["ratio"]
    assert now["ratio_source"] == f"measured on {len(manifest['shards'])} shards of {manifest['identity'][:16]}"
    [stale] = now["retirable"]
    assert stale["hash"] == old
    blocks = sum(
        path.stat().st_blocks * 512 for path in (repository.root / "data/hidden_states").rglob("*") if path.is_file()
    )
    assert blocks <= stale["num_bytes"] <= blocks + 3 * 4096, "each shard once, its list, and nothing else"

    (repository.root / "data/hidden_states.json").unlink()  # as DVC does before it runs the stage
    repository.ok("rm", "-r", str(repository.root / "data/hidden_states"))
    done = repository.run(sys.executable, *EXTRACT)
    assert done.returncode == 2
    assert f"{now['samples_that_fit']:,} of {now['num_samples']:,} samples would" in done.stderr
    needed = re.search(r"hidden states need ([\d.,]+ \w+);", done.stderr)[1]
    gate = {row.split()[0]: " ".join(row.split()) for row in done.stderr.splitlines() if "enough" in row}
    for option in now["options"]:
        shown = gate[option["name"]]
        assert shown.startswith(f"{option['name']} {option['figure']}") or option["name"] in ("gc", "retire")
    assert old[:8] in gate["retire"]
    assert now["needed_bytes"] / 1000 == pytest.approx(float(needed.removesuffix(" kB")), abs=0.06)
    assert "hint: `make budget`" in done.stderr


def test_without_git_nothing_is_reclaimable_and_the_rest_is_told(repository):
    repository.ok("dvc", "repro", "plan")
    with_git = budget(repository)
    repository.ok("rm", "-rf", ".git")
    without = budget(repository)
    assert (without["reclaimable_bytes"], without["retirable"]) == (0, [])
    assert without["reclaim_problem"]
    assert without["stored_bytes"] == with_git["stored_bytes"]
    repository.ok("rm", "-rf", ".dvc")
    assert budget(repository)["fits"]


@pytest.mark.slow
def test_a_run_that_was_stopped_is_counted_with_what_it_left(repository):
    repository.ok("dvc", "repro", "plan")
    fresh = budget(repository)
    assert fresh["done_bytes"] == 0
    code = (
        "import sys; from eyas.engines.fake import FakeEngine; capture, count = FakeEngine.capture, [0]\n"
        "def stops(self, batch):\n"
        "    count[0] += len(batch)\n"
        "    if count[0] > 6: raise KeyboardInterrupt\n"
        "    return capture(self, batch)\n"
        "FakeEngine.capture = stops\n"
        f"from eyas.stages.extract import main; main({EXTRACT[2:]!r})"
    )
    assert repository.run(sys.executable, "-c", code).returncode
    [spool] = repository.spools
    stored = sum(path.stat().st_size for path in spool.rglob("*.safetensors"))
    stopped = budget(repository)
    assert 0 < stopped["done_bytes"] == stored < stopped["stored_bytes"]
    assert stopped["needed_bytes"] == stopped["stored_bytes"] - stored
    assert stopped["retirable"] == [], "the spool that the next run goes on from is not stale"
    repository.ok(sys.executable, *EXTRACT)
    assert budget(repository)["needed_bytes"] == 0
