"""``eyas repair`` and the channel scales of a lossy codec: whose they are, and what damage to them costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from repair_cases import (
    MANIFEST,
    STATES,
    CountingEngine,
    flip,
    make_repository,
    manifest_of,
    replace,
)

from eyas import fs
from eyas.canonical import digest
from eyas.errors import StoreError
from eyas.ops.repair import repair
from eyas.ops.verify_states import verify_states
from eyas.shards.calibration import Calibration, write_calibration
from eyas.shards.format import CALIBRATION, block_name
from eyas.shards.opening import open_entry
from eyas.shards.verify import set_scales


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


def flip_scales(root: Path, shard: int) -> str:
    """One bit of a shard's channel scales; gives the shard's path."""
    manifest = manifest_of(root)
    entry = manifest.shards[shard]
    header = open_entry(root / STATES, entry, manifest)
    flip(root / STATES / entry.path, header.data_start + header.blocks[CALIBRATION].begin + 9)
    return entry.path


@pytest.fixture
def lossy(tmp_path: Path) -> Path:
    return make_repository(tmp_path, codec="int8")


class LouderEngine(CountingEngine):
    """Aux states twice as large, so that other scales come out."""

    def capture(self, batch):
        for captured in super().capture(batch):
            yield dataclasses.replace(captured, aux_TAD=captured.aux_TAD * 2)


def test_damaged_scales_are_another_shard_s_and_nothing_is_captured(lossy: Path) -> None:
    """Case 29: the damage names its shard and no sample."""
    whole, path = tree(lossy), flip_scales(lossy, 1)
    assert {(f.shard, f.sample_id) for f in verify_states(lossy).findings} == {(path, "")}
    engine = CountingEngine()
    (done,) = repair(lossy, engine)
    assert (done.shard, done.how, done.num_captured_samples, done.is_same) == (path, "written again", 0, True)
    assert engine.num_opened == 0
    assert tree(lossy) == whole


def test_damaged_scales_and_a_damaged_sample_cost_its_batch_alone(lossy: Path) -> None:
    whole, path = tree(lossy), flip_scales(lossy, 1)
    _, offset, sample_id = place_of(lossy, 1, 2, "last")
    flip(lossy / STATES / path, offset)
    assert {f.sample_id for f in verify_states(lossy).findings} == {"", sample_id}
    engine = CountingEngine()
    (done,) = repair(lossy, engine)
    assert (done.num_captured_samples, len(engine.batches)) == (1, 1)
    assert tree(lossy) == whole


def test_scales_that_no_shard_has_whole_are_calibrated_again(lossy: Path) -> None:
    whole = tree(lossy)
    paths = [flip_scales(lossy, shard) for shard in range(len(manifest_of(lossy).shards))]
    engine = CountingEngine()
    assert [(done.shard, done.how) for done in repair(lossy, engine)] == [(path, "written again") for path in paths]
    assert {len(batch) for batch in engine.batches} == {1}, "the slice, sample by sample, and once"
    assert len(set(engine.batches)) == len(engine.batches)
    assert tree(lossy) == whole


def test_scales_that_come_out_otherwise_are_refused(lossy: Path) -> None:
    for shard in range(len(manifest_of(lossy).shards)):
        flip_scales(lossy, shard)
    damaged = tree(lossy)
    with pytest.raises(StoreError, match=f"the manifest says {manifest_of(lossy).calibration}; the damaged files are"):
        repair(lossy, LouderEngine())
    assert tree(lossy) == damaged


def test_scales_left_in_the_spool_are_taken_when_they_are_the_set_s(lossy: Path) -> None:
    whole, manifest = tree(lossy), manifest_of(lossy)
    scales_ND = set_scales(lossy / STATES, manifest)
    assert scales_ND is not None
    kept = lossy / ".eyas/spool" / manifest.identity / "calibration.safetensors"
    for factor, num_opened in ((1, 0), (2, 1)):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_calibration(kept, Calibration(scales_ND * factor), manifest.identity)
        for shard in range(len(manifest.shards)):
            flip_scales(lossy, shard)
        engine = CountingEngine()
        repair(lossy, engine)
        assert engine.num_opened == num_opened
        assert tree(lossy) == whole


def test_a_shard_of_other_scales_is_captured_again(lossy: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A whole shard, recorded with its own hash, whose states are coded with scales that are not the set's."""

    whole, manifest = tree(lossy), manifest_of(lossy)
    other = make_repository(tmp_path_factory.mktemp("other"), codec="int8", engine=LouderEngine())
    entry = manifest_of(other).shards[0]
    replace(lossy / STATES / entry.path, (other / STATES / entry.path).read_bytes())
    fs.write_record(lossy / MANIFEST, dataclasses.replace(manifest, shards=(entry, *manifest.shards[1:])))
    findings = [f for f in verify_states(lossy).findings if f.shard == entry.path]
    assert {f.sample_id for f in findings} == {""}
    assert any(manifest.calibration in f.problem and manifest_of(other).calibration in f.problem for f in findings)
    (done,) = repair(lossy, CountingEngine())
    assert (done.how, done.num_captured_samples) == ("captured again", entry.num_samples)
    assert tree(lossy) == whole
