"""Anchored training: the loss of a few rows per sample, exact for those rows."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from drafter_world import (
    ENDS_OPEN,
    LONG,
    TWO_SPANS,
    compare,
    head_of,
    make_documents,
    make_drafter,
    ours,
    packed,
    theirs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.drafter.anchors import anchor_key, anchored_TS
from eyas.drafter.objective import Objective

MASKS = [TWO_SPANS, LONG, ENDS_OPEN, [1] * 6]


def anchors_of(pack):
    """Rows of each document that run and train, as places in it."""
    rows = pack.rows_R[pack.trains_RS.any(1)].tolist()
    return [{r - d.start for r in rows if d.start <= r < d.end} for d in pack.documents]


@pytest.mark.parametrize("num_anchors", [1, 2, 5])
@pytest.mark.parametrize("mask_oov", [True, False])
def test_anchors_compute_what_those_rows_compute_in_a_dense_run(num_anchors, mask_oov):
    """Against the restatement, where every row runs and the losses of other rows are left out."""
    drafter, documents = make_drafter(train_head=True), make_documents(MASKS)
    head_VD = head_of(drafter)
    found = ours(drafter, documents, head_VD, 3, mask_oov, multiple=2, anchors=num_anchors)
    anchors = anchors_of(found[2])
    assert max(len(rows) for rows in anchors) == num_anchors
    compare(found, theirs(drafter, documents, head_VD, 3, mask_oov, anchors=anchors))


@pytest.mark.parametrize("chosen", [Objective("ce"), Objective("lk", top_k=3)], ids=str)
def test_anchors_go_with_every_kind_of_loss(chosen):
    drafter, documents = make_drafter(), make_documents(MASKS)
    found = ours(drafter, documents, head_of(drafter), 3, anchors=2, objective=chosen)
    expected = theirs(
        drafter, documents, head_of(drafter), 3, kind=chosen.kind, top_k=chosen.top_k, anchors=anchors_of(found[2])
    )
    compare(found, expected)


def test_anchors_cost_as_many_rows_a_step():
    drafter, documents = make_drafter(), make_documents([LONG] * 5)
    head_VD = head_of(drafter)
    dense = packed(drafter, documents, head_VD, 4, mask_oov=False)
    few = packed(drafter, documents, head_VD, 4, mask_oov=False, anchors=2)
    assert dense.num_rows[0] == 5 * (11 + 3)
    assert few.num_rows[0] == 5 * 2
    assert all(count <= 5 * 2 for count in few.num_rows)
    assert len(few.ids_T) == len(dense.ids_T), "every row gives its step-0 keys"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_as_many_anchors_as_rows_equal_the_dense_run_to_the_bit(masks, steps, more):
    """Same pack, so the same run: every tensor and count of it."""
    drafter, documents = make_drafter(), make_documents(masks)
    dense = packed(drafter, documents, head_of(drafter), steps)
    most = max(len(rows) for rows in anchors_of(dense))
    same_pack(packed(drafter, documents, head_of(drafter), steps, anchors=max(1, most + more)), dense)


def same_pack(found, expected):
    """Every tensor and number, plans included."""
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            if not field.name.startswith("_"):
                same_pack(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            same_pack(*pair)
    elif isinstance(expected, torch.Tensor | np.ndarray):
        assert found.shape == expected.shape
        assert bool((found == expected).all())
    else:
        assert found == expected


def test_gradients_of_as_many_anchors_as_rows_equal_to_the_bit():
    drafter, documents = make_drafter(train_head=True), make_documents(MASKS)
    found, dense = (ours(drafter, documents, head_of(drafter), 3, anchors=n) for n in (14, 0))
    assert torch.equal(found[0].losses_S, dense[0].losses_S)
    assert all(torch.equal(grad, dense[1][name]) for name, grad in found[1].items())
    fewer = ours(drafter, documents, head_of(drafter), 3, anchors=8)
    assert not torch.equal(fewer[0].losses_S, dense[0].losses_S)


def test_a_samples_anchors_follow_from_its_key_alone():
    """Companions, their order, filling up and the number of steps do not matter; seed, step and sample do."""
    drafter, documents = make_drafter(), make_documents([LONG] * 3)
    head_VD, keys = head_of(drafter), [anchor_key(7, 0, name) for name in "abc"]

    def chosen(order, steps=3, multiple=1):
        some, their_keys = [documents[i] for i in order], [keys[i] for i in order]
        pack = packed(drafter, some, head_VD, steps, False, multiple, 4, their_keys)
        return dict(zip(order, anchors_of(pack), strict=True))

    expected = chosen([0, 1, 2])
    for order in ([2, 0, 1], [1], [2, 1]):
        assert chosen(order, multiple=8) == {i: expected[i] for i in order}
    assert chosen([0, 1, 2], steps=1) == expected
    assert len({frozenset(rows) for rows in expected.values()}) == 3
    assert len({anchor_key(s, e, i) for s in (1, 11) for e in (0, 1, 11) for i in "ab"}) == 12


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 8), st.text(max_size=8))
def test_anchors_are_rows_that_train_and_more_of_them_hold_the_fewer(trains, num_anchors, key):
    trains_TS = torch.tensor(trains)[:, None] & torch.tensor([True, False, True])
    few, more = (set(anchored_TS(trains_TS, n, key).any(1).nonzero()[:, 0].tolist()) for n in (num_anchors, 9))
    assert len(few) == min(num_anchors, sum(trains))
    assert few <= more <= {t for t, train in enumerate(trains) if train}


def test_what_else_trains_does_not_decide_between_two_rows():
    """Rows that were not chosen may go: the same are chosen. So an unroll of more steps keeps them too."""
    trains_TS = torch.rand(60, 3, generator=torch.Generator().manual_seed(0)) < 0.6
    chosen = anchored_TS(trains_TS, 6, "key").any(1)
    fewer_TS = trains_TS & (chosen | (torch.arange(60) % 2 == 0))[:, None]
    assert int(fewer_TS.any(1).sum()) < int(trains_TS.any(1).sum())
    assert torch.equal(anchored_TS(fewer_TS, 6, "key").any(1), chosen)


def test_every_row_is_an_anchor_equally_often():
    """4,000 steps, 3 of 12 rows: 1,000 each, give or take four standard deviations of 27."""
    trains_TS = torch.ones(20, 2, dtype=torch.bool)
    trains_TS[4:12] = False
    counts = Counter()
    for step in range(4000):
        counts.update(anchored_TS(trains_TS, 3, anchor_key(0, step, "sample")).any(1).nonzero()[:, 0].tolist())
    assert len(counts) == 12
    assert all(abs(count - 1000) < 4 * 27.4 for count in counts.values())


def test_anchors_are_the_same_on_every_machine():
    """Pinned: a run that goes on elsewhere must throw the same rows."""
    trains_TS = torch.ones(1000, 1, dtype=torch.bool)
    rows = anchored_TS(trains_TS, 4, anchor_key(0, 3, "0123456789abcdef")).any(1).nonzero()[:, 0].tolist()
    assert rows == [81, 431, 667, 768]


def test_out_of_vocab_pairs_are_counted_of_all_rows():
    """A fact of the data, which anchors do not change."""
    drafter, documents = make_drafter(), make_documents(MASKS)
    packs = {n: packed(drafter, documents, head_of(drafter), 3, anchors=n) for n in (0, 1, 4)}
    dense = packs[0]
    assert dense.num_oov > 10
    assert dense.num_in_span == dense.num_oov + sum(dense.num_trained)
    assert {(pack.num_oov, pack.num_in_span) for pack in packs.values()} == {(dense.num_oov, dense.num_in_span)}
    assert sum(packs[1].num_trained) < sum(packs[4].num_trained) < sum(dense.num_trained)
