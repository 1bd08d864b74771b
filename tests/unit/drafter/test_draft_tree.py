"""Draft trees: a tree of width 1 is the chain, and every node is what a chain along its path drafts."""

from __future__ import annotations

import pytest
import torch
from test_draft_chain import A, D, V, W, make_drafter

from eyas.drafter.chain import DraftChain, draw
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.tree import DraftTree, Tree
from eyas.drafter.ttt import unroll

DEPTH, LENGTHS, TOTAL = 3, (9, 5, 7), 12


def known(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, V, (len(LENGTHS), TOTAL), generator=generator)
    return ids_BT, torch.randn(len(LENGTHS), TOTAL, A, D, generator=generator), torch.tensor(LENGTHS)


def grow(drafter: Drafter, width: int, num_tokens: int, depth: int = DEPTH) -> Tree:
    ids_BT, aux_BTAD, count_B = known()
    tree = DraftTree(drafter, depth, width, num_tokens, len(LENGTHS), TOTAL)
    tree.extend(aux_BTAD[:, :9], ids_BT[:, 1:10], torch.zeros_like(count_B), count_B)
    found = tree.draft()
    again = tree.draft()
    assert torch.equal(found.ids_BJ, again.ids_BJ), "drafting twice gives the same"
    assert found.ids_BJ.shape[1] == tree.num_tokens
    return found


def sharp(drafter: Drafter) -> Drafter:
    """Weights so large that what a node saw decides its children, not its token alone."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(3.0)
    return drafter


def path_to(tree: Tree, b: int, place: int) -> list[int]:
    """Token ids from the root's child down to a node."""
    ids: list[int] = []
    while place:
        ids.insert(0, int(tree.ids_BJ[b, place]))
        place = int(tree.parent_BJ[b, place])
    return ids


def chain_log_shares(drafter: Drafter, b: int, path: list[int]) -> torch.Tensor:
    """Of each step along a path, by the training unroll: log q over the draft vocab, [depth + 1, W]."""
    ids_BT, aux_BTAD, count_B = known()
    row = int(count_B[b]) - 1
    ids_T = torch.tensor([*ids_BT[b, : row + 2].tolist(), *path, 0])
    aux_TAD = torch.zeros(len(ids_T), A, D)
    aux_TAD[: row + 1] = aux_BTAD[b, : row + 1]
    pack = pack_documents([Document(ids_T, torch.ones_like(ids_T), aux_TAD, torch.zeros(len(ids_T), D))], len(path) + 1)
    place = pack.rows_R.tolist().index(row)
    return torch.stack(
        [drafter.logits(normed_RE)[place].detach().log_softmax(-1) for normed_RE in unroll(drafter, pack)]
    )


@pytest.mark.parametrize(("fc_norm", "norm_output"), [(False, False), (True, True)])
def test_tree_of_width_one_is_the_chain(fc_norm: bool, norm_output: bool) -> None:
    drafter = make_drafter(fc_norm, norm_output)
    ids_BT, aux_BTAD, count_B = known()
    chain = DraftChain(drafter, DEPTH, len(LENGTHS), TOTAL)
    chain.extend(aux_BTAD[:, :9], ids_BT[:, 1:10], torch.zeros_like(count_B), count_B)
    found = grow(drafter, 1, 1 + DEPTH)
    assert torch.equal(found.ids_BJ[:, 1:], chain.draft())
    assert found.parent_BJ.tolist() == [[0, 0, 1, 2]] * 3
    assert found.depth_BJ.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("norm_output", [False, True])
def test_nodes_are_the_likeliest_of_chains_along_their_paths(norm_output: bool) -> None:
    """All nodes kept: scores come from the unroll, level by level, as the best three of nine are carried on."""
    drafter, width = sharp(make_drafter(norm_output, norm_output)), 3
    found = grow(drafter, width, 1 + width + (DEPTH - 1) * width**2)
    target_ids_W = drafter.target_ids(torch.arange(W)).tolist()
    for b in range(len(LENGTHS)):
        nodes = {tuple(path_to(found, b, j)) for j in range(1, found.ids_BJ.shape[1])}
        carried, expected = {(): 0.0}, set()
        for _ in range(DEPTH):
            grown = {}
            for path, score in carried.items():
                best = (chain_log_shares(drafter, b, list(path))[-1] + score).topk(width)
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                grown |= {(*path, target_ids_W[i]): value for value, i in pairs}
            expected |= set(grown)
            carried = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
        assert nodes == expected


def test_kept_nodes_hang_together_and_are_the_likeliest() -> None:
    drafter = sharp(make_drafter(False, False))
    whole, some = grow(drafter, 3, 22), grow(drafter, 3, 8)
    for b in range(len(LENGTHS)):
        scores = {}
        for j in range(1, 22):
            path = path_to(whole, b, j)
            logs_SW = chain_log_shares(drafter, b, path[:-1])
            ids = [int((drafter.t2d[:t]).sum()) for t in path]
            scores[tuple(path)] = sum(float(logs_SW[k, i]) for k, i in enumerate(ids))
        kept = [tuple(path_to(some, b, j)) for j in range(1, 8)]
        assert sorted(kept) == sorted(sorted(scores, key=lambda path: -scores[path])[:7])
        assert bool((some.parent_BJ[b, 1:] < torch.arange(1, 8)).all())
        assert all(path[:-1] in kept for path in kept if len(path) > 1)


def test_a_node_sees_itself_and_what_is_above_it() -> None:
    parent_BJ = torch.tensor([[0, 0, 0, 1, 3]])
    tree = Tree(torch.zeros(1, 5, dtype=torch.long), parent_BJ, torch.tensor([[0, 1, 1, 2, 3]]))
    assert [row.nonzero()[:, 0].tolist() for row in tree.seen_BJJ()[0]] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 3],
        [0, 1, 3, 4],
    ]


def test_draws_invert_the_cumulative_shares() -> None:
    share_RN = torch.tensor([[0.0, 0.25, 0.0, 0.75], [0.5, 0.5, 0.0, 0.0], [2.0, 1.0, 1.0, 0.0]])
    for uniform, chosen in ((0.0, [1, 0, 0]), (0.3, [3, 0, 0]), (0.6, [3, 1, 1]), (1 - 2**-53, [3, 1, 2])):
        assert draw(share_RN, torch.full((3,), uniform, dtype=torch.float64)).tolist() == chosen


def test_a_sampled_chain_is_drawn_from_the_shares_it_returns() -> None:
    """Uniform numbers next to 0 draw the first token of any share; the shares are softmax at the temperature."""
    drafter = make_drafter(False, False)
    ids_BT, aux_BTAD, count_B = known()
    chain = DraftChain(drafter, 2, len(LENGTHS), TOTAL)
    chain.extend(aux_BTAD[:, :9], ids_BT[:, 1:10], torch.zeros_like(count_B), count_B)
    uniform_BS = torch.rand(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drafts_BS, share_BSW = chain.draft_sampled(0.7, uniform_BS)
    target_ids_W = drafter.target_ids(torch.arange(W)).tolist()
    for b in range(3):
        for step in range(2):
            logs_W = chain_log_shares(drafter, b, drafts_BS[b, :step].tolist())[-1]
            expected_W = (logs_W.double() / 0.7).softmax(-1)
            torch.testing.assert_close(share_BSW[b, step].double(), expected_W, rtol=1e-4, atol=1e-6)
            index = int((expected_W.cumsum(0) <= uniform_BS[b, step]).sum())
            assert int(drafts_BS[b, step]) == target_ids_W[index]
