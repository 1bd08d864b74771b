"""What an engine is: a small Protocol that captures states and generates text.

Engines yield samples in any order; whoever stores them goes by ``sample_id``. The states of a sample
are those of the sample alone: no other sample, cache or padding may touch them.

Letters: T tokens of the sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from eyas.contracts import EngineFacts, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest

OnWait = Callable[[], None]
"""Called again and again while an engine waits for its server: who watches this process learns that it does not hang."""
LOOK_S = 0.2


def nobody() -> None:
    """Who watches when nobody does."""


def wait(seconds: float, on_wait: OnWait) -> None:
    """Sleep, and say so."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        on_wait()
        time.sleep(min(LOOK_S, left_s))


@dataclass(frozen=True, slots=True)
class CapturedSample:
    """Hidden states of one sample, one row per token, on the CPU.

    Shapes: aux_TAD bf16, the residual stream entering each boundary, never normed; last_TD bf16, after
    the target's final norm. input_ids_T int32 are the ids the engine really ran.
    """

    sample_id: str
    input_ids_T: torch.Tensor
    aux_TAD: torch.Tensor
    last_TD: torch.Tensor


class Engine(Protocol):
    """Runs the target. Use as: announce what is to be captured, open, capture or generate, close."""

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """What is going to be asked for, in this order, after what was announced before. An engine may work ahead.

        Called before ``open``, and again while it is open when more becomes known.
        """
        ...

    def open(self) -> None:
        """Load or start what is needed."""
        ...

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """States of every sample of one planned batch; raises ``CaptureError`` naming a sample.

        What is yielded is given away: it is encoded while the engine goes on, so its memory must not be used again.
        """
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """Continuations, each as soon as its batch is done."""
        ...

    def describe(self) -> EngineFacts:
        """Name, version, numerics-relevant options and the promise of determinism."""
        ...

    def close(self) -> None:
        """Give back memory and processes; safe to call twice."""
        ...
