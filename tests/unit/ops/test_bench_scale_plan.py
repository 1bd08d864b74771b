"""The repository that the planner is measured on is a real one: what eyas writes is found whole by what eyas reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eyas import fs
from eyas.contracts import CapturePlan, ShardManifest
from eyas.ops.bench import scale_plan
from eyas.ops.bench.scale_world import SAMPLES_PER_SHARD, make_world
from eyas.shards.verify import verify
from eyas.tokens.table import TokenTable

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_source(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/src")


def test_its_tokens_plan_states_and_cache_are_whole(tmp_path):
    root = tmp_path / "world"
    make_world(root, ROOT / "params.yaml", 150)
    plan = fs.read_record(CapturePlan, root / "data/plan.json")
    manifest = fs.read_record(ShardManifest, root / "data/hidden_states.json")
    assert plan.num_samples == manifest.num_stored_samples == len(TokenTable(root / "data/tokens", root)) == 150
    assert 150 / SAMPLES_PER_SHARD / 2 < len(plan.shards) < 150 / SAMPLES_PER_SHARD * 2
    assert verify(root / "data/hidden_states", manifest) == []
    done = subprocess.run([sys.executable, "-m", "dvc", "status", "-q"], cwd=root, check=False)
    assert done.returncode in (0, 1)  # dvc reads its lock and its lists


@pytest.mark.slow
def test_every_part_is_measured(tmp_path):
    figures = scale_plan.measure(tmp_path, ROOT / "params.yaml", (60, 120))["planner"]
    assert set(figures) == {"60", "120"}
    for parts in figures.values():
        assert set(parts) == set(scale_plan.PARTS)
        assert all(one["seconds"] > 0 and one["peak_bytes"] > 10_000_000 for one in parts.values())
    assert "60" in scale_plan.table({"planner": figures})
    assert list(tmp_path.iterdir()) == []
