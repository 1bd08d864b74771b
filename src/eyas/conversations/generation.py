"""What is asked of an engine that writes answers, and what it gives back; both live only in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to continue."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float
    seed: int
    """Decides the sampled tokens together with the prompt, whatever runs beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A continuation; its ids end with the end-of-turn token when ``finish`` is ``stop``."""

    request_id: str
    ids: tuple[int, ...]
    finish: Literal["stop", "length"]
