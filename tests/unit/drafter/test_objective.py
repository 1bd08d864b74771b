"""Every kind of loss against the restatement and against differences of values."""

import dataclasses
import math

import drafter_reference as reference
import pytest
import torch
from drafter_world import (
    D2T_W,
    DECAY,
    ENDS_OPEN,
    SHAPE,
    TARGET_IDS_W,
    TWO_SPANS,
    compare,
    head_of,
    make_documents,
    make_drafter,
    ours,
    packed,
    theirs,
    value,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.drafter import objective
from eyas.drafter.loss import ttt_loss
from eyas.drafter.objective import Objective
from eyas.drafter.weights import FlatWeights

SMALL = [0, 1, 1, 1, 1, 0, 0, 1, 1]
OPTIONS = {
    "kl": ({}, Objective()),
    "ce": ({}, Objective("ce")),
    "lk": ({}, Objective("lk")),
    "kl of 3": ({}, Objective(top_k=3)),
    "lk of 3": ({}, Objective("lk", top_k=3)),
    "fc_norm": ({"fc_norm": True}, Objective()),
    "norm_output": ({"norm_output": True}, Objective("lk")),
    "norm_before_residual": ({"norm_before_residual": True}, Objective()),
    "all norms": ({"fc_norm": True, "norm_output": True, "norm_before_residual": True}, Objective("ce")),
    "one key-value head": ({"num_key_value_heads": 1, "num_aux": 2}, Objective()),
}
options = pytest.mark.parametrize(("change", "chosen"), OPTIONS.values(), ids=OPTIONS.keys())


def agree(chosen, steps, shape=SHAPE, mask_oov=True, masks=(TWO_SPANS, ENDS_OPEN, [1] * 6)):
    drafter, documents = make_drafter(shape, train_head=True), make_documents(masks, num_aux=shape.num_aux)
    head_VD = head_of(drafter)
    compare(
        ours(drafter, documents, head_VD, steps, mask_oov, objective=chosen),
        theirs(drafter, documents, head_VD, steps, mask_oov, kind=chosen.kind, top_k=chosen.top_k),
    )


def same_slopes(slopes, grads):
    assert slopes.keys() == grads.keys()
    for name, (direction, slope) in slopes.items():
        assert float((grads[name] * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-9), name


@options
@pytest.mark.parametrize("mask_oov", [True, False])
def test_every_option_equals_the_restatement(change, chosen, mask_oov):
    agree(chosen, 3, dataclasses.replace(SHAPE, **change), mask_oov)


@options
def test_gradients_are_slopes_of_the_restated_loss(change, chosen):
    """Every parameter of every option, along random directions; the weight of lk's KL part is a constant."""
    shape = dataclasses.replace(SHAPE, **change)
    drafter, documents = make_drafter(shape, train_head=True), make_documents([SMALL], num_aux=shape.num_aux)
    head_VD, embedding_VE = head_of(drafter), drafter.embed_tokens.weight
    weights, lk_weights = {n: p.detach().clone() for n, p in drafter.named_parameters()}, {}

    def loss():
        chosen_by = {"kind": chosen.kind, "top_k": chosen.top_k, "lk_weights": lk_weights}
        return reference.reference_loss(
            weights, embedding_VE, head_VD, D2T_W, shape, documents, 2, DECAY, False, **chosen_by
        )[0]

    loss()
    slopes = reference.numeric_gradients(loss, weights)
    same_slopes(slopes, ours(drafter, documents, head_VD, 2, mask_oov=False, objective=chosen)[1])


@options
def test_gradients_are_slopes_of_our_loss(monkeypatch, change, chosen):
    """Here the weight of lk's KL part is set to be a constant, so that values and gradients mean the same."""
    monkeypatch.setattr(objective, "_kl_weight", lambda accepted: torch.full_like(accepted, 0.4))
    shape = dataclasses.replace(SHAPE, **change)
    drafter = make_drafter(shape, train_head=True)
    documents, head_VD = make_documents([SMALL, SMALL], num_aux=shape.num_aux), head_of(drafter)
    _, grads, pack = ours(drafter, documents, head_VD, 2, objective=chosen)
    weights = {name: p.data for name, p in drafter.named_parameters()}
    slopes = reference.numeric_gradients(lambda: value(drafter, pack, head_VD[TARGET_IDS_W], objective=chosen), weights)
    same_slopes(slopes, grads)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from(
        [Objective("ce"), Objective("lk"), Objective(top_k=2), Objective("lk", top_k=1), Objective(top_k=99)]
    ),
)
def test_any_masks_equal_the_restatement_under_every_kind(masks, steps, chosen):
    if any(reference.trains(m, t, 0) for m in masks for t in range(len(m))):
        agree(chosen, steps, mask_oov=False, masks=masks)


def row(chosen, target, logits):
    """(loss, gradient of the logits) of one row, through the code under test."""
    p_CW = chosen.restrict_(torch.tensor([target], dtype=torch.float64)).softmax(-1)
    logits_XW = torch.tensor([logits], dtype=torch.float64)
    loss = float(chosen.values(p_CW, objective.entropy(p_CW), logits_XW))
    return loss, chosen.gradient_(p_CW, logits_XW.softmax(-1))[0].tolist()


def test_losses_of_one_row_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): half a nat of KL over two, a = 3/4."""
    target, logits = [math.log(2), 0.0, 0.0], [0.0, 0.0, math.log(2)]
    kl, ce = 0.25 * math.log(2), math.log(4)
    assert row(Objective(), target, logits)[0] == pytest.approx(kl, rel=1e-12)
    assert row(Objective(), target, logits)[1] == pytest.approx([-1 / 4, 0, 1 / 4], abs=1e-12)
    assert row(Objective("ce"), target, logits)[0] == pytest.approx(ce, rel=1e-12)
    assert row(Objective("ce"), target, logits)[1] == pytest.approx([-3 / 4, 1 / 4, 1 / 2], abs=1e-12)
    w = math.exp(-9 / 4)
    loss, gradient = row(Objective("lk"), target, logits)
    assert loss == pytest.approx(w * kl + (1 - w) / 4, rel=1e-12)
    # only the first token's q lies below its p: 1 - a falls where its logit rises
    through = [1 / 4 * (1 / 4 - 1), 1 / 4 * 1 / 4, 1 / 2 * 1 / 4]
    expected = [w * k + (1 - w) * t for k, t in zip([-1 / 4, 0, 1 / 4], through, strict=True)]
    assert gradient == pytest.approx(expected, abs=1e-12)


def test_the_first_of_equal_choices_and_every_equal_logit_count():
    """Ties: cross-entropy takes the first, top_k keeps all that equal the last one it keeps."""
    target, logits = [1.0, 3.0, 3.0, 2.0, 2.0], [0.0] * 5
    assert row(Objective("ce"), target, logits)[1] == pytest.approx([0.2, -0.8, 0.2, 0.2, 0.2])
    p_CW = Objective(top_k=1).restrict_(torch.tensor([target])).softmax(-1)
    assert p_CW[0].tolist() == [0, 0.5, 0.5, 0, 0]
    p_CW = Objective(top_k=3).restrict_(torch.tensor([target])).softmax(-1)
    assert [bool(p > 0) for p in p_CW[0]] == [False, True, True, True, True]
    assert float(p_CW.sum()) == pytest.approx(1)
    assert torch.equal(
        Objective(top_k=5).restrict_(torch.tensor([target])).softmax(-1), torch.tensor([target]).softmax(-1)
    )


def test_cross_entropy_is_the_kl_of_the_largest_logit():
    drafter, documents = make_drafter(train_head=True), make_documents([TWO_SPANS, ENDS_OPEN])
    hard, of_one = (
        ours(drafter, documents, head_of(drafter), 3, objective=o) for o in (Objective("ce"), Objective(top_k=1))
    )
    torch.testing.assert_close(hard[0].losses_S, of_one[0].losses_S, rtol=1e-12, atol=0)
    for name, grad in hard[1].items():
        torch.testing.assert_close(grad, of_one[1][name], rtol=1e-10, atol=1e-13)


def test_lk_follows_the_kl_far_off_and_what_is_accepted_when_near():
    """Far off KL alone moves the draft; where p and q agree nothing moves, and each is as small as it gets."""
    far_target, far_logits = [30.0, 0.0, 0.0], [0.0, 0.0, 30.0]
    assert row(Objective("lk"), far_target, far_logits)[1] == pytest.approx(
        row(Objective(), far_target, far_logits)[1], abs=1e-9
    )
    near = [0.3, -1.0, 2.0]
    loss, gradient = row(Objective("lk"), near, near)
    assert loss == pytest.approx(0, abs=1e-12)
    assert gradient == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("chosen", [Objective(), Objective("ce"), Objective("lk"), Objective(top_k=2)], ids=str)
def test_rows_outside_the_draft_vocab_are_counted_alike(chosen):
    """Case 68: whatever the loss, pairs whose target choice is out of vocab train nothing and are counted."""
    drafter, documents = make_drafter(), make_documents([TWO_SPANS, ENDS_OPEN])
    pack = packed(drafter, documents, head_of(drafter), 3)
    report, _, _ = ours(drafter, documents, head_of(drafter), 3, objective=chosen)
    inside = sum(reference.trains(d[1].tolist(), t, k) for d in documents for t in range(len(d[0])) for k in range(3))
    assert pack.num_oov > 3
    assert int(report.num_trained_S.sum()) + pack.num_oov == inside


@options
def test_flat_weights_collect_the_same_gradients(change, chosen):
    """As training runs: every weight's gradient summed in one flat tensor, over two packs."""
    shape = dataclasses.replace(SHAPE, **change)
    plain, drafter = (make_drafter(shape, train_head=True) for _ in range(2))
    documents, head_VD = make_documents([TWO_SPANS, ENDS_OPEN], num_aux=shape.num_aux), head_of(plain)
    _, expected, whole = ours(plain, documents, head_VD, 3, objective=chosen)
    flat = FlatWeights(drafter, torch.float64)
    for document in documents:
        pack = packed(drafter, [document], head_VD, 3)
        counts = whole.num_trained
        total, _ = ttt_loss(
            drafter, pack, head_VD[TARGET_IDS_W], DECAY, weights=flat, num_trained_S=counts, objective=chosen
        )
        total.backward()
    for name, grad in flat.grad_views.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.gpu
@options
def test_a_gpu_gives_the_same_losses_and_gradients(change, chosen):
    """Case 65: kernels against the torch path in float64; the products round to tf32 at worst."""
    shape = dataclasses.replace(SHAPE, head_dim=16, **change)
    on_cpu, on_gpu = make_drafter(shape, train_head=True), make_drafter(shape, train_head=True).float()
    documents, head_VD = make_documents([TWO_SPANS, ENDS_OPEN], num_aux=shape.num_aux), head_of(on_cpu)
    expected_report, expected, pack = ours(on_cpu, documents, head_VD, 3, multiple=16, objective=chosen)
    flat = FlatWeights(on_gpu, torch.float32, "cuda")
    pack = pack.with_embedding(on_gpu.embed_tokens.weight).map(lambda t: t.float() if t.is_floating_point() else t)
    teacher_WD = head_VD[TARGET_IDS_W].float().cuda()
    total, report = ttt_loss(on_gpu, pack.to("cuda"), teacher_WD, DECAY, weights=flat, objective=chosen)
    total.backward()
    torch.testing.assert_close(report.losses_S.double().cpu(), expected_report.losses_S, rtol=5e-3, atol=1e-4)
    for name, grad in flat.grad_views.items():
        wrong = (grad.double().cpu() - expected[name]).norm() / expected[name].norm()
        assert float(wrong) < 2e-2, name
