"""The target writes the assistant turns itself: ``data/conversations`` → ``data/responses``.

    conversations → threads (greedy, sample-i) → rounds of one turn each → journal → parquet + rejects.jsonl

Every text turn of the assistant is written anew, in order, after the history as the target has written it so
far; a conversation that ends in another's turn gets an answer. A turn that calls tools stays as given,
because the tool's reply answers that very call. Work goes through windows of conversations, so that memory
does not grow with the data; windows change no byte.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from eyas import console, fs
from eyas.canonical import canonical_json, digest
from eyas.config import RespondConfig
from eyas.contracts import Answer, Conversation
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.conversations.journal import Journal, make_request
from eyas.conversations.loops import loop_share
from eyas.conversations.table import FILE_NAME, read_conversations, write_table
from eyas.errors import DataError

Generate = Callable[[Sequence[GenerateRequest]], Iterator[Generated]]
REJECTS_NAME = "rejects.jsonl"
WINDOW = 8192
"""Conversations in memory at a time."""
TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Templates are programs: besides their own refusals, they stumble over values they did not expect."""
GREEDY = (0.0, 1.0, 0)


@dataclass
class RespondSummary:
    """Every count of a run."""

    num_conversations: int = 0
    num_rows: int = 0
    num_new_answers: int = 0
    num_reused_answers: int = 0
    """Answered before, in this run or an earlier one."""
    num_new_tokens: int = 0
    generate_s: float = 0.0
    finishes: Counter[str] = field(default_factory=Counter)
    """Answers in the output, by ``variant kind: finish``."""
    loop_shares: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Loop share of every answer in the output, by variant kind."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""

    def counts(self) -> list[tuple[str, str]]:
        """Every count and the mean loop share of each kind of variant, as a table shows them."""
        rows = [
            ("conversations", self.num_conversations),
            ("rows written", self.num_rows),
            ("answers generated", self.num_new_answers),
            ("answers known before", self.num_reused_answers),
            ("tokens generated", self.num_new_tokens),
            *[(f"answers, {what}", count) for what, count in sorted(self.finishes.items())],
            *[(f"rejected: {reason}", count) for reason, count in sorted(self.rejected.items())],
        ]
        shares = [
            (f"loop share, {kind}", f"{sum(values) / len(values):.3f}")
            for kind, values in sorted(self.loop_shares.items())
            if values
        ]
        return [(what, f"{count:,}") for what, count in rows] + shares


@dataclass
class _Thread:
    """One conversation in one variant, on its way."""

    given: Conversation
    variant: str
    sampling: tuple[float, float, int]
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    num_read: int = 0
    """Given messages that were gone through."""

    def to_next_turn(self) -> bool:
        """Take over given messages up to the next turn to write; False when there is none."""
        while self.num_read < len(self.given.messages):
            message = self.given.messages[self.num_read]
            self.num_read += 1
            if message["role"] == "assistant" and not message.get("tool_calls"):
                return True
            self.messages.append(message)
        return self.messages[-1]["role"] != "assistant"


@dataclass
class Responder:
    """What writing turns needs.

    Args:
        config: Limits, sampling, seeds.
        tokenizer: The target's tokenizer with its chat template.
        context: Positions of the target.
        generate: Continues prompts; called only when something is left to generate.
        journal: Open journal of this target and engine.
    """

    config: RespondConfig
    tokenizer: Any
    context: int
    generate: Generate
    journal: Journal
    summary: RespondSummary = field(default_factory=RespondSummary)
    _rejects: dict[tuple[str, str, str, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def respond(self, conversations: Path, folder: Path) -> RespondSummary:
        """Write ``conversations.parquet`` and ``rejects.jsonl`` into a folder, whole or not at all.

        Raises:
            DataError: The conversations are missing or damaged, or every row was rejected.
        """
        with fs.atomic_dir(folder) as part:
            write_table(part / FILE_NAME, self._rows(read_conversations(conversations)))
            lines = [
                {"conversation_id": name, "source": source, "split": split, "reason": reason, "variants": variants}
                for (name, source, split, reason), variants in sorted(self._rejects.items())
            ]
            fs.write_bytes(part / REJECTS_NAME, "".join(canonical_json(line) + "\n" for line in lines).encode())
        return self.summary

    def _rows(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        stream = iter(conversations)
        while window := list(itertools.islice(stream, WINDOW)):
            self.summary.num_conversations += len(window)
            threads = [thread for row in window for thread in self._threads(row)]
            while threads:
                open_threads = [thread for thread in threads if thread.to_next_turn()]
                is_open = set(map(id, open_threads))
                yield from (self._finished(thread) for thread in threads if id(thread) not in is_open)
                threads = self._round(open_threads)
        if not self.summary.num_rows:
            reason = min((reason for *_, reason in self._rejects), default="")
            raise DataError(
                f"every one of {self.summary.num_conversations:,} conversations was rejected, one for: {reason}",
                "look at the target's chat template and at respond.max_new_tokens",
            )

    def _threads(self, row: Conversation) -> Iterator[_Thread]:
        yield _Thread(row, "greedy", GREEDY)
        # Held-out text must be the target's argmax, or the exact walk would not apply.
        for index in range(self.config.num_samples if row.split == "train" else 0):
            seed = int(digest([self.config.seed, index])[:15], 16)
            yield _Thread(row, f"sample-{index}", (self.config.temperature, self.config.top_p, seed))

    def _round(self, threads: list[_Thread]) -> list[_Thread]:
        """Write one turn of every thread; returns those that were not rejected."""
        going, requests = [], []
        for thread in threads:
            prompt_ids = self._prompt(thread)
            if prompt_ids is not None:
                going.append(thread)
                requests.append(make_request(prompt_ids, self.config.max_new_tokens, thread.sampling))
        self._answer(requests)
        for thread, request in zip(going, requests, strict=True):
            answer = self.journal.get(request.request_id)
            text = self._text(answer)
            thread.messages.append({"role": "assistant", "content": text})
            thread.answers.append(
                Answer(finish=answer.finish, num_tokens=len(answer.ids), loop_share=loop_share(answer.ids))
            )
        return going

    def _text(self, answer: Generated) -> str:
        return self.tokenizer.decode(list(answer.ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _prompt(self, thread: _Thread) -> list[int] | None:
        try:
            ids = self.tokenizer.apply_chat_template(
                thread.messages,
                tools=list(thread.given.tools) or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except TEMPLATE_ERRORS as error:
            self._reject(thread, f"chat template: {' '.join(str(error).split()) or type(error).__name__}")
            return None
        room = self.context - self.config.max_new_tokens
        if len(ids) > room:
            self._reject(thread, f"prompt longer than the context allows: {len(ids)} tokens, expected at most {room}")
            return None
        return list(ids)

    def _reject(self, thread: _Thread, reason: str) -> None:
        row = thread.given
        variants = self._rejects[row.conversation_id, row.source, row.split, reason]
        if not variants:
            self.summary.rejected[reason.split(":")[0]] += 1
        variants.append(thread.variant)

    def _answer(self, requests: Sequence[GenerateRequest]) -> None:
        """Bring every request's answer into the journal."""
        missing = {r.request_id: r for r in requests if r.request_id not in self.journal}
        self.summary.num_reused_answers += len(requests) - len(missing)
        if not missing:
            return
        # Prompts of like length run side by side; the order is that of the content, not of the input.
        ordered = sorted(missing.values(), key=lambda r: (len(r.prompt_ids), r.request_id))
        progress = console.Progress("respond", len(ordered), unit="answers")
        answers = self.generate(ordered)
        start_s, start_tokens = time.perf_counter(), self.summary.num_new_tokens
        for answer in answers:
            self.journal.append(answer)
            self.summary.num_new_answers += 1
            self.summary.num_new_tokens += len(answer.ids)
            elapsed_s = max(time.perf_counter() - start_s, 1e-9)
            progress.advance(1, f"{(self.summary.num_new_tokens - start_tokens) / elapsed_s:,.0f} tok/s")
        self.journal.sync()
        progress.close()
        self.summary.generate_s += time.perf_counter() - start_s

    def _finished(self, thread: _Thread) -> Conversation:
        kind = thread.variant.split("-")[0]
        self.summary.num_rows += 1
        self.summary.finishes.update(f"{kind}: {answer.finish}" for answer in thread.answers)
        self.summary.loop_shares[kind].extend(answer.loop_share for answer in thread.answers)
        return replace(
            thread.given, messages=tuple(thread.messages), variant=thread.variant, answers=tuple(thread.answers)
        )


def pass_through(conversations: Path, folder: Path) -> RespondSummary:
    """Copy the conversations as they are, when answering is switched off."""
    summary = RespondSummary()

    def counted() -> Iterator[Conversation]:
        for row in read_conversations(conversations):
            summary.num_conversations += 1
            summary.num_rows += 1
            yield row

    with fs.atomic_dir(folder) as part:
        write_table(part / FILE_NAME, counted())
        fs.write_bytes(part / REJECTS_NAME, b"")
    return summary
