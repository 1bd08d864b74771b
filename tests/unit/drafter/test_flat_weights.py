"""The trainer's flat weights: the same gradients as autograd's, and parameters that follow the masters."""

import pytest
import torch
from drafter_world import ENDS_OPEN, TARGET_IDS_W, TWO_SPANS, head_of, make_documents, make_drafter, ours, packed

from eyas.drafter.loss import ttt_loss
from eyas.drafter.weights import FlatWeights


@pytest.mark.parametrize("train_head", [False, True])
def test_gradients_are_those_of_autograd(train_head):
    documents = make_documents([TWO_SPANS, ENDS_OPEN])
    plain, drafter = make_drafter(train_head=train_head), make_drafter(train_head=train_head)
    head_VD = head_of(plain)
    _, expected, _ = ours(plain, documents, head_VD, 3)
    flat = FlatWeights(drafter, torch.float64)
    pack = packed(drafter, documents, head_VD, 3)
    for passes in (1, 2):  # gradients sum up over packs
        ttt_loss(drafter, pack, head_VD[TARGET_IDS_W], 0.8, weights=flat)[0].backward()
        assert set(flat.grad_views) == set(expected)
        for name, grad in flat.grad_views.items():
            torch.testing.assert_close(grad, passes * expected[name], rtol=1e-10, atol=1e-12)
    flat.zero_grad()
    assert not flat.grad_P.any()


def test_parameters_are_views_of_the_masters():
    drafter = make_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    flat = FlatWeights(drafter, torch.float64)
    assert all(torch.equal(p, before[name]) for name, p in drafter.named_parameters())
    flat.master_P.mul_(2)
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    assert all(torch.equal(p, 2 * before[name]) for name, p in trained.items())
    assert {name: p.ndim > 1 for name, p in trained.items()} == {
        name: view.storage_offset() < flat.num_matrix_values for name, view in flat.views.items()
    }


def test_num_trained_of_many_packs_divides_the_sum():
    """Two packs with common divisors give the gradient of one pack of both documents."""
    documents = make_documents([TWO_SPANS, ENDS_OPEN])
    drafter = make_drafter()
    head_VD = head_of(drafter)
    _, expected, whole = ours(drafter, documents, head_VD, 3)
    flat = FlatWeights(drafter, torch.float64)
    for document in documents:
        pack = packed(drafter, [document], head_VD, 3)
        teacher_WD = head_VD[TARGET_IDS_W]
        ttt_loss(drafter, pack, teacher_WD, 0.8, weights=flat, num_trained_S=whole.num_trained)[0].backward()
    for name, grad in flat.grad_views.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)
