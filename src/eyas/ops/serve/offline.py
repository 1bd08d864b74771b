"""What the walk and the target say of the very texts that a server wrote: the same prompts, tokens and chain.

Letters: T tokens of prompt and answer, N of the answer, A aux streams, D target hidden size, V target vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eyas import console
from eyas.contracts import StoredSample
from eyas.drafter.judged import target_argmax
from eyas.drafter.model import Drafter
from eyas.engines.taps import Taps, text_model
from eyas.evaluate.judge import PACK_TOKENS, walk_group
from eyas.evaluate.plain import tie_limit
from eyas.evaluate.summary import WalkedDocument
from eyas.shards.reader import StoredStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A prompt and what was written to it."""

    prompt_id: str
    source: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """How far the target's own choice is from a text, token by token."""

    num_ties: int
    """Tokens other than the target's first, behind it by no more than rounding explains."""
    largest_gap: float
    """In logits, over all tokens."""
    fault: str
    """Why the text is none of greedy decoding's; empty for one that is."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Tells a near tie, which another forward may turn, from a token that the target does not choose.

    Each text is read once however often it is asked for.

    Args:
        model: The target, as ``load_model`` gives it, in the dtype it was served in.
        eos_ids: They end an answer.
        max_new_tokens: An answer that they do not end has so many.
    """

    model: Any
    eos_ids: Sequence[int]
    max_new_tokens: int
    _known: dict[Written, Judged] = field(default_factory=dict)

    def __call__(self, one: Written) -> Judged:
        """Judge a text that a server wrote greedily."""
        if one not in self._known:
            self._known[one] = self._judge(one)
        return self._known[one]

    @torch.no_grad()
    def _judge(self, one: Written) -> Judged:
        base, ids = text_model(self.model), [*one.prompt_ids, *one.answer_ids]
        output = base(input_ids=torch.tensor([ids], device=base.device), use_cache=False)
        last_ND = output.last_hidden_state[0, len(one.prompt_ids) - 1 : -1]
        logits_NV = self.model.get_output_embeddings()(last_ND)
        own_N = torch.tensor(one.answer_ids, device=logits_NV.device)
        gap_N = (logits_NV.amax(-1) - logits_NV.gather(1, own_N[:, None])[:, 0]).float()
        limit_N = tie_limit(logits_NV)
        fault = ""
        if not bool((gap_N <= limit_N).all()):  # NaN is no tie
            place = int((~(gap_N <= limit_N)).nonzero()[0])
            fault = (
                f"{one.prompt_id}, new token {place}: {one.answer_ids[place]}, the target's choice is "
                f"{int(logits_NV[place].argmax())} by {float(gap_N[place]):.4g} in logits, a tie is at most "
                f"{float(limit_N[place]):.4g}"
            )
        elif len(one.answer_ids) < self.max_new_tokens and one.answer_ids[-1] not in self.eos_ids:
            fault = f"{one.prompt_id} ends after {len(one.answer_ids)} tokens without an end of turn"
        return Judged(num_ties=int((own_N != logits_NV.argmax(-1)).sum()), largest_gap=float(gap_N.max()), fault=fault)


def as_served(drafter: Drafter, dtype: str) -> Drafter:
    """The same drafter with its weights rounded as the export rounds them; they stay float32."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(weight.to(getattr(torch, dtype)).to(weight.dtype))
    return drafter


def walk_written(
    drafter: Drafter,
    model: Any,
    boundaries: Sequence[int],
    head_VD: torch.Tensor,
    written: Sequence[Written],
    chain_length: int,
) -> list[WalkedDocument]:
    """Walk every answer with the drafter.

    Args:
        drafter: With the target's embedding and draft vocab set.
        model: The target, as ``load_model`` gives it, in the dtype it was served in.
        boundaries: Of the drafter.
        head_VD: The target's head.
        written: Prompts and answers.
        chain_length: Drafts of a round.
    """
    walked: list[WalkedDocument] = []
    progress = console.Progress("serve-bench walks", len(written), unit="texts")
    for group in _groups(model, boundaries, written):
        argmaxes = [target_argmax(stored, head_VD) for stored in group]
        walked += walk_group(drafter, group, argmaxes, chain_length)
        progress.advance(len(group))
    progress.close()
    return walked


def _groups(model: Any, boundaries: Sequence[int], written: Sequence[Written]) -> Iterator[list[StoredStates]]:
    group: list[StoredStates] = []
    for one in written:
        stored = _capture(model, boundaries, one)
        if group and sum(each.sample.num_tokens for each in group) + stored.sample.num_tokens > PACK_TOKENS:
            yield group
            group = []
        group.append(stored)
    yield group


@torch.no_grad()
def _capture(model: Any, boundaries: Sequence[int], one: Written) -> StoredStates:
    """States of one text in one forward, in the model's dtype: not rounded as stored ones are."""
    ids = [*one.prompt_ids, *one.answer_ids]
    base = text_model(model)
    taps = Taps(base, tuple(boundaries))
    with taps.listening():
        output = base(input_ids=torch.tensor([ids], device=base.device), use_cache=False)
    sample = StoredSample(
        sample_id=one.prompt_id,
        num_tokens=len(ids),
        conversation_id=one.prompt_id,
        source=one.source,
        split="held_out",
        variant="greedy",
    )
    return StoredStates(
        sample=sample,
        input_ids_T=torch.tensor(ids, dtype=torch.int32),
        loss_mask_T=torch.tensor([0] * len(one.prompt_ids) + [1] * len(one.answer_ids), dtype=torch.uint8),
        aux_TAD=taps.take()[0].cpu(),
        last_TD=output.last_hidden_state[0].cpu(),
        num_aux_rows=len(ids),
        has_last_T=torch.ones(len(ids), dtype=torch.bool),
    )
