"""Which request is with the worker, which waits: admission, retries, restarts. Knows nothing of states or text.

    waiting ──admit──▶ flying ──done, and its file there──▶ landed ──taken──▶
       ▲                  │ worker died, file damaged or missing
       └──── once more ◀──┘          (the third time: failed, with the reason)

A job whose worker died twice under it runs alone, so that one request that breaks the engine takes no other with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import console
from eyas.engines.base import OnWait, nobody, wait
from eyas.engines.vllm import files
from eyas.engines.vllm.process import Worker, WorkerEndError
from eyas.errors import ServerError

MAX_FAULTS = 3
ALONE_AFTER_FAULTS = 2
MAX_RESTARTS = 5
"""In a row, without one request that ended in between."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
LOOK_FOR_FILE_S = 0.002


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be."""

    key: str
    message: Mapping[str, Any]
    """What the worker is sent, without its name and path."""
    num_bytes: int = 0
    """Of its file in shared memory; 0: it writes none."""


@dataclass(slots=True)
class Flight:
    """A job that is with the worker."""

    job: Job
    request_id: str
    path: Path | None
    answer: dict[str, Any] | None = None
    answered_s: float = 0.0


class Dispatcher:
    """Runs jobs on one worker after another.

    Args:
        start: Starts a worker.
        folder: Where states come to lie.
        max_flying: Requests that are with the worker at most.
        patience_s: How long a worker may be silent, or a file may be late.
        on_wait: Called while a worker is waited for.
    """

    def __init__(
        self,
        start: Callable[[], Worker],
        folder: Path,
        max_flying: int,
        patience_s: float,
        on_wait: OnWait = nobody,
    ) -> None:
        self._start, self._folder, self._max_flying, self._patience_s = start, folder, max_flying, patience_s
        self._on_wait = on_wait
        self.worker: Worker | None = None
        self.budget_bytes = 0
        self._wanted: deque[Job] = deque()
        self._ahead: deque[Iterator[Job]] = deque()
        self._next_ahead: Job | None = None
        self._asked: set[str] = set()
        self._flying: dict[str, Flight] = {}
        self._landed: dict[str, Flight] = {}
        self._failed: dict[str, str] = {}
        self._faults: dict[str, int] = {}
        self._num_requests = self._num_restarts = 0

    def want(self, jobs: Iterable[Job]) -> None:
        """Jobs that somebody waits for now; those already under way are not sent again."""
        known = self._known()
        jobs = [job for job in jobs if job.key not in known]
        self._asked |= {job.key for job in jobs}
        self._wanted = deque(jobs)

    def announce(self, jobs: Iterable[Job], keys: Iterable[str]) -> None:
        """Further jobs that will be wanted, in order; they are worked at as far as there is room, and made only then.

        Args:
            jobs: To be.
            keys: Theirs.
        """
        self._ahead.append(iter(jobs))
        self._asked -= set(keys)

    def _known(self) -> set[str]:
        return {flight.job.key for flight in self._flying.values()} | self._landed.keys() | self._failed.keys()

    def take(self, key: str) -> Flight | str | None:
        """A landed flight, whose file the caller reads and removes; a reason why there is none; or None, not yet."""
        if key in self._failed:
            self._faults.pop(key, None)
            return self._failed.pop(key)
        return self._landed.pop(key, None)

    def refuse(self, flight: Flight, reason: str) -> None:
        """What landed was no good: once more."""
        self._once_more(flight.job, reason)

    def turn(self, timeout_s: float) -> None:
        """Admit, listen for so long at most, and sort what came.

        Raises:
            ServerError: The worker does not stay up.
        """
        self._on_wait()
        try:
            worker = self._running()
            self._admit(worker)
            late = any(flight.answer is not None for flight in self._flying.values())
            for message in worker.receive(min(timeout_s, LOOK_FOR_FILE_S) if late else timeout_s):
                self._sort(message)
            self._look_for_files()
            if any(flight.answer is None for flight in self._flying.values()):
                worker.check_moves()
        except WorkerEndError as ended:
            self._recover(ended)

    def close(self) -> None:
        """End the worker, forget everything."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None

    def _running(self) -> Worker:
        while self.worker is None:
            try:
                self.worker = self._start()
            except ServerError as error:
                if not self._num_restarts:
                    raise  # the very first one: waiting would change nothing
                self._pause(error.message, error.hint or "")
        return self.worker

    def _admit(self, worker: Worker) -> None:
        while (job := self._next()) is not None:
            self._num_requests += 1
            request_id = f"{self._num_requests:08d}"
            path = files.path_of(self._folder, request_id) if job.num_bytes else None
            if not self._flying:
                worker.last_word_s = time.monotonic()
            self._flying[request_id] = Flight(job, request_id, path)
            place = {} if path is None else {"path": str(path)}
            worker.send({**job.message, "submit": request_id, **place})

    def _next(self) -> Job | None:
        """The next job that may go: half of the room is for what is wanted, half for work ahead."""
        if len(self._flying) >= self._max_flying:
            return None
        if any(self._is_suspect(flight.job) for flight in self._flying.values()):
            return None
        if self._wanted:
            # When nothing flies, what was done ahead fills its half; somebody waits for this one, and it fits the other.
            fits = self._fits(self._wanted[0], 1.0) and not self._is_suspect(self._wanted[0])
            return self._wanted.popleft() if fits or not self._flying else None
        job = self._look_ahead()
        if job is None or not self._fits(job, 0.5) or (self._is_suspect(job) and self._flying):
            return None
        self._next_ahead = None
        return job

    def _look_ahead(self) -> Job | None:
        known = self._known()
        while self._next_ahead is None or self._next_ahead.key in known or self._next_ahead.key in self._asked:
            if not self._ahead:
                self._next_ahead = None
                return None
            self._next_ahead = next(self._ahead[0], None)
            if self._next_ahead is None:
                self._ahead.popleft()
        return self._next_ahead

    def _fits(self, job: Job, share: float) -> bool:
        return not job.num_bytes or self._used_bytes() + job.num_bytes <= share * self.budget_bytes

    def _is_suspect(self, job: Job) -> bool:
        return self._faults.get(job.key, 0) >= ALONE_AFTER_FAULTS

    def _used_bytes(self) -> int:
        under_way = (*self._flying.values(), *self._landed.values())
        return sum(flight.job.num_bytes for flight in under_way)

    def _sort(self, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            flight = self._flying.pop(message["failed"])
            self._failed[flight.job.key] = f"vLLM refuses it: {message['reason']}"
        elif "done" in message:
            flight = self._flying[message["done"]]
            if message["finish"] not in ("stop", "length"):
                del self._flying[flight.request_id]
                self._once_more(flight.job, f"vLLM ended the request with {message['finish']!r}")
            else:
                flight.answer, flight.answered_s = dict(message), time.monotonic()

    def _look_for_files(self) -> None:
        for flight in [f for f in self._flying.values() if f.answer is not None]:
            if flight.path is None or flight.path.exists():
                self._landed[flight.job.key] = self._flying.pop(flight.request_id)
                self._num_restarts = 0
            elif (reason := files.failure(flight.path)) is not None:
                self._once_more(self._flying.pop(flight.request_id).job, f"its states could not be written: {reason}")
                files.remove(flight.path)
            elif time.monotonic() - flight.answered_s > self._patience_s:
                del self._flying[flight.request_id]
                self._once_more(flight.job, f"vLLM answered, but its states did not come for {self._patience_s:g} s")

    def _once_more(self, job: Job, reason: str) -> None:
        faults = self._faults[job.key] = self._faults.get(job.key, 0) + 1
        if faults >= MAX_FAULTS:
            self._failed[job.key] = f"{reason}; tried {faults} times"
        else:
            console.log(f"vllm: {job.key} once more: {reason}")
            self._wanted.appendleft(job)

    def _recover(self, ended: WorkerEndError) -> None:
        """After a death: what had landed is whole, what flew is sent again, to a new worker, after a pause."""
        assert self.worker is not None
        tail, log, self.worker = self.worker.tail(), self.worker.log, None
        lost = [flight for flight in self._flying.values() if flight.answer is None or not _is_there(flight)]
        for flight in self._flying.values():
            if flight not in lost:
                self._landed[flight.job.key] = flight
        self._flying.clear()
        for flight in reversed(lost):
            if flight.path is not None:
                files.remove(flight.path)
            self._once_more(flight.job, f"vLLM's process ended: {ended}")
        self._pause(f"{ended}; {len(lost)} requests go to a new process", f"the whole log: {log}", tail)

    def _pause(self, what: str, hint: str, tail: str = "") -> None:
        """Before another worker: count, and wait longer each time.

        Raises:
            ServerError: It were one too many without a finished request between.
        """
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise ServerError(
                f"vLLM ended {self._num_restarts} times without one finished request, at last: {what}\n{tail}".rstrip(),
                f"{hint}; finished shards are kept, the same command resumes",
            )
        pause_s = min(FIRST_BACKOFF_S * 2 ** (self._num_restarts - 1), MAX_BACKOFF_S)
        console.log(f"vllm: {what}; once more in {pause_s:g} s")
        wait(pause_s, self._on_wait)


def _is_there(flight: Flight) -> bool:
    return flight.path is None or flight.path.exists()
