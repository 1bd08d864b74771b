"""The extraction loop at its limits: a full disk, a held lock, a slow disk, and what it says meanwhile."""

import os
import re
import threading
import time
import weakref

import pytest
from extract_cases import HIDDEN_SIZE, Case, EditedEngine, in_child

from eyas import console, fs
from eyas.errors import DiskError, EyasError
from eyas.shards import encode, writer
from eyas.shards.codecs import RawCodec


def test_a_plan_that_does_not_fit_is_refused_before_the_engine_opens(case, monkeypatch):
    monkeypatch.setattr(fs, "free_bytes", lambda _: case.plan.payload_bytes)
    engine = EditedEngine()
    with pytest.raises(DiskError, match=r"need .* does not fit, \d+ of 40 samples would"):
        case.extract(engine)
    assert engine.num_opened == 0
    assert not list((case.spool.parent).iterdir())


def test_a_run_stops_at_a_shard_boundary_when_the_disk_falls_to_the_reserve(case, unbroken, monkeypatch):
    """Case 61: another program eats the disk in mid-run."""
    free = iter([10**9] * 12)
    monkeypatch.setattr(fs, "free_bytes", lambda _: next(free, 1000))
    with pytest.raises(DiskError, match="1,000 bytes are free") as caught:
        case.extract(reserve_bytes=500)
    assert "run the same command again" in str(caught.value)
    stored = len((case.spool / "journal.jsonl").read_text().splitlines())
    assert 0 < stored < len(case.plan.shards)
    assert not list(case.spool.rglob("*.part"))
    monkeypatch.undo()
    assert case.extract().num_resumed_shards == stored
    assert case.hashes() == unbroken


def test_a_second_extraction_is_told_who_holds_the_lock(case, unbroken):
    case.home.mkdir(parents=True)
    with fs.volume_lock(case.home / "extract.lock", "extract of somebody"):
        with pytest.raises(EyasError, match=r"extract of somebody, pid \d+, since 20"):
            case.extract()
        pid = in_child(case.extract)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert not case.spool.exists()
    case.extract()
    assert case.hashes() == unbroken


@pytest.mark.parametrize("num_writers", [1, 3])
def test_states_in_memory_stay_within_a_shard_and_one_a_writer_on_a_slow_disk(tmp_path, monkeypatch, num_writers):
    """Case 39: backpressure; the engine waits for the disk, memory does not grow with the run."""
    monkeypatch.setenv("EYAS_WRITE_THREADS", str(num_writers))
    case = Case(tmp_path, num_samples=60)
    assemblies, most = weakref.WeakSet(), [0]
    write, start = writer.write_shard, writer.ShardAssembly.__init__

    def slow(*args):
        time.sleep(0.02)
        return write(*args)

    def watched(self, *args):
        start(self, *args)
        assemblies.add(self)
        most[0] = max(most[0], len(assemblies))

    monkeypatch.setattr(writer, "write_shard", slow)
    monkeypatch.setattr(writer.ShardAssembly, "__init__", watched)
    case.extract()
    assert most[0] == 1 + num_writers
    assert len(case.plan.shards) > 10


def test_writers_side_by_side_store_the_same_and_lose_nothing_when_one_fails(case, unbroken, monkeypatch):
    """Shards end in any order: a full disk in the third leaves the others journalled, and the rerun makes the rest."""
    monkeypatch.setenv("EYAS_WRITE_THREADS", "3")
    write, begun, failed = writer.write_shard, [], threading.Event()

    def third_fails(folder, facts, *args):
        begun.append(facts.shard)
        if facts.shard == case.plan.shards[2].path:
            failed.set()
            raise DiskError("the volume is full", "free some")
        if facts.shard == case.plan.shards[1].path:
            assert failed.wait(30), "the second is still being written while the third fails"
        return write(folder, facts, *args)

    monkeypatch.setattr(writer, "write_shard", third_fails)
    with pytest.raises(DiskError, match="the volume is full"):
        case.extract()
    lines = (case.spool / "journal.jsonl").read_text().splitlines()
    assert len(lines) == len(set(begun)) - 1 >= 2, "whatever was begun was finished, but for the one"
    monkeypatch.setattr(writer, "write_shard", write)
    assert case.extract().num_resumed_shards == len(lines)
    assert case.hashes() == unbroken


def test_an_engine_ahead_of_the_encoder_waits(tmp_path, monkeypatch):
    """Case 39: states that nobody encoded yet are bounded in bytes, whatever the size of a shard."""
    case = Case(tmp_path, num_samples=120, shard_bytes=1 << 30)
    alive, peak_bytes = weakref.WeakSet(), [0]
    code = RawCodec.encode

    def slow(self, rows_RD, stream):
        time.sleep(0.002)
        return code(self, rows_RD, stream)

    def watched(answers):
        for captured in answers:
            alive.add(captured.aux_TAD.untyped_storage())
            peak_bytes[0] = max(peak_bytes[0], sum(storage.nbytes() for storage in alive))
            yield captured

    limit = case.plan.payload_bytes // 10
    monkeypatch.setattr(encode, "WAITING_BYTES", limit)
    monkeypatch.setattr(RawCodec, "encode", slow)
    case.extract(EditedEngine(watched))
    assert len(case.plan.shards) == 1
    batch_bytes = case.plan.capture.batch_tokens * 4 * HIDDEN_SIZE * 2
    assert 0 < peak_bytes[0] <= limit + 2 * batch_bytes < case.plan.payload_bytes / 2


def test_progress_says_speed_bytes_ratio_free_space_and_time_left(case, monkeypatch, capsys):
    """The ratio is that of whole shards: bytes on the disk to the bf16 of their tokens."""
    monkeypatch.setattr(console, "PLAIN_PROGRESS_EVERY_S", 0)
    monkeypatch.setattr(fs, "free_bytes", lambda _: 7_500_000_000)
    manifest = case.extract().manifest
    lines = [line for line in capsys.readouterr().err.splitlines() if "tok/s" in line]
    form = r"extract: [\d,]+/[\d,]+ tok, [\d,]+ tok/s, .+ left  .+ written( \((\d+\.\d\d) of bf16\))?, 7\.5 GB free"
    found = [re.fullmatch(form, line) for line in lines]
    assert len(found) == sum(len(shard.batches) for shard in case.plan.shards)
    assert all(found), lines
    assert found[0][2] is None
    size_bytes = num_tokens = 0
    ratios = set()
    for entry in manifest.shards:
        size_bytes, num_tokens = size_bytes + entry.size_bytes, num_tokens + entry.num_tokens
        ratios.add(f"{size_bytes / (num_tokens * 4 * HIDDEN_SIZE * 2):.2f}")
    assert {match[2] for match in found} - {None} <= ratios
    assert found[-1][2] is not None
