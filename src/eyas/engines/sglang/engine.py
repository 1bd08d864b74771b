"""The sglang engine: states out of a real server's prefill, answers by its decoding.

Captures keep the prefill full across planned batches: what was announced is sent ahead as far as the arena admits,
and finished samples lie there until they are asked for. Memory is bounded by the arena and the batch that was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas import config
from eyas.contracts import EngineFacts, TargetIdentity, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.base import CapturedSample, OnWait, nobody
from eyas.engines.generate import check_request
from eyas.engines.sglang import collector, preflight, wire
from eyas.engines.sglang.client import Reply
from eyas.engines.sglang.flight import Attempt, Flight, Outcome
from eyas.engines.sglang.launch import Wanted
from eyas.engines.sglang.session import Answered, Keeper
from eyas.errors import CaptureError, EyasError, ServerError
from eyas.plan.identity import engine_version
from eyas.plan.interpreter import sglang_versions

OPTIONS = ("attention_backend", "chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "tp_size")
MAX_TAKERS = 4
"""Threads that copy samples out of the arena."""
ANSWERS_UNDER_WAY = 256
MAX_LOST_ANSWERS = 3


class SglangEngine:
    """Captures and generates through a server that this process starts, or one that already runs.

    Args:
        target: Identity of the target.
        folder: The target's files.
        boundaries: Aux boundaries, in stored order; empty for generation.
        dtype: Dtype of the weights while running.
        device: ``cpu`` or ``cuda``.
        trust_remote_code: Let the server run the repository's own model code.
        longest_tokens: Of all that may be asked for, when it is announced bit by bit; 0: the announcement tells.
        label: Begins the names of its logs.
        on_wait: Called while the server is waited for.
        options: See ``OPTIONS``; ``max_running_requests: 1`` is the deterministic setting.
    """

    def __init__(
        self,
        target: TargetIdentity,
        folder: Path,
        boundaries: Sequence[int],
        *,
        dtype: str,
        device: str = "cpu",
        trust_remote_code: bool = False,
        longest_tokens: int = 0,
        label: str = "",
        on_wait: OnWait = nobody,
        **options: Any,
    ) -> None:
        self._wanted = Wanted(
            target=target,
            folder=folder,
            boundaries=tuple(boundaries),
            dtype=dtype,
            device=device,
            version=sglang_versions()["sglang"],
            options=options,
            trust_remote_code=trust_remote_code,
            label=label,
        )
        self._longest_tokens = longest_tokens
        self.keeper = Keeper(self._wanted, on_wait)
        self._flight = Flight(self._wanted.layout)
        self._takers: ThreadPoolExecutor | None = None
        self._torch_threads = 0

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """What will be asked for, in this order: sizes the arena, and is sent ahead."""
        layout = self._wanted.layout
        if self._longest_tokens:  # the first announcement is not all of it
            self.keeper.longest = self._longest_tokens
        else:
            self.keeper.longest = max((len(sample.input_ids) for sample in samples), default=0)
            self.keeper.total_bytes = sum(layout.slot_bytes(len(sample.input_ids)) for sample in samples)
        self._flight.announce(samples)

    def open(self) -> None:
        """Start the server, or attach to the one that ``EYAS_SGLANG_URL`` names.

        Raises:
            ServerError: It does not come up, or is not as the plan expects.
            DiskError: There is too little shared memory.
        """
        context = self._wanted.target.max_position_embeddings
        preflight.check_longest(self.keeper.longest, {}, context)
        # The server computes; a copy in a thread of ours would start one more for every core.
        self._torch_threads = self._torch_threads or torch.get_num_threads()
        torch.set_num_threads(1)
        self.keeper.open()
        self._attach()

    def describe(self) -> EngineFacts:
        """Deterministic only one request at a time: kernels depend on what runs beside."""
        wanted = self._wanted
        return EngineFacts(
            name="sglang",
            version=engine_version("sglang"),
            options={"dtype": wanted.dtype, **wanted.options},
            deterministic=wanted.options.get("max_running_requests") == 1,
        )

    def close(self) -> None:
        """End the server, if it is ours, and give the shared memory back."""
        if self._takers is not None:
            self._takers.shutdown()
            self._takers = None
        if self._torch_threads:
            torch.set_num_threads(self._torch_threads)
            self._torch_threads = 0
        self.keeper.close()

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """States of one planned batch, as they come.

        Raises:
            CaptureError: Samples have no states; all others of the batch were given before.
            ServerError: The server fails again and again, or refuses every request.
        """
        for captured in self.capture_raw(batch):
            yield replace(
                captured, aux_TAD=captured.aux_TAD.to(torch.bfloat16), last_TD=captured.last_TD.to(torch.bfloat16)
            )

    def capture_raw(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """As ``capture``, in the dtype that the server computes in: for comparing engines."""
        flight, problems, num_left = self._flight, [], len({sample.sample_id for sample in batch})
        flight.ask(batch)
        while num_left:
            self._send()
            decided = flight.take_outcomes()
            num_left -= len(decided)
            taken = self._take([outcome for outcome in decided if outcome.attempt is not None])
            problems += [outcome.problem for outcome in decided if outcome.attempt is None]
            self._send()  # into the slots that are free again, before the caller works on these
            for captured in taken:
                if isinstance(captured, CapturedSample):
                    yield captured
                else:
                    problems.append(captured.message)
            if num_left:
                self._step()
        if problems:
            more = f" (and {len(problems) - 1} more samples)" if len(problems) > 1 else ""
            raise CaptureError(problems[0] + more)

    def _attach(self) -> None:
        session = self.keeper.session
        if self._takers is None:
            self._takers = ThreadPoolExecutor(min(MAX_TAKERS, config.cores()), "sglang-take")
        if session.hello is not None:
            self._flight.attach(
                session.nonce, session.arena.num_bytes, session.longest_prompt, session.hello.vocab_size
            )

    def _take(self, complete: Sequence[Outcome]) -> list[CapturedSample | EyasError]:
        assert self._takers is not None
        taken = list(self._takers.map(self._take_one, complete))
        for outcome in complete:
            assert outcome.attempt is not None
            self._flight.slots.give_back(outcome.attempt.slot.offset)
        return taken

    def _take_one(self, outcome: Outcome) -> CapturedSample | EyasError:
        attempt = outcome.attempt
        assert attempt is not None
        session = self.keeper.session
        try:
            return collector.take(outcome.sample, attempt.slot, attempt.pieces, self._flight.layout, session.arena)
        except CaptureError as error:
            return error

    def _send(self) -> None:
        session = self.keeper.session
        if not self._flight.under_way:
            self.keeper.progressed()
        while not session.end and (attempt := self._flight.next_to_send()) is not None:
            ids = (0,) if attempt.sample is None else attempt.sample.input_ids
            session.client.send(attempt.slot.attempt, capture_body(attempt, ids))

    def _step(self) -> None:
        """Take what happened; when the server failed, go on with another."""
        keeper, flight = self.keeper, self._flight
        session = keeper.session
        for event in keeper.next_events():
            match event:
                case wire.Piece():
                    flight.piece(event)
                case Answered():
                    self._answered(event)
                case wire.Pong():
                    if flight.handed_over(event):
                        session.pulse.beat(now=True)
                case _:
                    pass
        if flight.outcomes:
            return  # what is complete lies in this arena: it is taken before the server may be given up
        fault = keeper.fault(is_busy=bool(flight.under_way))
        if not fault and flight.is_stuck:
            self._send()  # what was under way has just ended: now finished samples may be given up for it
            fault = "no part of the shared memory comes free" if flight.is_stuck else ""
        if fault:
            keeper.renew(fault)
            self._attach()

    def _answered(self, event: Answered) -> None:
        session, reply = self.keeper.session, event.reply
        if reply.kind == "unusable":
            raise unusable(reply)
        if reply.kind == "lost" and not session.outlives(event.at_s):
            return  # a restart follows, and sends it again
        if reply.kind == "done":
            self.keeper.finished()
        # A ping that is under way already may have passed the last piece: only a later one decides.
        if self._flight.answered(event.number, reply, session.pulse.next_number):
            session.pulse.beat(now=True)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """Continuations as they end, by the server's own batching; greedy ones do not depend on the seed.

        Raises:
            CaptureError: A request cannot be run.
            ServerError: The server fails again and again, or refuses every request.
        """
        target, keeper = self._wanted.target, self.keeper
        for request in requests:
            check_request(request, target.vocab_size, target.max_position_embeddings - preflight.INPUT_MARGIN)
        waiting, under_way = deque(enumerate(requests)), dict[int, GenerateRequest]()
        num_lost: dict[int, int] = {}
        while waiting or under_way:
            if not under_way:
                keeper.progressed()
            while waiting and len(under_way) < ANSWERS_UNDER_WAY:
                number, request = waiting.popleft()
                under_way[number] = request
                keeper.session.client.send(number, answer_body(request, target.eos_token_ids))
            for event in keeper.next_events():
                if not isinstance(event, Answered):
                    continue
                request, reply = under_way.pop(event.number), event.reply
                if reply.kind == "done":
                    keeper.finished()
                    yield answer(request, reply)
                elif reply.kind == "lost":
                    num_lost[event.number] = num_lost.get(event.number, 0) + keeper.session.outlives(event.at_s)
                    if num_lost[event.number] == MAX_LOST_ANSWERS:
                        raise CaptureError(f"request {request.request_id}: no answer: {reply.message}")
                    waiting.appendleft((event.number, request))
                else:
                    raise (
                        unusable(reply)
                        if reply.kind == "unusable"
                        else CaptureError(f"request {request.request_id}: {reply.message}")
                    )
            fault = keeper.fault(is_busy=bool(under_way))
            if fault:
                waiting.extendleft(reversed(under_way.items()))
                under_way.clear()
                keeper.renew(fault)


def unusable(reply: Reply) -> ServerError:
    """The error of a reply that every request would get."""
    keys = ", ".join(sorted(capture_body(None, ())))
    return ServerError(
        f"the server refuses what eyas sends ({keys}): {reply.message}",
        "is it SGLang, of a version that `make doctor` names? Nothing was tried again",
    )


def capture_body(attempt: Attempt | None, ids: Sequence[int]) -> dict[str, Any]:
    """A request whose prefill is captured. The key of its own keeps even a radix cache from sharing prompts."""
    rid = attempt.slot.rid if attempt is not None else ""
    return {
        "input_ids": list(ids),
        "rid": rid,
        "extra_key": rid,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    }


def answer_body(request: GenerateRequest, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """A request whose answer is wanted."""
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "stop_token_ids": list(eos_token_ids),
    }
    if request.temperature > 0:
        sampling |= {"top_p": request.top_p, "sampling_seed": request.seed % (1 << 31)}
    return {"input_ids": list(request.prompt_ids), "sampling_params": sampling}


def answer(request: GenerateRequest, reply: Reply) -> Generated:
    """The continuation in a reply; one that stopped ends with its end-of-turn token.

    Raises:
        CaptureError: The reply holds no ids, or more than were asked for.
    """
    finish: Mapping[str, Any] = reply.finish or {}
    ids = reply.output_ids
    if finish.get("type") == "stop":
        matched = finish.get("matched")
        if isinstance(matched, int) and ids[-1:] != (matched,):
            ids = (*ids, matched)
    if not 1 <= len(ids) <= request.max_new_tokens + 1 or finish.get("type") not in ("stop", "length"):
        raise CaptureError(
            f"request {request.request_id}: {len(ids)} tokens and finish reason {finish.get('type')!r}, expected 1 to "
            f"{request.max_new_tokens} tokens and stop or length"
        )
    return Generated(request_id=request.request_id, ids=ids, finish=finish["type"])
