"""The only module that imports Ray: a connection to a cluster, and workers on it as handles with names.

Without an address a Ray of this machine is started for the run and ended with it. Nothing here decides anything: what
a lost worker means is the driver's matter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eyas
from eyas import config
from eyas.contracts import PlannedShard, TokenSample
from eyas.engines.base import CapturedSample
from eyas.engines.ray.spec import Lost, News, WorkerSpec
from eyas.engines.ray.worker import Worker
from eyas.errors import ServerError

if TYPE_CHECKING:
    import torch

ADDRESS_VARIABLES = ("EYAS_RAY_ADDRESS", "RAY_ADDRESS")
INSTALL = "pip install -e '.[ray]', in the environment of every node"
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}
"""Of a Ray that is started here: nothing is reported to its makers; as without Ray no worker is ended because the machine's
memory runs low, and none stands behind other programs (Ray's own niceness is 15)."""
POLL_S = 2.0
"""A worker with nothing to say answers after so long."""
STOP_S, CONNECT_S = 20.0, 10.0
NODE_GONE = "node has died"
"""Ray's words of an actor that ends with its node."""
STORE_BYTES = 1 << 30
"""Of a Ray of our own: only token ids and a few samples pass through it."""


@dataclass(slots=True)
class _Hired:
    """A worker that was asked for."""

    actor: Any
    asked: Any
    """The call for news that is under way."""
    heard_s: float = 0.0
    """When it last answered; 0 before it did, for it may wait for a place on a node."""
    limit_s: float = 0.0
    """Seconds of silence after which it is lost: while its engine starts, those of a start, for what loads may hold it up."""


class Cluster:
    """A connection, and the workers of one run. Use as a context manager.

    Raises:
        ServerError: Ray is not installed, or the cluster does not answer.
    """

    def __init__(self) -> None:
        ray = self._ray = _import_ray()
        self.address = _address()
        self._hired: dict[str, _Hired] = {}
        self._watchdog_s = config.watchdog_s()
        self._start_s = max(self._watchdog_s, config.start_s())
        settings = {"logging_level": logging.WARNING, "log_to_driver": True, "namespace": "eyas"}
        if not self.address:
            settings |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        try:
            _knock(self.address)
            with _own_sigterm():
                ray.init(address=self.address or "local", **settings)
        except Exception as error:  # Ray raises bare ones: a node that was too slow to start, say
            ray.shutdown()
            reason = str(error).strip().split("\n")[0]
            where = f"the Ray cluster at {self.address} is not reached" if self.address else "Ray does not start here"
            raise ServerError(f"{where}: {reason}", self._hint()) from error
        self._worker_class = ray.remote(Worker)

    def _hint(self) -> str:
        if not self.address:
            return "`ray start --head` shows what is wrong; or name a cluster: EYAS_RAY_ADDRESS=HOST:6379"
        return (
            f"`ray status --address {self.address}` must answer here; unset EYAS_RAY_ADDRESS to use this machine alone"
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def places(self, gpus_per_worker: int) -> int:
        """Workers that the nodes that are there have room for: by their GPUs, else one a node."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if gpus_per_worker:
            return sum(int(node.get("GPU", 0)) // gpus_per_worker for node in nodes)
        return sum(node.get("CPU", 0) >= 1 for node in nodes)

    def hire(self, spec: WorkerSpec, gpus_per_worker: int) -> None:
        """Ask for a worker; it says that it is ready by its first news."""
        actor = self._worker_class.options(
            num_cpus=1,
            num_gpus=gpus_per_worker,
            max_restarts=0,
            max_concurrency=4,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
        ).remote(spec)
        self._hired[spec.name] = _Hired(actor, actor.news.remote(POLL_S), limit_s=self._start_s)

    @property
    def names(self) -> list[str]:
        """Of the workers that were asked for and are not lost."""
        return list(self._hired)

    def news(self, timeout_s: float) -> list[tuple[str, News | Lost]]:
        """What happened with the workers; waits so long when nothing did. A lost worker is forgotten here."""
        asked = {hired.asked: name for name, hired in self._hired.items()}
        if not asked:
            time.sleep(timeout_s)
            return []
        done, _ = self._ray.wait(list(asked), num_returns=1, timeout=timeout_s)
        if len(done) and len(asked) > 1:  # the others that have something too
            done, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        found = [(asked[ref], self._answer(asked[ref], ref)) for ref in done]
        now_s = time.monotonic()
        for name, hired in list(self._hired.items()):
            silent_s = now_s - hired.heard_s if hired.heard_s else 0.0
            if silent_s > hired.limit_s:
                self.dismiss(name)
                knob = "EYAS_WATCHDOG_S" if hired.limit_s == self._watchdog_s else "EYAS_SGLANG_START_S"
                found.append((name, Lost(f"{name} has not answered for {silent_s:.0f} s ({knob})")))
        return found

    def _answer(self, name: str, ref: Any) -> News | Lost:
        hired = self._hired[name]
        try:
            news: News = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self.dismiss(name)
            return Lost(f"{name}: {_cause(error)}", is_node_gone=NODE_GONE in str(error))
        hired.heard_s = time.monotonic()
        if news.ready is not None:
            hired.limit_s = self._watchdog_s
        hired.asked = hired.actor.news.remote(POLL_S)
        return news

    def begin(self, name: str, scales_ND: torch.Tensor | None) -> None:
        """Let a ready worker make shards."""
        self._hired[name].actor.begin.remote(scales_ND)

    def give(self, name: str, planned: PlannedShard, samples: Sequence[TokenSample]) -> None:
        """Hand a shard over. That it arrived shows by the worker's news."""
        self._hired[name].actor.take.remote(planned, list(samples))

    def capture(self, name: str, samples: Sequence[TokenSample], timeout_s: float) -> list[CapturedSample]:
        """States of a few samples by a worker that is ready and makes no shards yet.

        Raises:
            ServerError: It is lost, or has not answered in time.
            CaptureError: As the engine says.
        """
        try:
            return self._ray.get(self._hired[name].actor.capture.remote(list(samples)), timeout=timeout_s)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except self._ray.exceptions.RayError as error:
            raise ServerError(f"{name}: {_cause(error)}", "run the same command again") from error

    def dismiss(self, name: str) -> None:
        """End a worker's process at once; a server of its own ends with it."""
        hired = self._hired.pop(name)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(hired.actor)

    def close(self) -> None:
        """Let the workers close their engines, end them, and leave the cluster."""
        ray = self._ray
        with contextlib.suppress(ray.exceptions.RayError, KeyboardInterrupt):
            heard = [hired for hired in self._hired.values() if hired.heard_s]
            if heard:
                ray.wait([hired.actor.stop.remote() for hired in heard], num_returns=len(heard), timeout=STOP_S)
        for name in self.names:
            self.dismiss(name)
        ray.shutdown()


def _address() -> str:
    return next(filter(None, map(os.environ.get, ADDRESS_VARIABLES)), "")


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray sets a handler of its own, which ends this process by another code than Ctrl-C's way out."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _knock(address: str) -> None:
    """Whether anybody listens there: Ray itself tries for minutes.

    Raises:
        OSError: Nobody does.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _import_ray() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.exceptions  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ServerError(f"extract.executor is ray, and Ray is not installed: {error}", INSTALL) from error
    return ray


def _python_path() -> str:
    """Workers run the driver's own eyas where its folder is on the volume, else what their node has installed."""
    own = Path(eyas.__file__).resolve().parents[1]
    others = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # noqa: PTH100
    return os.pathsep.join(dict.fromkeys([os.fspath(own), *others]))


def _cause(error: Exception) -> str:
    """The lines of Ray's error that say something, in one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:6])}"[:600]


def findings() -> list[tuple[str, str, str, str]]:
    """What ``eyas doctor`` shows: whether Ray is there and the named cluster answers."""
    try:
        ray = _import_ray()
    except ServerError as error:
        return [("ray", "problem", error.message, error.hint or "")]
    rows = [("ray", "found", ray.__version__, "")]
    if not _address():
        return [*rows, ("ray cluster", "found", "none is named: a Ray of this machine is started for each run", "")]
    try:
        with Cluster() as cluster:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            gpus = sum(int(node["Resources"].get("GPU", 0)) for node in nodes)
            rows.append(("ray cluster", "found", f"{cluster.address}: {len(nodes)} nodes, {gpus} GPUs", ""))
    except ServerError as error:
        rows.append(("ray cluster", "problem", error.message, error.hint or ""))
    return rows
