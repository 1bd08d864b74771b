"""Conversations to token samples, many at a time, in the order they come.

::

    conversations → render → tokenise whole texts → mask → verify → cut to length → samples and rejects

Few conversations are worked on in this process, where the tokenizer's own threads do the parallel part.
Many go in chunks to fresh processes (never forked ones, whose tokenizer threads could deadlock). Results
keep the order of the input either way, and at most two chunks a worker are in memory.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from eyas.contracts import Conversation, TokenSample
from eyas.errors import DataError
from eyas.tokens import loss_mask, render
from eyas.tokens.dataset import Reject, make_sample
from eyas.tokens.render import RejectError, Rendered

CHUNK_CONVERSATIONS = 128
FEW_CONVERSATIONS = 2000
"""Up to so many, starting processes would take longer than the work."""
CHUNK_TIMEOUT_S = 900.0
MIN_TOKENS = 3
"""Shorter samples have no row whose next token but one is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRules:
    """What decides a sample beside its text."""

    max_tokens: int
    vocab_size: int
    """Of the target; no id may reach it."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one conversation: a sample or a reject."""

    sample: TokenSample | None = None
    reject: Reject | None = None
    truncated: bool = False
    end_ids: tuple[int, ...] = ()
    """Trained end-of-turn tokens."""


def tokenize(
    conversations: Iterable[Conversation], load_tokenizer: Callable[[], Any], rules: TokenizeRules, num_workers: int = 1
) -> Iterator[Outcome]:
    """One outcome a conversation, in order, whatever the number of workers.

    Args:
        conversations: Consumed as they are needed.
        load_tokenizer: Called once in every process; must pickle when there are several.
        rules: Limits and ids of the target.
        num_workers: Processes for many conversations; 1 works in this one.

    Raises:
        DataError: The tokenizer does not fit the model, or a worker died or stalled.
    """
    iterator = iter(conversations)
    first = list(islice(iterator, FEW_CONVERSATIONS + 1))
    chunks = _chunks(chain(first, iterator))
    if num_workers == 1 or len(first) <= FEW_CONVERSATIONS:
        tokenizer = load_tokenizer()
        for chunk in chunks:
            yield from tokenize_chunk(tokenizer, chunk, rules)
    else:
        yield from _in_processes(chunks, load_tokenizer, rules, num_workers)


def tokenize_chunk(tokenizer: Any, chunk: list[Conversation], rules: TokenizeRules) -> list[Outcome]:
    """Outcomes of some conversations, in order."""
    outcomes: list[Outcome | None] = []
    rendered: list[tuple[int, Rendered]] = []
    for i, conversation in enumerate(chunk):
        try:
            rendered.append((i, render.render(tokenizer, conversation)))
            outcomes.append(None)
        except RejectError as error:
            outcomes.append(_rejected(conversation, error))
    closing = loss_mask.closing_ids(tokenizer, rules.eos_token_ids)
    for i, one, encoded in _encode(tokenizer, rendered):
        try:
            if isinstance(encoded, RejectError):
                raise encoded
            outcomes[i] = _to_sample(tokenizer, chunk[i], one, encoded, closing, rules)
        except RejectError as error:
            outcomes[i] = _rejected(chunk[i], error)
    return [outcome for outcome in outcomes if outcome is not None]


def _encode(
    tokenizer: Any, rendered: list[tuple[int, Rendered]]
) -> Iterator[tuple[int, Rendered, loss_mask.Encoded | RejectError]]:
    if tokenizer.is_fast:
        encoded = loss_mask.encode(tokenizer, [one for _, one in rendered]) if rendered else []
        yield from ((i, one, tokens) for (i, one), tokens in zip(rendered, encoded, strict=True))
        return
    for i, one in rendered:
        try:
            yield i, one, loss_mask.encode(tokenizer, [one])[0]
        except RejectError as error:
            yield i, one, error


def _to_sample(
    tokenizer: Any,
    conversation: Conversation,
    rendered: Rendered,
    encoded: loss_mask.Encoded,
    closing: np.ndarray,
    rules: TokenizeRules,
) -> Outcome:
    _check_vocab(encoded.ids_T, conversation, rules)
    masked = loss_mask.make_mask(tokenizer, rendered, encoded, closing, rules.eos_token_ids)
    _check_marks(tokenizer, conversation, rendered, encoded, masked, closing)
    trained = np.flatnonzero(masked.mask_T)
    # Nothing reads the states behind the last trained token, so they are not captured.
    num_tokens = int(trained[-1]) + 1 if len(trained) else 0
    kept = trained[trained < rules.max_tokens]
    if len(kept) == 0:
        raise RejectError("no_trained_token", f"no assistant token among the first {rules.max_tokens:,} tokens")
    stop = int(kept[-1]) + 1
    if stop < MIN_TOKENS:
        raise RejectError("too_short", f"{stop} tokens, expected {MIN_TOKENS} or more")
    sample = make_sample(
        encoded.ids_T[:stop].tolist(),
        masked.mask_T[:stop].tolist(),
        conversation_id=conversation.conversation_id,
        source=conversation.source,
        split=conversation.split,
        variant=conversation.variant,
    )
    return Outcome(sample=sample, truncated=num_tokens > rules.max_tokens, end_ids=masked.end_ids)


def _check_vocab(ids_T: np.ndarray, conversation: Conversation, rules: TokenizeRules) -> None:
    highest = int(ids_T.max(initial=0))
    if highest >= rules.vocab_size:
        raise DataError(
            f"the tokenizer does not fit the model: conversation {conversation.conversation_id} has token id "
            f"{highest:,}, expected less than {rules.vocab_size:,}: the target's vocab",
            "fetch tokenizer and weights from one place: `dvc repro --force fetch`",
        )


def _check_marks(
    tokenizer: Any,
    conversation: Conversation,
    rendered: Rendered,
    encoded: loss_mask.Encoded,
    masked: loss_mask.Masked,
    closing: np.ndarray,
) -> None:
    """Where the template marks the assistant itself, both masks must agree."""
    marked = render.generation_mask(tokenizer, conversation)
    if marked is None:
        return
    ids, mask = marked
    if ids != encoded.ids_T.tolist():
        raise RejectError("mask_not_verified", "the template's marks belong to other tokens")
    blank_T = loss_mask.blanks(rendered.text, encoded)
    if not loss_mask.agrees(masked, np.asarray(mask), np.isin(encoded.ids_T, closing), blank_T):
        raise RejectError("mask_not_verified", "the template marks other tokens as the assistant's")


def _rejected(conversation: Conversation, error: RejectError) -> Outcome:
    reject = Reject(
        conversation_id=conversation.conversation_id,
        source=conversation.source,
        variant=conversation.variant,
        reason=error.reason,
        detail=error.detail,
    )
    return Outcome(reject=reject)


def _chunks(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    iterator = iter(conversations)
    while chunk := list(islice(iterator, CHUNK_CONVERSATIONS)):
        yield chunk


# ── workers ───────────────────────────────────────────────────────────────────────────────────

_worker_tokenizer: Any = None


def _start_worker(load_tokenizer: Callable[[], Any]) -> None:
    global _worker_tokenizer  # noqa: PLW0603 - one tokenizer a process, set before its first chunk
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = load_tokenizer()


def _work(chunk: list[Conversation], rules: TokenizeRules) -> list[Outcome]:
    return tokenize_chunk(_worker_tokenizer, chunk, rules)


def _in_processes(
    chunks: Iterator[list[Conversation]], load_tokenizer: Callable[[], Any], rules: TokenizeRules, num_workers: int
) -> Iterator[Outcome]:
    others = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), _start_worker, (load_tokenizer,)
    )
    waiting: deque[tuple[list[Conversation], concurrent.futures.Future]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_work, chunk, rules)))
            if len(waiting) >= 2 * num_workers:
                yield from _result(*waiting.popleft())
        while waiting:
            yield from _result(*waiting.popleft())
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()  # the interpreter waits for its workers when it ends: one that stalls would hold it for ever
        raise
    pool.shutdown()


def _result(chunk: list[Conversation], future: concurrent.futures.Future) -> list[Outcome]:
    where = f"conversations {chunk[0].conversation_id} to {chunk[-1].conversation_id}"
    try:
        return future.result(timeout=CHUNK_TIMEOUT_S)
    except TimeoutError:
        raise DataError(f"{where}: no answer in {CHUNK_TIMEOUT_S:.0f} s", "run with EYAS_WORKERS=1") from None
    except BrokenProcessPool as error:
        raise DataError(f"{where}: a worker process died: {error}", "run with EYAS_WORKERS=1") from None
