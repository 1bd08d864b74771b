"""Every Triton kernel against its torch twin, on a GPU or, without one, in Triton's interpreter."""

import math
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed here")

from eyas.drafter import pointwise, tiles
from eyas.drafter.kernels.adamw import adamw
from eyas.drafter.kernels.attend import attend_backward, attend_forward
from eyas.drafter.kernels.divergence import divergence
from eyas.drafter.kernels.gate import gate_backward, gate_forward
from eyas.drafter.kernels.norm import norm_again, norm_backward, norm_forward
from eyas.drafter.kernels.rotary import rotate_backward, rotate_forward
from eyas.drafter.loss import Part, gradient_of_logits
from eyas.drafter.objective import Objective
from eyas.drafter.pointwise import Rotation
from eyas.drafter.rows import Document, pack_documents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator) * scale


def here(*tensors):
    return [t.to(DEVICE) for t in tensors]


def close(found, expected, tolerance=2e-5):
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [32, 100])
@pytest.mark.parametrize("with_past", [True, False])
def test_norm(width, with_past):
    x, gain, grad, past = numbers(13, width), numbers(width), numbers(13, width, seed=1), numbers(13, width, seed=2)
    normed, inverse = pointwise.rms_norm(x, gain, 1e-5)
    found, found_inverse = norm_forward(*here(x, gain), 1e-5)
    close(found, normed)
    close(found_inverse, inverse)
    close(norm_again(*here(x, inverse, gain)), normed)
    expected = pointwise.rms_norm_backward(x, inverse, gain, grad, past if with_past else None)
    found = norm_backward(*here(x, inverse, gain, grad), past.to(DEVICE) if with_past else None)
    for one, two in zip(found, expected, strict=True):
        close(one, two)


def test_gate():
    gate_up, grad = numbers(7, 2 * 1100), numbers(7, 1100)
    close(gate_forward(*here(gate_up)), pointwise.gate(gate_up))
    expected = pointwise.gate_backward(gate_up, grad)
    written = here(gate_up.clone(), grad.clone())
    for one, two, place in zip(gate_backward(*written), expected, written, strict=True):
        close(one, two)
        assert one.data_ptr() == place.data_ptr(), "in place"


@pytest.mark.parametrize("num_turned", [0, 3, 5])
def test_rotary(num_turned):
    hidden, embedded, grad = numbers(9, 5, 8), numbers(11, 5, 8, seed=1), numbers(9, 5, 8, seed=2)
    places = torch.tensor([3, 0, 10, 4, -1, 7, 2, 9, 1])
    embedded[-1] = 0  # what -1 reads in torch
    angles = numbers(16, 4, seed=3)
    tables = torch.cat([angles.cos()] * 2, 1), torch.cat([-angles.sin(), angles.sin()], 1)
    rotation = Rotation(*tables, torch.arange(9) // 2, 3)
    on_device = Rotation(*here(*rotation[:3]), 3)
    places[2] = 8
    expected = pointwise.add_and_rotate(hidden, embedded, places, rotation, num_turned, torch.empty_like(hidden))
    out = torch.empty_like(hidden, device=DEVICE)
    close(rotate_forward(*here(hidden, embedded, places), on_device, num_turned, out), expected)
    sums = numbers(11, 5, 8, seed=4)
    found_sums = sums.clone().to(DEVICE)
    expected = pointwise.add_and_rotate_backward(grad, places, rotation, num_turned, sums, torch.empty_like(grad))
    close(rotate_backward(*here(grad, places), on_device, num_turned, found_sums, out), expected)
    close(found_sums, sums)


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (6, 2, 16), (3, 3, 24)])
@pytest.mark.parametrize("step", [0, 2])
def test_attention(heads, groups, width, step):
    check_attention(heads, groups, width, step, [[0] * 5 + [1] * 60, [1] * 3, [0] * 20 + [1] * 30 + [0] * 9 + [1] * 40])


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (3, 1, 16), (2, 2, 24)])
def test_attention_over_blocks_that_every_row_sees(heads, groups, width):
    """Documents longer than two blocks of keys, one of which ends inside a block."""
    check_attention(heads, groups, width, 1, [[0] * 3 + [1] * 187, [1] * 70])


def check_attention(heads, groups, width, step, masks):
    documents = [Document(torch.zeros(len(m)).long(), torch.tensor(m), torch.zeros(len(m), 1, 1), torch.zeros(len(m), 1)) for m in masks]  # fmt: skip
    pack = pack_documents(documents, 4, multiple=8)
    R, T = pack.num_rows[step], len(pack.ids_T)
    q, shared, grad = numbers(R, heads, width), numbers(T, 2 * groups, width, seed=1), numbers(R, heads, width, seed=2)
    own = numbers(3, pack.num_rows[1], 2 * groups, width, seed=3)
    plan = pack.attention[step]
    mixed, lse = tiles.attend_forward(q, shared, own[:step], plan)
    on_device = plan.map(lambda t: t.to(DEVICE))
    found_mixed, found_lse = attend_forward(*here(q, shared, own), step, on_device)
    close(found_mixed, mixed)
    order = plan.order_R.long()
    close(found_lse, lse[order])
    sums = torch.zeros_like(shared), torch.zeros_like(own)
    expected = tiles.attend_backward(grad, (q, mixed, lse), shared, own[:step], (sums[0], sums[1][:step]), plan)
    found_sums = here(*(torch.zeros_like(s) for s in sums))
    saved = tuple(here(q, mixed, lse[order]))
    close(attend_backward(*here(grad), saved, *here(shared, own), found_sums, step, on_device), expected)
    for one, two in zip(found_sums, sums, strict=True):
        close(one, two)


@pytest.mark.parametrize("chosen", [Objective(), Objective("ce"), Objective(top_k=3)], ids=str)
def test_divergence(chosen):
    C, W = 5, 5000
    teacher, logits = numbers(C, W, scale=4.0), numbers(8, W, seed=1, scale=4.0)
    logits[0] = teacher[1]
    chosen.restrict_(teacher)
    parts = [
        Part(0, torch.arange(3), torch.tensor([1, 2, 4]), slice(0, 3)),
        Part(1, torch.arange(0), torch.arange(0), slice(3, 3)),
        Part(2, torch.arange(5), torch.arange(5), slice(3, 8)),
    ]

    def run(function, *tensors):
        found = [(torch.zeros(n, device=tensors[0].device), torch.zeros(n, dtype=torch.bool, device=tensors[0].device)) for n in (3, 0, 5)]  # fmt: skip
        grad = torch.empty_like(tensors[1])
        moved = [Part(p.step, p.rows.to(DEVICE), p.teachers.to(DEVICE), p.at) for p in parts] if function is divergence else parts  # fmt: skip
        function(tensors[0].clone(), tensors[1].clone(), moved, found, grad)
        return grad, *(t for pair in found for t in pair)

    expected = run(gradient_of_logits, teacher, logits)
    for one, two in zip(run(divergence, *here(teacher, logits)), expected, strict=True):
        if one.dtype == torch.bool:
            assert torch.equal(one.cpu(), two)
        else:
            close(one, two)
    assert expected[2].tolist()[0] is True


def test_adamw_is_torchs():
    size, decayed, rates = 5000, 3000, (1e-2, 5e-3, 1e-3)
    master, grads = numbers(size), [numbers(size, seed=s) for s in range(3)]
    matrices, gains = (torch.nn.Parameter(part.clone()) for part in master.split([decayed, size - decayed]))
    groups = [{"params": [matrices], "weight_decay": 0.1}, {"params": [gains], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    mine, moments, products = (
        master.to(DEVICE),
        here(torch.zeros(size), torch.zeros(size)),
        torch.zeros(size, device=DEVICE),
    )
    for step, (grad, rate) in enumerate(zip(grads, rates, strict=True), 1):
        for group in reference.param_groups:
            group["lr"] = rate
        matrices.grad, gains.grad = (part * 0.5 for part in grad.split([decayed, size - decayed]))
        reference.step()
        for clip in (math.nan, 0.5):
            for part, decay in ((slice(decayed), 0.1), (slice(decayed, None), 0.0)):
                adamw(
                    mine[part], (moments[0][part], moments[1][part]), grad.to(DEVICE)[part], products[part],
                    torch.tensor(clip, device=DEVICE), step=step, rate=rate, betas=(0.9, 0.95), decay=decay, eps=1e-8,
                )  # fmt: skip
        close(mine, torch.cat([matrices.detach(), gains.detach()]), 1e-6)
        close(products, mine.cpu())
