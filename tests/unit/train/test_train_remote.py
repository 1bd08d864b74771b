"""A training whose shards lie on a remote alone: the same drafter, within a bounded cache."""

from __future__ import annotations

import shutil

import pytest
from train_world import MemoryReader, make_inputs, result_bytes, run, write_shards

from eyas.shards.handover import SHARD_CACHE
from eyas.shards.reader import ShardReader
from eyas.shards.remote import RemoteStore
from eyas.shards.shard_cache import VARIABLE, ShardCache, shard_cache


@pytest.fixture
def far(tmp_path):
    """States on a shared folder, a remote of the repository ``tmp_path``, and nowhere else."""
    whole = write_shards(tmp_path / "states", MemoryReader(), "blosc2", "trained")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text(
        f"[core]\n    no_scm = true\n    remote = there\n['remote \"there\"']\n    url = {tmp_path}/shared\n"
    )
    for entry in whole.manifest.shards:
        place = tmp_path / "shared/files/md5" / entry.md5[:2] / entry.md5[2:]
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "states" / entry.path, place)
    run(tmp_path / "near", make_inputs(tmp_path / "near", reader=whole))
    shutil.rmtree(tmp_path / "states")
    return tmp_path, whole.manifest


@pytest.mark.parametrize("num_shards", [2, 100])
def test_the_drafter_is_the_one_of_the_workspace(far, num_shards):
    root, manifest = far
    largest = max(entry.size_bytes for entry in manifest.shards)
    assert len(manifest.shards) > 4
    cache = ShardCache(root / SHARD_CACHE, num_shards * largest, RemoteStore(root), largest)
    run(root / "far", make_inputs(root / "far", reader=ShardReader(root / "states", manifest, cache)))
    assert result_bytes(root / "far") == result_bytes(root / "near")
    held = sum(path.stat().st_size for path in (root / SHARD_CACHE).iterdir())
    assert held <= num_shards * largest
    assert (cache.num_fetched_bytes > manifest.stored_bytes) == (num_shards == 2)


def test_the_cache_is_asked_for_by_the_environment(far, monkeypatch):
    root, manifest = far
    monkeypatch.delenv(VARIABLE, raising=False)
    assert shard_cache(root, manifest) is None
    monkeypatch.setenv(VARIABLE, "1000000")
    reader = ShardReader(root / "states", manifest, shard_cache(root, manifest))
    assert len(reader.samples) == manifest.num_stored_samples
    reader.read(reader.samples[0].sample_id)
    assert any((root / SHARD_CACHE).iterdir())
