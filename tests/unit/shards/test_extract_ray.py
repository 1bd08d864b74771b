"""The driver of a cluster and its workers, as threads here: the same bytes as a run without one, whatever happens."""

import dataclasses
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from extract_cases import Case, fake_engine
from ray_threads import ThreadCluster, fake_spec, flip, run_on

from eyas import fs
from eyas.contracts import ShardManifest
from eyas.engines.fake import FakeEngine
from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.ray import cluster as adapter
from eyas.engines.ray import driver
from eyas.engines.ray.driver import RayExecutor
from eyas.engines.ray.spec import Lost
from eyas.errors import CaptureError, ConfigError, DiskError, EyasError, ServerError
from eyas.plan.watch import Watch
from eyas.shards import writer
from eyas.shards.spool import Spool


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_bytes_are_those_of_a_run_here(case, unbroken, on_threads, num_workers):
    on_threads.num_places = num_workers
    result, executor = run_on(case)
    assert case.hashes() == unbroken
    assert len(on_threads.made[0].specs) == num_workers
    assert len(executor.finishes) == len(case.plan.shards)
    assert result.num_tokens == case.plan.num_tokens
    assert not case.spool.exists()


def test_a_worker_knows_what_it_is_told_before_torch_is_there(case, on_threads):
    """Torch looks at ``OMP_NUM_THREADS`` once, and Ray sets it to the CPUs that it counts: other bytes than here."""
    run_on(case)
    read = "import pickle, sys; pickle.load(sys.stdin.buffer); import eyas.engines.ray.worker; sys.exit('torch' in sys.modules)"
    told = pickle.dumps(on_threads.made[0].specs[0])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", read], env=environment, input=told, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_number_of_workers_is_a_knob(case, unbroken, on_threads, monkeypatch):
    monkeypatch.setenv("EYAS_RAY_WORKERS", "3")
    run_on(case)
    assert len(on_threads.made[0].specs) == 3
    assert case.hashes() == unbroken
    monkeypatch.setenv("EYAS_RAY_WORKERS", "none")
    with pytest.raises(ConfigError, match="EYAS_RAY_WORKERS"):
        run_on(Case(case.root / "other"))


def test_shards_of_lost_workers_are_made_by_others(case, unbroken, on_threads):
    struck = []

    def strike(cluster, name, planned):
        is_struck = len(cluster.given) in (2, 5, 9)
        struck.extend([planned.path] * is_struck)
        return is_struck

    on_threads.strike = staticmethod(lambda *a: strike(on_threads.made[0], *a))
    _, executor = run_on(case)
    assert case.hashes() == unbroken
    assert executor.num_lost_workers == len(struck) == 3


@pytest.fixture
def hang(monkeypatch):
    """The first engine that captures goes on only when the test ends; workers live and answer meanwhile."""
    ended, is_taken, capture = threading.Event(), threading.Lock(), FakeEngine.capture

    def captures(self, batch):
        if is_taken.acquire(blocking=False):
            ended.wait(20)
            raise ServerError("the test has ended")
        return capture(self, batch)

    monkeypatch.setattr(FakeEngine, "capture", captures)
    monkeypatch.setattr(ThreadCluster, "dismiss", lambda self, name: self.workers.pop(name))  # as a kill: at once
    monkeypatch.setenv("EYAS_WATCHDOG_S", "1")
    yield
    ended.set()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_that_answers_but_hangs_is_lost(case, unbroken, on_threads, hang, capfd, num_workers):
    on_threads.num_places = num_workers
    begin_s = time.monotonic()
    _, executor = run_on(case)
    assert case.hashes() == unbroken
    assert executor.num_lost_workers == 1
    assert (
        "answers, but nothing went on there for 1 s, expected at most 1 s (EYAS_WATCHDOG_S)" in capfd.readouterr().err
    )
    assert time.monotonic() - begin_s < 15


def test_an_engine_that_starts_and_a_slow_disk_are_no_hang(case, unbroken, on_threads, monkeypatch):
    """A start takes as long as it takes, and a worker without work has nothing to move."""
    monkeypatch.setenv("EYAS_WATCHDOG_S", "1")
    monkeypatch.setenv("EYAS_WRITE_THREADS", "1")
    monkeypatch.setattr(FakeEngine, "open", lambda self: time.sleep(2.5))
    monkeypatch.setattr(writer, "LOOK_BYTES", 1000)
    write, slow = Watch.write, []

    def writes(self, path, num_left_bytes):
        if not slow or path == slow[0]:  # one shard, and all wait for it
            slow.append(path)
            time.sleep(0.3)
        write(self, path, num_left_bytes)

    monkeypatch.setattr(Watch, "write", writes)
    _, executor = run_on(case)
    assert executor.num_lost_workers == 0
    assert len(slow) > 4  # more than a second
    assert case.hashes() == unbroken


@pytest.mark.parametrize(
    ("engine", "patience_s"), [("hf", 7), ("fake", 7), ("sglang", 2 * 7 + 50), ("vllm", 2 * 7 + 50)]
)
def test_an_engine_has_the_time_to_start_its_own_server_again(monkeypatch, engine, patience_s):
    monkeypatch.setenv("EYAS_WATCHDOG_S", "7")
    monkeypatch.setenv("EYAS_SGLANG_START_S", "50")
    assert driver._patience_s(engine) == patience_s


def test_a_shard_that_ends_every_worker_is_named_and_the_same_command_goes_on(case, unbroken, on_threads, capsys):
    poison = case.plan.shards[3].path
    on_threads.strike = staticmethod(lambda name, planned: planned.path == poison)
    with pytest.raises(CaptureError, match=poison) as caught:
        run_on(case)
    assert caught.value.message.count("killed by the test") == 4
    journaled = Spool(case.home, case.plan.capture).journal()
    assert journaled
    assert poison not in journaled
    assert not (case.spool / "incoming").exists()
    result = case.extract()  # without a cluster
    assert result.num_resumed_shards == len(journaled)
    assert "there, 0 of them read through" in capsys.readouterr().err, "moved in from a worker, it is known as well"
    assert case.hashes() == unbroken


def test_a_run_that_was_begun_here_goes_on_with_workers(case, unbroken, on_threads):
    on_threads.strike = staticmethod(lambda name, planned: planned.path == case.plan.shards[5].path)
    with pytest.raises(CaptureError):
        run_on(case)
    (case.spool / "incoming/w9-000000/000").mkdir(parents=True)
    (case.spool / "incoming/w9-000000/000/shard-00007.safetensors").write_bytes(b"left by a driver that was killed")
    on_threads.strike = None
    result, executor = run_on(case)
    assert 0 < result.num_resumed_shards == len(case.plan.shards) - len(executor.finishes)
    assert case.hashes() == unbroken


def test_failed_samples_are_listed_as_in_a_run_here(tmp_path, on_threads):
    here, there = Case(tmp_path / "here"), Case(tmp_path / "there")
    bad = dict(list(here.tokens.items())[::9])
    for case in (here, there):
        case.tokens |= {
            name: dataclasses.replace(s, input_ids=(5000, *s.input_ids[1:])) for name, s in bad.items()
        }  # outside the vocab of 1000
    here.extract(max_failed=len(bad))
    run_on(there, max_failed=len(bad))
    manifest = fs.read_record(ShardManifest, there.manifest_path)
    assert {sample.sample_id for sample in manifest.failed} == bad.keys()
    assert there.hashes() == here.hashes()
    with pytest.raises(CaptureError, match=r"extract\.max_failed_samples allows 1"):
        run_on(Case.at(there, tmp_path / "again"), max_failed=1)


@pytest.mark.parametrize("is_far", [True, False])
def test_a_shard_that_is_damaged_on_the_way_is_made_again(case, unbroken, on_threads, is_far):
    """From another machine every byte is looked at; from this one, whose memory wrote it, size and header are."""
    damaged = []

    def edit(name, news):
        if news.ready is not None and is_far:
            news = dataclasses.replace(news, ready=dataclasses.replace(news.ready, kernel="another"))
        for finished in news.finished:
            path = case.spool / "incoming" / name / finished.path
            if len(damaged) < 2:
                damaged.append(finished.path)
                if is_far:
                    flip(path)
                else:
                    path.write_bytes(path.read_bytes()[:-1])
        return news

    on_threads.edit = staticmethod(edit)
    run_on(case)
    assert len(damaged) == 2
    assert case.hashes() == unbroken


def test_an_engine_that_opens_nowhere_ends_the_run_by_its_own_error(case, on_threads, monkeypatch):
    def closed(self):
        raise ServerError("no such device", "look at it")

    monkeypatch.setattr(FakeEngine, "open", closed)
    with pytest.raises(ServerError, match="no such device"):
        run_on(case)
    assert 3 <= len(on_threads.made[0].specs) <= 5


@pytest.mark.parametrize(("num_lost", "limit_s", "pause_s"), [(8, 1, 0.2), (30, 1800, 0.0)])
def test_nodes_that_go_while_their_engines_start_end_no_run(
    case, unbroken, on_threads, monkeypatch, num_lost, limit_s, pause_s
):
    """A host with eight engines that start is gone, slowly, or several are, in a moment: nothing is wrong with any."""
    monkeypatch.setenv("EYAS_SGLANG_START_S", str(limit_s))
    lost = []

    def edit(name, news):
        if news.ready is None or len(lost) == num_lost:
            return news
        lost.append(name)
        time.sleep(pause_s)
        on_threads.made[0].workers.pop(name).stop()
        return Lost(f"{name}: its node has died", is_node_gone=True)

    on_threads.edit = staticmethod(edit)
    _, executor = run_on(case)
    assert case.hashes() == unbroken
    assert executor.num_lost_workers == num_lost


@pytest.mark.parametrize("pattern", ["n", "nnf", "nr"])
def test_a_run_whose_workers_all_go_as_they_start_ends(case, on_threads, monkeypatch, pattern):
    """With their (n)odes, by (f)ailed starts in between, or as soon as they are (r)eady: in turn as well."""
    monkeypatch.setenv("EYAS_SGLANG_START_S", "1")
    monkeypatch.setattr(driver, "HIRE_EVERY_S", 0.02)
    lost, ready = [], set()

    def edit(name, news):
        if news.ready is None and name not in ready:
            return news
        how = pattern[len(lost) % len(pattern)]
        if how == "r" and name not in ready:
            ready.add(name)
            return news
        assert len(lost) < 200, "it goes on for ever"
        lost.append(name)
        time.sleep(0.06)
        on_threads.made[0].workers.pop(name).stop()
        return Lost(f"{name}: it is gone", is_node_gone=how == "n")

    on_threads.edit = staticmethod(edit)
    with pytest.raises(EyasError, match="it is gone") as caught:
        run_on(case)
    if pattern == "n":
        assert isinstance(caught.value, ServerError)
        assert re.search(r"\d\d workers were lost in .* and none became ready, expected one in 1", caught.value.message)
        assert 20 <= len(lost) < 30


def test_engines_that_do_not_start_end_no_run_while_another_works(case, unbroken, on_threads, monkeypatch):
    """One node of many has no device: the others make the shards."""
    monkeypatch.setattr(driver, "HIRE_EVERY_S", 0.02)
    opened, whole, capture = [], FakeEngine.open, FakeEngine.capture

    def once(self):
        opened.append(self)
        if len(opened) > 1:
            raise ServerError("no such device", "look at it")
        whole(self)

    def slowly(self, batch):
        time.sleep(0.05)
        yield from capture(self, batch)

    monkeypatch.setattr(FakeEngine, "open", once)
    monkeypatch.setattr(FakeEngine, "capture", slowly)
    _, executor = run_on(case)
    assert case.hashes() == unbroken
    assert executor.num_lost_workers > 3


def test_the_reserve_is_kept(case, on_threads, monkeypatch):
    """The volume fills up while workers write."""
    free = fs.free_bytes(case.root.parent)
    monkeypatch.setattr(fs, "free_bytes", lambda path: free)
    executor = RayExecutor(fake_spec())
    taken = 0

    def edit(name, news):
        nonlocal taken
        taken += len(news.finished)
        if taken >= 3:
            monkeypatch.setattr(fs, "free_bytes", lambda path: 1000)
        return news

    on_threads.edit = staticmethod(edit)
    places = {"out": case.out, "manifest_path": case.manifest_path, "home": case.home}
    with pytest.raises(DiskError, match=r"extract\.reserve_bytes"):
        extract(
            case.plan, case.tokens, fake_engine(), ExtractLimits(reserve_bytes=500, max_failed_samples=0), **places,
            executor=executor,
        )  # fmt: skip
    assert 0 < len(Spool(case.home, case.plan.capture).journal()) < len(case.plan.shards)


def test_a_lossy_codec_is_calibrated_by_one_worker_for_all(tmp_path, on_threads):
    here, there = Case(tmp_path / "here", codec="int8"), Case(tmp_path / "there", codec="int8")
    here.extract()
    run_on(there)
    assert there.hashes() == here.hashes()


def test_nobody_has_room(case, on_threads):
    on_threads.num_places = 0
    with pytest.raises(ServerError, match="no node of the Ray cluster at this machine has 2 GPUs") as caught:
        run_on(case, device="cuda", options={"tp_size": 2})
    assert "EYAS_RAY_WORKERS" in caught.value.hint


def test_ray_is_not_installed(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ServerError, match=r"extract.executor is ray, and Ray is not installed") as caught:
        run_on(case)
    assert ".[ray]" in caught.value.hint
    assert adapter.findings()[0][1] == "problem"
    assert not case.spool.exists()


def test_a_cluster_that_does_not_answer_is_said_at_once(case, monkeypatch):
    pytest.importorskip("ray", reason="`make test-ray` installs Ray and runs this")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("EYAS_RAY_ADDRESS", address)
        with pytest.raises(ServerError, match=f"the Ray cluster at {address} is not reached") as caught:
            run_on(case)
        assert "ray status" in caught.value.hint
        assert [row[1] for row in adapter.findings()] == ["found", "problem"]


def test_one_server_for_all_workers_is_refused(monkeypatch):
    monkeypatch.setenv("EYAS_SGLANG_URL", "http://127.0.0.1:1")
    with pytest.raises(ServerError, match="EYAS_SGLANG_URL"):
        RayExecutor(fake_spec())


def test_the_lock_is_the_driver_s(case, on_threads):
    lock = fs.volume_lock(case.home / "extract.lock", "somebody")
    with lock, pytest.raises(EyasError, match="is locked by somebody"):
        run_on(case)
    assert not on_threads.made
