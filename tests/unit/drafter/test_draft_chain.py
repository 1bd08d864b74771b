"""The decoding chain drafts what the training unroll drafts from the same text."""

from __future__ import annotations

import pytest
import torch

from eyas.contracts import DrafterShape
from eyas.drafter.chain import DraftChain
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.ttt import draft_tokens

V, W, D, A, S = 97, 31, 16, 3, 4


def make_drafter(fc_norm: bool, norm_output: bool) -> Drafter:
    torch.manual_seed(11)
    shape = DrafterShape(
        target_hidden_size=D,
        hidden_size=D,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_aux=A,
        vocab_size=V,
        draft_vocab_size=W,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=256,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )
    drafter = Drafter(shape)
    target_ids_W = torch.randperm(V)[:W].sort().values
    t2d_V = torch.zeros(V, dtype=torch.bool)
    t2d_V[target_ids_W] = True
    drafter.set_target(torch.randn(V, D), target_ids_W - torch.arange(W), t2d_V)
    return drafter


def unrolled_drafts(drafter: Drafter, ids: list[int], aux_TAD: torch.Tensor, row: int) -> list[int]:
    """Drafts of one row by the training unroll over the whole text."""
    ids_T = torch.tensor(ids)
    document = Document(ids_T, torch.ones_like(ids_T), aux_TAD, torch.zeros(len(ids), D))
    pack = pack_documents([document], S)
    place = pack.rows_R.tolist().index(row)
    return draft_tokens(drafter, pack)[place].tolist()


@pytest.mark.parametrize(("fc_norm", "norm_output"), [(False, False), (True, True)])
def test_chain_equals_the_unroll_when_its_own_drafts_are_the_text(fc_norm: bool, norm_output: bool) -> None:
    """Case 64: from every row, after blocks with ignored places and with rows taken in again."""
    drafter = make_drafter(fc_norm, norm_output)
    generator = torch.Generator().manual_seed(3)
    lengths, total = (20, 14, 17), 26
    texts = [torch.randint(0, V, (total,), generator=generator).tolist() for _ in lengths]
    aux_BTAD = torch.randn(3, total, A, D, generator=generator)
    chain = DraftChain(drafter, S, 3, total)
    blocks = [(torch.tensor([0, 0, 0]), 6, torch.tensor([5, 6, 1]))]
    start_B = torch.tensor([5, 6, 1])
    for counts in ([3, 1, 2], [1, 3, 3], [2, 2, 1], [3, 1, 3]):
        blocks.append((start_B, 3, torch.tensor(counts)))
        start_B = start_B + torch.tensor(counts)
    blocks.append((start_B - torch.tensor([0, 1, 0]), 3, torch.tensor([1, 2, 2])))
    for block_start_B, J, count_B in blocks:
        place_BJ = (block_start_B[:, None] + torch.arange(J)).clamp_max(total - 1)
        known_BJ = torch.arange(J) < count_B[:, None]
        next_ids_BJ = torch.tensor([[(texts[b] + [0])[int(p) + 1] for p in row] for b, row in enumerate(place_BJ)])
        next_ids_BJ = torch.where(known_BJ, next_ids_BJ, 7)
        aux_BJAD = torch.where(known_BJ[..., None, None], aux_BTAD[torch.arange(3)[:, None], place_BJ], 99.0)
        chain.extend(aux_BJAD, next_ids_BJ, block_start_B, count_B)
        drafts_BS = chain.draft()
        assert torch.equal(drafts_BS, chain.draft()), "drafting twice gives the same"
        for b in range(3):
            row = int(block_start_B[b] + count_B[b]) - 1
            ids = [*texts[b][: row + 2], *drafts_BS[b].tolist(), 0]
            assert drafts_BS[b].tolist() == unrolled_drafts(drafter, ids, aux_BTAD[b, : len(ids)], row)


def test_chain_of_one_sequence_does_not_depend_on_its_companions() -> None:
    drafter = make_drafter(False, False)
    aux_BTAD, ids_BT = torch.randn(3, 8, A, D), torch.randint(0, V, (3, 8))
    count_B = torch.tensor([8, 5, 7])
    many, one = DraftChain(drafter, S, 3, 8), DraftChain(drafter, S, 1, 8)
    many.extend(aux_BTAD, ids_BT, torch.zeros(3, dtype=torch.long), count_B)
    together_BS = many.draft()
    for b in range(3):
        one.extend(aux_BTAD[b : b + 1], ids_BT[b : b + 1], torch.zeros(1, dtype=torch.long), count_B[b : b + 1])
        assert torch.equal(one.draft()[0], together_BS[b])
