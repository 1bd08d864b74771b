"""A cluster whose workers are threads of this process: real workers and engines, no Ray. It can lose them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from extract_cases import Case, fake_engine

from eyas.contracts import PlannedShard, TokenSample
from eyas.engines.loop import ExtractLimits, ExtractResult, extract
from eyas.engines.ray.driver import RayExecutor
from eyas.engines.ray.spec import Lost, News, WorkerSpec
from eyas.engines.ray.worker import Worker
from eyas.engines.registry import EngineSpec
from fake_target import make_target

Strike = Callable[["ThreadCluster", str, PlannedShard], bool]
"""Whether a worker is lost when it is handed this shard."""


def fake_spec(**changes) -> EngineSpec:
    given = {
        "name": "fake", "target": make_target(), "folder": None, "boundaries": (1, 2, 3), "dtype": "bfloat16", "device": "cpu",
        "options": {},
    }  # fmt: skip
    return EngineSpec(**given | changes)


class ThreadCluster:
    """Stands in the place of ``Cluster``."""

    strike: Strike | None = None
    edit: Callable[[str, News], News] | None = None
    num_places = 2
    address = ""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.gone: dict[str, str] = {}
        self.given: list[tuple[str, str]] = []
        self.specs: list[WorkerSpec] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers.values():
            worker.stop()

    def places(self, gpus_per_worker):
        return self.num_places

    def hire(self, spec, gpus_per_worker):
        self.specs.append(spec)
        self.workers[spec.name] = Worker(spec)

    @property
    def names(self):
        return list(self.workers)

    def news(self, timeout_s):
        found: list[tuple[str, News | Lost]] = []
        for name, worker in list(self.workers.items()):
            if name in self.gone:
                self.dismiss(name)
                found.append((name, Lost(f"{name}: {self.gone[name]}")))
                continue
            news = worker.news(0.005)
            found.append((name, self.edit(name, news) if self.edit else news))
        time.sleep(0.002)
        return found

    def begin(self, name, scales_ND):
        self.workers[name].begin(scales_ND)

    def give(self, name: str, planned: PlannedShard, samples: Sequence[TokenSample]) -> None:
        self.given.append((name, planned.path))
        if self.strike is not None and self.strike(name, planned):
            self.gone[name] = "killed by the test"
        else:
            self.workers[name].take(planned, samples)

    def capture(self, name, samples, timeout_s):
        return self.workers[name].capture(samples)

    def dismiss(self, name):
        self.workers.pop(name).stop()


def run_on(case: Case, *, max_failed: int = 0, reserve_bytes: int = 0, **changes) -> tuple[ExtractResult, RayExecutor]:
    """Extract with workers whose engine differs so from the fake one."""
    executor = RayExecutor(fake_spec(**changes))
    limits = ExtractLimits(max_failed_samples=max_failed, reserve_bytes=reserve_bytes)
    places = {"out": case.out, "manifest_path": case.manifest_path, "home": case.home}
    result = extract(case.plan, case.tokens, fake_engine(), limits, **places, executor=executor)
    return result, executor


def flip(path: Path) -> None:
    """Damage one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
