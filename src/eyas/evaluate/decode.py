"""Real chain speculative decoding beside plain greedy decoding, on one numeric path.

Both sides continue the same prefill with forwards of the same shape ``[B, S + 1]``, because in bf16 another
shape picks another token at about one position in a hundred. Plain decoding uses the first place of the
block and advances by one token; speculative decoding fills the other S places with drafts and advances by
what the target agrees with. A finished row keeps its place until its batch is done.

Letters: B rows, J = S + 1 tokens per row in one forward, S draft steps, A aux streams, D target hidden,
V target vocab, P padded prompt length.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from eyas.drafter.rows import Document
from eyas.engines.decode import BlockDecoder, PrefillOutput
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
    round_accepted: tuple[int, ...]
    """Draft tokens that each round accepted, of those the text has room for."""
    document: Document | None
    """Prompt and answer with the states that the rounds saw: what the walk needs to take the same rounds."""
    walked_alike: bool = False
    """The walk over that document takes the same rounds, accepted tokens and all."""

    def without_states(self) -> Decoded:
        """The same, for keeping."""
        return dataclasses.replace(self, document=None)


@dataclass(slots=True)
class DecodeTimes:
    """Seconds of each side, prefill left out: for the run record, never for the report."""

    plain_s: float = 0.0
    speculative_s: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one round found for all B rows, finished ones included."""

    ids_BJ: torch.Tensor
    """Accepted draft tokens, then the target's own next token; what lies behind means nothing."""
    accepted_B: torch.Tensor
    aux_BJAD: torch.Tensor
    """Of the row's last known token and of the accepted ones."""
    last_BJD: torch.Tensor


class Mode(Protocol):
    """One way of drafting and checking, for one batch (``eyas.evaluate.modes``)."""

    def choose(self, logits_RV: torch.Tensor, keys: Sequence[bytes], place: int) -> torch.Tensor:
        """The target's own token [R] at this place of every answer."""
        ...

    def extend(
        self, aux_BJAD: torch.Tensor, next_ids_BJ: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor
    ) -> None:
        """Tell the drafter rows ``start .. start + count - 1``; places at and after ``count`` are ignored."""
        ...

    def round(self, decoder: BlockDecoder, rows: Rows) -> Emitted:
        """Draft from every row's last known state and let the target check it in one forward."""
        ...


@dataclass(slots=True)
class Rows:
    """Tokens of the rows of one batch: what is known, what is new, what is finished."""

    prompts: Sequence[Prompt]
    max_new_tokens: int
    eos_ids: frozenset[int]
    new: list[list[int]] = field(init=False)
    sizes: list[list[int]] = field(init=False)
    accepted: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.new = [[] for _ in self.prompts]
        self.sizes = [[] for _ in self.prompts]
        self.accepted = [[] for _ in self.prompts]

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
    mode: Mode,
    prompts: Sequence[Prompt],
    *,
    chain_length: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    times: DecodeTimes,
) -> list[Decoded]:
    """Decode B prompts speculatively and plainly, both greedily, and compare them token for token.

    Raises:
        EvaluateError: The two differ; names the prompt, the place, both tokens and their logit gap.
    """
    prefill = decoder.prefill([p.ids for p in prompts])
    _require_numbers(prefill.logits_RV, prompts)
    rows = Rows(prompts, max_new_tokens, frozenset(eos_ids))
    decoded, seconds = speculate(decoder, mode, rows, prefill)
    times.speculative_s += seconds
    plain = Rows(prompts, max_new_tokens, frozenset(eos_ids))
    for row, choice in enumerate(prefill.logits_RV.argmax(-1).tolist()):
        plain.take(row, [choice])
    started_s = time.perf_counter()
    gaps = _plain(decoder, plain, rows.new, chain_length + 1)
    times.plain_s += time.perf_counter() - started_s
    times.num_tokens += sum(len(ids) for ids in plain.new)
    for row, prompt in enumerate(prompts):
        _require_equal(prompt, plain.new[row], rows.new[row], gaps[row])
    return decoded


@torch.inference_mode()
def speculate(
    decoder: BlockDecoder, mode: Mode, rows: Rows, prefill: PrefillOutput, keys: Sequence[bytes] = ()
) -> tuple[list[Decoded], float]:
    """Decode B prompts in one mode.

    Args:
        decoder: Filled with the prompts.
        mode: Fresh.
        rows: Fresh; holds prompts and limits.
        prefill: Of the prompts.
        keys: Per prompt what its uniform numbers derive from; none when nothing is drawn.

    Returns:
        What was decoded, and the seconds of the rounds: both prefills are left out.
    """
    assert len(rows.prompts) == decoder.batch_size
    assert prefill.aux_RPAD is not None
    prompt_ids = [p.ids for p in rows.prompts]
    first_B = mode.choose(prefill.logits_RV, keys, 0).cpu()
    for row, choice in enumerate(first_B.tolist()):
        rows.take(row, [choice])
    mode.extend(prefill.aux_RPAD, *_prompt_rows(prompt_ids, first_B))
    traces = [
        _Trace([prefill.aux_RPAD[row, : len(ids)]], [prefill.last_RPD[row, : len(ids)]])
        for row, ids in enumerate(prompt_ids)
    ]
    decoder.settle()
    started_s = time.perf_counter()
    while live := rows.live:
        start_B = rows.start_B()
        found = mode.round(decoder, rows)
        mode.extend(found.aux_BJAD, found.ids_BJ, start_B, found.accepted_B + 1)
        for row in live:
            accepted = int(found.accepted_B[row])
            kept = rows.take(row, found.ids_BJ[row, : accepted + 1].tolist())
            rows.sizes[row].append(kept)
            rows.accepted[row].append(min(accepted, kept))
            traces[row].add(found.aux_BJAD[row, : accepted + 1], found.last_BJD[row, : accepted + 1])
    decoder.settle()
    seconds = time.perf_counter() - started_s
    decoded = [
        Decoded(
            prompt,
            tuple(rows.new[row]),
            tuple(rows.sizes[row]),
            tuple(rows.accepted[row]),
            traces[row].document(prompt.ids, rows.new[row]),
        )
        for row, prompt in enumerate(rows.prompts)
    ]
    return decoded, seconds


@dataclass(frozen=True, slots=True)
class _Trace:
    """States of one row's known tokens, in order."""

    aux: list[torch.Tensor]
    last: list[torch.Tensor]

    def add(self, aux_JAD: torch.Tensor, last_JD: torch.Tensor) -> None:
        self.aux.append(aux_JAD.clone())
        self.last.append(last_JD.clone())

    def document(self, prompt: Sequence[int], answer: Sequence[int]) -> Document:
        """The last token was never read by the target: its row is zero, and nobody asks for it."""
        ids_T = torch.tensor([*prompt, *answer])
        mask_T = (torch.arange(len(ids_T)) >= len(prompt)).long()
        states = []
        for parts in (self.aux, self.last):
            whole = torch.cat(parts)[: len(ids_T) - 1].cpu()
            states.append(torch.cat([whole, torch.zeros_like(whole[:1])]))
        return Document(ids_T, mask_T, *states)


def _prompt_rows(
    prompts: Sequence[Sequence[int]], first_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Next ids, starts and counts of the prompts' rows; the last row's next token is the first new one."""
    next_ids_BP = torch.zeros(len(prompts), max(len(ids) for ids in prompts), dtype=torch.long)
    for row, ids in enumerate(prompts):
        next_ids_BP[row, : len(ids)] = torch.tensor([*ids[1:], int(first_B[row])])
    return next_ids_BP, torch.zeros(len(prompts), dtype=torch.long), torch.tensor([len(ids) for ids in prompts])


def _plain(decoder: BlockDecoder, rows: Rows, rivals: Sequence[Sequence[int]], block: int) -> list[list[float]]:
    """Plain greedy decoding, and per token the logit gap to the other side's token at that place."""
    gaps: list[list[float]] = [[0.0] for _ in rivals]
    while live := rows.live:
        ids_BJ = rows.last_B()[:, None].expand(-1, block).contiguous()
        logits_BV = decoder.forward(ids_BJ, rows.start_B()).logits_BJV[:, 0]
        _require_numbers(logits_BV, rows.prompts)
        choice_B = logits_BV.argmax(-1)
        for row in live:
            place = len(rows.new[row])
            choice, rival = int(choice_B[row]), rivals[row][place] if place < len(rivals[row]) else int(choice_B[row])
            gaps[row].append(float(logits_BV[row, choice]) - float(logits_BV[row, rival]))
            rows.take(row, [choice])
    return gaps


def _require_numbers(logits_BV: torch.Tensor, prompts: Sequence[Prompt]) -> None:
    """Two decodings of NaN are equal, token for token: that is no losslessness."""
    broken = logits_BV.isnan().any(-1).tolist()
    if any(broken):
        prompt = prompts[broken.index(True)]
        raise EvaluateError(
            f"the target's logits hold NaN: prompt {prompt.sample_id} ({prompt.source})",
            "set evaluate.dtype=float32; if it stays, the target's files are damaged: `make doctor`",
        )


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
