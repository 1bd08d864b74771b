"""``eyas repair`` gives back the bytes of an undamaged run, and leaves alone what is whole."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
from repair_cases import (
    MANIFEST,
    STATES,
    CountingEngine,
    flip,
    link_into_cache,
    make_repository,
    manifest_of,
    object_of,
    replace,
)

from eyas import fs
from eyas.canonical import digest
from eyas.errors import EyasError, StoreError
from eyas.ops.repair import repair
from eyas.ops.verify_journal import Journal
from eyas.ops.verify_states import verify_states
from eyas.shards.consistency import INCOHERENT
from eyas.shards.format import block_name
from eyas.shards.opening import open_entry
from eyas.shards.verify import Finding


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


def tree(root: Path) -> str:
    return digest([*fs.tree_digests(root / STATES), fs.file_digest(root / MANIFEST, root)])


def place_of(root: Path, shard: int, index: int, kind: str) -> tuple[Path, int, str]:
    """Path, file offset inside a block, and the block's sample."""
    manifest = manifest_of(root)
    entry = manifest.shards[shard]
    header = open_entry(root / STATES, entry, manifest)
    block = header.blocks[block_name(index, kind)]
    return (
        root / STATES / entry.path,
        header.data_start + (block.begin + block.end) // 2,
        header.samples[index].sample_id,
    )


def inodes(root: Path) -> dict[str, int]:
    return {entry.path: (root / STATES / entry.path).stat().st_ino for entry in manifest_of(root).shards}


@pytest.mark.parametrize("codec", ["raw", "blosc2", "int8"])
@pytest.mark.parametrize("last_rows", ["all", "trained"])
def test_only_the_batch_of_a_damaged_sample_is_captured_again(tmp_path: Path, codec: str, last_rows: str) -> None:
    """Case 29: one flipped bit; the repaired set is that of an undamaged run, to the last byte."""
    root = make_repository(tmp_path, codec=codec, last_rows=last_rows)
    whole, before = tree(root), inodes(root)
    path, offset, sample_id = place_of(root, 1, 2, "aux")
    flip(path, offset)
    report = verify_states(root)
    assert {f.sample_id for f in report.findings} == {"", sample_id}
    engine = CountingEngine()
    (done,) = repair(root, engine)
    assert (done.how, done.num_captured_samples, done.is_same) == ("captured again", 1, True)
    assert [sample_id in batch for batch in engine.batches] == [True]
    assert len(engine.batches[0]) > 1, "the batch runs in its planned composition"
    assert tree(root) == whole
    touched = {entry for entry, inode in inodes(root).items() if before[entry] != inode}
    assert touched == {done.shard}
    assert verify_states(root).findings == ()
    assert repair(root, engine) == []
    assert engine.num_opened == 1


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_an_unreadable_header_costs_the_whole_shard_and_no_more(tmp_path: Path, codec: str) -> None:
    root = make_repository(tmp_path, codec=codec)
    whole = tree(root)
    entry = manifest_of(root).shards[0]
    flip(root / STATES / entry.path, 40)
    engine = CountingEngine()
    (done,) = repair(root, engine)
    assert (done.shard, done.num_captured_samples) == (entry.path, entry.num_samples)
    assert tree(root) == whole


def test_missing_cut_and_empty_shards_come_back(root: Path) -> None:
    """Case 28: a shard cut in half, one of 0 bytes, one that is not there."""
    whole = tree(root)
    paths = [root / STATES / entry.path for entry in manifest_of(root).shards]
    assert len(paths) >= 3
    replace(paths[0], paths[0].read_bytes()[: paths[0].stat().st_size // 2])
    replace(paths[1], b"")
    paths[2].unlink()
    assert [done.how for done in repair(root, CountingEngine())] == ["captured again"] * 3
    assert tree(root) == whole


def test_shards_that_changed_places_are_moved_back_without_an_engine(root: Path) -> None:
    whole = tree(root)
    first, second = (root / STATES / entry.path for entry in manifest_of(root).shards[:2])
    spare = root / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    engine = CountingEngine()
    assert [done.how for done in repair(root, engine)] == ["moved back", "moved back"]
    assert engine.num_opened == 0
    assert tree(root) == whole


def test_a_foreign_shard_is_replaced_and_kept_aside(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Case 35: a shard of another capture under our name."""
    other = make_repository(tmp_path_factory.mktemp("other"), last_rows="trained")
    whole, entry = tree(root), manifest_of(root).shards[0]
    foreign = (other / STATES / entry.path).read_bytes()
    replace(root / STATES / entry.path, foreign)
    (done,) = repair(root, CountingEngine())
    assert done.is_same
    assert tree(root) == whole
    (aside,) = (root / ".eyas/foreign" / manifest_of(other).identity).rglob("*.safetensors")
    assert aside.read_bytes() == foreign


def test_both_names_of_a_hard_linked_object_are_mended(root: Path) -> None:
    """Case 85: the cache's object is the workspace's inode, mode 0444, so it is damaged with it."""
    link_into_cache(root)
    entry = manifest_of(root).shards[1]
    path, offset, _ = place_of(root, 1, 0, "last")
    flip(path, offset)
    cached = object_of(root, entry.md5)
    assert fs.hash_file(cached, "md5") != entry.md5
    (done,) = repair(root, CountingEngine())
    assert done.how == "captured again"
    assert path.samefile(cached)
    assert fs.hash_file(cached, "md5") == entry.md5
    assert path.stat().st_mode & 0o777 == 0o444
    assert not list(root.rglob("*.part"))


def test_an_intact_object_under_another_inode_is_linked_and_no_engine_is_opened(root: Path) -> None:
    link_into_cache(root)
    entry = manifest_of(root).shards[1]
    path, cached = root / STATES / entry.path, object_of(root, entry.md5)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.unlink()
    path.write_bytes(damaged)
    engine = CountingEngine()
    assert [done.how for done in repair(root, engine)] == ["from the cache"]
    assert path.samefile(cached)
    assert engine.num_opened == 0


def test_a_damaged_object_does_not_restore_anything(root: Path) -> None:
    """Case 85: workspace and object damaged apart from each other."""
    link_into_cache(root)
    whole, entry = tree(root), manifest_of(root).shards[1]
    path, cached = root / STATES / entry.path, object_of(root, entry.md5)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + b"?")
    flip(cached, len(content) // 2)
    assert [done.how for done in repair(root, CountingEngine())] == ["captured again"]
    assert path.samefile(cached)
    assert tree(root) == whole


def test_other_bytes_of_an_engine_that_promises_equal_ones_are_refused(root: Path) -> None:
    path, offset, _ = place_of(root, 0, 0, "last")
    flip(path, offset)
    damaged = tree(root)
    with pytest.raises(StoreError, match="promises equal bytes; the damaged file is still in place"):
        repair(root, CountingEngine(change=True))
    assert tree(root) == damaged
    (done,) = repair(root, CountingEngine())
    assert done.is_same


def test_other_bytes_of_an_engine_without_the_promise_are_recorded(tmp_path: Path) -> None:
    root = make_repository(tmp_path, engine=CountingEngine(deterministic=False))
    before = manifest_of(root)
    path, offset, _ = place_of(root, 0, 0, "last")
    flip(path, offset)
    (done,) = repair(root, CountingEngine(deterministic=False, change=True))
    after = manifest_of(root)
    assert not done.is_same
    assert after.shards[0].md5 == done.md5 != before.shards[0].md5
    assert after.shards[1:] == before.shards[1:]
    assert verify_states(root).findings == ()


def test_states_that_were_wrong_when_they_were_written_are_replaced(tmp_path: Path) -> None:
    """The manifest records the wrong bytes, so their hash is no aim."""

    class Broken(CountingEngine):
        def capture(self, batch):
            for captured in super().capture(batch):
                captured.aux_TAD[3] = 7
                yield captured

    whole = tree(make_repository(tmp_path / "whole"))
    root = make_repository(tmp_path / "broken", engine=Broken())
    manifest = manifest_of(root)
    findings = [
        Finding(shard=entry.path, sample_id=sample.sample_id, problem=INCOHERENT)
        for entry in manifest.shards
        for sample in open_entry(root / STATES, entry, manifest).samples
    ]
    Journal(root, manifest.identity).keep(findings)
    assert not any(done.is_same for done in repair(root, CountingEngine()))
    assert tree(root) == whole


def test_an_interrupted_repair_is_run_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tree(root)
    for shard in (0, 2):
        path, offset, _ = place_of(root, shard, 0, "aux")
        flip(path, offset)
    replaced = os.replace
    calls = []

    def die(source, target):
        if str(target).endswith(manifest_of(root).shards[2].path) and "repair" in str(source):
            calls.append(target)
            if len(calls) == 2:  # the first is the staged file's own rename
                raise KeyboardInterrupt
        return replaced(source, target)

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        repair(root, CountingEngine())
    monkeypatch.undo()
    assert [(done.how, done.is_same) for done in repair(root, CountingEngine())] == [
        ("whole", True),
        ("captured again", True),
    ]
    assert tree(root) == whole
    assert not (root / ".eyas/repair" / manifest_of(root).identity).exists()


def test_an_extraction_that_runs_keeps_repair_out(root: Path) -> None:
    with fs.volume_lock(root / ".eyas/extract.lock", "extract"), pytest.raises(EyasError, match="is locked by extract"):
        repair(root, CountingEngine())


def test_a_plan_of_another_capture_is_refused(root: Path) -> None:
    plan = root / "data/plan.json"
    plan.unlink()
    path, offset, _ = place_of(root, 0, 0, "aux")
    flip(path, offset)
    with pytest.raises(StoreError, match="is not the plan of the states"):
        repair(root, CountingEngine())


def test_another_engine_version_is_refused_before_it_loads(root: Path) -> None:
    path, offset, _ = place_of(root, 0, 0, "aux")
    flip(path, offset)
    engine = CountingEngine()
    facts = dataclasses.replace(engine.describe(), version="2")
    engine.describe = lambda: facts
    with pytest.raises(StoreError, match="the engine here is fake 2, the states are of fake 1"):
        repair(root, engine)
    assert engine.num_opened == 0


@pytest.mark.slow
def test_dvc_sees_nothing_after_a_repair(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real DVC: committed by hard link, damaged in place, repaired: status is clean, the lock is as before."""
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(root / ".dvc-site"))
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")

    def dvc(*arguments: str) -> str:
        return subprocess.run(["dvc", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout

    dvc("init", "--no-scm", "-q")
    dvc("config", "cache.type", "hardlink")
    (root / "dvc.yaml").write_text(
        "stages:\n  extract:\n    cmd: 'true'\n    outs: [data/hidden_states, data/hidden_states.json]\n"
    )
    dvc("commit", "-f", "extract")
    lock = (root / "dvc.lock").read_text()
    entry = manifest_of(root).shards[1]
    path, offset, _ = place_of(root, 1, 1, "aux")
    assert path.samefile(object_of(root, entry.md5))
    flip(path, offset)
    (done,) = repair(root, CountingEngine())
    assert done.is_same
    assert path.samefile(object_of(root, entry.md5))
    assert "up to date" in dvc("status")
    dvc("commit", "-f", "extract")
    assert (root / "dvc.lock").read_text() == lock
    path.unlink()
    dvc("checkout", "--force")
    assert fs.hash_file(path, "md5") == entry.md5
    object_of(root, entry.md5).unlink()
    path.unlink()
    (done,) = repair(root, CountingEngine())
    assert done.is_same
    assert path.samefile(object_of(root, entry.md5)), "an object that DVC lists is put back"
    assert "up to date" in dvc("status")
