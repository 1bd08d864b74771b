"""When a worker on Ray counts as silent; Ray is a stand-in here, whose workers say what they are told to."""

import time
from types import SimpleNamespace

import pytest

from eyas.contracts import EngineFacts
from eyas.engines.ray import cluster as adapter
from eyas.engines.ray.spec import Lost, News, Ready

READY = Ready(host="n1", pid=1, kernel="k", code="c", is_copying=False, devices="", start_s=1.0,
              facts=EngineFacts(name="fake", version="1", options={}, deterministic=True))  # fmt: skip


class StandIn:
    """As much of Ray as a cluster asks for."""

    def __init__(self) -> None:
        self.answers: list[News] = []
        self.killed = 0
        self.exceptions = SimpleNamespace(RayError=ConnectionError)
        self.actor = SimpleNamespace(news=SimpleNamespace(remote=lambda timeout_s: object()),
                                     stop=SimpleNamespace(remote=object))  # fmt: skip

    def init(self, **_):
        pass

    shutdown = init

    def remote(self, _):
        hired = SimpleNamespace(remote=lambda spec: self.actor)
        return SimpleNamespace(options=lambda **_: hired)

    def wait(self, asked, num_returns, timeout):
        time.sleep(0.05)
        return (asked if self.answers else [], [])

    def get(self, _):
        return self.answers.pop()

    def kill(self, _):
        self.killed += 1


@pytest.fixture
def world(monkeypatch):
    ray = StandIn()
    monkeypatch.setattr(adapter, "_import_ray", lambda: ray)
    monkeypatch.delenv("EYAS_RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("EYAS_WATCHDOG_S", "1")
    with adapter.Cluster() as cluster:
        cluster.hire(SimpleNamespace(name="w1"), 0)  # type: ignore[arg-type]
        yield cluster, ray


def heard(cluster, seconds: float) -> list[object]:
    end_s, found = time.monotonic() + seconds, []
    while time.monotonic() < end_s:
        found += [what for _, what in cluster.news(0.05)]
    return found


def test_a_silent_worker_is_lost_and_one_that_waits_for_a_place_or_starts_its_engine_is_not(world):
    cluster, ray = world
    assert heard(cluster, 1.3) == []  # nowhere yet
    ray.answers = [News()]
    assert heard(cluster, 1.3) == [News()]  # it starts: what loads may not answer for a while
    ray.answers = [News(ready=READY)]
    ready, lost = heard(cluster, 1.3)
    assert ready == News(ready=READY)
    assert lost == Lost("w1 has not answered for 1 s (EYAS_WATCHDOG_S)")
    assert (ray.killed, cluster.names) == (1, [])


def test_a_start_has_a_limit_too(world, monkeypatch):
    _, ray = world
    monkeypatch.setenv("EYAS_SGLANG_START_S", "2")
    with adapter.Cluster() as cluster:
        cluster.hire(SimpleNamespace(name="w2"), 0)  # type: ignore[arg-type]
        ray.answers = [News()]
        assert heard(cluster, 2.4) == [News(), Lost("w2 has not answered for 2 s (EYAS_SGLANG_START_S)")]
