"""A worker: one engine on its own devices, and a pipeline that makes the shards it is handed.

    driver ── take(shard, samples) ─▶ inbox ─▶ thread: engine, pipeline ─▶ incoming/<worker>/… on the shared volume
           ◀── news() ─────────────── finished, begun, tokens, an error

The class knows nothing of Ray: an actor of Ray's runs it. Nothing here imports torch before the environment stands.
With ``EYAS_RAY_SPOOL`` a shard is written on the node's own disk first and then copied to the shared volume, see
``node_disk``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import heap
from eyas.engines.ray.node_disk import SPOOL_VARIABLE, WorkerWatch, copy_shard, own_folder

if TYPE_CHECKING:
    import torch

    from eyas.contracts import PlannedShard, TokenSample
    from eyas.engines.base import CapturedSample, Engine
    from eyas.engines.pipeline import Work
    from eyas.engines.ray.spec import News, Ready, WorkerSpec
    from eyas.engines.registry import EngineSpec
    from eyas.shards.writer import FinishedShard

THREADS = "OMP_NUM_THREADS"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
JOIN_S = 15.0


class _StoppedError(Exception):
    """The driver wants no more."""


class Worker:
    """Makes shards until it is stopped.

    Args:
        spec: What it is told.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._engine: Engine
        self._wake = threading.Condition()
        self._inbox: deque[Work] = deque()
        self._unannounced: list[TokenSample] = []
        self._ready: Ready | None = None
        self._begun: list[str] = []
        self._finished: list[FinishedShard] = []
        self._num_tokens = 0
        self._error: Exception | None = None
        self._scales_ND: torch.Tensor | None = None
        self._may_begin = self._is_stopping = False
        self._num_open, self._moved_s = 0, time.monotonic()
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def news(self, timeout_s: float) -> News:
        """What happened since the last call; waits so long when nothing did."""
        from eyas.engines.ray.spec import News

        with self._wake:
            self._wake.wait_for(
                lambda: self._ready or self._begun or self._finished or self._error or self._is_stopping, timeout_s
            )
            found = News(
                ready=self._ready,
                begun=tuple(self._begun),
                finished=tuple(self._finished),
                num_tokens=self._num_tokens,
                error=self._error,
                idle_s=time.monotonic() - self._moved_s if self._num_open else 0.0,
                num_held=self._num_open,
            )
            self._ready, self._begun, self._finished, self._num_tokens = None, [], [], 0
            return found

    def capture(self, samples: Sequence[TokenSample]) -> list[CapturedSample]:
        """States of a few samples, before ``begin``: for the calibration of a lossy codec."""
        return list(self._engine.capture(samples))

    def begin(self, scales_ND: torch.Tensor | None) -> None:
        """Shards may be made from now on, with these channel scales."""
        with self._wake:
            self._scales_ND, self._may_begin = scales_ND, True
            self._wake.notify_all()

    def take(self, planned: PlannedShard, samples: Sequence[TokenSample]) -> None:
        """Make this shard after those that were handed over before."""
        with self._wake:
            if not self._num_open:
                self._move()
            self._num_open += 1
            self._inbox.append((planned, {sample.sample_id: sample for sample in samples}))
            self._unannounced += samples
            self._wake.notify_all()

    def stop(self) -> None:
        """Make nothing more, and close the engine; shards that are with the writers are finished."""
        with self._wake:
            self._is_stopping = True
            self._inbox.clear()
            self._wake.notify_all()
        self._thread.join(JOIN_S)

    def _work(self) -> None:
        try:
            spec = self._spec
            _settle_in(spec)
            _check_target(spec.engine)
            self._engine = spec.engine.make(longest_tokens=spec.longest_tokens, label=f"{spec.name}-")
            with _states(spec) as states, contextlib.closing(self._engine):
                ready = self._open()
                with self._wake:
                    self._ready = ready
                    self._wake.notify_all()
                    self._wake.wait_for(lambda: self._may_begin or self._is_stopping)
                self._make_shards(states)
        except _StoppedError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver decides
            with self._wake:
                self._error = _sendable(error)
                self._wake.notify_all()

    def _open(self) -> Ready:
        from eyas.engines.ray.spec import Ready

        spec, engine, start_s = self._spec, self._engine, time.monotonic()
        engine.open()
        if spec.probe:
            from eyas.engines.check_start import check_start

            assert spec.engine.folder is not None
            check_start(
                engine,
                spec.probe,
                spec.engine.target,
                spec.engine.folder,
                spec.engine.boundaries,
                dtype=spec.engine.dtype,
                trust_remote_code=spec.engine.trust_remote_code,
            )
        return Ready(
            host=socket.gethostname(),
            pid=os.getpid(),
            kernel=kernel(),
            code=code_digest(),
            is_copying=bool(os.environ.get(SPOOL_VARIABLE)),
            devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            facts=engine.describe(),
            start_s=time.monotonic() - start_s,
        )

    def _make_shards(self, states: Path) -> None:
        from eyas.engines.pipeline import Pipeline, Told

        spec, own = self._spec, os.environ.get(SPOOL_VARIABLE, "")
        told = Told(
            begun=self._has_begun,
            looked=self._announce,
            captured=self._captured,
            stored=(lambda done: self._stored(self._bring(states, done))) if own else self._stored,
        )
        watch = WorkerWatch(states, spec.reserve_bytes, spec.payload_ratio, moved=self._move, own=own)
        pipeline = Pipeline(
            spec.capture,
            spec.hidden_size,
            self._engine,
            states,
            watch,
            told,
            scales_ND=self._scales_ND,
            max_failed_samples=spec.max_failed_samples,
        )
        with pipeline:
            pipeline.run(self._shards())

    def _shards(self) -> Iterator[Work]:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._is_stopping)
                if self._is_stopping:
                    return
                work = self._inbox.popleft()
            yield work

    def _announce(self) -> None:
        """In the engine's own thread: what came meanwhile, a word to stop included."""
        with self._wake:
            if self._is_stopping:
                raise _StoppedError
            new, self._unannounced = self._unannounced, []
        if new:
            self._engine.announce(new)

    def _move(self) -> None:
        """Something goes on; from any thread."""
        self._moved_s = time.monotonic()

    def _has_begun(self, planned: PlannedShard) -> None:
        with self._wake:
            self._move()
            self._begun.append(planned.path)
            self._wake.notify_all()

    def _captured(self, num_tokens: int) -> None:
        with self._wake:
            self._move()
            self._num_tokens += num_tokens

    def _stored(self, finished: FinishedShard) -> None:
        with self._wake:
            self._move()
            self._num_open -= 1
            self._finished.append(finished)
            self._wake.notify_all()

    def _bring(self, states: Path, finished: FinishedShard) -> FinishedShard:
        """Copy a shard from the node's disk to the shared volume, hashed on the way."""
        if finished.entry is not None:
            copy_shard(states / finished.path, self._spec.incoming / finished.path, finished.entry.md5, self._move)
            (states / finished.path).unlink()
        return finished


def _sendable(error: Exception) -> Exception:
    """The error as another process can read it: ours as it is, another one as text with where it came from."""
    from eyas.errors import EyasError

    if isinstance(error, EyasError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)).strip())


def kernel() -> str:
    """Names the kernel that runs here."""
    return BOOT_ID.read_text().strip()


def code_digest() -> str:
    """Of every module of the eyas that this process would import now."""
    import eyas
    from eyas import fs
    from eyas.canonical import digest

    root = Path(eyas.__file__).parent
    return digest([fs.file_digest(path, root) for path in sorted(root.rglob("*.py"))])


def _settle_in(spec: WorkerSpec) -> None:
    """The driver's environment and folder, before anything reads either.

    A node's own setting goes before the driver's; but for threads, which decide numerics on a CPU: Ray sets them anew.
    """
    from eyas.engines.ray.spec import PROOF
    from eyas.errors import StoreError

    for name, value in spec.environment.items():
        os.environ.setdefault(name, value)
    heap.keep_freed()
    os.environ.pop(THREADS, None)
    if THREADS in spec.environment:
        os.environ[THREADS] = spec.environment[THREADS]
    if spec.root.is_dir():
        os.chdir(spec.root)
    with contextlib.suppress(OSError):
        if (spec.incoming / PROOF).read_text() == spec.proof:
            return
    raise StoreError(
        f"node {socket.gethostname()} does not see {spec.incoming} as the driver does",
        "driver and workers need the volume of the repository under the same path on every node",
    )


def _states(spec: WorkerSpec) -> contextlib.AbstractContextManager[Path]:
    """Where this worker writes its shards: on its node's own disk, or where the driver takes them from."""
    own = os.environ.get(SPOOL_VARIABLE)
    if own:
        return own_folder(Path(own), f"{spec.capture.digest[:16]}-{spec.name}")
    return contextlib.nullcontext(spec.incoming)


def _check_target(engine: EngineSpec) -> None:
    """This node's files, before anything is computed with them."""
    from eyas.target.copies import check_copy

    if engine.folder is not None:
        check_copy(engine.target, engine.folder)
