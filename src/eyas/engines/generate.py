"""Continuing prompts in fixed shapes, so that an answer depends on its own prompt and limits alone.

Prompts are put in buckets by padded length (64, then multiples of 512). A bucket runs as a stream: a
batch of rows (``batch_size`` of short prompts, fewer of long ones) decodes one token per forward, and rows that ended are refilled, eight at a time,
by prefills of one shape. Every forward of a bucket thus has the same shapes, whoever is in it, and few rows
run idle. Rows with nothing to do repeat their last token.

Letters: B rows, R refilled rows, V target vocab.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.decode import BlockDecoder
from eyas.engines.sampling import choose, draw_key, uniform
from eyas.errors import CaptureError

SHORT_PROMPT = 64
LONG_PROMPT_STEP = 512
REFILL_ROWS = 8
LEAST_ROWS = 32


def prompt_bucket(num_tokens: int, context: int) -> int:
    """Padded length of a prompt: 64, else the next multiple of 512, never beyond the context."""
    padded = SHORT_PROMPT if num_tokens <= SHORT_PROMPT else -(-num_tokens // LONG_PROMPT_STEP) * LONG_PROMPT_STEP
    return min(padded, context)


def bucket_rows(batch_size: int, padded: int) -> int:
    """Rows of a bucket: ``batch_size`` at the short length, in proportion fewer beyond, but not below 32.

    So the work and the cache of a forward stay alike, and a small set of long prompts fills its rows.
    """
    return min(batch_size, max(LEAST_ROWS, batch_size * SHORT_PROMPT // padded))


def check_request(request: GenerateRequest, vocab_size: int, context: int) -> None:
    """Raise ``CaptureError`` for a prompt that is empty, out of vocab, or beyond the context with its answer."""
    if not request.prompt_ids:
        raise CaptureError(f"request {request.request_id}: no prompt tokens, expected at least one")
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        raise CaptureError(f"request {request.request_id}: token ids {low} to {high}, expected 0 to {vocab_size - 1}")
    wanted = len(request.prompt_ids) + request.max_new_tokens
    if wanted > context:
        raise CaptureError(
            f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens and up to "
            f"{request.max_new_tokens} new ones are {wanted}, the target's context is {context}",
            "lower respond.max_new_tokens, or drop the long conversation",
        )


def generate(
    model: Any, requests: Sequence[GenerateRequest], batch_size: int, eos_token_ids: Sequence[int]
) -> Iterator[Generated]:
    """Continue every prompt; answers come as they end.

    Args:
        model: A causal LM of transformers, see ``BlockDecoder``.
        requests: Prompts, in any order and of any mix of greedy and sampled.
        batch_size: Rows of the shortest bucket, see ``bucket_rows``; part of the numerics.
        eos_token_ids: Tokens that end an answer.

    Raises:
        CaptureError: A request cannot be run; nothing was generated then.
    """
    text_config = model.config.get_text_config()
    context = text_config.max_position_embeddings
    buckets: dict[tuple[int, int], list[GenerateRequest]] = defaultdict(list)
    for request in requests:
        check_request(request, text_config.vocab_size, context)
        buckets[prompt_bucket(len(request.prompt_ids), context), request.max_new_tokens].append(request)
    for (prompt_length, max_new_tokens), members in sorted(buckets.items()):
        rows = bucket_rows(batch_size, prompt_length)
        decoder = BlockDecoder(model, rows, min(prompt_length + max_new_tokens, context))
        yield from _Stream(decoder, prompt_length, members, frozenset(eos_token_ids)).run()


@dataclass
class _Row:
    request: GenerateRequest
    key: bytes
    ids: list[int] = field(default_factory=list)


class _Stream:
    """One bucket: requests waiting, rows decoding."""

    def __init__(
        self, decoder: BlockDecoder, prompt_length: int, requests: list[GenerateRequest], eos: frozenset[int]
    ) -> None:
        self._decoder, self._prompt_length, self._eos = decoder, prompt_length, eos
        self._refill_rows = min(REFILL_ROWS, decoder.batch_size)
        self._waiting = deque(requests)
        self._rows: dict[int, _Row] = {}
        self._free = deque(range(decoder.batch_size))
        self._ids_B1 = torch.zeros(decoder.batch_size, 1, dtype=torch.long)
        self._position_B = torch.zeros(decoder.batch_size, dtype=torch.long)

    def run(self) -> Iterator[Generated]:
        while self._rows or self._waiting:
            while self._waiting and len(self._free) >= min(self._refill_rows, len(self._waiting)):
                yield from self._refill()
            if self._rows:
                output = self._decoder.forward(self._ids_B1, self._position_B)
                yield from self._advance(list(range(self._decoder.batch_size)), output.logits_BJV[:, 0])

    def _refill(self) -> Iterator[Generated]:
        places = []
        for _ in range(min(self._refill_rows, len(self._waiting))):
            request, place = self._waiting.popleft(), self._free.popleft()
            self._rows[place] = _Row(request, draw_key(request.seed, request.prompt_ids))
            self._position_B[place] = len(request.prompt_ids) - 1
            places.append(place)
        # A short refill repeats its last row, which writes the same values again.
        places += places[-1:] * (self._refill_rows - len(places))
        prompts = [self._rows[place].request.prompt_ids for place in places]
        output = self._decoder.prefill(prompts, places, self._prompt_length)
        yield from self._advance(places, output.logits_RV)

    def _advance(self, places: list[int], logits_RV: torch.Tensor) -> Iterator[Generated]:
        """Choose a token for each place and end the rows that are done."""
        rows = [self._rows.get(place) for place in places]
        tokens = choose(
            logits_RV,
            [row.request.temperature if row else 0.0 for row in rows],
            [row.request.top_p if row else 1.0 for row in rows],
            [uniform(row.key, len(row.ids)) if row and row.request.temperature else 0.0 for row in rows],
        )
        for place, token in dict(zip(places, tokens, strict=True)).items():
            row = self._rows.get(place)
            if row is None:
                continue
            row.ids.append(token)
            self._ids_B1[place, 0] = token
            if token in self._eos or len(row.ids) == row.request.max_new_tokens:
                del self._rows[place]
                self._free.append(place)
                finish = "stop" if token in self._eos else "length"
                yield Generated(request_id=row.request.request_id, ids=tuple(row.ids), finish=finish)
            else:
                self._position_B[place] += 1
