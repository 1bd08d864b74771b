"""From drafts and states to a walked document: what counts as the target's choice, misses, coverage."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from eyas.contracts import StoredSample
from eyas.drafter.judged import UNKNOWN, target_argmax
from eyas.errors import StoreError
from eyas.evaluate.documents import walk_document
from eyas.evaluate.summary import alpha, summarise, tau
from eyas.shards.reader import StoredStates

V, CHAIN = 50, 3
IDS = np.array([7, 3, 11, 4, 9, 21, 8, 30, 2, 17, 5, 40], dtype=np.int64)
MASK = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], dtype=np.uint8)
EVERY = np.ones(V, dtype=bool)


def sample(variant: str = "greedy") -> StoredSample:
    return StoredSample(
        sample_id="s", num_tokens=len(IDS), conversation_id="c", source="chatterbot", split="held_out", variant=variant
    )


def right_drafts(ids: np.ndarray = IDS) -> np.ndarray:
    return np.array([[ids[t + k + 2] if t + k + 2 < len(ids) else 0 for k in range(CHAIN)] for t in range(len(ids))])


def argmax_of(ids: np.ndarray = IDS) -> np.ndarray:
    return np.where(MASK.astype(bool), ids, UNKNOWN)


@pytest.mark.parametrize(
    ("mask", "judged"),
    [
        ([0, 0, 1, 1, 1, 0], [3, 4]),
        ([1, 1, 1, 0, 1, 1], [2, 5]),
        ([0, 1, 0, 1, 0, 0], []),
        ([0, 0, 0, 0, 1, 1], [5]),
    ],
    ids=["one span", "a span that opens the document", "spans of one token", "to the end"],
)
def test_target_argmax_comes_from_the_row_before(mask: list[int], judged: list[int]) -> None:
    """Of every token but the first of its span: that one comes from the prefill. No other row is read."""
    head_VD = torch.randn(V, 6, generator=torch.Generator().manual_seed(0))
    last_TD = head_VD[torch.tensor([1, 2, 3, 4, 5, 6])] * 50
    best = (last_TD @ head_VD.T).argmax(-1).tolist()
    has_last_T = torch.tensor([t + 1 in judged for t in range(6)])
    states = StoredStates(
        dataclasses.replace(sample(), num_tokens=6),
        torch.zeros(6, dtype=torch.int32),
        torch.tensor(mask, dtype=torch.uint8),
        last_TD[:, None],
        last_TD.masked_fill(~has_last_T[:, None], float("nan")),
        6,
        has_last_T,
    )
    expected = [best[t - 1] if t in judged else UNKNOWN for t in range(6)]
    assert target_argmax(states, head_VD).tolist() == expected
    if judged:
        gone = dataclasses.replace(states, has_last_T=torch.zeros(6, dtype=torch.bool))
        with pytest.raises(StoreError, match=f"sample s: row {judged[0] - 1} of last is not stored"):
            target_argmax(gone, head_VD)


def test_right_drafts_are_all_accepted() -> None:
    """Case 73: 9 tokens = the prefill's one + two rounds of 4; the span's end clips nothing here."""
    document = walk_document(sample(), IDS, MASK, right_drafts(), argmax_of(), EVERY)
    assert [(r.row, r.num_emitted) for r in document.rounds] == [(2, 4), (6, 4)]
    assert alpha([document]) == (1.0, 1.0, 1.0)
    assert document.hits_S == document.rows_S == (8, 7, 6)
    assert document.num_tokens == document.num_covered == 9


def test_token_outside_the_draft_vocab_is_a_miss_and_is_reported() -> None:
    """Case 75: the target's top-1 at token 6 is outside; the best inside is drafted there and does not count."""
    t2d_V = EVERY.copy()
    t2d_V[IDS[6]] = False
    drafts = np.where(right_drafts() == IDS[6], 1, right_drafts())
    document = walk_document(sample(), IDS, MASK, drafts, argmax_of(), t2d_V)
    assert [(r.row, r.num_accepted, r.num_emitted) for r in document.rounds] == [(2, 2, 3), (5, 3, 4), (9, 1, 1)]
    assert document.num_oov == 1
    figures = summarise([document], 10, 0)
    assert figures.oov_share == pytest.approx(1 / 9)
    assert figures.step_accuracy[0] == pytest.approx(7 / 8)


def test_greedy_text_is_the_targets_choice_where_the_recomputed_argmax_ties() -> None:
    """A near tie: decoding chose token 5 of the text, the stored state's argmax is another one."""
    near_tie = argmax_of()
    near_tie[5] = 1
    document = walk_document(sample(), IDS, MASK, right_drafts(), near_tie, EVERY)
    assert tau([document]) == 4.0
    assert (document.num_covered, document.num_tokens) == (8, 9)
    assert document.hits_S == (7, 6, 6), "rows 3 and 2 drafted token 5; at step 2 that would be row 1"


def test_foreign_text_accepts_only_where_it_follows_the_target() -> None:
    """Case 76: text that is not greedy: the run ends where the text leaves the target's path; coverage says so."""
    left_at_5 = argmax_of()
    left_at_5[5] = 1
    document = walk_document(sample("given"), IDS, MASK, right_drafts(), left_at_5, EVERY)
    assert [(r.row, r.num_accepted) for r in document.rounds] == [(2, 1), (4, 3), (8, 2)]
    assert summarise([document], 10, 0).coverage == pytest.approx(8 / 9)
    drafting_the_argmax = np.where(right_drafts() == IDS[5], 1, right_drafts())
    document = walk_document(sample("given"), IDS, MASK, drafting_the_argmax, left_at_5, EVERY)
    assert (document.rounds[0].row, document.rounds[0].num_accepted) == (2, 1)


def test_spans_are_walked_apart() -> None:
    two = np.array([0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1], dtype=np.uint8)
    document = walk_document(sample(), IDS, two, right_drafts(), np.where(two.astype(bool), IDS, UNKNOWN), EVERY)
    assert [(r.row, r.num_asked, r.num_emitted) for r in document.rounds] == [(0, 2, 2), (7, 3, 3)]


def test_loop_share_is_of_the_assistant_tokens() -> None:
    """Ten equal tokens: three 8-grams, two of them seen before."""
    ids, mask = np.array([1, 2, *[9] * 10]), np.array([0, 0, *[1] * 10])
    document = walk_document(sample(), ids, mask, np.zeros((12, CHAIN), dtype=int), np.where(mask, ids, UNKNOWN), EVERY)
    assert document.loop_share == pytest.approx(2 / 3)
