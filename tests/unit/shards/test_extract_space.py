"""The watch on free space, on a volume that is really that small: a stranger fills it while a capture runs."""

import contextlib
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from extract_cases import Case, EditedEngine
from test_extract_crash import journal_lines, tmpfs

from eyas import fs
from eyas.errors import DiskError
from eyas.plan.budget import Reclaim, Retirable
from eyas.plan.watch import SPARE_BYTES, Watch
from eyas.shards import writer

VOLUME_BYTES, RESERVE_BYTES = 6 << 20, 1 << 20
SHARD_BYTES = 80_000


NUM_SAMPLES = 160


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    case = Case(tmp_path_factory.mktemp("whole"), num_samples=NUM_SAMPLES, shard_bytes=SHARD_BYTES)
    case.extract()
    assert len(case.plan.shards) == 5
    assert min(len(shard.batches) for shard in case.plan.shards[:-1]) > 8
    return case


class Stranger:
    """Another process that writes a file, and a thread that keeps the least free space ever seen after it."""

    def __init__(self, folder, leave_bytes: int) -> None:
        self.folder, self.leave_bytes = folder, leave_bytes
        self.least_bytes: int | None = None
        self.has_come = False

    def fill(self) -> None:
        """Take everything but ``leave_bytes``."""
        take = fs.free_bytes(self.folder) - self.leave_bytes
        subprocess.run(f"head -c {take} /dev/zero > {self.folder}/filler", shell=True, check=True)
        self.least_bytes, self.has_come = fs.free_bytes(self.folder), True

    def leave(self) -> None:
        (self.folder / "filler").unlink()

    @contextlib.contextmanager
    def watched(self):
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                if self.has_come:
                    self.least_bytes = min(self.least_bytes, fs.free_bytes(self.folder))
                time.sleep(0.0002)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def fills_at(number: int, stranger: Stranger, case: Case) -> EditedEngine:
    """An engine in whose ``number``-th answer the stranger comes; the shard before it is stored by then."""
    count = [0]

    def edit(answers):
        for captured in answers:
            count[0] += 1
            if count[0] == number:
                while not journal_lines(case):
                    time.sleep(0.001)
                stranger.fill()
            yield captured

    return EditedEngine(edit)


def stops_cleanly(case: Case, engine: EditedEngine, stranger: Stranger, capsys) -> DiskError:
    capsys.readouterr()
    with stranger.watched(), pytest.raises(DiskError) as caught:
        case.extract(engine, reserve_bytes=RESERVE_BYTES)
    assert not list(case.root.rglob("*.part"))
    assert not case.out.exists()
    stored = journal_lines(case)
    shards = case.plan.shards
    num_stored = sum(len(shard.samples) for shard in shards[:stored])
    account = f"{NUM_SAMPLES} samples ({case.plan.num_tokens:,} tokens) planned = {num_stored:,} ("
    end = capsys.readouterr().err.splitlines()[-1]
    assert account in end
    assert f"+ 0 (0) failed + {NUM_SAMPLES - num_stored:,} (" in end
    assert sorted(p.name for p in (case.spool / "states").rglob("*.safetensors")) == [
        shard.path.partition("/")[2] for shard in shards[:stored]
    ]
    return caught.value


def finishes(case: Case, whole: Case, stranger: Stranger) -> None:
    stored = journal_lines(case)
    stranger.leave()
    assert case.extract(reserve_bytes=RESERVE_BYTES).num_resumed_shards == stored < len(case.plan.shards)
    assert case.hashes() == whole.hashes()


@pytest.mark.parametrize(
    ("leave_bytes", "share"),
    [(RESERVE_BYTES + 50_000, 0.1), (RESERVE_BYTES, 0.5), (RESERVE_BYTES // 2, 0.9), (0, 0.5)],
)
def test_a_stranger_fills_the_volume_in_mid_shard(tmp_path, whole, capsys, leave_bytes, share):
    """Case 61: what is in the making does not fit any more: no batch is run for it, nothing is written below the
    reserve, or below what the stranger left."""
    with tmpfs(tmp_path / "small", VOLUME_BYTES) as root:
        case, stranger = whole.at(root), Stranger(root, leave_bytes)
        first, second = (len(shard.samples) for shard in case.plan.shards[:2])
        engine = fills_at(first + int(second * share), stranger, case)
        error = stops_cleanly(case, engine, stranger, capsys)
        assert "extract.reserve_bytes keeps 1,048,576" in error.message
        assert "make budget" in error.hint
        asked = sum(len(batch) for batch in engine.asked)
        assert first + int(second * share) <= asked < first + second, "it stopped in mid-shard"
        assert stranger.least_bytes >= min(leave_bytes, RESERVE_BYTES)
        finishes(case, whole, stranger)


@pytest.mark.parametrize("leave_bytes", [RESERVE_BYTES + 50_000, 20_000])
def test_a_stranger_fills_the_volume_while_a_shard_is_written(tmp_path, whole, capsys, monkeypatch, leave_bytes):
    """Case 61: half of the shard is there; the rest would touch the reserve, so the half goes as well."""
    with tmpfs(tmp_path / "small", VOLUME_BYTES) as root:
        case, stranger = whole.at(root), Stranger(root, leave_bytes)
        write_all, count, told = fs.write_all, [0], []

        def interrupted(handle, buffers):
            count[0] += 1
            mine = count[0]

            def passed():
                for i, buffer in enumerate(buffers):
                    if mine == 2 and i == 20:
                        handle.flush()
                        assert 0 < os.fstat(handle.fileno()).st_size < SHARD_BYTES
                        stranger.fill()
                    yield buffer

            try:
                write_all(handle, passed())
            except DiskError as error:
                told.append(error.message)
                raise

        monkeypatch.setattr(writer, "LOOK_BYTES", 4096)
        monkeypatch.setattr(fs, "write_all", interrupted)
        stops_cleanly(case, EditedEngine(), stranger, capsys)  # by the maker's error, should it look first
        assert "shards that are being written still need" in told[0]
        assert stranger.least_bytes >= min(leave_bytes, RESERVE_BYTES) - 4096 - SPARE_BYTES
        assert journal_lines(case) == 1
        monkeypatch.undo()
        finishes(case, whole, stranger)


def test_a_shard_that_came_out_larger_than_expected_is_not_begun(tmp_path, whole):
    """The maker expects, the writer knows: states that the codec cannot shrink are stopped before their first byte."""
    with tmpfs(tmp_path / "small", VOLUME_BYTES) as root:
        shard = whole.plan.shards[0]
        watch = Watch(root, fs.free_bytes(root) - SHARD_BYTES, ratio=0.5)
        watch.check(shard)
        exact = (whole.out / shard.path).stat().st_size
        with pytest.raises(DiskError, match=f"{exact:,} bytes"):
            watch.write(shard.path, exact)
        watch.write(shard.path, SHARD_BYTES - SPARE_BYTES)
        with pytest.raises(DiskError):
            watch.write(shard.path, SHARD_BYTES - SPARE_BYTES + 1)
        watch.write(shard.path, SHARD_BYTES - SPARE_BYTES - 100)
        with pytest.raises(DiskError):
            watch.write("another", 101)
        watch.written("another")
        watch.written(shard.path)
        assert watch.has_room(shard)
        watch.hand_over(shard)
        assert not watch.has_room(shard), "the one with the writer counts as well"


def test_a_run_that_needs_the_volume_to_the_last_block_finishes(tmp_path, whole):
    """The watch costs no capture that fits: what the gate let in with a thousandth to spare is stored."""
    with tmpfs(tmp_path / "small", VOLUME_BYTES) as root:
        case = whole.at(root)
        needed = case.plan.payload_bytes + case.plan.token_bytes + NUM_SAMPLES * 1024 + len(case.plan.shards) * 4096
        reserve = fs.free_bytes(root) - needed - 100_000
        case.extract(reserve_bytes=reserve)
        assert case.hashes() == whole.hashes()
        assert fs.free_bytes(root) >= reserve


def test_the_gate_names_gap_and_ways_out_before_the_engine_opens(tmp_path, whole):
    """Case 18: asked what could be deleted only when it does not fit."""
    asked = []

    def reclaim() -> Reclaim:
        asked.append(True)
        return Reclaim(0, (Retirable("ab" * 16, "vllm-old", 10**9),))

    with tmpfs(tmp_path / "small", 100_000) as root:
        case, engine = whole.at(root), EditedEngine()
        with pytest.raises(DiskError, match=r"does not fit, \d+ of 160 samples would; .* lack") as caught:
            case.extract(engine, reclaim=reclaim)
    assert (engine.num_opened, asked) == (0, [True])
    assert "retire" in caught.value.message
    assert "abababab (vllm-old, 1.0 GB)" in caught.value.message
    assert "`make budget`" in caught.value.hint
    case = whole.at(tmp_path / "roomy")
    case.extract(reclaim=reclaim)
    assert asked == [True]


@contextlib.contextmanager
def btrfs_with_quota(folder: Path):
    """A subvolume under a quota of its own, which ``statvfs`` does not show; gives it and a way to set the limit."""

    def ok(*command: str) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"no {command[0]} here")
        if done.returncode:
            pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")

    image, mount = folder / "image", folder / "mount"
    mount.mkdir(parents=True)
    with image.open("wb") as handle:
        handle.truncate(160 << 20)
    ok("mkfs.btrfs", "-q", str(image))
    ok("mount", "-o", "loop", str(image), str(mount))
    try:
        ok("btrfs", "subvolume", "create", f"{mount}/sub")
        ok("btrfs", "quota", "enable", str(mount))
        yield mount / "sub", lambda limit: ok("btrfs", "qgroup", "limit", limit, f"{mount}/sub")
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_quota_that_nobody_sees_stops_the_run_as_a_full_disk_does(tmp_path, whole):
    """EDQUOT: 80 MB are free by ``statvfs``, and half of the states may be written."""
    with btrfs_with_quota(tmp_path / "quota") as (root, set_limit):
        case = whole.at(root)
        set_limit("300K")
        assert fs.free_bytes(root) > 50_000_000
        with pytest.raises(DiskError, match="disk full while writing"):
            case.extract()
        stored = journal_lines(case)
        assert stored < len(case.plan.shards)
        assert not list(root.rglob("*.part"))
        set_limit("none")
        assert case.extract().num_resumed_shards == stored
        assert case.hashes() == whole.hashes()
