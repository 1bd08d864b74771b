"""A tiny float64 drafter, documents for it, and its loss by the code under test and by the restatement."""

import drafter_reference as reference
import pytest
import torch

from eyas.contracts import DrafterShape
from eyas.drafter.loss import ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.teacher import teacher_ids

SHAPE = DrafterShape(
    target_hidden_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_aux=3,
    vocab_size=40,
    draft_vocab_size=20,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    fc_norm=False,
    norm_output=False,
)
D2T_W = torch.arange(20)  # every second target id
TARGET_IDS_W = torch.arange(20) + D2T_W
DECAY = 0.8

TWO_SPANS = [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1]
ENDS_OPEN = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
LONG = [0] * 3 + [1] * 12 + [0] * 2 + [1] * 4


def make_drafter(shape=SHAPE, train_head=False, seed=0):
    torch.manual_seed(seed)
    drafter = Drafter(shape).double()
    t2d_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
    t2d_V[TARGET_IDS_W] = True
    drafter.set_target(torch.randn(shape.vocab_size, 16).bfloat16(), D2T_W, t2d_V)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    drafter.lm_head.weight.requires_grad_(train_head)
    return drafter


def make_documents(masks, seed=1, num_aux=3):
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for mask in masks:
        T = len(mask)
        documents.append(
            (
                torch.randint(0, 40, (T,), generator=generator),
                torch.tensor(mask),
                torch.randn(T, num_aux, 16, generator=generator, dtype=torch.float64),
                torch.randn(T, 16, generator=generator, dtype=torch.float64) * 2,
            )
        )
    return documents


def head_of(drafter, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(drafter.shape.vocab_size, 16, generator=generator, dtype=torch.float64)


def packed(drafter, documents, head_VD, steps, mask_oov=True, multiple=1, anchors=0, keys=None):
    def in_vocab(last):
        return drafter.t2d[teacher_ids(last, head_VD)] if mask_oov else None

    keys = keys or [str(len(ids)) for ids, *_ in documents]
    whole = [Document(*document, in_vocab(document[3]), key) for document, key in zip(documents, keys, strict=True)]
    return pack_documents(whole, steps, multiple, anchors)


def ours(drafter, documents, head_VD, steps, mask_oov=True, multiple=1, anchors=0, **options):
    pack = packed(drafter, documents, head_VD, steps, mask_oov, multiple, anchors)
    drafter.zero_grad()
    total, report = ttt_loss(drafter, pack, head_VD[TARGET_IDS_W], DECAY, **options)
    total.backward()
    grads = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return report, grads, pack


def value(drafter, pack, teacher_WD, **options):
    return ttt_loss(drafter, pack, teacher_WD, DECAY, **options)[1].total(DECAY)


def theirs(drafter, documents, head_VD, steps, mask_oov=True, **options):
    weights = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in drafter.named_parameters()}
    total, losses, counts, oov = reference.reference_loss(
        weights,
        drafter.embed_tokens.weight,
        head_VD,
        D2T_W,
        drafter.shape,
        documents,
        steps,
        DECAY,
        mask_oov,
        **options,
    )
    total.backward()
    return total.detach(), losses, counts, oov, {n: w.grad for n, w in weights.items() if w.grad is not None}


def compare(found, expected):
    """(report, gradients, pack) of the code under test against what ``theirs`` gives."""
    report, grads, pack = found
    total, losses, counts, oov, expected_grads = expected
    assert report.num_trained_S.tolist() == counts[: len(report.num_trained_S)]
    assert pack.num_oov == oov
    assert report.total(DECAY) == pytest.approx(float(total), rel=1e-11)
    for k, value in enumerate(report.losses_S):
        torch.testing.assert_close(value, losses[k].detach(), rtol=1e-11, atol=1e-12)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-9, atol=1e-11, msg=name)


def agree(drafter, documents, steps, mask_oov=True, multiple=1):
    head_VD = head_of(drafter)
    compare(
        ours(drafter, documents, head_VD, steps, mask_oov, multiple),
        theirs(drafter, documents, head_VD, steps, mask_oov),
    )
