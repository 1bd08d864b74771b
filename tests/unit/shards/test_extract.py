"""The extraction loop: what it publishes, what it refuses, how it fails."""

import dataclasses
import hashlib
import itertools
import json
import random

import pytest
import torch
from extract_cases import HIDDEN_SIZE, Case, EditedEngine, fake_engine, with_nan

from eyas import fs
from eyas.contracts import ShardManifest
from eyas.errors import CaptureError, StoreError
from eyas.shards import writer
from eyas.shards.opening import read_header
from eyas.shards.reader import ShardReader
from eyas.shards.spool import Spool
from eyas.shards.verify import verify


def drop(case, num_lines):
    """Undo publication, and forget shards: a run that was killed before these journal lines."""
    spool = case.spool
    spool.mkdir(parents=True)
    manifest = fs.read_record(ShardManifest, case.manifest_path)
    case.manifest_path.unlink()
    case.out.rename(spool / "states")
    journal = Spool(case.home, case.plan.capture)
    for entry in manifest.shards[: len(manifest.shards) - num_lines]:
        journal.append(writer.FinishedShard(path=entry.path, entry=entry))


def test_a_whole_run_publishes_what_the_engine_gave(case):
    """Case 38: folders are made. Case 59: the account closes."""
    result = case.extract()
    manifest = fs.read_record(ShardManifest, case.manifest_path)
    assert manifest == result.manifest
    assert len(manifest.shards) == len(case.plan.shards) > 8
    assert manifest.num_stored_samples == manifest.num_planned_samples == 40
    assert manifest.num_stored_tokens == result.num_tokens == sum(len(s.input_ids) for s in case.tokens.values())
    assert verify(case.out, manifest, case.tokens) == []
    reader = ShardReader(case.out, manifest)
    for captured in fake_engine().capture(list(case.tokens.values())):
        stored = reader.read(captured.sample_id)
        assert torch.equal(stored.aux_TAD, captured.aux_TAD)
        assert torch.equal(stored.last_TD, captured.last_TD)
        assert stored.loss_mask_T.tolist() == list(case.tokens[captured.sample_id].loss_mask)
    assert not case.spool.exists()
    assert (manifest.num_stored_tokens * 4 * HIDDEN_SIZE * 2) == case.plan.payload_bytes < manifest.stored_bytes


def test_bytes_do_not_depend_on_the_order_in_which_the_engine_answers(case, unbroken):
    """Cases 34, 46."""

    def shuffled(answers):
        answers = list(answers)
        random.Random(5).shuffle(answers)
        yield from answers

    case.extract(EditedEngine(shuffled))
    assert case.hashes() == unbroken


def test_a_run_begun_with_one_thread_ends_with_four_in_the_same_bytes(tmp_path, monkeypatch):
    """Case 34: the number of workers may change in mid-run."""
    whole, case = (Case(tmp_path / name, codec="blosc2") for name in ("whole", "run"))
    monkeypatch.setenv("EYAS_ENCODE_THREADS", "1")
    whole.extract()
    count = itertools.count()

    def stops(answers):
        for captured in answers:
            if next(count) == 25:
                raise ZeroDivisionError
            yield captured

    with pytest.raises(ZeroDivisionError):
        case.extract(EditedEngine(stops))
    monkeypatch.setenv("EYAS_ENCODE_THREADS", "4")
    assert 0 < case.extract().num_resumed_shards < len(case.plan.shards)
    assert case.hashes() == whole.hashes()


def test_nobody_sees_a_shard_in_the_making(tmp_path, monkeypatch):
    """Case 37: while a shard is written, what lies under a shard's name is whole, and nothing is published."""
    case, md5, seen = Case(tmp_path, num_samples=12), hashlib.md5, []

    class Watching:
        """The md5 that runs beside the writing; looks around before its first piece."""

        def __init__(self, **options):
            self.real = md5(**options)
            self.update, self.hexdigest = self.real.update, self.real.hexdigest
            assert list(case.spool.rglob("*.part"))
            assert not case.out.exists()
            assert not case.manifest_path.exists()
            shards = list(case.root.rglob("*.safetensors"))
            for path in shards:
                read_header(path, path.name)
            seen.append(len(shards))

    monkeypatch.setattr(writer.hashlib, "md5", Watching)
    case.extract()
    assert set(seen) == set(range(len(case.plan.shards)))


def test_half_empty_and_unlisted_shards_are_captured_again_and_no_others(case, unbroken):
    """Case 28: resume after a crash that left damage at final names."""
    case.extract()
    drop(case, num_lines=1)
    states = case.spool / "states"
    paths = [states / shard.path for shard in case.plan.shards]
    paths[0].write_bytes(paths[0].read_bytes()[:500])
    paths[1].write_bytes(b"")
    flipped = bytearray(paths[2].read_bytes())
    flipped[-40] ^= 1
    paths[2].write_bytes(flipped)
    paths[3].unlink()
    (states / "000/shard-00004.safetensors.part").write_bytes(b"half")
    inodes = {path: path.stat().st_ino for path in paths[4:-1]}
    engine = EditedEngine()
    result = case.extract(engine)
    redone = [case.plan.shards[i] for i in (0, 1, 2, 3, -1)]
    assert set(sum(engine.asked, ())) == {s.sample_id for shard in redone for s in shard.samples}
    assert result.num_resumed_shards == len(paths) - 5
    assert {p: (case.out / p.relative_to(states)).stat().st_ino for p in inodes} == inodes
    assert case.hashes() == unbroken


@pytest.mark.parametrize("damage", ["torn", "flipped", "garbage between"])
def test_a_damaged_journal_line_counts_as_not_written(case, unbroken, damage):
    case.extract()
    drop(case, num_lines=0)
    journal = case.spool / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    if damage == "torn":
        lines[-1] = lines[-1][:-1]
    elif damage == "flipped":
        at = lines[-1].index(b'"md5":"') + 8
        lines[-1] = lines[-1][:at] + bytes([lines[-1][at] ^ 1]) + lines[-1][at + 1 :]
    else:
        lines[1] = b"\0\xff{[\n"
    journal.write_bytes(b"".join(lines))
    assert case.extract().num_resumed_shards == len(lines) - 1
    assert case.hashes() == unbroken


def test_a_finished_set_is_taken_back_verified_and_published_again(case, unbroken):
    """Case 39: idempotent; the engine is not even opened."""
    case.extract()
    engine = EditedEngine()
    assert case.extract(engine).num_tokens == 0
    assert (engine.num_opened, engine.asked) == (0, [])
    assert case.hashes() == unbroken
    path = case.out / case.plan.shards[1].path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    case.extract(engine)
    assert len(engine.asked) == len(case.plan.shards[1].batches)
    assert case.hashes() == unbroken


def test_a_wiped_output_is_captured_again(case, unbroken):
    """The outputs are deleted before a stage runs; stale spool lines must not count as states."""
    case.extract()
    drop(case, num_lines=0)
    (case.spool / "states").rename(case.root / "gone")
    assert case.extract().num_resumed_shards == 0
    assert case.hashes() == unbroken


def test_files_of_another_capture_are_refused_with_both_identities(case, tmp_path):
    """Cases 35, 36: other tokens or another revision, same sizes."""
    case.extract()
    drop(case, num_lines=1)
    other = Case(tmp_path / "other", revision=2)
    other.extract()
    target = case.spool / "states" / case.plan.shards[1].path
    target.write_bytes((other.out / case.plan.shards[1].path).read_bytes())
    with pytest.raises(StoreError) as caught:
        case.extract()
    assert case.plan.identity in caught.value.message
    assert other.plan.identity in caught.value.message
    assert not case.out.exists()


def test_published_states_of_another_capture_are_refused_and_left_alone(case, tmp_path):
    """Case 35: a changed parameter never mixes into a kept folder."""
    case.extract()
    before = case.hashes()
    other = Case(case.root, revision=2)
    for manifest_there in (True, False):
        engine = EditedEngine()
        if not manifest_there:
            case.manifest_path.rename(tmp_path / "manifest.json")
        with pytest.raises(StoreError) as caught:
            other.extract(engine)
        assert case.plan.identity in caught.value.message
        assert other.plan.identity in caught.value.message
        assert engine.num_opened == 0
    (tmp_path / "manifest.json").rename(case.manifest_path)
    assert case.hashes() == before


def test_a_manifest_of_another_capture_without_its_states_is_refused(case):
    """Case 35: it is the only record of what DVC's cache may hold."""
    case.extract()
    case.out.rename(case.root / "elsewhere")
    before = case.manifest_path.read_bytes()
    with pytest.raises(StoreError, match=case.plan.identity):
        Case(case.root, revision=2).extract()
    assert case.manifest_path.read_bytes() == before


def test_a_shard_that_the_plan_does_not_name_is_refused(case):
    """Case 42: an eleventh file in a kept folder of ten."""
    case.extract()
    drop(case, num_lines=1)
    extra = case.spool / "states/000/shard-00099.safetensors"
    extra.write_bytes((case.spool / "states" / case.plan.shards[0].path).read_bytes())
    with pytest.raises(StoreError, match=r"shard-00099\.safetensors is not in the plan"):
        case.extract()
    assert extra.exists()


def test_spools_of_other_captures_are_listed_with_their_size_and_kept(case, capsys):
    left = case.home / "spool" / ("f" * 64)
    left.mkdir(parents=True)
    (left / "shard").write_bytes(bytes(2_500_000))
    case.extract()
    assert f"{'f' * 64} is left of another capture: 2.5 MB" in capsys.readouterr().err
    assert (left / "shard").stat().st_size == 2_500_000


def test_states_in_both_places_are_refused(case):
    case.extract()
    states = case.spool / "states/000"
    states.mkdir(parents=True)
    (states / "shard-00000.safetensors").write_bytes(b"something")
    with pytest.raises(StoreError, match="both"):
        case.extract()


def test_tokens_that_are_not_the_plan_s_are_refused(case):
    """Case 36: the plan's samples are not in the dataset, or have other lengths."""
    sample_id = next(iter(case.tokens))
    sample = case.tokens.pop(sample_id)
    with pytest.raises(StoreError, match=f"{sample_id}.*not in the token dataset"):
        case.extract()
    case.tokens[sample_id] = dataclasses.replace(sample, input_ids=(*sample.input_ids, 1))
    with pytest.raises(StoreError, match=f"{sample_id}.*{len(sample.input_ids) + 1} tokens there"):
        case.extract()


def test_another_engine_version_is_refused_before_it_opens(case):
    engine = EditedEngine()
    capture = dataclasses.replace(case.plan.capture, engine_version="0.0")
    case.plan = dataclasses.replace(case.plan, capture=capture, identity=capture.digest)
    with pytest.raises(StoreError, match=r"fake 0\.0"):
        case.extract(engine)
    assert engine.num_opened == 0


# ── failed samples ────────────────────────────────────────────────────────────────────────────


def always(bad, change):
    def edit(answers):
        for captured in answers:
            yield from change(captured) if captured.sample_id == bad else (captured,)

    return edit


FAULTS = {
    "nan": lambda captured: [with_nan(captured)],
    "absent": lambda _: [],
    "short": lambda c: [dataclasses.replace(c, aux_TAD=c.aux_TAD[:-1])],
    "one stream less": lambda c: [dataclasses.replace(c, aux_TAD=c.aux_TAD[:, :-1])],
    "zero": lambda c: [dataclasses.replace(c, last_TD=torch.zeros_like(c.last_TD))],
    "other ids": lambda c: [dataclasses.replace(c, input_ids_T=c.input_ids_T + 1)],
    "foreign": lambda c: [dataclasses.replace(c, sample_id="0" * 16)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_fails_twice_is_listed_within_the_limit(case, unbroken, fault):
    """Cases 30, 31, 32, 33, 59: never a row of zeros, never in silence, never another sample's rows."""
    batch = next(batch for shard in case.plan.shards for batch in shard.batches if len(batch) > 2)
    bad = batch[1].sample_id  # others come before and after it
    engine = EditedEngine(always(bad, FAULTS[fault]))
    result = case.extract(engine, max_failed=1)
    assert engine.asked.count((bad,)) >= 1
    [failed] = result.manifest.failed
    assert failed.sample_id == bad
    assert bad in failed.reason
    assert result.manifest.num_stored_samples + 1 == result.manifest.num_planned_samples == 40
    assert result.num_tokens + failed.num_tokens == case.plan.num_tokens
    reader = ShardReader(case.out, result.manifest)
    assert bad not in {sample.sample_id for sample in reader.samples}
    for captured in fake_engine().capture([s for s in case.tokens.values() if s.sample_id != bad]):
        stored = reader.read(captured.sample_id)
        assert torch.equal(stored.input_ids_T, captured.input_ids_T)
        assert torch.equal(stored.aux_TAD, captured.aux_TAD), "rows of another sample or shifted"
        assert torch.equal(stored.last_TD, captured.last_TD), "rows of another sample or shifted"
    assert case.extract(max_failed=1).manifest == result.manifest  # by hand again: failures are kept
    assert case.extract(max_failed=0).manifest.failed == ()  # a lower limit captures them again
    assert case.hashes() == unbroken


def test_more_failures_than_allowed_end_the_run_with_the_reason(case, unbroken):
    """Case 30: exit code 2, nothing published, finished shards kept."""
    bad = case.plan.shards[2].samples[1].sample_id
    with pytest.raises(CaptureError, match=f"1 samples failed, extract.max_failed_samples allows 0(.|\n)*{bad}"):
        case.extract(EditedEngine(always(bad, FAULTS["nan"])))
    assert not case.out.exists()
    assert not case.manifest_path.exists()
    assert case.extract().num_resumed_shards == 2
    assert case.hashes() == unbroken


def test_a_sample_that_fails_once_is_captured_alone(case, unbroken):
    bad = case.plan.shards[2].samples[1].sample_id
    seen = []

    def once(answers):
        for captured in answers:
            seen.append(captured.sample_id)
            yield with_nan(captured) if captured.sample_id == bad and seen.count(bad) == 1 else captured

    engine = EditedEngine(once)
    assert case.extract(engine).manifest.failed == ()
    assert (bad,) in engine.asked
    assert case.hashes() == unbroken


def test_an_engine_error_in_mid_batch_costs_no_sample(case, unbroken):
    def breaks_once(answers):
        for i, captured in enumerate(answers):
            if i == 1 and len(engine.asked) == 3:
                raise CaptureError(f"sample {captured.sample_id}: the connection was lost")
            yield captured

    engine = EditedEngine(breaks_once)
    case.extract(engine)
    assert case.hashes() == unbroken


def test_a_reason_that_names_its_sample_names_it_once(case):
    bad = case.plan.shards[1].samples[0].sample_id

    def refuses(answers):
        for captured in answers:
            if captured.sample_id == bad:
                raise CaptureError(f"sample {bad}: the server refused it")
            yield captured

    failed = case.extract(EditedEngine(refuses), max_failed=1).manifest.failed
    assert [sample.reason for sample in failed] == [f"sample {bad}: the server refused it"]


def test_nothing_stored_is_an_error(case):
    """Case 38: 0 written is an error, nothing is published."""
    with pytest.raises(CaptureError, match="none of 40 planned samples is stored"):
        case.extract(EditedEngine(lambda answers: (with_nan(c) for c in answers)), max_failed=40)
    assert not case.manifest_path.exists()


def test_an_engine_fault_that_is_no_capture_error_is_not_hidden(case):
    def breaks(answers):
        yield next(answers)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        case.extract(EditedEngine(breaks))
    assert not case.out.exists()


def test_the_manifest_is_canonical_and_holds_no_path_of_this_machine(case):
    case.extract()
    text = case.manifest_path.read_text()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    assert str(case.root) not in text
