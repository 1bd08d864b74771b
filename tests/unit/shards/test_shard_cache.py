"""The folder of shards that several processes share: whose a part is, also where no pid can say."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eyas.contracts import ShardEntry
from eyas.errors import DiskError
from eyas.shards.shard_cache import ShardCache

SIZE = 40_000
FETCHING = """
import os, sys, time
from pathlib import Path
import test_shard_cache as world

elsewhere = sys.argv[2:]
if elsewhere:  # a container: its pid is nobody's here
    os.getpid = lambda: 999_999_999
remote = world.Remote(held=Path(sys.argv[1]).with_name("held"))
with world.cache(Path(sys.argv[1]), 2, remote).open(world.entry(b"a")):
    pass
print(remote.num_asked, flush=True)
"""


class Remote:
    """Objects of one letter; one that is ``held`` stops after half of an object for as long as that file is there."""

    name = "there"

    def __init__(self, held: Path | None = None) -> None:
        self.held, self.num_asked = held, 0

    def pieces(self, md5, size_bytes):
        self.num_asked += 1
        letter = next(letter for letter in (b"a", b"b", b"c") if entry(letter).md5 == md5)
        yield letter * (size_bytes // 2)
        while self.held is not None and self.held.exists():
            time.sleep(0.01)
        yield letter * (size_bytes - size_bytes // 2)


def entry(letter):
    md5 = hashlib.md5(letter * SIZE, usedforsecurity=False).hexdigest()
    return ShardEntry(path=f"{letter.decode()}.safetensors", size_bytes=SIZE, md5=md5, num_samples=1, num_tokens=1)


def cache(folder, num_shards, remote=None):
    return ShardCache(folder, num_shards * SIZE, remote or Remote(), SIZE)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def fetching(folder):
    """Starts a process that has fetched half a shard."""
    started = []
    folder.with_name("held").touch()

    def start(*elsewhere):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, "-c", FETCHING, folder, *elsewhere], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        until(lambda: parts(folder) or process.poll() is not None)
        assert process.poll() is None
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def parts(folder):
    return list(folder.glob("*.part")) if folder.exists() else []


def until(condition, seconds=30):
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.01)


def opened(of, letter, seconds=20):
    """Whether a shard was opened within some seconds: room that never comes is waited for without end."""
    found = []

    def read():
        with of.open(entry(letter)) as fd:
            found.append(os.pread(fd.number, SIZE + 1, 0))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    return found == [letter * SIZE]


def test_the_part_of_a_killed_process_is_nobodys_though_its_pid_is_somebodys(folder, fetching):
    """A zombie has a place in /proc, as has whoever got the pid of one that ended."""
    process = fetching()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and its pid not free
    assert Path("/proc", str(process.pid)).exists()
    assert opened(cache(folder, 1), b"b")
    assert not parts(folder)


def test_the_part_of_a_living_process_is_its_own_though_its_pid_is_nobodys_here(folder, fetching):
    """Of another PID namespace or another host: what it fetches counts, and is there for it when it has arrived."""
    process = fetching("elsewhere")
    ours = cache(folder, 2)
    for letter in (b"b", b"c"):
        assert opened(ours, letter)
        assert len(parts(folder)) == 1
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 2 * SIZE
    folder.with_name("held").unlink()
    said, _ = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "1\n")
    assert opened(ours, b"a")


def test_two_processes_of_one_pid_fetch_the_same_shard(folder, fetching):
    """In two containers both may be number 1."""
    first, second = fetching("elsewhere"), fetching("elsewhere")
    until(lambda: len(parts(folder)) == 2)
    folder.with_name("held").unlink()
    assert [process.communicate(timeout=30)[0] for process in (first, second)] == ["1\n", "1\n"]
    assert opened(cache(folder, 1), b"a")


def test_a_part_of_an_earlier_version_is_removed(folder):
    ours = cache(folder, 1)
    left = folder / f"{'0' * 32}.{os.getpid()}.part"
    left.write_bytes(bytes(SIZE))
    assert opened(ours, b"a")
    assert not left.exists()


def test_a_shard_that_lies_here_and_cannot_be_opened_is_an_error_and_no_endless_wait(folder):
    """No file descriptor is left, say."""
    one, raised = cache(folder, 2), []
    with one.open(entry(b"a")):
        pass

    def read():
        try:
            one.open(entry(b"a"))
        except DiskError as error:
            raised.append(str(error))

    before, lowest = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    reader = threading.Thread(target=read, daemon=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        reader.start()
        reader.join(5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(lowest)
    reader.join(5)
    assert len(raised) == 1, "it went on without end"
    assert "cannot be opened: Too many open files" in raised[0]
