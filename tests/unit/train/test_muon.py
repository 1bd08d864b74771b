"""Muon: its polynomials against the minimax theorem, what becomes of odd matrices, whole runs."""

import json
from math import prod

import numpy as np
import pytest
import torch
import train_world as world
from test_train import StoppedError, golden_numbers, stop_at
from test_train_optimizer import gradient, make

from eyas.train import muon
from eyas.train.muon import BAND, COEFFICIENTS, SMALLEST, orthogonal

ROUNDING = 0.03
"""Products and results are bfloat16: 2 ** -8 at each of them."""
SHAPES = [(96, 256), (256, 96), (128, 128)]


def polynomial(coefficients, x):
    a, b, c = coefficients
    return a * x + b * x**3 + c * x**5


def spread(shape, singular_values):
    """A matrix with these singular values in random directions."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(size, len(singular_values), generator=generator))[0] for size in shape)
    return u * singular_values @ v.T


def orthogonal_float64(matrix):
    """By singular values, without iterations on matrices."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for coefficients in COEFFICIENTS:
        s = polynomial(coefficients, s)
    return (u * s) @ v


# ── the polynomials ───────────────────────────────────────────────────────────────────────────


def test_every_polynomial_is_the_nearest_to_one_on_the_interval_that_is_left():
    """Chebyshev: the best of three coefficients errs equally, with signs in turn, at four points."""
    low, high = SMALLEST, 1.01
    for a, b, c in COEFFICIENTS:
        inner = np.sort(np.sqrt(np.roots([5 * c, 3 * b, a]).real))
        points = np.array([low, *inner, high])
        assert (np.diff(points) > 0).all()
        errors = (polynomial((a, b, c), points) - 1) * [-1, 1, -1, 1]
        assert errors == pytest.approx(errors.mean(), abs=1e-3)
        error = errors.mean()
        low, high = (1 - error) * 0.99, (1 + error) * 1.01
    assert error == pytest.approx(BAND, abs=1e-3)
    assert prod(a for a, _, _ in COEFFICIENTS) == pytest.approx(354, abs=1)


def test_in_exact_arithmetic_the_band_is_kept():
    x = np.geomspace(SMALLEST, 1.0, 100_000)
    for coefficients in COEFFICIENTS:
        x = polynomial(coefficients, x)
    assert x.min() > 1 - BAND
    assert x.max() < 1 + BAND


# ── matrices ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_random_matrices_end_in_the_band_along_their_own_directions(shape, size):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrix * size).double()
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    told = s / s.norm() > SMALLEST
    values = torch.linalg.svdvals(found)
    assert values[: told.sum()].min() > 1 - BAND - ROUNDING
    assert values.max() < 1 + BAND + ROUNDING
    inside = u.T @ found @ v.mT
    assert (inside - torch.diag(torch.diagonal(inside))).abs().max() < 0.1


@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_do_what_the_polynomials_say(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = orthogonal_float64(matrix)
    assert (orthogonal(matrix).double() - expected).norm() < ROUNDING * expected.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_ill_conditioned_matrices_end_in_the_band_as_far_as_it_reaches(shape):
    """Half of the singular values below what the iterations reach: those stay below the band."""
    singular_values = torch.logspace(0, -6, min(shape))
    found = torch.linalg.svdvals(orthogonal(spread(shape, singular_values)).double())
    num_told = int((singular_values / singular_values.norm() > SMALLEST).sum())
    assert found.max() < 1 + BAND + ROUNDING
    assert found[: num_told - 2].min() > 1 - BAND - ROUNDING
    assert found[-min(shape) // 3 :].max() < 0.5


@pytest.mark.parametrize("shape", [*SHAPES, (1, 40), (40, 1), (1, 1)])
@pytest.mark.parametrize("exact", [False, True])
def test_a_matrix_of_rank_one_keeps_its_direction(shape, exact):
    """Its one singular value is the norm itself, the upper end of the first interval; ``exact`` is in bfloat16."""
    matrix = torch.ones(shape) if exact else spread(shape, torch.ones(1))
    found = orthogonal(matrix).double()
    size = (found * matrix).sum() / matrix.norm()
    assert 1 - BAND - ROUNDING < size < 1 + BAND + ROUNDING
    rest = found - size * matrix / matrix.norm()
    # what rounding adds in other directions grows up to 354-fold
    assert torch.linalg.matrix_norm(rest, 2) < (0.01 if exact else 0.3)


def test_no_gradient_gives_no_update_and_no_nan():
    assert not orthogonal(torch.zeros(3, 5)).any()
    name = "midlayer.self_attn.o_proj.weight"
    _, weights, optimizer = make(optimizer="muon")
    gradient(weights, 0)
    weights.grad_views[name].zero_()
    before = weights.views[name].clone()
    optimizer.step(0, 1e-2)
    assert torch.equal(weights.views[name], before)
    assert weights.master_P.isfinite().all()


def test_hidden_matrices_keep_no_second_moment():
    """Muon looks at none: at 8B that is 1.2 GB. A checkpoint still has one value for each weight, 0 for theirs."""
    _, weights, optimizer = make(optimizer="muon")
    hidden = sum(place.stop - place.start for place in muon.Muon(weights).places)
    assert len(optimizer._own["exp_avg_sq"]) == len(weights.master_P) - hidden
    weights.grad_P.fill_(1.0)
    optimizer.step(0, 1e-3)
    state = optimizer.state()
    assert {name: len(values) for name, values in state.items()} == dict.fromkeys(state, len(weights.master_P))
    for place in muon.Muon(weights).places:
        assert not state["exp_avg_sq"][place].any()
    assert int((state["exp_avg_sq"] > 0).sum()) == len(weights.master_P) - hidden

    _, _, again = make(optimizer="muon")
    for name, values in state.items():
        again.restore(name, values)
    assert all(torch.equal(values, again.state()[name]) for name, values in state.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_gives_the_same_directions(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    here, there = orthogonal(matrix).float(), orthogonal(matrix.cuda())
    assert there.is_cuda
    assert torch.equal(there, orthogonal(matrix.cuda()))
    assert (there.float().cpu() - here).norm() < 0.05 * here.norm()


# ── steps ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_steps_are_those_of_the_definition_and_the_rest_is_adamws(weight_decay, monkeypatch):
    """Three steps in float64, clipped: Nesterov momentum 0.95, root mean square 0.2, decoupled decay."""
    monkeypatch.setattr(muon, "orthogonal", lambda matrix: orthogonal_float64(matrix).float())
    changes = {"train_head": True, "max_grad_norm": 2.0, "weight_decay": weight_decay}
    drafter, weights, optimizer = make(optimizer="muon", **changes)
    _, adamw_weights, adamw = make(**changes)
    expected = {name: p.detach().double() for name, p in drafter.named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(3):
        gradient(weights, step)
        gradient(adamw_weights, step)
        clip = 2.0 / weights.grad_P.double().norm()
        for name, value in expected.items():
            scaled = weights.grad_views[name].double() * clip
            momentum[name] = 0.95 * momentum[name] + 0.05 * scaled
            if value.ndim == 2:
                update = orthogonal_float64(0.05 * scaled + 0.95 * momentum[name])
                expected[name] = value * (1 - 1e-2 * weight_decay) - 1e-2 * 0.2 * max(value.shape) ** 0.5 * update
        optimizer.step(step, 1e-2)
        adamw.step(step, 1e-2)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1 or name == "lm_head.weight":
            assert torch.equal(parameter, adamw_weights.views[name]), name
        else:
            assert torch.allclose(parameter.double(), expected[name], rtol=0, atol=1e-6), name


# ── runs ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    world.run(folder, world.make_inputs(folder, optimizer="muon"))
    return world.result_bytes(folder)


def test_a_run_that_goes_on_ends_in_the_same_bytes(tmp_path, trained, monkeypatch):
    """Case 69 with Muon: its momentum is in the state."""
    restore = stop_at(monkeypatch, 6)
    with pytest.raises(StoppedError):
        world.run(tmp_path, world.make_inputs(tmp_path, optimizer="muon"))
    restore()
    _, outcome = world.run(tmp_path, world.make_inputs(tmp_path, optimizer="muon"))
    assert outcome.resumed_at == 4
    assert world.result_bytes(tmp_path) == trained


def test_trained_numbers_are_those_of_their_revision(trained):
    """As in test_train, for Muon, and with a wider tolerance, because its products are bfloat16 everywhere.

    Processor types round them differently. Float32 products move a number by 1.0 %, a unit in the last place of
    every update by 0.6 %; five iterations of one polynomial move one by 4 %, three iterations by 5 %. Finer changes
    than that fail the test against float64.
    """
    revision = world.make_config().revision
    path = world.Path(__file__).parents[2] / f"golden/train_revision_{revision}_muon.json"
    assert golden_numbers((trained,)) == pytest.approx(json.loads(path.read_text()), rel=0.02), (
        "Muon gives other numbers than its revision stands for: undo that, or raise train.revision and write "
        f"{path.name}"
    )
