"""The driver: hands out shards, takes in what is finished, journals it. It computes nothing and schedules no process.

    plan ─▶ handout ─▶ workers ─▶ incoming/<worker>/… ─▶ looked at, renamed into the spool, journaled

A worker writes below its own folder alone, and only the driver moves a shard to where it counts: a worker that was given
up but goes on writing, behind a broken network, changes nothing. How many workers: ``EYAS_RAY_WORKERS``, else as many as
the nodes that are there have room for, looked at again all the while.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from eyas import config, console, fs
from eyas.contracts import EngineFacts, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.base import CapturedSample
from eyas.engines.loop import Run
from eyas.engines.pipeline import check_failures, num_writers
from eyas.engines.ray.cluster import Cluster
from eyas.engines.ray.handout import Handout
from eyas.engines.ray.spec import PROOF, Lost, News, Ready, WorkerSpec
from eyas.engines.ray.worker import THREADS, code_digest, kernel
from eyas.engines.registry import SERVER_ENGINES, EngineSpec
from eyas.errors import DiskError, EyasError, ServerError, StoreError
from eyas.plan.watch import Watch
from eyas.shards.opening import check_identity, read_header
from eyas.shards.verify import verify_file
from eyas.shards.writer import LOOK_BYTES, FinishedShard

WORKERS_VARIABLE, GPUS_VARIABLE = "EYAS_RAY_WORKERS", "EYAS_RAY_GPUS_PER_WORKER"
OWN_VARIABLES = ("EYAS_RAY_ADDRESS", WORKERS_VARIABLE, GPUS_VARIABLE)
MAX_FAILED_STARTS = 3
"""Workers in a row that were lost before their engine was open, while no other works and their nodes live."""
MAX_LOST = 20
"""Workers that may be lost, by whatever cause, while none is ready: more than two hosts of eight that go as they start. Only
with a start's whole time between the first and the last of them is the run over."""
LOOK_S, SOON_S, HIRE_EVERY_S, WAIT_NOTE_S = 0.5, 0.02, 5.0, 60.0


@dataclass(frozen=True, slots=True)
class Finish:
    """A shard that a worker finished, for measurements."""

    at_s: float
    worker: str
    path: str


class RayExecutor:
    """Makes the shards of a run on a Ray cluster; an executor of ``engines.loop``.

    Args:
        engine: What each worker hosts.
        probe: Samples by which each engine is judged when it is open.
    """

    def __init__(self, engine: EngineSpec, probe: Sequence[TokenSample] = ()) -> None:
        if os.environ.get("EYAS_SGLANG_URL"):
            raise ServerError(
                "EYAS_SGLANG_URL names one running server, and extract.executor is ray: each worker starts its own",
                "unset EYAS_SGLANG_URL, or set extract.executor=local",
            )
        self.engine, self.probe = engine, tuple(probe)
        self.finishes: list[Finish] = []
        self.workers: dict[str, tuple[float, Ready]] = {}
        """Every worker that was ever ready, and when it became so; for measurements."""
        self.num_lost_workers = 0

    def __call__(self, run: Run, watch: Watch) -> None:
        """Make what is left of the run.

        Raises:
            ServerError: Ray or the engine cannot be started.
            CaptureError: Too many samples failed, or one shard ends every worker.
            DiskError: The volume is down to its reserve.
        """
        try:
            with Cluster() as cluster, ThreadPoolExecutor(num_writers(), "shard-accept") as acceptors:
                _Driver(self, run, watch, cluster, acceptors).drive()
        finally:
            shutil.rmtree(run.spool.incoming, ignore_errors=True)


class _Driver:
    def __init__(
        self,
        executor: RayExecutor,
        run: Run,
        watch: Watch,
        cluster: Cluster,
        acceptors: ThreadPoolExecutor,
    ) -> None:
        self._executor, self._run, self._watch, self._cluster = executor, run, watch, cluster
        self._incoming, self._acceptors = run.spool.incoming.resolve(), acceptors
        self._facts, self._code = run.engine.describe(), code_digest()
        self._handout = Handout(run.left)
        self._gpus = config.knob(GPUS_VARIABLE, executor.engine.num_gpus) if executor.engine.num_gpus else 0
        self._patience_s = _patience_s(executor.engine.name)
        self._ready: dict[str, Ready] = {}
        self._given_s: dict[str, float] = {}
        self._accepting: dict[Future[FinishedShard], tuple[str, str]] = {}
        self._nonce, self._num_hired, self._num_failed_starts = secrets.token_hex(3), 0, 0
        self._hired_s, self._noted_s = 0.0, time.monotonic()
        self._lost_s: list[float] = []
        """When workers were lost while none was ready, since one was."""

    def drive(self) -> None:
        """Until every shard is journaled."""
        self._check_places()
        while self._handout.num_left:
            console.stop_if_interrupted()
            self._hire()
            self._hand_out()
            for name, what in self._cluster.news(SOON_S if self._accepting else LOOK_S):
                self._heard(name, what)
            self._take_in()

    def _check_places(self) -> None:
        where = self._cluster.address or "this machine"
        if not self._cluster.places(self._gpus) and not os.environ.get(WORKERS_VARIABLE):
            wants = f"{self._gpus} GPUs" if self._gpus else "a CPU"
            raise ServerError(
                f"no node of the Ray cluster at {where} has {wants} for a worker",
                f"`ray status` shows what there is; {WORKERS_VARIABLE}=N waits for nodes that join later",
            )

    def _hire(self) -> None:
        """As many workers as are wanted, looked at now and then: nodes join."""
        now_s = time.monotonic()
        if now_s - self._hired_s < HIRE_EVERY_S and self._cluster.names:
            return
        self._hired_s = now_s
        wanted = config.knob(WORKERS_VARIABLE, max(1, self._cluster.places(self._gpus)))
        for _ in range(min(wanted, self._handout.num_left) - len(self._cluster.names)):
            self._num_hired += 1
            self._cluster.hire(self._spec(f"w{self._num_hired}-{self._nonce}"), self._gpus)
        if not self._ready and now_s - self._noted_s > WAIT_NOTE_S:
            self._noted_s = now_s
            room = self._cluster.places(self._gpus)
            console.log(
                f"extract: {len(self._cluster.names)} workers are asked for, none is ready yet; the nodes that are there "
                f"have room for {room}"
            )

    def _spec(self, name: str) -> WorkerSpec:
        run, folder, proof = self._run, self._incoming / name, secrets.token_hex(8)
        fs.write_text(folder / PROOF, proof)
        return WorkerSpec(
            name=name,
            engine=self._executor.engine,
            probe=self._executor.probe,
            capture=run.plan.capture,
            hidden_size=run.plan.hidden_size,
            longest_tokens=max(sample.num_tokens for shard in run.plan.shards for sample in shard.samples),
            root=Path.cwd(),
            incoming=folder,
            proof=proof,
            reserve_bytes=self._watch.reserve_bytes + LOOK_BYTES * len(self._cluster.names),
            payload_ratio=self._watch.ratio,
            max_failed_samples=run.limits.max_failed_samples,
            environment=_environment(),
        )

    def _hand_out(self) -> None:
        for name in self._ready:
            while (planned := self._handout.next_for(name, len(self._cluster.names))) is not None:
                if not self._watch.has_room(planned):
                    if self._handout.num_out:
                        return  # what is out is expected to take so much; once it lies there, it is known
                    self._watch.check(planned)
                self._watch.hand_over(self._handout.give(name))
                samples = [self._run.tokens[sample.sample_id] for sample in planned.samples]
                self._cluster.give(name, planned, samples)
                self._given_s[name] = time.monotonic()

    def _heard(self, name: str, what: News | Lost) -> None:
        if isinstance(what, Lost):
            self._lose(name, what.reason, None, is_node_gone=what.is_node_gone)
            return
        if what.ready is not None:
            self._begin(name, what.ready)
        self._handout.begun(name, what.begun)
        if what.num_tokens:
            self._run.captured(what.num_tokens)
        for finished in what.finished:
            accepted = self._acceptors.submit(self._accept, name, finished)
            self._accepting[accepted] = (name, finished.path)
        if what.error is not None:
            self._failed(name, what.error)
        elif (idle_s := max(what.idle_s, self._astray_s(name, what.num_held))) > self._patience_s:
            self._cluster.dismiss(name)
            reason = f"{name} answers, but nothing went on there for {idle_s:.0f} s, expected at most "
            self._lose(name, f"{reason}{self._patience_s:.0f} s (EYAS_WATCHDOG_S)", None)

    def _astray_s(self, name: str, num_held: int) -> float:
        """Since a worker was given a shard that it still does not know of: a call that got lost is told to nobody."""
        num_taken = sum(worker == name for worker, _ in self._accepting.values())
        is_astray = self._handout.num_with(name) > num_held + num_taken
        return time.monotonic() - self._given_s[name] if is_astray else 0.0

    def _begin(self, name: str, ready: Ready) -> None:
        found, expected = (ready.facts.name, ready.facts.version), (self._facts.name, self._facts.version)
        if found != expected:
            raise StoreError(
                f"node {ready.host} has the engine {' '.join(found)}, the plan was made for {' '.join(expected)}",
                "install the same versions on every node: states of two are not mixed",
            )
        if ready.code != self._code:
            raise StoreError(
                f"node {ready.host} runs another eyas than this driver did when it started: its shards may have other bytes",
                "one checkout for all nodes, unchanged while a run goes on; then run the same command again",
            )
        devices = f", GPU {ready.devices}" if self._gpus else ""
        console.log(
            f"extract: worker {name} on {ready.host}, process {ready.pid}{devices}, is ready after "
            f"{console.human_seconds(ready.start_s)}"
        )
        self._num_failed_starts = 0
        self._lost_s.clear()
        if not self._ready:
            self._run.calibrate(_Borrowed(self._cluster, name, self._facts, self._patience_s))
        self._cluster.begin(name, self._run.scales_ND)
        self._ready[name] = ready
        self._executor.workers[name] = (time.monotonic(), ready)

    def _failed(self, name: str, error: Exception) -> None:
        """A worker ended by an error: a server's and an unknown one may be its node's alone, others are everybody's."""
        if isinstance(error, EyasError) and not isinstance(error, ServerError):
            host = self._ready[name].host if name in self._ready else ""
            console.log(f"extract: worker {name} on {host or 'its node'} ended by an error")
            is_local = isinstance(error, DiskError) and host
            raise DiskError(f"node {host}: {error.message}", error.hint) if is_local else error
        self._cluster.dismiss(name)
        self._lose(name, f"{name}: {error.message if isinstance(error, EyasError) else error}", error)

    def _lose(self, name: str, reason: str, error: Exception | None, *, is_node_gone: bool = False) -> None:
        self._executor.num_lost_workers += 1
        was_ready = self._ready.pop(name, None) is not None
        # What it finished and said is taken in first: only what nobody has seen goes out again.
        self._take_in(of=name)
        back = self._handout.lost(name, reason)
        for planned in back:
            self._watch.written(planned.path)
        shutil.rmtree(self._incoming / name, ignore_errors=True)
        console.log(f"extract: worker {name} is lost, {len(back)} shards go out again: {reason}")
        if was_ready or is_node_gone:
            self._hired_s = 0.0  # another at once; where none starts, not before the next look
        if self._ready:
            return
        self._check_losses(reason)
        if was_ready or is_node_gone:
            return
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            if isinstance(error, EyasError):
                raise error
            raise ServerError(
                f"{self._num_failed_starts} workers in a row were lost before their engine was open; the last one: "
                f"{reason}",
                "`ray logs cluster` has what they said",
            )

    def _check_losses(self, reason: str) -> None:
        """Whoever is hired next will be lost too; also where nodes, of which each may go, all go."""
        self._lost_s.append(time.monotonic())
        num_lost, lasted_s, limit_s = len(self._lost_s), self._lost_s[-1] - self._lost_s[0], config.start_s()
        if num_lost >= MAX_LOST and lasted_s >= limit_s:
            raise ServerError(
                f"{num_lost} workers were lost in {console.human_seconds(lasted_s)} and none became ready, expected one in "
                f"{console.human_seconds(limit_s)} (EYAS_SGLANG_START_S); the last one: {reason}",
                "`ray status` shows the nodes, their own logs why they go; finished shards are kept, the same command goes on",
            )

    def _accept(self, name: str, finished: FinishedShard) -> FinishedShard:
        """In a thread: look at a shard, put it into its place, journal it.

        One that was written by another kernel, or copied, is read through; else what reads it is what wrote it, as in a
        run without a cluster, and its header is enough.
        """
        entry = finished.entry
        if entry is not None:
            path, identity = self._incoming / name / entry.path, self._run.spool.identity
            ready = self._ready.get(name)
            if ready is None or ready.is_copying or ready.kernel != kernel():
                for finding in verify_file(path, entry, identity)[1]:
                    raise StoreError(finding.problem)
            header, size_bytes = read_header(path, entry.path)
            check_identity(header, identity, entry.path)
            if size_bytes != entry.size_bytes:
                raise StoreError(f"{entry.path}: {size_bytes:,} bytes, expected {entry.size_bytes:,}")
            place = self._run.spool.states / entry.path
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
            fs.fsync_dir(place.parent)
        self._run.finish(finished)
        return finished

    def _take_in(self, of: str | None = None) -> None:
        """What the acceptors are done with; all that a worker gave, waited for, when it is named."""
        for accepted in [a for a, (name, _) in self._accepting.items() if name == of or (of is None and a.done())]:
            name, path = self._accepting.pop(accepted)
            self._watch.written(path)
            try:
                accepted.result()
            except StoreError as error:
                console.log(f"extract: {path} of worker {name} is not taken: {error.message}")
                self._handout.refused(name, path, f"{name}: {error.message}")
                continue
            self._handout.finished(name, path)
            self._executor.finishes.append(Finish(time.monotonic(), name, path))
            check_failures(self._run.failed, self._run.limits.max_failed_samples)


class _Borrowed:
    """A worker's engine, for what the driver itself captures: the slice that a lossy codec is calibrated on."""

    def __init__(self, cluster: Cluster, name: str, facts: EngineFacts, patience_s: float) -> None:
        self._cluster, self._name, self._facts, self._patience_s = cluster, name, facts, patience_s

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """Nothing is computed ahead."""

    def open(self) -> None:
        """It is."""

    def close(self) -> None:
        """Its worker does."""

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """As the worker's engine does."""
        return iter(self._cluster.capture(self._name, batch, self._patience_s))

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """Never asked for."""
        raise NotImplementedError

    def describe(self) -> EngineFacts:
        """As the driver's engine does, which was compared with the worker's."""
        return self._facts


def _patience_s(engine: str) -> int:
    """Seconds in which a worker with work must begin, capture or write something.

    Engines with a server watch it themselves: they need the time to notice that it hangs, to start another and to
    capture a batch with that one. A worker's own start is not in it: nobody has work before it is ready.
    """
    watchdog_s = config.watchdog_s()
    return 2 * watchdog_s + config.start_s() if engine in SERVER_ENGINES else watchdog_s


def _environment() -> dict[str, str]:
    """What workers know of the driver's environment: knobs, and threads, which decide numerics on a CPU."""
    named = {name: value for name, value in os.environ.items() if name.startswith("EYAS_")}
    for name in OWN_VARIABLES:
        named.pop(name, None)
    return named | {name: os.environ[name] for name in (THREADS,) if name in os.environ}
