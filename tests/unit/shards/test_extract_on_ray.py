"""A real Ray: separate nodes on this machine, workers and nodes that are killed, a driver that is killed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from extract_cases import Case, fake_engine
from ray_threads import fake_spec

from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.ray.driver import RayExecutor
from eyas.engines.ray.handout import Handout
from eyas.engines.ray.node_disk import own_folder

pytest.importorskip("ray", reason="`make test-ray` installs Ray and runs these")
pytestmark = pytest.mark.timeout(300)
MARK = "EYAS_TEST_OF_RAY"
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Of each node of Ray's: when all else is killed, they look for a minute for somebody to tell, and end."""
DRIVER = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from test_extract_on_ray import Handout, run_on, large_case
from eyas.console import user_errors
case, next_for = large_case(Path(sys.argv[1])), Handout.next_for
most = len(case.plan.shards) // 2  # it cannot end before the signal comes
Handout.next_for = lambda self, *given: next_for(self, *given) if self.num_left > most else None
with user_errors():
    run_on(case)
"""
HERE = Path(__file__).parent


def large_case(root: Path) -> Case:
    return Case(root, num_samples=500, seed=3)


def run_on(case: Case, executor: RayExecutor | None = None) -> RayExecutor:
    executor = executor or RayExecutor(fake_spec())
    places = {"out": case.out, "manifest_path": case.manifest_path, "home": case.home}
    extract(
        case.plan, case.tokens, fake_engine(), ExtractLimits(max_failed_samples=0, reserve_bytes=0), **places,
        executor=executor,
    )  # fmt: skip
    return executor


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    case = large_case(tmp_path_factory.mktemp("whole"))
    case.extract()
    return case.hashes()


@pytest.fixture(scope="module")
def nodes():
    from eyas.ops.bench.ray_nodes import Nodes

    with Nodes(4) as nodes:
        yield nodes


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_bytes_are_those_of_a_run_here_and_every_worker_makes_some(tmp_path, whole, nodes, monkeypatch, num_workers):
    monkeypatch.setenv("EYAS_RAY_WORKERS", str(num_workers))
    case, executor, next_for = large_case(tmp_path), RayExecutor(fake_spec()), Handout.next_for
    monkeypatch.setattr(  # nobody begins before all are there: the first would make everything meanwhile
        Handout, "next_for", lambda *given: next_for(*given) if len(executor.workers) >= num_workers else None
    )
    run_on(case, executor)
    assert len({finish.worker for finish in executor.finishes}) == num_workers
    assert len({ready.pid for _, ready in executor.workers.values()}) == num_workers
    assert case.hashes() == whole


class _Oldest(random.Random):
    def randrange(self, *_):
        return 0


def test_nodes_and_workers_are_killed_and_join(tmp_path, whole, nodes, monkeypatch):
    """On the nodes' own disk, where nobody holds what the killed ones left."""
    monkeypatch.setenv("EYAS_RAY_WORKERS", "4")
    monkeypatch.setenv("EYAS_RAY_SPOOL", str(tmp_path / "node"))
    case, executor, next_for = large_case(tmp_path), RayExecutor(fake_spec()), Handout.next_for
    most, is_over = len(case.plan.shards) // 2, threading.Event()
    monkeypatch.setattr(  # it does not end before the last kill
        Handout,
        "next_for",
        lambda self, *given: next_for(self, *given) if self.num_left > most or is_over.is_set() else None,
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_on, case, executor)

        def wait_for(is_there):
            while not is_there():
                assert not running.done()
                time.sleep(0.01)

        try:
            wait_for(lambda: len(executor.finishes) >= 20)
            os.kill(executor.workers[executor.finishes[-1].worker][1].pid, signal.SIGKILL)
            wait_for(lambda: executor.num_lost_workers >= 1)
            for _ in range(4):  # whoever is left has a node of these, and others join
                nodes.kill_one(_Oldest())
            wait_for(lambda: executor.num_lost_workers >= 2)
        finally:
            is_over.set()
        running.result()
    assert case.hashes() == whole
    until_s = time.monotonic() + 60  # the driver does not wait for a worker that it ended while that one started
    while True:
        with own_folder(tmp_path / "node", "next") as folder:
            found = [path for path in folder.parent.iterdir() if path.is_dir()]
        if found == [folder]:
            break
        assert time.monotonic() < until_s, found
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_driver_that_ends_leaves_nothing_behind_and_its_work_goes_on(tmp_path, whole, number, code):
    """On a Ray of its own. What is left is made here, or by another cluster."""
    case = large_case(tmp_path)
    journal = case.spool / "journal.jsonl"
    mark = f"{MARK}={number.value}-{os.getpid()}"
    environment = os.environ | dict([mark.split("=")]) | {"EYAS_RAY_WORKERS": "2"}
    environment.pop("EYAS_RAY_ADDRESS", None)
    paths = [str(HERE), str(HERE.parents[1])]
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *paths]
    log = tmp_path / "driver.log"  # no pipe: what a killed driver leaves holds it open, and a full one holds a driver
    with log.open("wb") as stderr:
        driver = subprocess.Popen(command, env=environment, start_new_session=True, stderr=stderr)
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 20):
        assert driver.poll() is None, log.read_text()[-2000:]
        time.sleep(0.02)
    os.killpg(driver.pid, number) if number == signal.SIGINT else driver.send_signal(number)
    assert driver.wait(timeout=120) == code
    deadline_s = time.monotonic() + 60
    while (left := marked(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert left == []
    num_done = journal.read_bytes().count(b"\n")
    assert num_done < len(case.plan.shards)
    if number == signal.SIGKILL:
        assert len(run_on(case).finishes) == len(case.plan.shards) - num_done
    else:
        assert case.extract().num_resumed_shards == num_done
    assert case.hashes() == whole


def marked(mark: str) -> list[str]:
    """Commands of processes that have this in their environment, but for Ray's agents."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
        except OSError:
            continue
    return [command for command in found if not command.startswith(AGENTS)]
