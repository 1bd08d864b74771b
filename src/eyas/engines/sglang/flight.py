"""Which samples wait, are under way, or lie finished in the arena; one thread's work, no waiting and no sockets.

A sample is sent only with a slot, in the order of the plan, as far ahead as the arena admits. What was asked for goes
first: when nothing else is under way and no slot is free, finished samples that nobody asked for yet are given up.
The slot of a failed request is kept apart until a request that was sent later is finished with nothing older under
way: until then a late piece may still be written into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eyas.contracts import TokenSample
from eyas.engines.sglang import wire
from eyas.engines.sglang.arena import VARIABLE, Slots
from eyas.engines.sglang.client import Reply
from eyas.engines.sglang.collector import RADIX, Pieces

MAX_LOST = 3
"""Attempts at a sample that may end without an answer while the server lives."""
MAX_CRASHES = 2
"""Servers that may end while a sample that is asked for runs there; then it is tried alone."""


@dataclass(slots=True)
class Attempt:
    """One request under way."""

    sample: TokenSample | None
    """None for a request that only lifts the quarantine."""
    slot: wire.Slot
    pieces: Pieces
    reply: Reply | None = None
    awaited_ping: int = 0
    """The answer to this ping must say that all pieces were handed over."""


@dataclass(slots=True)
class Outcome:
    """What became of a sample that was asked for: a complete attempt, or the reason why there is none."""

    sample: TokenSample
    attempt: Attempt | None
    problem: str = ""


@dataclass(slots=True)
class Flight:
    """The state of one capture.

    Args:
        layout: Of a sample in its slot.
    """

    layout: wire.Layout
    slots: Slots = field(default_factory=lambda: Slots(0))
    nonce: str = ""
    longest_prompt: int = 0
    vocab_size: int = 0
    ahead: dict[str, TokenSample] = field(default_factory=dict)
    """Announced, not sent, in the order of the plan."""
    urgent: dict[str, TokenSample] = field(default_factory=dict)
    """Asked for, not sent."""
    asked: set[str] = field(default_factory=set)
    under_way: dict[int, Attempt] = field(default_factory=dict)
    finished: dict[str, Attempt] = field(default_factory=dict)
    quarantine: list[tuple[int, int]] = field(default_factory=list)
    """(offset, first attempt that was sent later)."""
    outcomes: list[Outcome] = field(default_factory=list)
    num_lost: dict[str, int] = field(default_factory=dict)
    num_crashes: dict[str, int] = field(default_factory=dict)
    next_attempt: int = 0

    def attach(self, nonce: str, arena_bytes: int, longest_prompt: int, vocab_size: int) -> None:
        """A new server with an empty arena: what was sent to the old one is sent again.

        A sample that was asked for and saw too many servers end is given up instead: the caller tries it alone.
        """
        assert not self.outcomes, "outcomes lie in the old arena"
        lost = [attempt.sample for attempt in self.under_way.values() if attempt.sample is not None]
        again = sorted([*self.finished.values()], key=lambda attempt: attempt.slot.attempt)
        self.under_way, self.finished, self.quarantine = {}, {}, []
        self.slots, self.nonce = Slots(arena_bytes), nonce
        self.longest_prompt, self.vocab_size = longest_prompt, vocab_size
        for sample in lost:
            self.num_crashes[sample.sample_id] = self.num_crashes.get(sample.sample_id, 0) + 1
        # One of them may have ended the server: those that nobody waits for are not sent ahead a second time.
        lost = [sample for sample in lost if sample.sample_id in self.asked]
        self._send_again([*lost, *(attempt.sample for attempt in again if attempt.sample is not None)])
        for name in [n for n in self.urgent if self.num_crashes.get(n, 0) >= MAX_CRASHES]:
            self._give_up(self.urgent.pop(name), f"{self.num_crashes[name]} servers ended while it ran")

    def _send_again(self, samples: Iterable[TokenSample]) -> None:
        early = {}
        for sample in samples:
            (self.urgent if sample.sample_id in self.asked else early)[sample.sample_id] = sample
        self.ahead = {**early, **self.ahead}

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """These will be asked for, in this order, after those that were announced before."""
        flying = {attempt.sample.sample_id for attempt in self.under_way.values() if attempt.sample is not None}
        known = flying | self.finished.keys() | self.asked
        self.ahead |= {sample.sample_id: sample for sample in samples if sample.sample_id not in known}

    def ask(self, samples: Sequence[TokenSample]) -> None:
        """These are wanted now."""
        flying = {attempt.sample.sample_id for attempt in self.under_way.values() if attempt.sample is not None}
        for sample in samples:
            name = sample.sample_id
            self.asked.add(name)
            self.ahead.pop(name, None)
            if name in self.finished:
                self.outcomes.append(Outcome(sample, self.finished.pop(name)))
            elif name not in flying:
                self.urgent[name] = sample

    def next_to_send(self) -> Attempt | None:
        """The next request, with its slot; None while nothing more can be sent."""
        if self.num_crashes and any(self._goes_alone(attempt.sample) for attempt in self.under_way.values()):
            return None
        while self.urgent or self.ahead:
            waiting = self.urgent or self.ahead
            name, sample = next(iter(waiting.items()))
            if self.under_way and self._goes_alone(sample):
                return None
            problem = self._unfit(sample)
            if problem:
                del waiting[name]
                if name in self.asked:
                    self._give_up(sample, problem)
                continue
            attempt = self._start(sample, len(sample.input_ids))
            while attempt is None and waiting is self.urgent and not self.under_way and self.finished:
                self._evict()
                attempt = self._start(sample, len(sample.input_ids))
            if attempt is not None:
                del waiting[name]
            elif not self.under_way and self.quarantine:
                return self._lift()
            return attempt
        return None

    def _goes_alone(self, sample: TokenSample | None) -> bool:
        """Too many servers ended under it: nothing else is under way beside it, so that the next end is its own."""
        return sample is not None and self.num_crashes.get(sample.sample_id, 0) >= MAX_CRASHES

    def _unfit(self, sample: TokenSample) -> str:
        """Why a server must not be sent this sample: one wrong id would end it."""
        num_tokens, name = len(sample.input_ids), f"sample {sample.sample_id}"
        if not 1 <= num_tokens <= self.longest_prompt:
            return f"{name}: {num_tokens} tokens, expected 1 to {self.longest_prompt} (what the server takes)"
        low, high = min(sample.input_ids), max(sample.input_ids)
        if low < 0 or high >= self.vocab_size:
            return f"{name}: token ids {low} to {high}, expected 0 to {self.vocab_size - 1}"
        size = self.layout.slot_bytes(num_tokens)
        if size > self.slots.num_bytes:
            return f"{name}: {size} bytes of states, the shared memory has {self.slots.num_bytes}: raise {VARIABLE}"
        return ""

    def _start(self, sample: TokenSample | None, num_tokens: int) -> Attempt | None:
        offset = self.slots.take(self.layout.slot_bytes(num_tokens))
        if offset is None:
            return None
        slot = wire.Slot(self.nonce, offset, num_tokens, self.next_attempt)
        self.next_attempt += 1
        self.under_way[slot.attempt] = Attempt(sample, slot, Pieces(num_tokens))
        return self.under_way[slot.attempt]

    def _evict(self) -> None:
        """Give up the finished sample that will be asked for last."""
        name = max(self.finished, key=lambda n: self.finished[n].slot.attempt)
        attempt = self.finished.pop(name)
        self.slots.give_back(attempt.slot.offset)
        assert attempt.sample is not None
        self._send_again([attempt.sample])

    def _lift(self) -> Attempt | None:
        """A request of one token: when it is done, nothing can be written into the slots of failed ones."""
        attempt = self._start(None, 1)
        while attempt is None and self.finished:
            self._evict()
            attempt = self._start(None, 1)
        return attempt

    @property
    def is_stuck(self) -> bool:
        """Something is wanted, nothing is under way, and nothing can be sent."""
        return bool(self.urgent) and not self.under_way and not self.outcomes

    def piece(self, piece: wire.Piece) -> None:
        """A piece came; those of other attachments and ended attempts count no more."""
        slot = wire.parse_rid(piece.rid)
        attempt = self.under_way.get(slot.attempt) if slot is not None else None
        if attempt is not None and attempt.slot == slot:
            attempt.pieces.add(piece)
            self._settle(attempt)

    def answered(self, number: int, reply: Reply, ping: int) -> bool:
        """A reply came; True when its pieces are not all there, and the answer to ``ping`` must decide."""
        attempt = self.under_way.get(number)
        if attempt is None:
            return False
        attempt.reply, attempt.awaited_ping = reply, ping
        self._settle(attempt)
        return number in self.under_way

    def handed_over(self, pong: wire.Pong) -> bool:
        """All pieces of earlier replies were handed over: what is missing now never comes. True: ask once more."""
        waiting = [a for a in self.under_way.values() if a.reply is not None and a.awaited_ping <= pong.number]
        if pong.num_waiting:
            return bool(waiting)
        for attempt in waiting:
            self._fail(attempt, attempt.pieces.missing())
        return any(attempt.reply is not None for attempt in self.under_way.values())

    def _settle(self, attempt: Attempt) -> None:
        reply = attempt.reply
        if reply is None:
            return
        if reply.kind == "lost":
            self._lost(attempt, reply.message)
        elif reply.kind == "aborted":
            self._fail(attempt, f"the server aborted it: {reply.message}")
        elif reply.kind == "refused":
            self._fail(attempt, f"the server refused it: {reply.message}")
        elif reply.cached_tokens:
            self._fail(attempt, f"{reply.cached_tokens} tokens were not computed: {RADIX}")
        elif reply.prompt_tokens != attempt.slot.num_tokens:
            self._fail(attempt, f"the server ran {reply.prompt_tokens} tokens, expected {attempt.slot.num_tokens}")
        elif attempt.pieces.problem:
            self._fail(attempt, attempt.pieces.problem)
        elif attempt.pieces.is_complete:
            self._complete(attempt)

    def _complete(self, attempt: Attempt) -> None:
        number = attempt.slot.attempt
        del self.under_way[number]
        if min(self.under_way, default=number) >= number:
            free = [offset for offset, barrier in self.quarantine if number >= barrier]
            self.quarantine = [(offset, barrier) for offset, barrier in self.quarantine if number < barrier]
            for offset in free:
                self.slots.give_back(offset)
        if attempt.sample is None:
            self.slots.give_back(attempt.slot.offset)
        elif attempt.sample.sample_id in self.asked:
            self.outcomes.append(Outcome(attempt.sample, attempt))
        else:
            self.finished[attempt.sample.sample_id] = attempt

    def _end(self, attempt: Attempt) -> None:
        del self.under_way[attempt.slot.attempt]
        self.quarantine.append((attempt.slot.offset, self.next_attempt))

    def _fail(self, attempt: Attempt, problem: str) -> None:
        self._end(attempt)
        if attempt.sample is not None and attempt.sample.sample_id in self.asked:
            self._give_up(attempt.sample, problem)

    def _lost(self, attempt: Attempt, problem: str) -> None:
        self._end(attempt)
        if attempt.sample is None:
            return
        name = attempt.sample.sample_id
        self.num_lost[name] = self.num_lost.get(name, 0) + 1
        if self.num_lost[name] < MAX_LOST:
            self._send_again([attempt.sample])
        elif name in self.asked:
            self._give_up(attempt.sample, f"{self.num_lost[name]} requests ended without an answer: {problem}")

    def _give_up(self, sample: TokenSample, problem: str) -> None:
        name = f"sample {sample.sample_id}"
        said = problem if problem.startswith(name) else f"{name}: {problem}"
        self.num_lost.pop(sample.sample_id, None)
        self.outcomes.append(Outcome(sample, None, said))

    def take_outcomes(self) -> list[Outcome]:
        """What is decided of the samples that were asked for; they are asked for no more."""
        decided, self.outcomes = self.outcomes, []
        for outcome in decided:
            self.asked.discard(outcome.sample.sample_id)
        return decided
