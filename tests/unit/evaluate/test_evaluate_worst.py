"""Worst documents: the right ones, cut where rounds were, every character once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.walk import walk
from eyas.evaluate.summary import WalkedDocument
from eyas.evaluate.worst import NUM_DOCUMENTS, cut_text, worst_documents
from eyas.shards.reader import ShardReader


def document(sample_id: str, agree_TS: np.ndarray, start: int, end: int) -> WalkedDocument:
    return WalkedDocument(
        sample_id=sample_id,
        source="set",
        rounds=walk(agree_TS, start, end),
        loop_share=0.25,
        num_tokens=end - start - 1,
        num_covered=0,
        num_oov=0,
        hits_S=(0,),
        rows_S=(0,),
    )


def reader(num_tokens: int) -> ShardReader:
    ids = torch.arange(num_tokens)
    return cast("ShardReader", SimpleNamespace(read=lambda _: SimpleNamespace(input_ids_T=ids)))


def letters(ids) -> str:
    return "".join(chr(ord("a") + i) for i in ids)


def test_text_is_cut_where_the_rounds_were() -> None:
    """Prompt abc, answer d to j; by hand: d is the prefill's, then ef+g (two accepted), then +h (none), then i+j."""
    agree = np.zeros((10, 2), bool)
    agree[2] = True  # row 2 stands before token d; its drafts are e and f, both right: the bonus is g
    agree[6, 0] = True  # h is the bonus of row 5; row 6 drafts i rightly, and one token is left for the bonus
    (found,) = worst_documents([document("x", agree, 3, 10)], reader(10), letters)
    assert found.prompt == "abc"
    assert found.first == "d"
    assert [(one.accepted, one.bonus) for one in found.rounds] == [("ef", "g"), ("", "h"), ("i", "j")]
    assert found.tau == 2.0
    assert (found.num_rounds, found.loop_share, found.source) == (3, 0.25, "set")


def test_a_round_that_the_end_clips_has_no_bonus() -> None:
    (found,) = worst_documents([document("x", np.ones((6, 3), bool), 1, 5)], reader(5), letters)
    assert [(one.accepted, one.bonus) for one in found.rounds] == [("cde", "")]


def test_the_lowest_come_first_and_short_ones_are_passed_over() -> None:
    nothing, all_right = np.zeros((40, 2), bool), np.ones((40, 2), bool)
    half = nothing.copy()
    half[::2] = True
    documents = [document(f"all {k}", all_right, 1, 40) for k in range(NUM_DOCUMENTS)]
    documents += [document("none", nothing, 1, 40), document("half", half, 1, 40), document("short", nothing, 1, 4)]
    found = worst_documents(documents, reader(40), letters)
    assert [one.sample_id for one in found][:3] == ["none", "half", "all 0"]
    assert len(found) == NUM_DOCUMENTS
    assert worst_documents(documents[-1:], reader(4), letters)[0].sample_id == "short"  # rather than nothing


@given(st.text(min_size=1), st.data())
def test_every_character_is_in_one_piece(text: str, data: st.DataObject) -> None:
    """Ids are bytes here, as in a byte-level vocab: cuts fall inside characters."""
    ids = list(text.encode("utf-8", "replace"))
    inner = data.draw(st.lists(st.integers(0, len(ids)), max_size=8).map(sorted))
    pieces = cut_text(ids, [0, *inner, len(ids)], lambda part: bytes(part).decode("utf-8", "replace"))
    assert "".join(pieces) == bytes(ids).decode("utf-8", "replace")
