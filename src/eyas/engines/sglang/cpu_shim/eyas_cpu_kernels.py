"""In torch, what SGLang's own CPU kernels do for a chain of drafts: bookkeeping of slots and tokens, no arithmetic.

SGLang's wheel of these kernels wants a CPU with AMX. They move integers, so a restatement can be exact; a kernel that
computes states stays absent and raises. Chains alone: a tree of drafts is refused.

Letters: B requests, N tokens to verify of each (the last known one and the drafts).
"""

from __future__ import annotations

from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    rows_B: torch.Tensor,
    table: torch.Tensor,
    begin_B: torch.Tensor,
    end_B: torch.Tensor,
    slots: torch.Tensor,
    _width: int,
) -> None:
    """Note the slots, request after request, at places ``begin`` to ``end`` of each request's row of the table."""
    at = 0
    for row, begin, end in _spans(rows_B, begin_B, end_B):
        table[row, begin:end] = slots[at : at + end - begin].to(table.dtype)
        at += end - begin


def assign_extend_cache_locs_cpu(
    rows_B: torch.Tensor,
    table: torch.Tensor,
    begin_B: torch.Tensor,
    end_B: torch.Tensor,
    slots: torch.Tensor,
    _width: int,
) -> None:
    """Read them: the inverse of ``assign_req_to_token_pool_cpu``."""
    at = 0
    for row, begin, end in _spans(rows_B, begin_B, end_B):
        slots[at : at + end - begin] = table[row, begin:end].to(slots.dtype)
        at += end - begin


def assign_draft_cache_locs_contiguous_cpu(
    rows_B: torch.Tensor,
    table: torch.Tensor,
    begin_B: torch.Tensor,
    slots: torch.Tensor,
    width: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the slots that the drafts of each request take."""
    _require_chain(topk)
    assign_extend_cache_locs_cpu(rows_B, table, begin_B, begin_B + num_steps, slots, width)


def copy_all_layer_kv_cache_cpu(
    _addresses: torch.Tensor, _widths: torch.Tensor, to: torch.Tensor, from_: torch.Tensor
) -> None:
    """Nothing, for slots that stay where they are: SGLang's warm-up. Trees alone move any."""
    if not torch.equal(to, from_):
        raise NotImplementedError("this CPU server moves no keys and values")


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, num_accepted_B: torch.Tensor, bonus_B: torch.Tensor, stride: int
) -> None:
    """The last accepted token of each request."""
    first_B = torch.arange(len(num_accepted_B)) * stride
    bonus_B.copy_(tokens.flatten()[first_B + num_accepted_B.long() - 1])


def fill_accept_out_cache_loc_cpu(index: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor) -> None:
    """The slots of accepted tokens, without gaps."""
    kept = index[index > -1].long()
    accepted[: len(kept)] = slots[kept]


def build_tree_kernel_efficient_cpu(
    _parents: torch.Tensor,
    _selected: torch.Tensor,
    length_B: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index_BN: torch.Tensor,
    next_BN: torch.Tensor,
    sibling_BN: torch.Tensor,
    topk: int,
    _depth: int,
    num_tokens: int,
    mask_mode: int,
) -> None:
    """A chain as a tree: every token's only child is the one behind it."""
    _require_chain(topk)
    if int(mask_mode) != 1:
        raise NotImplementedError(f"tree mask mode {mask_mode}, expected the mask among the drafts alone (1)")
    place_N = torch.arange(num_tokens)
    positions.copy_((length_B[:, None] + place_N).flatten())
    index_BN.copy_(torch.arange(index_BN.numel()).view_as(index_BN))
    next_BN.copy_(torch.where(place_N + 1 < num_tokens, place_N + 1, -1))
    sibling_BN.fill_(-1)
    mask.view(len(length_B), num_tokens, num_tokens).copy_(place_N[:, None] >= place_N)


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    target_predict: torch.Tensor,
    **_tree: Any,
) -> None:
    """Accept drafts as long as each is what the target chose in its place; the target's own choice follows them."""
    agree_BS = candidates[:, 1:] == target_predict[:, :-1]
    accepted_B = agree_BS.long().cumprod(1).sum(1)
    place_N = torch.arange(candidates.shape[1])
    kept_BN = place_N <= accepted_B[:, None]
    accept_token_num.copy_(accepted_B)
    accept_index.copy_(torch.where(kept_BN, retrive_index, -1)[:, : accept_index.shape[1]])
    predicts[retrive_index[kept_BN]] = target_predict[kept_BN].to(predicts.dtype)


def _spans(*columns: torch.Tensor) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _require_chain(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError(f"speculative_eagle_topk {topk}: this CPU server drafts chains, expected 1")
