"""Repair beside damaged notes, edited manifests, unreadable sectors and a full disk: refused or mended, never a crash."""

import dataclasses
import errno
import os
import shutil
from pathlib import Path

import pytest
from repair_cases import (
    LIMITS,
    MANIFEST,
    STATES,
    CountingEngine,
    flip,
    link_into_cache,
    make_repository,
    manifest_of,
    object_of,
)

from eyas import fs
from eyas.contracts import CapturePlan
from eyas.engines.loop import extract
from eyas.errors import DiskError, StoreError
from eyas.ops.repair import repair
from eyas.ops.verify_states import verify_states
from eyas.tokens.dataset import iter_tokens, write_tokens


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "repository"))


def damage(root: Path) -> tuple[Path, bytes]:
    """The first shard with a flipped bit in its middle, and its right bytes."""
    entry = manifest_of(root).shards[0]
    path = root / STATES / entry.path
    data = path.read_bytes()
    flip(path, entry.size_bytes // 2)
    return path, data


@pytest.mark.parametrize("text", ['[{"shard":1}]', "[1]", "null", '{"a":1}', "garbage", "[{"])
def test_damaged_findings_count_as_none(root: Path, text: str) -> None:
    path, data = damage(root)
    assert verify_states(root).findings
    next((root / ".eyas/verify").glob("*.findings.json")).write_text(text)
    assert [repaired.is_same for repaired in repair(root, CountingEngine())] == [True]
    assert path.read_bytes() == data


@pytest.mark.parametrize("text", ["stages: 3", "stages: {extract: 1}", "stages: {extract: {outs: [1, {md5: a}]}}"])
def test_an_odd_lock_does_not_stop_a_repair(root: Path, text: str) -> None:
    path, data = damage(root)
    (root / "dvc.lock").write_text(text)
    assert [repaired.is_same for repaired in repair(root, CountingEngine())] == [True]
    assert path.read_bytes() == data


@pytest.mark.parametrize("text", ["", "{}", "[1]", "garbage"])
def test_a_damaged_listing_in_the_cache_does_not_stop_a_repair(root: Path, text: str) -> None:
    path, data = damage(root)
    md5 = f"{'ab' * 16}.dir"
    (root / "dvc.lock").write_text(f"stages: {{extract: {{outs: [{{path: {STATES}, md5: {md5}}}]}}}}")
    listing = object_of(root, md5)
    listing.parent.mkdir(parents=True)
    listing.write_text(text)
    assert [repaired.is_same for repaired in repair(root, CountingEngine())] == [True]
    assert path.read_bytes() == data


def test_a_lock_that_is_no_yaml_is_refused(root: Path) -> None:
    damage(root)
    (root / "dvc.lock").write_text(": : [")
    with pytest.raises(StoreError, match="no YAML"):
        repair(root, CountingEngine())


def test_a_manifest_cannot_lead_a_repair_out_of_the_states_folder(root: Path) -> None:
    link_into_cache(root)
    edit(root, path="../../outside")
    with pytest.raises(StoreError, match="as a shard's path"):
        repair(root, CountingEngine())
    assert not (root / "outside").exists()


def test_a_shard_that_the_plan_does_not_name_is_refused(root: Path) -> None:
    edit(root, path="000/shard-00077.safetensors")
    with pytest.raises(StoreError, match="not in the plan of the same states"):
        repair(root, CountingEngine())


def edit(root: Path, **changes: object) -> None:
    manifest = manifest_of(root)
    shards = (*manifest.shards[:-1], dataclasses.replace(manifest.shards[-1], **changes))
    fs.write_record(root / MANIFEST, dataclasses.replace(manifest, shards=shards))


def test_tokens_without_a_planned_sample_are_refused(root: Path) -> None:
    samples = list(iter_tokens(root / "data/tokens"))
    damage(root)
    shutil.rmtree(root / "data/tokens")
    write_tokens(root / "data/tokens", samples[:-2])
    with pytest.raises(StoreError, match="not in the token dataset"):
        repair(root, CountingEngine())


def test_a_shard_on_a_bad_sector_is_written_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of one byte end with EIO; one batch is captured, and the file lies elsewhere then."""
    entry = manifest_of(root).shards[0]
    path = root / STATES / entry.path
    inode, bad, data, read, hashed = (
        path.stat().st_ino,
        entry.size_bytes // 2,
        path.read_bytes(),
        os.preadv,
        fs.hash_file,
    )

    def preadv(fd, buffers, offset):
        if os.fstat(fd).st_ino == inode and offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    def hash_file(path, algorithm="sha256"):
        if path.stat().st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return hashed(path, algorithm)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(fs, "hash_file", hash_file)
    engine = CountingEngine()
    (repaired,) = repair(root, engine)
    assert (repaired.how, repaired.is_same, len(engine.batches)) == ("captured again", True, 1)
    assert path.read_bytes() == data
    assert verify_states(root).findings == ()


def test_a_full_disk_leaves_no_part_of_a_copy_among_the_states(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache copies, a shard is restored by a copy; half of one would be a stranger to guard and verify."""
    link_into_cache(root)
    (root / ".dvc/config").write_text("[cache]\n    type = copy\n")
    entry = manifest_of(root).shards[0]
    path = root / STATES / entry.path
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:100])
    real = shutil.copy2

    def full(source, target):
        Path(target).write_bytes(data[:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(DiskError, match="disk full"):
        repair(root, CountingEngine())
    assert not list(root.rglob("*.part"))
    monkeypatch.setattr(shutil, "copy2", real)
    assert [repaired.how for repaired in repair(root, CountingEngine())] == ["from the cache"]
    assert path.read_bytes() == data


@pytest.mark.parametrize("is_same", [True, False])
def test_what_was_repaired_is_what_a_rerun_publishes(tmp_path: Path, is_same: bool) -> None:
    """The spool that DVC does not hold yet has the damaged file under a second name, and knows that by its ``stat``.

    An engine that promises no equal bytes may have given others.
    """
    (tmp_path / ".dvc").mkdir()
    root = make_repository(tmp_path, engine=CountingEngine(deterministic=is_same))
    undamaged, before = fs.tree_digests(root / STATES), (root / STATES / manifest_of(root).shards[0].path).stat()
    path, _ = damage(root)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk's fault, of which no time tells
    assert [r.how for r in repair(root, CountingEngine(deterministic=is_same, change=not is_same))] == [
        "captured again"
    ]
    whole, manifest = fs.tree_digests(root / STATES), (root / MANIFEST).read_bytes()
    assert (whole == undamaged) is is_same
    assert (root / ".eyas/spool" / manifest_of(root).identity / "manifest.json").read_bytes() == manifest
    shutil.rmtree(root / STATES)  # as DVC does before it runs the stage
    (root / MANIFEST).unlink()
    tokens = {sample.sample_id: sample for sample in iter_tokens(root / "data/tokens")}
    engine = CountingEngine(deterministic=is_same)
    places = {"out": root / STATES, "manifest_path": root / MANIFEST, "home": root / ".eyas"}
    extract(fs.read_record(CapturePlan, root / "data/plan.json"), tokens, engine, LIMITS, **places)
    assert fs.tree_digests(root / STATES) == whole
    assert (root / MANIFEST).read_bytes() == manifest
    assert engine.batches == []
