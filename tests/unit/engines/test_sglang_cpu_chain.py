"""The restated kernels of the CPU shim, against loops that follow what SGLang's kernels say of themselves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.engines.sglang import versions

FILE = Path(versions.__file__).parent / "cpu_shim/eyas_cpu_kernels.py"


@pytest.fixture(scope="module")
def kernels():
    spec = importlib.util.spec_from_file_location("eyas_cpu_kernels", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("eyas_cpu_kernels", None)


def tree(kernels, lengths, num_tokens):
    B = len(lengths)
    positions = torch.empty(B * num_tokens, dtype=torch.long)
    mask = torch.ones(B * num_tokens * num_tokens, dtype=torch.bool)
    index, after, sibling = torch.full((3, B, num_tokens), -1).unbind()
    kernels.build_tree_kernel_efficient_cpu(
        torch.empty(0), torch.empty(0), torch.tensor(lengths), mask, positions, index, after, sibling, 1, 3,
        num_tokens, 1,
    )  # fmt: skip
    return positions, mask.view(B, num_tokens, num_tokens), index, after, sibling


def test_a_chain_is_a_tree_of_only_children(kernels):
    positions, mask, index, after, sibling = tree(kernels, [7, 30], 4)
    assert positions.tolist() == [7, 8, 9, 10, 30, 31, 32, 33]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert after.tolist() == [[1, 2, 3, -1]] * 2
    assert (sibling == -1).all()
    assert mask[1].tolist() == [[j <= i for j in range(4)] for i in range(4)]


@given(st.data())
def test_verification_walks_the_tree(kernels, data):
    """Each request: from the root to the child that the target chose, until there is none."""
    B, N = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    tokens = st.lists(st.lists(st.integers(0, 2), min_size=N, max_size=N), min_size=B, max_size=B)
    candidates, target = torch.tensor(data.draw(tokens)), torch.tensor(data.draw(tokens))
    _, _, index, after, sibling = tree(kernels, [9] * B, N)
    predicts = torch.zeros(B * N, dtype=torch.int32)
    accepted = torch.full((B, N), -1, dtype=torch.int32)
    count = torch.empty(B, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accepted, accept_token_num=count, candidates=candidates, retrive_index=index,
        retrive_next_token=after, retrive_next_sibling=sibling, target_predict=target,
    )  # fmt: skip
    for b in range(B):
        at, path = 0, [b * N]
        while after[b, at] != -1 and candidates[b, after[b, at]] == target[b, at]:
            at = int(after[b, at])
            path.append(b * N + at)
        assert accepted[b].tolist() == path + [-1] * (N - len(path))
        assert int(count[b]) == len(path) - 1
        assert [int(predicts[p]) for p in path] == target[b, : len(path)].tolist()
        assert not predicts[b * N + len(path) : (b + 1) * N].any()
    bonus = torch.empty(B, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(predicts, count + 1, bonus, N)
    assert bonus.tolist() == [int(target[b, int(count[b])]) for b in range(B)]
    slots = torch.arange(B * N) + 100
    kept = torch.full((B * N,), -7)
    kernels.fill_accept_out_cache_loc_cpu(accepted.flatten(), slots, kept)
    expected = [int(i) + 100 for i in accepted.flatten().tolist() if i >= 0]
    assert kept.tolist() == expected + [-7] * (B * N - len(expected))


def test_slots_are_noted_and_read_again(kernels):
    table = torch.zeros(5, 12, dtype=torch.int32)
    rows, begin, end = torch.tensor([3, 1]), torch.tensor([4, 0]), torch.tensor([8, 3])
    kernels.assign_req_to_token_pool_cpu(rows, table, begin, end, torch.arange(20, 27), 12)
    assert table[3].tolist() == [0] * 4 + [20, 21, 22, 23] + [0] * 4
    assert table[1, :4].tolist() == [24, 25, 26, 0]
    found = torch.empty(7, dtype=torch.long)
    kernels.assign_extend_cache_locs_cpu(rows, table, begin, end, found, 12)
    assert found.tolist() == list(range(20, 27))
    drafts = torch.empty(4, dtype=torch.long)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, torch.tensor([5, 1]), drafts, 12, 1, 2)
    assert drafts.tolist() == [21, 22, 25, 26]


def test_what_is_not_restated_raises(kernels):
    one = torch.tensor([1])
    with pytest.raises(NotImplementedError, match="speculative_eagle_topk 4"):
        kernels.assign_draft_cache_locs_contiguous_cpu(one, one, one, one, 1, 4, 3)
    with pytest.raises(NotImplementedError, match="tree mask mode 0"):
        kernels.build_tree_kernel_efficient_cpu(one, one, one, one, one, one, one, one, 1, 3, 4, 0)
    with pytest.raises(NotImplementedError, match="moves no keys"):
        kernels.copy_all_layer_kv_cache_cpu(one, one, one, one + 1)
    kernels.copy_all_layer_kv_cache_cpu(one, one, one, one)
