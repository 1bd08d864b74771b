"""Filling the ring: which shard is captured next, when there is room for it, what goes.

    order of the batches → shards by first need → capturing process → ring → readers → shards read to the end go

Shards are captured in the order in which the batches need them and written only when the room is there, counted to
the byte. A shard that no batch up to here needs any more stays until its room is wanted, that with the most distant
next use first: a ring that holds the whole set captures it once. Both sides wait for each other and never for
themselves: the shard that the next step needs is written before any other, and when it does not fit although
everything else has gone, the ring is too small, which is said.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from eyas import console
from eyas.batches.account import Counts, EpochAccount
from eyas.batches.capturing import CapturingProcess, Launch, Message
from eyas.batches.demand import Demand, Use
from eyas.canonical import from_plain
from eyas.contracts import RING_SPARE_BYTES, CapturePlan, FailedSample, ShardEntry, ring_disk_bytes
from eyas.errors import DiskError, EyasError, ServerError
from eyas.shards.ring import Kind, Ring, RingRecord

AHEAD = 2
"""Shards asked of the process at a time, pinned ones too: the engine works at one while the other is written. What waits
for its room waits in that process's memory."""
MAX_STARTS = 3
"""Processes that may end in a row without a shard in between."""
TICK_S = 0.02
NEVER = 1 << 62
Key = tuple[Kind, str]


@dataclass(slots=True)
class _Job:
    """One shard on its way."""

    number: int
    kind: Kind
    path: str
    only: frozenset[str] | None
    need: int
    """Batch that needs it; lower ones are written first."""
    epoch: int = -1
    """Whose account it counts in; none when it does not."""
    is_again: bool = False
    is_sent: bool = False
    size_bytes: int | None = None
    """Known when it is captured."""
    failed: tuple[FailedSample, ...] = ()
    is_granted: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Lower ones go first."""
        return self.need, self.number


class Feed:
    """Fills a ring from a thread of its own.

    Args:
        ring: Prepared by ``start``.
        plan: Of the whole set.
        launch: Starts the capturing process.
        ring_bytes: Most that the ring may take.
        pinned: Samples that stay in the ring, by the shard that the plan has them in.
    """

    def __init__(
        self, ring: Ring, plan: CapturePlan, launch: Launch, ring_bytes: int, pinned: Mapping[str, frozenset[str]]
    ) -> None:
        self._ring, self._plan, self._launch, self.ring_bytes, self._pinned = ring, plan, launch, ring_bytes, pinned
        self._shards = {shard.path: frozenset(s.sample_id for s in shard.samples) for shard in plan.shards}
        self._counts: dict[str, Counts] = {
            shard.path: (len(shard.samples), sum(s.num_tokens for s in shard.samples)) for shard in plan.shards
        }
        self._records: dict[Key, RingRecord] = {}
        self._claims: dict[str, list[Use]] = {}
        self._jobs: list[_Job] = []
        self._numbers, self._serial = itertools.count(), 0
        self._process: CapturingProcess | None = None
        self._num_ended = 0
        self._demand: Demand | None = None
        self._uses: Iterator[Use] = iter(())
        self._next_use: Use | None = None
        self._read, self._end, self._packs_per_step = 0, 0, 1
        self._lock = threading.Lock()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="ring-feed", daemon=True)
        self.error: EyasError | None = None
        self._accounts: dict[int, EpochAccount] = {}
        self.accounts: list[EpochAccount] = []
        """Of the epochs that ended."""
        self.peak_bytes = 0
        self.num_captured_tokens = 0
        self.capture_s = 0.0

    # ── for the training ──────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Take up what the ring holds and begin with the pinned samples.

        Raises:
            StoreError: The ring holds something else.
        """
        wanted: dict[Key, frozenset[str]] = {("states", path): samples for path, samples in self._shards.items()}
        wanted |= {("pinned", path): samples for path, samples in self._pinned.items()}
        self._records = self._ring.prepare(wanted)
        self._serial = max((record.serial for record in self._records.values()), default=0)
        while self._live_bytes() > self._room_bytes and self._evict():
            pass  # that run's ring was larger
        self.peak_bytes = self._live_bytes()
        if self._records:
            console.log(f"stream: {len(self._records):,} shards of an earlier run lie in the ring")
        for path, samples in self._pinned.items():
            if ("pinned", path) not in self._records:
                self._jobs.append(_Job(next(self._numbers), "pinned", path, samples, -1))
        self._thread.start()

    def follow(self, demand: Demand, packs_per_step: int, num_steps: int) -> None:
        """Training begins: capture what it needs.

        Args:
            demand: From the batch where it begins.
            packs_per_step: Batches that are read before ``read_up_to`` is told.
            num_steps: Left to do; what only later batches read is not captured.
        """
        with self._lock:
            self._demand, self._packs_per_step = demand, packs_per_step
            self._uses = iter(demand)
            self._next_use, self._end = next(self._uses), packs_per_step * num_steps

    def read_up_to(self, number: int, num_steps: int) -> None:
        """All ranks have read every batch before this one, and so many steps are left."""
        with self._lock:
            self._read, self._end = number, number + self._packs_per_step * num_steps

    def stop(self) -> None:
        """End the thread and the process; shards stay for the next run."""
        self._is_stopped = True
        if self._thread.is_alive():
            self._thread.join()

    # ── the thread ────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._turn()
            self._tell("the training was stopped", "the same command goes on")
        except EyasError as error:
            self.error = error
            self._tell(error.message, error.hint or "")
        finally:
            if self.error is None and not self._is_stopped:  # an error that is no user's: its traceback follows
                self.error = ServerError(
                    "what feeds the training ended by an error of eyas' own", "report it, with the lines above"
                )
                self._tell(self.error.message, self.error.hint or "")
            if self._process is not None:
                self._process.end()
            for epoch in sorted(self._accounts):
                self._close(epoch)

    def _tell(self, message: str, hint: str) -> None:
        with contextlib.suppress(DiskError):  # of a full disk this process tells itself
            self._ring.end(message, hint)

    def _close(self, epoch: int) -> None:
        account = self._accounts.pop(epoch)
        self.accounts.append(account)
        console.log(account.line())

    def _turn(self) -> None:
        """One round: let go, ask, grant, hear."""
        with self._lock:
            read = self._read
        self._release(read)
        self._repeat()
        self._ask(read)
        if not self._jobs:
            time.sleep(TICK_S)
            return
        begin_s = time.monotonic()
        try:
            process = self._opened()
            for job in sorted(self._jobs, key=lambda job: job.rank)[:AHEAD]:  # the first ones also when others wait
                self._send(process, job)
            self._grant(process, read)
            sent = [job for job in self._jobs if job.is_sent]
            has_work = not process.is_ready or any(job.size_bytes is None or job.is_granted for job in sent)
            message = process.hear(TICK_S)
            process.check(has_work=has_work)
        except ServerError as error:
            self._restart(error)
            return
        if any(job.size_bytes is None for job in sent) and process.is_ready:
            self.capture_s += time.monotonic() - begin_s
        if message is not None:
            self._take(message)

    def _opened(self) -> CapturingProcess:
        if self._process is None:
            self._process = CapturingProcess(self._launch)
        return self._process

    def _restart(self, error: ServerError) -> None:
        """A process that is gone takes its captures with it; what lies in the ring stays."""
        assert self._process is not None
        self._process.kill()
        self._process = None
        self._num_ended += 1
        if self._num_ended >= MAX_STARTS:
            raise ServerError(
                f"{error.message}; it was the third in a row without a shard",
                "its own lines above say why; the same command goes on from the last checkpoint",
            )
        console.log(f"stream: {error.message}; it is started again")
        for job in self._jobs:
            if job.is_granted:
                self._ring.drop(job.kind, job.path)
            job.is_sent = job.is_granted = False
            job.size_bytes = None

    # ── what is needed ────────────────────────────────────────────────────────────────────────

    def _release(self, read: int) -> None:
        for path, uses in list(self._claims.items()):
            uses[:] = [use for use in uses if use.last >= read]
            if not uses:
                del self._claims[path]
        for epoch in list(self._accounts):
            if self._demand is not None and self._demand.begin(epoch + 1) <= read:
                self._close(epoch)

    def _repeat(self) -> None:
        """Shards that a reader found damaged are captured once more."""
        for record in self._ring.asked_again(self._records):
            console.log(f"stream: {record.path} is damaged in the ring and captured once more")
            self._drop(record)
            only = self._pinned[record.path] if record.kind == "pinned" else None
            self._jobs.append(_Job(next(self._numbers), record.kind, record.path, only, -1, is_again=True))

    def _ask(self, read: int) -> None:
        """Take the next needed shards on, up to ``AHEAD``; those that lie there are claimed and stay."""
        with self._lock:
            if self._demand is None:
                return
        while self._next_use is not None and len([j for j in self._jobs if not j.is_again]) < AHEAD:
            use = self._next_use
            if use.first >= min(self._end, self._horizon(read)):
                return
            self._next_use = next(self._uses)
            self._claims.setdefault(use.shard, []).append(use)
            account = self._account(use.epoch)
            record = self._records.get(("states", use.shard))
            is_coming = any((job.kind, job.path) == ("states", use.shard) for job in self._jobs)
            if record is None and not is_coming:
                self._jobs.append(_Job(next(self._numbers), "states", use.shard, None, use.first, use.epoch))
            else:
                account.add("kept", self._counts[use.shard], () if record is None else record.failed)

    def _horizon(self, read: int) -> int:
        """Nothing is asked for beyond the epoch after the one that is being read."""
        demand = self._demand
        assert demand is not None
        epoch = next(e for e in itertools.count(demand.start_epoch) if demand.begin(e + 1) > read)
        return demand.begin(epoch + 2)

    def _account(self, epoch: int) -> EpochAccount:
        if epoch not in self._accounts:
            assert self._demand is not None
            account = self._accounts[epoch] = EpochAccount(epoch)
            needed = self._demand.uses(epoch)
            for path, counts in self._counts.items():
                account.planned = (account.planned[0] + counts[0], account.planned[1] + counts[1])
                if path not in needed:
                    account.add("unneeded", counts)
        return self._accounts[epoch]

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────

    def _send(self, process: CapturingProcess, job: _Job) -> None:
        if job.is_sent:
            return
        job.is_sent = True
        only = None if job.only is None else sorted(job.only)
        process.say(capture=job.number, shard=job.path, kind=job.kind, only=only)

    def _grant(self, process: CapturingProcess, read: int) -> None:
        """Let the shard that is needed first be written, when it is captured and its room is there."""
        waiting = [job for job in self._jobs if not job.is_granted]
        job = min(waiting, key=lambda job: job.rank, default=None)
        if job is None or job.size_bytes is None or any(other.is_granted for other in self._jobs):
            return
        wanted = ring_disk_bytes(job.size_bytes)
        while self._live_bytes() + wanted > self._room_bytes:
            if self._evict():
                continue
            if job.need >= read + self._packs_per_step:
                return
            if not self._put_off(read):
                raise self._too_small(wanted)
        job.is_granted = True
        self.peak_bytes = max(self.peak_bytes, self._live_bytes() + wanted)
        process.say(write=job.number)

    def _evict(self) -> bool:
        """Let the shard go that is needed last of those that no batch up to here needs."""
        free = [path for kind, path in self._records if kind == "states" and path not in self._claims]
        if not free:
            return False
        self._drop(self._records["states", max(free, key=self._next_need)])
        return True

    def _put_off(self, read: int) -> bool:
        """The next step's room is taken by shards that lay there and are needed after it: the last of them goes again."""
        later = {
            path: uses[0]
            for path, uses in self._claims.items()
            if uses[0].first >= read + self._packs_per_step and ("states", path) in self._records
        }
        if not later:
            return False
        use = max(later.values(), key=lambda use: use.first)
        record = self._records["states", use.shard]
        self._drop(record)
        self._account(use.epoch).add("kept", self._counts[use.shard], record.failed, sign=-1)
        self._jobs.append(_Job(next(self._numbers), "states", use.shard, None, use.first, use.epoch, is_again=True))
        return True

    def _next_need(self, path: str) -> int:
        coming = self._next_use
        if coming is None or self._demand is None:
            return 0
        for epoch in (coming.epoch, coming.epoch + 1):
            use = self._demand.uses(epoch).get(path)
            if use is not None and use.first >= coming.first:
                return use.first
        return NEVER

    def _drop(self, record: RingRecord) -> None:
        self._ring.drop(record.kind, record.path)
        del self._records[record.kind, record.path]

    @property
    def _room_bytes(self) -> int:
        return self.ring_bytes - RING_SPARE_BYTES

    def _live_bytes(self) -> int:
        return sum(record.disk_bytes for record in self._records.values())

    def _take(self, message: Message) -> None:
        numbered = next((message[key] for key in ("captured", "written", "progress") if key in message), None)
        job = next((job for job in self._jobs if job.number == numbered), None)
        if job is None:
            return
        if "progress" in message:
            self.num_captured_tokens += message["num_tokens"]
        elif "captured" in message:
            job.size_bytes = message["size_bytes"]
            job.failed = tuple(from_plain(FailedSample, sample) for sample in message["failed"])
        else:
            self._written(job, message["entry"])

    def _written(self, job: _Job, entry: Message | None) -> None:
        self._jobs.remove(job)
        self._serial, self._num_ended = self._serial + 1, 0
        record = RingRecord(
            path=job.path,
            kind=job.kind,
            serial=self._serial,
            entry=None if entry is None else from_plain(ShardEntry, entry),
            failed=job.failed,
        )
        if job.epoch >= 0:
            self._account(job.epoch).add("captured", self._counts[job.path], job.failed)
        for sample in job.failed:
            console.log(f"stream: not captured: {sample.reason}")
        self._records[job.kind, job.path] = record
        self._ring.publish(record)

    def _too_small(self, wanted_bytes: int) -> DiskError:
        needed = self._live_bytes() + wanted_bytes + RING_SPARE_BYTES
        return DiskError(
            f"the ring holds at most {console.human_bytes(self.ring_bytes)}; the next step needs "
            f"{console.human_bytes(needed)} of shards at once",
            f"set EYAS_RING_BYTES to {needed} or more, or a smaller train.shuffle_shards (it decides the order)",
        )
