"""SIGKILL and full disks: whatever happens, the same command ends with the hashes of an unbroken run."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from extract_cases import Case, EditedEngine, in_child, last_words

from eyas import fs
from eyas.errors import DiskError
from eyas.shards import spool as spool_room


def end(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    whole = Case(tmp_path_factory.mktemp("unbroken"), num_samples=60)
    assert end(in_child(whole.extract)) == 0
    return whole, whole.hashes()


def slow_engine(seed):
    rng = random.Random(seed)

    def edit(answers):
        answers = list(answers)
        rng.shuffle(answers)
        for captured in answers:
            time.sleep(rng.random() * 0.002)
            yield captured

    return EditedEngine(edit)


def journal_lines(case: Case) -> int:
    path = case.spool / "journal.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def kill_until_done(case: Case, rng: random.Random, max_delay_s: float) -> int:
    """Kill runs over one folder at random times until one ends; gives the number of kills."""
    kills, stored = 0, 0
    while True:
        pid = in_child(partial(case.extract, slow_engine(kills)))
        deadline_s = time.monotonic() + rng.random() * max_delay_s
        while time.monotonic() < deadline_s:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0, last_words(pid)
                return kills
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        if end(pid) == 0:
            return kills
        kills += 1
        if (case.spool / "states").exists():
            assert journal_lines(case) >= stored, "finished shards were lost"
            stored = journal_lines(case)


def run_kills(root: Path, unbroken, wanted: int) -> None:
    whole, hashes = unbroken
    start_s = time.monotonic()
    assert end(in_child(partial(whole.at(root / "timed").extract, slow_engine(0)))) == 0
    duration_s = time.monotonic() - start_s
    kills, folders, rng = 0, 0, random.Random(wanted)
    while kills < wanted:
        folders += 1
        case = whole.at(root / str(folders))
        kills += kill_until_done(case, rng, 1.2 * duration_s)
        assert case.hashes() == hashes


def test_killed_at_random_times_the_result_is_that_of_an_unbroken_run(tmp_path, unbroken):
    """Case 28."""
    run_kills(tmp_path, unbroken, wanted=20)


@pytest.mark.slow
def test_killed_200_times_at_random(tmp_path, unbroken):
    run_kills(tmp_path, unbroken, wanted=200)


CALLS = ("fsync", "replace", "rename", "truncate", "unlink", "rmdir", "mkdir", "write")


def die_at(number: int, before: bool) -> None:
    """In a child: SIGKILL itself just before or just after its n-th call that changes the disk."""
    count = [0]

    def deadly(call):
        def wrapped(*args, **kwargs):
            count[0] += 1
            mine = count[0]
            if before and mine == number:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **kwargs)
            finally:
                if mine == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("before", [True, False])
def test_killed_at_every_call_that_changes_the_disk(tmp_path, before, codec):
    """Inside rename, journal, publication and clean-up: each of them, one run each."""
    kill_at_calls(tmp_path, range(1, 1000), before, codec)


def test_killed_at_calls_that_change_the_disk(tmp_path):
    kill_at_calls(tmp_path, range(2, 1000, 7), before=True)


def test_killed_around_the_calibration_a_run_ends_with_the_same_scales(tmp_path):
    """The file with the scales is half, there, or already removed; every such call in the slow room."""
    kill_at_calls(tmp_path, [*range(13, 19), *range(22, 1000, 6)], True, "int8")


def kill_at_calls(tmp_path: Path, numbers: Iterable[int], before: bool, codec: str = "raw") -> None:
    whole = Case(tmp_path / "whole", num_samples=8, codec=codec)
    assert end(in_child(whole.extract)) == 0
    hashes = whole.hashes()
    assert len(whole.plan.shards) >= 3
    for number in numbers:
        case = whole.at(tmp_path / str(number))

        def run(case=case, number=number):
            die_at(number, before)
            case.extract()

        code = end(in_child(run))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if not case.manifest_path.exists() or not case.out.exists():
            assert end(in_child(case.extract)) == 0
        assert case.hashes() == hashes, f"killed at call {number}"
        # Run by hand over whatever is there now: the same again.
        assert end(in_child(case.extract)) == 0
        assert case.hashes() == hashes, f"killed at call {number}, then run twice"
    assert 40 < number < 999


def test_killed_while_taking_back(tmp_path):
    """The crash after a crash: the rerun dies in each of its own steps, with and without a manifest."""
    whole = Case(tmp_path / "whole", num_samples=8)
    assert end(in_child(whole.extract)) == 0
    hashes = whole.hashes()
    for number in range(1, 1000, 3):
        case = whole.at(tmp_path / str(number))
        assert end(in_child(case.extract)) == 0

        def run(case=case, number=number):
            die_at(number, before=True)
            case.extract()

        code = end(in_child(run))
        engine = EditedEngine()
        case.extract(engine)
        assert engine.asked == [], "nothing is captured twice"
        assert case.hashes() == hashes
        if code == 0:
            break
    assert number > 10


# ── full disk ─────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def tmpfs(folder: Path, size_bytes: int):
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full_at_any_write_damages_nothing(tmp_path, unbroken, monkeypatch):
    """Case 61: the gate is blinded, so the writes themselves meet ENOSPC; then there is room again."""
    whole, hashes = unbroken
    monkeypatch.setattr("eyas.engines.loop.fs.free_bytes", lambda _: 10**12)
    needed = sum(shard.size_bytes for shard in fs.read_record(spool_room.ShardManifest, whole.manifest_path).shards)
    full = 0
    for size_bytes in range(4096, 2 * needed, max(needed // 12, 4096)):
        with tmpfs(tmp_path / str(size_bytes), size_bytes) as root:
            case = whole.at(root / "run")
            try:
                case.extract()
            except DiskError as error:
                full += 1
                assert "disk full while writing" in error.message  # noqa: PT017 - success is an outcome too
                assert not case.manifest_path.exists()
                assert not case.out.exists()
                assert not list(root.rglob("*.part"))
                stored = journal_lines(case)
                subprocess.run(["mount", "-o", f"remount,size={4 * needed}", root], check=True)
                assert case.extract().num_resumed_shards in (stored, stored - 1)
            assert case.hashes() == hashes
    assert full >= 8


def test_a_full_disk_at_each_write_of_ours(tmp_path, unbroken, monkeypatch):
    """Without a mount: the n-th fsync reports ENOSPC, from the first shard to the manifest."""
    whole, hashes = unbroken
    real = os.fsync
    for number in (1, 2, 3, 4, 5, 9, 16, 17, 18, 40, 41, 42):
        count = [0]

        def full(fd, count=count, number=number):
            count[0] += 1
            if count[0] == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd)

        case = whole.at(tmp_path / str(number))
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DiskError, match="disk full"):
            case.extract()
        monkeypatch.setattr(os, "fsync", real)
        assert not case.manifest_path.exists()
        case.extract()
        assert case.hashes() == hashes


def test_spool_and_output_on_two_volumes_are_refused_before_the_engine_opens(tmp_path):
    case = Case(tmp_path / "run")
    with tmpfs(tmp_path / "other", 1 << 20) as other:
        case.home = other / ".eyas"
        engine = EditedEngine()
        with pytest.raises(DiskError, match="different volumes"):
            case.extract(engine)
        assert engine.num_opened == 0


def test_a_symbolic_link_for_the_states_is_refused_before_the_engine_opens(tmp_path):
    case = Case(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    case.out.parent.mkdir(parents=True)
    case.out.symlink_to(tmp_path / "elsewhere")
    engine = EditedEngine()
    with pytest.raises(DiskError, match="is a symbolic link to"):
        case.extract(engine)
    assert (engine.num_opened, case.out.is_symlink()) == (0, True)
