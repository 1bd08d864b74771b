"""One pass of all prompts through a running server: so many are under way, the next is sent when one is answered."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eyas import config
from eyas.conversations.generation import GenerateRequest
from eyas.engines.sglang.engine import answer, answer_body
from eyas.engines.sglang.session import LOOK_S, Answered, Session
from eyas.errors import ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What the server wrote to one prompt."""

    ids: tuple[int, ...]
    """New tokens, an end-of-turn token included."""
    num_rounds: int
    """Forwards of the target that checked drafts, by the server's own count; 0 without a drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """All prompts, answered once."""

    batch_size: int
    seconds: float
    texts: tuple[Text, ...]
    """In the order of the prompts."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all answers."""
        return sum(len(text.ids) for text in self.texts)

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second, prefill included."""
        return self.num_tokens / self.seconds


def make_requests(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[GenerateRequest]:
    """Greedy requests."""
    return [
        GenerateRequest(
            request_id=str(index), prompt_ids=tuple(ids), max_new_tokens=max_new_tokens, temperature=0.0, top_p=1.0, seed=0
        )
        for index, ids in enumerate(prompts)
    ]  # fmt: skip


def run_pass(
    session: Session, requests: Sequence[GenerateRequest], batch_size: int, eos_token_ids: Sequence[int]
) -> Pass:
    """Send every request once, ``batch_size`` at a time.

    Raises:
        ServerError: The server ended, hung (``EYAS_WATCHDOG_S``), or refused a prompt.
        CaptureError: An answer is none.
    """
    bodies = [answer_body(request, eos_token_ids) for request in requests]
    texts: dict[int, Text] = {}
    begun_s = moved_s = time.perf_counter()
    num_sent = 0
    while len(texts) < len(requests):
        while num_sent < len(requests) and num_sent - len(texts) < batch_size:
            session.client.send(num_sent, bodies[num_sent])
            num_sent += 1
        found = _next_answer(session, moved_s)
        if found is not None:
            texts[found.number] = _text(session, requests[found.number], found)
            moved_s = time.perf_counter()
    seconds = time.perf_counter() - begun_s
    return Pass(batch_size=batch_size, seconds=seconds, texts=tuple(texts[i] for i in range(len(requests))))


def _next_answer(session: Session, moved_s: float) -> Answered | None:
    try:
        _, event = session.events.get(timeout=LOOK_S)
        return event if isinstance(event, Answered) else None
    except queue.Empty:
        if session.end:
            raise _fault(session, session.end) from None
        patience_s = config.watchdog_s()
        if time.perf_counter() - moved_s > patience_s:
            raise _fault(session, f"no answer for {patience_s:.0f} s (EYAS_WATCHDOG_S)") from None
        return None


def _text(session: Session, request: GenerateRequest, found: Answered) -> Text:
    reply = found.reply
    if reply.kind != "done":
        if reply.kind == "lost":
            session.outlives(found.at_s)  # the connection breaks a moment before the process is gone
        raise _fault(session, session.end or f"prompt {request.request_id}: {reply.kind}: {reply.message}")
    return Text(ids=answer(request, reply).ids, num_rounds=reply.num_verifications)


def _fault(session: Session, what: str) -> ServerError:
    return session.server.fault(what) if session.server is not None else ServerError(what)
