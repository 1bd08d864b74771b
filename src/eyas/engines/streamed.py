"""The capturing process of a streamed training: shards of a plan on demand, into a ring.

    python -m eyas.engines.streamed TARGET_JSON TOKENS MANIFEST_JSON RING    started by the training (eyas.batches.feed)

Lines of JSON come in and go out. In: ``capture`` (a shard, or some samples of it), ``write`` (the room that a captured
shard takes is there). Out: ``ready``, ``progress``, ``alive`` (the engine waits for its server), ``captured`` (with the
exact size), ``written``, ``error``. A shard waits in memory between ``captured`` and ``write``, so the ring never holds a
byte that was not granted; the engine works at the next one meanwhile.

It runs as its own process: what ends an engine does not end a training, and it can have its own GPUs and threads.
When its input ends, it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from eyas import config, console, fs
from eyas.canonical import to_plain
from eyas.config import Params
from eyas.config.images import check_image
from eyas.contracts import (
    CapturePlan,
    EngineFacts,
    PlannedSample,
    PlannedShard,
    ShardManifest,
    TargetIdentity,
    TokenSample,
)
from eyas.engines.base import Engine, OnWait
from eyas.engines.batch import capture_batch
from eyas.engines.calibrate import calibrate, stored_calibration
from eyas.engines.check_start import check_planned
from eyas.engines.checked import Checks
from eyas.engines.registry import EngineSpec
from eyas.errors import DiskError, EyasError, StoreError
from eyas.plan.build import streamed_plan
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder
from eyas.shards.writer import FinishedShard, ShardAssembly
from eyas.target.locate import ensure
from eyas.tokens.dataset import read_lengths
from eyas.tokens.table import TokenTable

Message = dict[str, Any]
ALIVE_S = 1.0
"""Between two words that the engine waits for its server."""
MAX_WAITING = 64
"""Shards that may wait to be written; the training asks for a few at a time, and for damaged ones between."""


class Parent:
    """The training at the other end of the pipes.

    Args:
        source: Its lines.
        sink: Where ours go.
    """

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source, self._sink, self._saying = source, sink, threading.Lock()
        self.commands: queue.Queue[Message | None] = queue.Queue()
        self._permits, self._granted, self._is_gone = set[int](), threading.Condition(), False
        self._alive_s = 0.0

    def say(self, **message: Any) -> None:
        """Send a line."""
        with self._saying, contextlib.suppress(BrokenPipeError):  # its end is seen by ``listen``
            self._sink.write(json.dumps(message) + "\n")
            self._sink.flush()

    def alive(self) -> None:
        """Tell that the thread that calls this waits, and does not hang."""
        if time.monotonic() - self._alive_s > ALIVE_S:
            self._alive_s = time.monotonic()
            self.say(alive=True)

    def listen(self) -> None:
        """Sort what comes in, until it ends; for a thread of its own."""
        for line in self._source:
            message = json.loads(line)
            if "write" in message:
                with self._granted:
                    self._permits.add(message["write"])
                    self._granted.notify_all()
            else:
                self.commands.put(message)
        with self._granted:
            self._is_gone = True
            self._granted.notify_all()
        self.commands.put(None)
        os.kill(os.getpid(), signal.SIGTERM)  # also in the middle of a capture

    def take(self, *, wait: bool) -> list[Message]:
        """Commands that came; empty when none did, or when the training has ended."""
        found: list[Message] = []
        while wait or not self.commands.empty():
            command = self.commands.get()
            if command is None:
                self.commands.put(None)
                break
            found.append(command)
            wait = False
        return found

    def wait_to_write(self, job: int) -> None:
        """Return when a job may write.

        Raises:
            StoreError: The training has ended.
        """
        with self._granted:
            self._granted.wait_for(lambda: self._is_gone or job in self._permits)
            self._permits.discard(job)
            if self._is_gone:
                raise StoreError("the training has ended: nothing more goes into its ring")


@dataclass(slots=True)
class _Writing:
    """Grants the writing of one shard: the room was counted before its first byte."""

    parent: Parent
    job: int
    folder: Path
    reserve_bytes: int
    facts: Message
    is_told: bool = False

    def __call__(self, left_bytes: int) -> None:
        if not self.is_told:
            self.is_told = True
            self.parent.say(captured=self.job, size_bytes=left_bytes, **self.facts)
            self.parent.wait_to_write(self.job)
        free = fs.free_bytes(self.folder)
        if left_bytes > free - self.reserve_bytes:
            raise DiskError(
                f"a shard of the ring still needs {left_bytes:,} bytes; {free:,} are free and extract.reserve_bytes "
                f"keeps {self.reserve_bytes:,} of them",
                f"free space (`df -h {self.folder}`), then run the same command: it goes on from the last checkpoint",
            )


class Worker:
    """Captures what it is told to.

    Args:
        plan: As a stored set of all samples has it.
        tokens: By sample id.
        engine: Open.
        parent: Who asks.
        ring: Folder with ``states`` and ``pinned``.
        reserve_bytes: Free bytes that must remain.
    """

    def __init__(
        self,
        plan: CapturePlan,
        tokens: Mapping[str, TokenSample],
        engine: Engine,
        parent: Parent,
        ring: Path,
        reserve_bytes: int,
    ) -> None:
        self._plan, self._tokens, self._engine, self._parent, self._ring = plan, tokens, engine, parent, ring
        self.scales_ND: torch.Tensor | None = None
        """Channel scales of a lossy codec, once it is calibrated."""
        self._reserve_bytes = reserve_bytes
        self._shards = {shard.path: shard for shard in plan.shards}

    def run(self, waiting: deque[Message]) -> None:
        """Work until there are no more commands.

        Args:
            waiting: Commands that were announced to the engine already.
        """
        capture = self._plan.capture
        with (
            Encoder(make_codec(capture.codec, self.scales_ND)) as encoder,
            Checks(len(capture.boundaries), self._plan.hidden_size) as checks,
            ThreadPoolExecutor(MAX_WAITING, "ring-writer") as writer,
        ):
            writing: list[Future[None]] = []
            while waiting or (waiting := self.next_commands()):
                for done in [future for future in writing if future.done()]:
                    writing.remove(done)
                    done.result()
                writing.append(self._capture(waiting.popleft(), encoder, checks, writer))
                waiting += self.next_commands(wait=False)

    def next_commands(self, *, wait: bool = True) -> deque[Message]:
        """Commands that came meanwhile, told to the engine so that it works ahead; empty at the end."""
        found = self._parent.take(wait=wait)
        samples = [sample for command in found for batch in self._batches(command) for sample in batch]
        if samples:
            self._engine.announce([self._tokens[sample.sample_id] for sample in samples])
        return deque(found)

    def _batches(self, command: Message) -> list[tuple[PlannedSample, ...]]:
        """The planned batches that hold what is wanted; whole, or their bytes would be others."""
        only = command["only"]
        batches = self._shards[command["shard"]].batches
        return [b for b in batches if only is None or any(sample.sample_id in only for sample in b)]

    def _capture(self, command: Message, encoder: Encoder, checks: Checks, writer: ThreadPoolExecutor) -> Future[None]:
        job, shard, batches = command["capture"], self._shards[command["shard"]], self._batches(command)
        names = {sample.sample_id for batch in batches for sample in batch}
        only = frozenset(names if command["only"] is None else command["only"])
        tokens = {name: self._tokens[name] for name in names}
        assembly = ShardAssembly(
            _part(shard, only), self._plan.capture, self._plan.hidden_size, tokens, encoder, self.scales_ND
        )
        for batch in batches:
            samples = [tokens[sample.sample_id] for sample in batch]
            capture_batch(self._engine, samples, assembly, checks, frozenset(names) - only)
            self._parent.say(progress=job, num_tokens=sum(sample.num_tokens for sample in batch))
        return writer.submit(self._write, job, self._ring / command["kind"], assembly)

    def _write(self, job: int, folder: Path, assembly: ShardAssembly) -> None:
        failed = [to_plain(sample) for sample in assembly.failed]
        room = _Writing(self._parent, job, self._ring, self._reserve_bytes, {"failed": failed})
        try:
            finished: FinishedShard = assembly.write(folder, room)
        except EyasError as error:
            _tell(self._parent, error)
            raise
        if not room.is_told:  # nothing of it is left to write
            self._parent.say(captured=job, size_bytes=0, failed=failed)
        entry = None if finished.entry is None else to_plain(finished.entry)
        self._parent.say(written=job, entry=entry)


def _part(shard: PlannedShard, only: frozenset[str]) -> PlannedShard:
    """The shard with some of its samples."""
    batches = (tuple(sample for sample in batch if sample.sample_id in only) for batch in shard.batches)
    return dataclasses.replace(shard, batches=tuple(batch for batch in batches if batch))


# ── the process ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Folder:
    """What ``calibrate`` asks of a spool."""

    folder: Path
    states: Path


def serve(parent: Parent, target_path: Path, tokens_path: Path, manifest_path: Path, ring: Path) -> None:
    """Open the engine of the manifest's capture and work until the input ends.

    Raises:
        EyasError: The engine is not the one of the stored part, does not start, or the disk is full.
    """
    params = config.load()
    target = fs.read_record(TargetIdentity, target_path)
    manifest = fs.read_record(ShardManifest, manifest_path)
    check_image("extract.image", manifest.capture.image)
    plan = streamed_plan(manifest.capture, read_lengths(tokens_path), target.hidden_size)
    tokens = TokenTable(tokens_path, ring)
    engine = engine_of(params, target, plan, parent.alive)
    _check_engine(engine.describe(), manifest)
    worker = Worker(plan, tokens, engine, parent, ring, params.extract.reserve_bytes)
    with contextlib.closing(engine):
        waiting = worker.next_commands()  # what is asked for first is announced before the engine opens
        if not waiting:
            return
        engine.open()
        check_planned(engine, params, target, plan, tokens)
        place = _Folder(ring, ring / "states")
        calibration = stored_calibration(plan, place, {}) or calibrate(plan, tokens, engine, place, None)  # type: ignore[arg-type]
        worker.scales_ND = calibration.scales_ND if calibration else None
        parent.say(ready=True)
        worker.run(waiting)


def engine_of(params: Params, target: TargetIdentity, plan: CapturePlan, on_wait: OnWait) -> Engine:
    """The engine that a plan's capture names, with its options, dtype and device: what decides bytes is in the plan."""
    capture, options = plan.capture, dict(plan.capture.engine_options)
    dtype, device = options.pop("dtype"), options.pop("device")
    spec = EngineSpec(
        name=capture.engine,
        target=target,
        folder=None if capture.engine == "fake" else ensure(target, params.target),
        boundaries=capture.boundaries,
        dtype=dtype,
        device=device,
        options=options,
        trust_remote_code=params.target.trust_remote_code,
    )
    return spec.make(longest_tokens=plan.shards[0].samples[0].num_tokens, on_wait=on_wait)


def _check_engine(facts: EngineFacts, manifest: ShardManifest) -> None:
    found, expected = (facts.name, facts.version), (manifest.capture.engine, manifest.capture.engine_version)
    if found != expected:
        raise StoreError(
            f"the engine is {' '.join(found)}, the stored states are of {' '.join(expected)}",
            "install the packages of the extraction, or `make plan` and `make extract` anew",
        )


def _tell(parent: Parent, error: EyasError) -> None:
    parent.say(error=type(error).__name__, message=error.message, hint=error.hint)


@contextlib.contextmanager
def _own_output() -> Iterator[TextIO]:
    """What libraries print goes to standard error; the pipe is ours alone."""
    sys.stdout.flush()
    pipe = os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "w", encoding="utf-8") as sink:
        yield sink


def _stop(*_: object) -> None:
    raise SystemExit(0)


def main(argv: Sequence[str]) -> None:
    """Serve a training."""
    with _own_output() as sink:
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training decides
        parent = Parent(sys.stdin, sink)
        threading.Thread(target=parent.listen, name="ring-commands", daemon=True).start()
        try:
            serve(parent, *map(Path, argv))
        except EyasError as error:
            _tell(parent, error)
            raise SystemExit(2) from None


if __name__ == "__main__":
    console.run_main(main)
