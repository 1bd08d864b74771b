"""Speculative decoding with a real tiny target: equal to plain greedy whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.engines.decode import BlockDecoder
from eyas.errors import EvaluateError
from eyas.evaluate import decode
from eyas.evaluate.decode import DecodeTimes, Prompt, batches, decode_batch
from eyas.evaluate.modes import GreedyChain

V, CHAIN, LIMIT = 61, 4, 14
BOUNDARIES = (1, 2)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,  # sharp enough that greedy text does not stand still
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    lengths = (3, 9, 5, 1, 7)
    ids = [torch.randint(0, V, (n,), generator=generator).tolist() for n in lengths]
    return [Prompt(f"sample-{i}", "chatterbot", tuple(row)) for i, row in enumerate(ids)]


def greedy(target: LlamaForCausalLM, prompt: Sequence[int], limit: int, eos: Sequence[int]) -> list[int]:
    """Plain greedy without any cache: the reference."""
    ids = list(prompt)
    for _ in range(limit):
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


class TableChain:
    """Drafts from given texts, wrong at chosen places: what a drafter of known quality would draft."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: Sequence[set[int]]) -> None:
        self.texts, self.wrong = texts, wrong
        self.known = [0] * len(texts)

    def extend(
        self, aux_BJAD: torch.Tensor, next_ids_BJ: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor
    ) -> None:
        assert aux_BJAD.shape[:2] == next_ids_BJ.shape
        assert aux_BJAD.shape[2:] == (len(BOUNDARIES), 32)
        for row, text in enumerate(self.texts):
            start, count = int(start_B[row]), int(count_B[row])
            self.known[row] = start + count + 1
            told = next_ids_BJ[row, :count].tolist()
            assert told[: len(text) - start - 1] == list(text[start + 1 : start + 1 + count])

    def draft(self) -> torch.Tensor:
        rows = []
        for text, wrong, known in zip(self.texts, self.wrong, self.known, strict=True):
            places = range(known, known + CHAIN)
            right = [text[p] if p < len(text) else 0 for p in places]
            rows.append([(t + 1) % V if p in wrong else t for p, t in zip(places, right, strict=True)])
        return torch.tensor(rows)


def run(target: LlamaForCausalLM, prompts: list[Prompt], wrong: list[set[int]], eos: Sequence[int] = ()) -> list:
    texts = [[*p.ids, *greedy(target, p.ids, LIMIT, eos)] for p in prompts]
    longest = max(len(p.ids) for p in prompts)
    decoder = BlockDecoder(target, len(prompts), longest + LIMIT + CHAIN, boundaries=BOUNDARIES)
    return decode_batch(
        decoder,
        GreedyChain(TableChain(texts, wrong)),
        prompts,
        chain_length=CHAIN,
        max_new_tokens=LIMIT,
        eos_ids=eos,
        times=DecodeTimes(),
    )


def test_perfect_drafts_give_chain_plus_bonus_and_the_clipped_last_round(target, prompts) -> None:
    """Case 73: 14 tokens = the prefill's one + 5 + 5 + 3."""
    decoded = run(target, prompts, [set()] * 5)
    for prompt, result in zip(prompts, decoded, strict=True):
        assert list(result.ids) == greedy(target, prompt.ids, LIMIT, ())
        assert result.round_sizes == (5, 5, 3)


def test_wrong_drafts_give_one_token_a_round_and_the_same_text(target, prompts) -> None:
    """Case 73: tau 1.0."""
    decoded = run(target, prompts, [set(range(60))] * 5)
    for prompt, result in zip(prompts, decoded, strict=True):
        assert list(result.ids) == greedy(target, prompt.ids, LIMIT, ())
        assert result.round_sizes == (1,) * (LIMIT - 1)


@pytest.mark.parametrize("seed", range(6))
def test_any_drafts_give_the_same_text_in_the_rounds_of_the_walk(target, prompts, seed: int) -> None:
    import numpy as np

    from eyas.drafter.walk import walk

    rng = np.random.default_rng(seed)
    wrong = [set(np.flatnonzero(rng.random(60) < 0.4).tolist()) for _ in prompts]
    eos = (greedy(target, prompts[0].ids, LIMIT, ())[6], greedy(target, prompts[1].ids, LIMIT, ())[9])
    decoded = run(target, prompts, wrong, eos)
    for prompt, result, misses in zip(prompts, decoded, wrong, strict=True):
        text = greedy(target, prompt.ids, LIMIT, eos)
        assert list(result.ids) == text
        start, end = len(prompt.ids), len(prompt.ids) + len(text)
        agree_TS = np.array([[t + k + 2 not in misses for k in range(CHAIN)] for t in range(end)])
        assert result.round_sizes == tuple(r.num_emitted for r in walk(agree_TS, start, end))


def test_a_target_that_answers_differently_by_place_is_caught(target, prompts, monkeypatch) -> None:
    """A second numeric path is what the check exists for: the error names prompt, place, tokens and gap."""
    forward = BlockDecoder.forward

    def shifted(self, ids_BJ, start_B, attended=None):
        output = forward(self, ids_BJ, start_B, attended)
        if bool((ids_BJ == ids_BJ[:, :1]).all()):  # the plain side's block
            output.logits_BJV[2, 0] = output.logits_BJV[2, 0].roll(1)
        return output

    monkeypatch.setattr(BlockDecoder, "forward", shifted)
    with pytest.raises(
        EvaluateError, match=r"sample-2 \(chatterbot\), new token 1: plain greedy \d+, speculative \d+, logit gap"
    ):
        run(target, prompts, [set()] * 5)


def test_batches_are_even_within_a_set_and_put_like_answers_together() -> None:
    prompts = [Prompt(f"{i}", "a" if i < 5 else "b", (1,) * (i + 1)) for i in range(7)]
    found = list(batches(prompts, [5, 90, 7, 90, 1, 3, 128], 4))
    assert found == [[1, 3, 2], [0, 4], [6, 5]]


def test_rows_stop_at_the_limit_and_at_the_end_of_turn() -> None:
    rows = decode.Rows([Prompt("a", "s", (1,))], 4, frozenset({9}))
    assert rows.take(0, [5, 9, 7]) == 2
    assert rows.finished(0)
    rows = decode.Rows([Prompt("a", "s", (1,))], 4, frozenset({9}))
    assert rows.take(0, [5, 6, 7, 8, 5]) == 4
    assert rows.finished(0)
