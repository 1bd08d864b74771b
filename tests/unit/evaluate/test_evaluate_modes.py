"""Trees and sampling with a real tiny target: equal to plain decoding, in text or in distribution."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.contracts import DrafterShape
from eyas.drafter.chain import DraftChain
from eyas.drafter.model import Drafter
from eyas.drafter.tree import DraftTree, Tree
from eyas.drafter.walk import spans
from eyas.engines.decode import BlockDecoder
from eyas.engines.sampling import draw_key
from eyas.evaluate.decode import Decoded, Mode, Prompt, Rows, speculate
from eyas.evaluate.drafting import draft_and_weigh
from eyas.evaluate.expected import expect
from eyas.evaluate.modes import GreedyTree, SampledChain, choose_tokens
from eyas.evaluate.plain import Draws, follow, uniform_p_value

V, W, D, BOUNDARIES, STEPS = 6, 4, 16, (1, 2, 3), 3
TARGET_IDS = torch.tensor([0, 2, 3, 5])
PROMPT = (1, 4, 2)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(target: LlamaForCausalLM) -> Drafter:
    """As initialised at random: q is nothing like p, and two of six tokens lie outside its vocab."""
    torch.manual_seed(8)
    shape = DrafterShape(
        target_hidden_size=D,
        hidden_size=D,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_aux=3,
        vocab_size=V,
        draft_vocab_size=W,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=64,
        fc_norm=False,
        norm_output=False,
    )
    drafter = Drafter(shape)
    t2d_V = torch.zeros(V, dtype=torch.bool)
    t2d_V[TARGET_IDS] = True
    drafter.set_target(target.get_input_embeddings().weight, TARGET_IDS - torch.arange(W), t2d_V)
    return drafter.eval().requires_grad_(False)


def decode(
    target: LlamaForCausalLM, mode: Mode, prompts: Sequence[Prompt], limit: int, keys: Sequence[bytes] = ()
) -> list[Decoded]:
    decoder = BlockDecoder(target, len(prompts), length_of(prompts, limit), BOUNDARIES)
    with torch.inference_mode():
        prefill = decoder.prefill([p.ids for p in prompts])
    return speculate(decoder, mode, Rows(prompts, limit, frozenset()), prefill, keys)[0]


def length_of(prompts: Sequence[Prompt], limit: int) -> int:
    return max(len(p.ids) for p in prompts) + limit + 32


def some_prompts() -> list[Prompt]:
    texts = [(1, 4, 2), (3,), (0, 5, 5, 1, 2, 2, 4), (2, 2)]
    return [Prompt(f"sample-{i}", "chatterbot", text) for i, text in enumerate(texts)]


def next_shares(target: LlamaForCausalLM, ids: Sequence[int], temperature: float) -> torch.Tensor:
    return (target(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1)


def plain_text(target: LlamaForCausalLM, prompt: Sequence[int], limit: int, temperature: float, key: bytes) -> list:
    """Token by token without any cache; the uniform number of each place is that of ``modes``."""
    ids = list(prompt)
    for place in range(limit):
        logits_RV = target(torch.tensor([ids])).logits[:, -1]
        ids.append(int(choose_tokens(logits_RV, temperature, [key], [place])[0]))
    return ids[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("width", "num_tokens"), [(1, 4), (2, 6), (3, 16), (4, 30)])
def test_a_tree_emits_the_text_of_plain_decoding(target, drafter, width, num_tokens, temperature: float) -> None:
    """Token for token, greedy and sampled: only the rounds depend on what was drafted."""
    prompts, limit = some_prompts(), 12
    keys = [draw_key(0, p.ids) for p in prompts]
    tree = DraftTree(drafter, STEPS, width, num_tokens, len(prompts), length_of(prompts, limit))
    decoded = decode(target, GreedyTree(tree, temperature, keys), prompts, limit, keys)
    for prompt, one, key in zip(prompts, decoded, keys, strict=True):
        assert list(one.ids) == plain_text(target, prompt.ids, limit, temperature, key)
        assert sum(one.round_sizes) == limit - 1
    accepted = [a for one in decoded for a in one.round_accepted]
    assert width < 3 or max(accepted) >= 2, "rounds must branch and go deep, or the test shows little"


class TableTree:
    """A tree that holds the right tokens as children after a wrong sibling each, ``right`` levels deep."""

    chain_length = 3

    def __init__(self, texts: Sequence[Sequence[int]], right: int) -> None:
        self.texts, self.right, self.known = texts, right, [0] * len(texts)

    def extend(self, aux_BJAD, next_ids_BJ, start_B, count_B) -> None:
        self.known = (start_B + count_B + 1).tolist()

    def draft(self) -> Tree:
        """Places: root; wrong 1, right 1; wrong 2, right 2; wrong 3, right 3; each pair below the right one before."""
        rows = []
        for text, known in zip(self.texts, self.known, strict=True):
            right = [*text, 0, 0, 0, 0][known : known + 3]
            shown = [t if k < self.right else (t + 1) % V for k, t in enumerate(right)]
            rows.append([0, *(i for t in shown for i in ((t + 2) % V, t))])
        parent, depth = [0, 0, 0, 2, 2, 4, 4], [0, 1, 1, 2, 2, 3, 3]
        return Tree(torch.tensor(rows), torch.tensor([parent] * len(rows)), torch.tensor([depth] * len(rows)))


@pytest.mark.parametrize(("right", "sizes"), [(3, (4, 4, 3)), (2, (3, 3, 3, 2)), (1, (2,) * 5 + (1,)), (0, (1,) * 11)])
def test_a_tree_emits_what_is_right_of_it_and_the_bonus(target, right: int, sizes: tuple[int, ...]) -> None:
    """Case 73 for trees: S + 1 a round when perfect, 1 when useless; 11 tokens behind the prefill's."""
    prompts, limit = some_prompts(), 12
    texts = [[*p.ids, *plain_text(target, p.ids, limit, 0.0, b"")] for p in prompts]
    decoded = decode(target, GreedyTree(TableTree(texts, right)), prompts, limit)
    for text, prompt, one in zip(texts, prompts, decoded, strict=True):
        assert [*prompt.ids, *one.ids] == text
        assert one.round_sizes == sizes
        assert one.round_accepted == tuple(min(right, size) for size in sizes)


def test_states_of_an_accepted_path_are_those_of_its_tokens(target) -> None:
    """Kept keys, positions and masks are right when every traced state is that of a forward over the plain text."""
    prompts, limit = some_prompts(), 12
    texts = [[*p.ids, *plain_text(target, p.ids, limit, 0.0, b"")] for p in prompts]
    for one in decode(target, GreedyTree(TableTree(texts, 2)), prompts, limit):
        assert one.document is not None
        output = target(one.document.ids_T[None], output_hidden_states=True)
        aux_TAD = torch.stack([output.hidden_states[b][0] for b in BOUNDARIES], 1)
        torch.testing.assert_close(one.document.aux_TAD[:-1], aux_TAD[:-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.document.last_TD[:-1], output.hidden_states[-1][0, :-1], rtol=1e-4, atol=1e-5)


def sampled(target, drafter: Drafter, num_texts: int, limit: int, temperature: float, seed: int = 0) -> list[Decoded]:
    prompts = [Prompt(f"{i}", "chatterbot", PROMPT) for i in range(num_texts)]
    keys = [draw_key(seed, (i,)) for i in range(num_texts)]
    chain = DraftChain(drafter, STEPS, num_texts, length_of(prompts, limit))
    return decode(target, SampledChain(drafter, chain, temperature, keys), prompts, limit, keys)


def chi_square_p(counts: torch.Tensor, shares: torch.Tensor) -> float:
    """Of counts against a distribution; cells that expect fewer than five are joined."""
    expected = shares * counts.sum()
    many = expected >= 5
    observed = torch.cat([counts[many], counts[~many].sum()[None]])
    wanted = torch.cat([expected[many], expected[~many].sum()[None]])
    statistic = ((observed - wanted) ** 2 / wanted.clamp_min(1e-9)).sum()
    return float(torch.special.gammaincc(many.sum().double() / 2, statistic / 2))


def exact_shares(target, num_tokens: int, temperature: float) -> torch.Tensor:
    """The target's probability of every text of some tokens behind the prompt, by the chain rule."""
    texts = torch.tensor(list(itertools.product(range(V), repeat=num_tokens)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)
    logs = (target(ids).logits.double() / temperature).log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    return logs.gather(2, texts[..., None])[..., 0].sum(1).exp()


def counts_of(decoded: Sequence[Decoded]) -> torch.Tensor:
    codes = [sum(t * V ** (len(one.ids) - 1 - i) for i, t in enumerate(one.ids)) for one in decoded]
    return torch.bincount(torch.tensor(codes), minlength=V ** len(decoded[0].ids)).double()


@pytest.fixture(scope="module")
def shares_of_three(target) -> torch.Tensor:
    return exact_shares(target, 3, 0.8)


def test_sampled_texts_have_the_targets_distribution(target, drafter, shares_of_three) -> None:
    """2,000 texts of three tokens against all 216 computed ones; two tokens no draft can be."""
    decoded = sampled(target, drafter, 2000, 3, 0.8)
    assert shares_of_three.sum() == pytest.approx(1.0)
    assert chi_square_p(counts_of(decoded), shares_of_three) > 1e-3
    assert 0.2 < sum(a for one in decoded for a in one.round_accepted) / 2000 < 1.8


def test_the_wrong_residual_is_noticed(target, drafter, shares_of_three, monkeypatch) -> None:
    """After a refusal a token of p itself favours what q over-drafts: both tests say so."""
    monkeypatch.setattr(
        SampledChain, "_residual", lambda self, p_BJV, q_BSW, accepted_B: p_BJV[torch.arange(len(p_BJV)), accepted_B]
    )
    decoded = sampled(target, drafter, 2000, 3, 0.8)
    assert chi_square_p(counts_of(decoded), shares_of_three) < 1e-9
    assert (p_value_of(target, decoded) or 0.0) < 1e-4


def p_value_of(target, decoded: Sequence[Decoded]) -> float | None:
    prompts, answers = [one.prompt for one in decoded], [one.ids for one in decoded]
    draws = Draws(answers, 0.8, torch.Generator().manual_seed(0))
    follow(BlockDecoder(target, len(prompts), length_of(prompts, 16)), prompts, answers, draws)
    assert len(draws.values) == sum(map(len, answers))
    return uniform_p_value(draws.values)


def test_rounds_of_sampled_texts_are_as_many_as_expected(target, drafter) -> None:
    """The rule min(1, q/p) along the emitted text foretells the rounds that the loop really took."""
    decoded = sampled(target, drafter, 150, 16, 0.8)
    assert (p_value_of(target, decoded) or 0.0) > 1e-3
    documents = [one.document for one in decoded if one.document is not None]
    drafted = draft_and_weigh(drafter, documents, STEPS, target.get_output_embeddings().weight, 0.8)
    differences = [
        len(one.round_sizes) - expect(its.shares.of_text_TS, spans(document.mask_T.numpy()), STEPS).num_rounds
        for one, its, document in zip(decoded, drafted, documents, strict=True)
        if its.shares is not None
    ]
    found = torch.tensor(differences, dtype=torch.float64)
    assert len(found) == 150
    assert abs(float(found.mean())) < 4 * float(found.std()) / 150**0.5
    assert float(found.std()) < 2.0


def test_a_sampled_text_does_not_depend_on_its_companions(target, drafter) -> None:
    together = sampled(target, drafter, 5, 10, 0.8)
    alone = sampled(target, drafter, 1, 10, 0.8)
    assert alone[0].ids == together[0].ids
    assert alone[0].round_sizes == together[0].round_sizes


def test_shares_are_those_of_target_and_drafter(target, drafter) -> None:
    """Overlap, p of the draft and min(1, q/p) from distributions computed one by one."""
    (one,) = sampled(target, drafter, 1, 6, 0.8)
    assert one.document is not None
    ids = one.document.ids_T.tolist()
    (drafted,) = draft_and_weigh(drafter, [one.document], STEPS, target.get_output_embeddings().weight, 0.8)
    assert drafted.shares is not None
    row = len(PROMPT) - 1
    chain = DraftChain(drafter, STEPS, 1, 32)
    chain.extend(
        one.document.aux_TAD[None, : row + 1],
        one.document.ids_T[None, 1 : row + 2],
        torch.tensor([0]),
        torch.tensor([row + 1]),
    )
    _, q_BSW = chain.draft_sampled(0.8, torch.zeros(1, STEPS, dtype=torch.float64))
    p_V, q_V = next_shares(target, ids[: row + 2], 0.8), torch.zeros(V, dtype=torch.float64)
    q_V[TARGET_IDS] = q_BSW[0, 0].double()
    token = ids[row + 2]
    assert drafted.shares.overlap_TS[row, 0] == pytest.approx(float(torch.minimum(p_V, q_V).sum()), rel=1e-4)
    assert drafted.shares.of_draft_TS[row, 0] == pytest.approx(float(p_V[q_V.argmax()]), rel=1e-4)
    assert drafted.shares.of_text_TS[row, 0] == pytest.approx(min(1.0, float(q_V[token] / p_V[token])), rel=1e-4)
    assert drafted.shares.covered_T[row + 2] == pytest.approx(float(p_V[TARGET_IDS].sum()), rel=1e-4)
    assert drafted.draft_TS[row, 0] == int(q_V.argmax())


@pytest.mark.gpu
def test_modes_run_with_the_target_on_a_gpu(target, drafter) -> None:
    """The drafter stays where it is; texts are the target's there, greedy and sampled."""
    device_target, prompts = copy.deepcopy(target).cuda(), some_prompts()
    tree = DraftTree(drafter, STEPS, 3, 16, len(prompts), length_of(prompts, 12))
    for prompt, one in zip(prompts, decode(device_target, GreedyTree(tree), prompts, 12), strict=True):
        assert list(one.ids) == plain_text(target, prompt.ids, 12, 0.0, b"")
    decoded = sampled(device_target, drafter, 150, 16, 0.8)
    assert (p_value_of(device_target, decoded) or 0.0) > 1e-3
