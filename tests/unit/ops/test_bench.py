"""The benches of the store at small size: they run, and their figures are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from repair_cases import make_repository, manifest_of

from eyas.contracts import payload_bytes
from eyas.errors import StoreError
from eyas.ops.bench import crash as bench_crash
from eyas.ops.bench import dvc as bench_dvc
from eyas.ops.bench import replay
from eyas.ops.bench import store as bench_store


@pytest.fixture
def source(tmp_path: Path) -> replay.Source:
    return replay.load(make_repository(tmp_path / "repository", codec="raw"))


def test_the_store_is_written_whole_in_every_round(source: replay.Source, tmp_path: Path) -> None:
    payload = source.plan.payload_bytes
    figures = bench_store.measure(tmp_path, source, 3 * payload - 1)
    assert figures["gigabytes_written"] == pytest.approx(3 * payload / 1e9)
    speeds = {name: figures[f"{name}_gigabytes_per_s"] for name in ("codec", "md5", "disk", "write", "read", "decode")}
    slowest = min(speeds["codec"], speeds["md5"], speeds["disk"])
    assert figures["write_efficiency"] == pytest.approx(speeds["write"] / slowest)
    assert figures["read_efficiency"] == pytest.approx(speeds["read"] / speeds["decode"])
    entries = bench_store.write(
        source.planned_as(codec="blosc2", shard_bytes=bench_store.SHARD_BYTES), tmp_path / "again", 1
    )
    written = sum(path.stat().st_size for path in (tmp_path / "again").rglob("*.safetensors"))
    assert sum(entry.size_bytes for entry in entries) == written
    assert figures["lossless_ratio"] == pytest.approx(written / payload)


def test_what_is_replayed_is_what_was_stored(tmp_path: Path) -> None:
    root = make_repository(tmp_path)
    manifest, source = manifest_of(root), replay.load(root)
    assert source.plan.num_samples == len(source.states) == manifest.num_stored_samples
    assert source.plan.payload_bytes == payload_bytes(
        manifest.num_stored_tokens, manifest.hidden_size, len(manifest.capture.boundaries) + 1
    )
    assert len(replay.load(root, 3).states) == 3
    (root / "data/hidden_states.json").unlink()
    with pytest.raises(StoreError, match="nothing to replay") as caught:
        replay.load(root)
    assert "make extract" in caught.value.hint
    with pytest.raises(StoreError, match="rows trained, expected every row"):
        replay.load(make_repository(tmp_path / "trained", last_rows="trained"))


@pytest.mark.slow
def test_kills_are_counted_and_end_in_the_same_bytes(source: replay.Source, tmp_path: Path) -> None:
    """Case 28, in a DVC repository, handover included."""
    figures = bench_crash.measure(tmp_path / "crash", source, 6, seed=3)
    assert figures["kills"] == figures["identical"] >= 6
    assert figures["most_lost_shards"] <= 2
    assert sum(figures["kinds"].values()) == figures["kills"]


@pytest.mark.slow
def test_a_commit_writes_little_and_the_disk_holds_the_shards_once(tmp_path: Path) -> None:
    figures = bench_dvc.measure(tmp_path, 64 << 20, noop_files=100)
    assert figures.keys() == {
        "commit_read_fraction",
        "commit_read_fraction_without_handover",
        "commit_write_fraction",
        "disk_peak_ratio",
        "noop_seconds_80k",
    }
    assert figures["commit_write_fraction"] < 0.5
    assert 1 <= figures["disk_peak_ratio"] < 1.1
    assert figures["commit_read_fraction"] <= figures["commit_read_fraction_without_handover"]
