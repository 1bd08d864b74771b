"""The fake engine: integer-valued states from ids, positions and boundary; instant, for tests.

Every value is a small integer that bf16 holds exactly, so expected bytes can be written down:
``aux[t, a, d] = (ids[t] + 7 t + 31 boundary[a] + 3 d) mod 251 - 125`` and ``last`` likewise with the
constant 97 in the boundary term's place.

Letters: T tokens of the sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from eyas.contracts import EngineFacts, TargetIdentity, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.base import CapturedSample
from eyas.errors import CaptureError

if TYPE_CHECKING:
    import torch

LAST_OFFSET = 97
MODULUS = 251
ANSWER_TOKENS = 24
"""Answers have 1 to 24 tokens before the end-of-turn token."""


class FakeEngine:
    """Deterministic states and answers without a model.

    Args:
        target: Gives hidden size, vocab and end-of-turn tokens.
        boundaries: Aux boundaries, in stored order.
    """

    def __init__(self, target: TargetIdentity, boundaries: Sequence[int]) -> None:
        self._target, self._boundaries = target, tuple(boundaries)

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """Nothing is computed ahead."""

    def open(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to free."""

    def describe(self) -> EngineFacts:
        """Always deterministic, no options."""
        return EngineFacts(name="fake", version="1", options={}, deterministic=True)

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """States of each sample, see the module's formula.

        Raises:
            CaptureError: An id is outside the vocab.
        """
        import torch

        for sample in batch:
            worst = max(sample.input_ids)
            if worst >= self._target.vocab_size:
                raise CaptureError(f"sample {sample.sample_id}: id {worst}, expected below {self._target.vocab_size}")
            ids_T = torch.tensor(sample.input_ids, dtype=torch.int32)
            streams = [self._states(ids_T, 31 * boundary) for boundary in self._boundaries]
            yield CapturedSample(
                sample_id=sample.sample_id,
                input_ids_T=ids_T,
                aux_TAD=torch.stack(streams, dim=1),
                last_TD=self._states(ids_T, LAST_OFFSET),
            )

    def _states(self, ids_T: torch.Tensor, offset: int) -> torch.Tensor:
        import torch

        token_T1 = (ids_T.long() + 7 * torch.arange(len(ids_T)))[:, None]
        channel_D = 3 * torch.arange(self._target.hidden_size)
        return ((token_T1 + channel_D + offset) % MODULUS - MODULUS // 2).to(torch.bfloat16)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """Answers of hash-chosen ids and length; greedy ones do not depend on the seed."""
        for request in requests:
            yield self._answer(request)

    def _answer(self, request: GenerateRequest) -> Generated:
        salt = request.seed if request.temperature > 0 else None
        length = _hash(request.prompt_ids, salt, "length") % ANSWER_TOKENS + 1
        eos = self._target.eos_token_ids
        ids = []
        for position in range(min(length, request.max_new_tokens)):
            token = _hash(request.prompt_ids, salt, position) % self._target.vocab_size
            while token in eos:
                token = (token + 1) % self._target.vocab_size
            ids.append(token)
        if length >= request.max_new_tokens:
            return Generated(request_id=request.request_id, ids=tuple(ids), finish="length")
        return Generated(request_id=request.request_id, ids=(*ids, eos[0]), finish="stop")


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")
