"""Resumption without reading: which files are known by their journal line, and what makes one be read through."""

import dataclasses
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from extract_cases import Case, EditedEngine, with_nan

from eyas import fs
from eyas.contracts import ShardManifest
from eyas.shards.verify import verify


def killed(case: Case) -> list[Path]:
    """A run that ends at its last sample; gives the files of its journaled shards."""
    count = itertools.count(1)

    def dies(answers):
        for captured in answers:
            if next(count) == len(case.tokens):
                raise ZeroDivisionError
            yield captured

    with pytest.raises(ZeroDivisionError):
        case.extract(EditedEngine(dies))
    files = [case.spool / "states" / line["shard"]["path"] for line in lines(case)]
    assert len(files) == len(case.plan.shards) - 1
    return files


def lines(case: Case) -> list[dict]:
    return [json.loads(line) for line in (case.spool / "journal.jsonl").read_text().splitlines()]


def write_lines(case: Case, edited: list[dict]) -> None:
    text = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in edited)
    (case.spool / "journal.jsonl").write_text(text)


def rot(path: Path) -> None:
    """A flipped bit that no time of the file tells of: what a disk does, not a program, whose time of change is noted here."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-40, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    journal = path.parents[2] / "journal.jsonl"
    noted, now = ([stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns] for stat in (before, after))
    journal.write_text(
        journal.read_text().replace(
            json.dumps(noted, separators=(",", ":"))[:-1], json.dumps(now, separators=(",", ":"))[:-1]
        )
    )


@pytest.fixture
def resumed(case, capsys):
    """Extract and say (number of shards that were read through, number taken over)."""

    def run(of: Case = case) -> tuple[int, int]:
        capsys.readouterr()
        result = of.extract()
        said = re.search(r"shards are there, ([\d,]+) of them read through", capsys.readouterr().err)
        return int(said[1]) if said else 0, result.num_resumed_shards

    return run


def test_a_file_that_was_written_is_not_read_again_and_what_rots_is_found_when_it_is_read(case, unbroken, resumed):
    files = killed(case)
    rot(files[2])
    assert resumed() == (0, len(files))
    findings = verify(case.out, fs.read_record(ShardManifest, case.manifest_path), case.tokens)
    assert {finding.shard for finding in findings} == {case.plan.shards[2].path}
    (case.out / case.plan.shards[2].path).unlink()
    case.extract()
    assert case.hashes() == unbroken


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("how", ["written into", "copied over with its times", "moved over", "deleted and restored"])
def test_any_other_file_is_read_through(case, unbroken, resumed, how, is_whole):
    files = killed(case)
    path, data, before = files[1], bytearray(files[1].read_bytes()), files[1].stat()
    if not is_whole:
        data[-40] ^= 1
    if how == "moved over":
        path.rename(case.root / "aside")  # the inode stays taken
    elif how == "deleted and restored":
        path.unlink()  # ext4 gives the inode to the next file
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(data)
    if how != "written into":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert resumed() == (int(is_whole), len(files) - (not is_whole))
    assert case.hashes() == unbroken


def test_a_spool_without_notes_is_read_through_once(tmp_path, resumed):
    """What an earlier eyas left."""
    (tmp_path / "run/.dvc").mkdir(parents=True)  # the spool stays after publication
    case = Case(tmp_path / "run")
    files = killed(case)
    write_lines(case, [{"shard": line["shard"], "xxh3": line["xxh3"]} for line in lines(case)])
    assert resumed(case) == (len(files), len(files))
    assert resumed(case) == (0, len(files) + 1)
    assert resumed(case) == (0, len(files) + 1)


@pytest.mark.parametrize("note", [None, "x", [1, 2], ["a", 2, 3, "", 4, 5], [1, 2, "", 4, 5], {"inode": 3}])
def test_a_damaged_note_is_none(case, unbroken, resumed, note):
    files = killed(case)
    edited = lines(case)
    edited[3]["file"] = note
    write_lines(case, edited)
    rot(files[3])
    assert resumed() == (0, len(files) - 1), "it was read through"
    assert case.hashes() == unbroken


def test_a_copy_of_the_spool_is_read_through_even_where_inodes_and_times_agree(case, tmp_path, unbroken, resumed):
    """A folder copied with its times to a fresh disk can meet the same inodes."""
    killed(case)
    copy = case.at(tmp_path / "copy")
    shutil.copytree(case.home, copy.home)
    edited = lines(copy)
    for line in edited:
        found = (copy.spool / "states" / line["shard"]["path"]).stat()
        line["file"][0], line["file"][2] = found.st_ino, found.st_ctime_ns
    write_lines(copy, edited)
    rot(copy.spool / "states" / edited[0]["shard"]["path"])
    assert resumed(copy) == (len(edited) - 1, len(edited) - 1)
    assert copy.hashes() == unbroken


def test_a_plan_that_wants_other_samples_in_a_shard_does_not_know_the_file(case, resumed, capsys):
    files = killed(case)
    first, *others = case.plan.shards
    assert len(first.samples) > 1
    turned = dataclasses.replace(first, batches=tuple(batch[::-1] for batch in first.batches[::-1]))
    case.plan = dataclasses.replace(case.plan, shards=(turned, *others))
    capsys.readouterr()
    result = case.extract()
    assert result.num_resumed_shards == len(files) - 1
    assert f"{first.path}: holds other samples than the plan" in capsys.readouterr().err
    assert verify(case.out, result.manifest, case.tokens) == []


def test_failed_samples_belong_to_what_is_known(case, resumed):
    """A line with another list of failed samples than the file it was written for is not believed."""
    files = killed(case)
    edited = lines(case)
    assert all(line["file"][3] for line in edited)
    assert len({line["file"][3] for line in edited}) == len(files), "each shard has samples of its own"
    edited[0]["file"], edited[1]["file"] = edited[1]["file"], edited[0]["file"]
    write_lines(case, edited)
    assert resumed() == (2, len(files))


def test_a_published_set_is_taken_back_without_reading_while_the_spool_knows_its_files(tmp_path, resumed):
    """DVC's outputs are links to the spool's files: another number of names, another time of change, the same file."""
    (tmp_path / "run/.dvc").mkdir(parents=True)
    case = Case(tmp_path / "run")
    case.extract()
    hashes, num_shards = case.hashes(), len(case.plan.shards)
    assert resumed(case) == (0, num_shards)
    for path in case.out.rglob("*.safetensors"):
        path.chmod(0o444)  # as DVC protects what its cache links
    assert resumed(case) == (0, num_shards)
    shutil.rmtree(case.out)
    case.manifest_path.unlink()
    assert resumed(case) == (0, num_shards)
    shutil.rmtree(case.spool)  # settled: nobody here knows the files, so they are read, once
    assert resumed(case) == (num_shards, num_shards)
    assert resumed(case) == (0, num_shards)
    assert case.hashes() == hashes


def test_lines_are_those_that_earlier_readers_know(case):
    killed(case)
    [line, *_] = lines(case)
    assert set(line) == {"shard", "xxh3", "file"}
    assert set(line["shard"]) == {"path", "entry", "failed"}


def test_links_that_lead_nowhere_are_no_shards(case, unbroken, tmp_path):
    """What a symlinking cache leaves in the output when its objects are gone."""
    case.extract()
    path = case.out / case.plan.shards[1].path
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    case.extract()
    assert case.hashes() == unbroken


def test_a_link_that_leads_nowhere_in_the_spool_costs_no_state_that_lies_in_the_output(tmp_path, unbroken):
    (tmp_path / "run/.dvc").mkdir(parents=True)
    case = Case(tmp_path / "run")
    case.extract()
    path = case.spool / "states" / case.plan.shards[1].path
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    engine = EditedEngine()
    case.extract(engine)
    assert engine.asked == []
    assert case.hashes() == unbroken


def test_a_shard_whose_samples_all_fail_when_it_is_made_again_leaves_no_file(case):
    """Its earlier file, of a time when one of them had been captured, would be published beside those of the manifest."""
    ids = [[sample.sample_id for sample in shard.samples] for shard in case.plan.shards]
    pair = next(shard for shard in ids[:-1] if len(shard) == 2)
    single = [pair[0], *[shard[0] for shard in ids[:-1] if len(shard) > 1 and shard != pair][:2]]

    def dies(answers):
        for captured in answers:
            if captured.sample_id == ids[-1][-1]:
                raise ZeroDivisionError
            yield with_nan(captured) if captured.sample_id in single else captured

    def pair_fails(answers):
        return (with_nan(captured) if captured.sample_id in pair else captured for captured in answers)

    with pytest.raises(ZeroDivisionError):
        case.extract(EditedEngine(dies), max_failed=3)
    manifest = case.extract(EditedEngine(pair_fails), max_failed=2).manifest
    assert [sample.sample_id for sample in manifest.failed] == pair
    assert {path for path, _ in fs.walk_files(case.out)} == {entry.path for entry in manifest.shards}
    assert verify(case.out, manifest, case.tokens) == []
