"""A real Ray: separate nodes on this machine, workers and nodes that are killed, a driver that is killed."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from extract_cases import Case, fake_engine
from ray_threads import fake_spec

from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.ray.driver import RayExecutor

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MARK = "EYAS_TEST_OF_RAY"
DRIVER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from test_extract_on_ray import run_on, large_case
from eyas.console import user_errors
with user_errors():
    run_on(large_case(Path(sys.argv[1])))
"""
HERE = Path(__file__).parent


def large_case(root: Path) -> Case:
    return Case(root, num_samples=500, seed=3)


def run_on(case: Case) -> RayExecutor:
    executor = RayExecutor(fake_spec())
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


def test_nodes_and_workers_are_killed_and_join(tmp_path, whole):
    import random

    from eyas.ops.bench.ray_nodes import Nodes

    case = large_case(tmp_path)
    executor = RayExecutor(fake_spec())
    places = {"out": case.out, "manifest_path": case.manifest_path, "home": case.home}
    limits = ExtractLimits(max_failed_samples=0, reserve_bytes=0)
    with Nodes(2) as nodes, ThreadPoolExecutor(1) as pool:
        running = pool.submit(extract, case.plan, case.tokens, fake_engine(), limits, **places, executor=executor)
        while len(executor.finishes) < 20:
            assert not running.done()
            time.sleep(0.01)
        os.kill(next(iter(executor.workers.values()))[1].pid, signal.SIGKILL)
        nodes.kill_one(random.Random(0))
        running.result()
    assert executor.num_lost_workers >= 1
    assert case.hashes() == whole


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_driver_that_ends_leaves_nothing_behind_and_its_work_goes_on(tmp_path, whole, number, code):
    case = large_case(tmp_path)
    journal = case.spool / "journal.jsonl"
    mark = f"{MARK}={number.value}-{os.getpid()}"
    environment = os.environ | dict([mark.split("=")]) | {"EYAS_RAY_WORKERS": "2"}
    paths = [str(HERE), str(HERE.parents[1])]
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *paths]
    driver = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 20):
        assert driver.poll() is None, driver.communicate()[1].decode()[-2000:]
        time.sleep(0.02)
    os.killpg(driver.pid, number) if number == signal.SIGINT else driver.send_signal(number)
    driver.communicate(timeout=120)
    assert driver.returncode == code
    deadline_s = time.monotonic() + 60
    while (left := marked(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert left == []
    num_done = journal.read_bytes().count(b"\n")
    assert num_done < len(case.plan.shards)
    executor = run_on(case)
    assert len(executor.finishes) == len(case.plan.shards) - num_done
    assert case.hashes() == whole


def marked(mark: str) -> list[str]:
    """Commands of processes that have this in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
        except OSError:
            continue
    return found
