"""Real chain speculative decoding beside plain greedy decoding, on one numeric path.

Both sides continue the same prefill with forwards of the same shape ``[B, S + 1]``, because in bf16 another
shape picks another token at about one position in a hundred. Plain decoding uses the first place of the
block and advances by one token; speculative decoding fills the other S places with drafts and advances by
what the target agrees with. A finished row keeps its place until its batch is done.

Letters: B rows, J = S + 1 tokens per row in one forward, S draft steps, A aux streams, D target hidden,
V target vocab, P padded prompt length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from eyas.engines.decode import BlockDecoder
from eyas.errors import EvaluateError


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids before the first assistant token of a held-out document."""

    sample_id: str
    source: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """One prompt decoded both ways; the two ids were found equal."""

    prompt: Prompt
    ids: tuple[int, ...]
    """New tokens, an end-of-turn token included."""
    round_sizes: tuple[int, ...]
    """Tokens that each speculative round emitted; the prefill's first token belongs to none."""


@dataclass(slots=True)
class DecodeTimes:
    """Seconds of each side, prefill left out: for the run record, never for the report."""

    plain_s: float = 0.0
    speculative_s: float = 0.0
    num_tokens: int = 0


class Chain(Protocol):
    """The drafter's side of a batch (``eyas.drafter.chain.DraftChain``)."""

    def extend(
        self, aux_BJAD: torch.Tensor, next_ids_BJ: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor
    ) -> None:
        """Take in rows ``start .. start + count - 1``; places at and after ``count`` are ignored."""
        ...

    def draft(self) -> torch.Tensor:
        """S drafted target ids per row, [B, S], from each row's last known state."""
        ...


class ChainFactory(Protocol):
    """Makes the drafter's side of one batch."""

    def __call__(self, batch_size: int, max_length: int) -> Chain:
        """A chain for ``batch_size`` rows of up to ``max_length`` positions."""
        ...


@dataclass(slots=True)
class _Rows:
    """Tokens of the rows of one batch: what is known, what is new, what is finished."""

    prompts: Sequence[Prompt]
    max_new_tokens: int
    eos_ids: frozenset[int]
    new: list[list[int]] = field(init=False)
    sizes: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.new = [[] for _ in self.prompts]
        self.sizes = [[] for _ in self.prompts]

    def finished(self, row: int) -> bool:
        """The row's answer ended, by itself or at the limit."""
        return len(self.new[row]) >= self.max_new_tokens or (bool(self.new[row]) and self.new[row][-1] in self.eos_ids)

    def take(self, row: int, tokens: Sequence[int]) -> int:
        """Append tokens up to the end-of-turn token or the limit; how many were kept."""
        before = len(self.new[row])
        for token in tokens:
            if self.finished(row):
                break
            self.new[row].append(token)
        return len(self.new[row]) - before

    def last_B(self) -> torch.Tensor:
        """Each row's last known token."""
        return torch.tensor([new[-1] for new in self.new])

    def start_B(self) -> torch.Tensor:
        """Position of each row's last known token, which the next forward writes."""
        return torch.tensor([len(p.ids) + len(new) - 1 for p, new in zip(self.prompts, self.new, strict=True)])

    @property
    def live(self) -> list[int]:
        """Rows that go on."""
        return [row for row in range(len(self.prompts)) if not self.finished(row)]


@torch.inference_mode()
def decode_batch(
    decoder: BlockDecoder,
    make_chain: ChainFactory,
    prompts: Sequence[Prompt],
    *,
    chain_length: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    times: DecodeTimes,
) -> list[Decoded]:
    """Decode B prompts speculatively and plainly and compare them token for token.

    Raises:
        EvaluateError: The two differ; names the prompt, the place, both tokens and their logit gap.
    """
    assert len(prompts) == decoder.batch_size
    prefill = decoder.prefill([p.ids for p in prompts])
    assert prefill.aux_RPAD is not None
    first_B = prefill.logits_RV.argmax(-1)

    def rows() -> _Rows:
        fresh = _Rows(prompts, max_new_tokens, frozenset(eos_ids))
        for row in range(len(prompts)):
            fresh.take(row, [int(first_B[row])])
        return fresh

    chain = make_chain(decoder.batch_size, decoder.max_length)
    chain.extend(prefill.aux_RPAD, *_prompt_rows([p.ids for p in prompts], first_B))
    started_s = time.perf_counter()
    speculative = _speculate(decoder, chain, rows())
    middle_s = time.perf_counter()
    plain, gaps = _plain(decoder, rows(), speculative.new, chain_length + 1)
    times.speculative_s += middle_s - started_s
    times.plain_s += time.perf_counter() - middle_s
    times.num_tokens += sum(len(ids) for ids in plain.new)
    for row, prompt in enumerate(prompts):
        _require_equal(prompt, plain.new[row], speculative.new[row], gaps[row])
    return [
        Decoded(prompt, tuple(ids), tuple(sizes))
        for prompt, ids, sizes in zip(prompts, speculative.new, speculative.sizes, strict=True)
    ]


def _prompt_rows(
    prompts: Sequence[Sequence[int]], first_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Next ids, starts and counts of the prompts' rows; the last row's next token is the first new one."""
    next_ids_BP = torch.zeros(len(prompts), max(len(ids) for ids in prompts), dtype=torch.long)
    for row, ids in enumerate(prompts):
        next_ids_BP[row, : len(ids)] = torch.tensor([*ids[1:], int(first_B[row])])
    return next_ids_BP, torch.zeros(len(prompts), dtype=torch.long), torch.tensor([len(ids) for ids in prompts])


def _speculate(decoder: BlockDecoder, chain: Chain, rows: _Rows) -> _Rows:
    while live := rows.live:
        drafts_BS = chain.draft()
        start_B = rows.start_B()
        output = decoder.forward(torch.cat([rows.last_B()[:, None], drafts_BS.cpu()], dim=1), start_B)
        assert output.aux_BJAD is not None
        choice_BJ = output.logits_BJV.argmax(-1).cpu()
        accepted_B = (choice_BJ[:, :-1] == drafts_BS.cpu()).long().cumprod(1).sum(1)
        chain.extend(output.aux_BJAD, choice_BJ, start_B, accepted_B + 1)
        for row in live:
            rows.sizes[row].append(rows.take(row, choice_BJ[row, : int(accepted_B[row]) + 1].tolist()))
    return rows


def _plain(
    decoder: BlockDecoder, rows: _Rows, rivals: Sequence[Sequence[int]], block: int
) -> tuple[_Rows, list[list[float]]]:
    """Plain greedy decoding, and per token the logit gap to the other side's token at that place."""
    gaps: list[list[float]] = [[0.0] for _ in rivals]
    while live := rows.live:
        ids_BJ = rows.last_B()[:, None].expand(-1, block).contiguous()
        logits_BV = decoder.forward(ids_BJ, rows.start_B()).logits_BJV[:, 0]
        choice_B = logits_BV.argmax(-1)
        for row in live:
            place = len(rows.new[row])
            choice, rival = int(choice_B[row]), rivals[row][place] if place < len(rivals[row]) else int(choice_B[row])
            gaps[row].append(float(logits_BV[row, choice]) - float(logits_BV[row, rival]))
            rows.take(row, [choice])
    return rows, gaps


def _require_equal(prompt: Prompt, plain: Sequence[int], speculative: Sequence[int], gaps: Sequence[float]) -> None:
    if list(plain) == list(speculative):
        return
    pairs = zip(plain, speculative, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(speculative)))
    one, other = (ids[place] if place < len(ids) else "no token" for ids in (plain, speculative))
    gap = gaps[place] if place < len(gaps) else 0.0
    raise EvaluateError(
        f"speculative decoding is not lossless: prompt {prompt.sample_id} ({prompt.source}), new token {place}: "
        f"plain greedy {one}, speculative {other}, logit gap {gap:.4g}; expected equal tokens everywhere",
        "a gap near 0 is a near tie: set evaluate.dtype=float32; a large one is a fault, please report it",
    )


def batches(prompts: Sequence[Prompt], num_new_tokens: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Indices of the prompts of each batch: even batches of one prompt set, at most ``batch_size`` each.

    A set's prompts are of like length, which saves padding; answers of like length go together, so that the
    rows of a batch end together.
    """
    for source in sorted({p.source for p in prompts}):
        members = [i for i, p in enumerate(prompts) if p.source == source]
        members.sort(key=lambda i: (-num_new_tokens[i], len(prompts[i].ids), prompts[i].sample_id))
        num_batches = -(-len(members) // batch_size)
        even = -(-len(members) // num_batches)
        for begin in range(0, len(members), even):
            yield members[begin : begin + even]
