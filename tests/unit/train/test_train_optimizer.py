"""The optimizer over flat tensors against torch's own, Muon against its definition."""

import pytest
import torch
import train_world as world
from torch import nn

from eyas.contracts import DrafterShape
from eyas.drafter.model import Drafter
from eyas.drafter.weights import FlatWeights
from eyas.errors import ConfigError, TrainError
from eyas.train.distributed import World
from eyas.train.muon import orthogonal
from eyas.train.optimizer import Optimizer

ALONE = World(0, 1, torch.device("cpu"))
SHAPE = DrafterShape(
    target_hidden_size=16, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
    head_dim=6, num_aux=3, vocab_size=60, draft_vocab_size=24, rms_norm_eps=1e-5, rope_theta=1000.0,
    max_position_embeddings=128, fc_norm=True, norm_output=False,
)  # fmt: skip


def make(seed=0, **changes):
    torch.manual_seed(seed)
    drafter = Drafter(SHAPE)
    weights = FlatWeights(drafter, torch.float32)
    return drafter, weights, Optimizer(weights, world.make_config(**changes), ALONE)


def gradient(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    weights.zero_grad()
    for view in weights.grad_views.values():
        view.copy_(torch.randn(view.shape, generator=generator))


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch(max_grad_norm, weight_decay):
    """Six steps with clipping and decay of matrices alone, to a few units of the last place."""
    changes = {"max_grad_norm": max_grad_norm, "weight_decay": weight_decay}
    drafter, weights, optimizer = make(**changes)
    peers = {name: nn.Parameter(p.detach().clone().double()) for name, p in drafter.named_parameters()}
    groups = [
        {"params": [p for p in peers.values() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in peers.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(6):
        gradient(weights, step)
        for name, parameter in peers.items():
            parameter.grad = weights.grad_views[name].double().clone()
        torch.nn.utils.clip_grad_norm_(list(peers.values()), max_grad_norm)
        peer.step()
        optimizer.step(step, 1e-2)
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(parameter.double(), peers[name], rtol=1e-5, atol=1e-6), name


def test_a_gradient_that_is_not_finite_changes_nothing_and_names_its_step():
    _, weights, optimizer = make()
    gradient(weights, 0)
    optimizer.step(0, 1e-2)
    before = weights.master_P.clone(), {name: value.clone() for name, value in optimizer.state().items()}
    gradient(weights, 1)
    weights.grad_P[5] = float("inf")
    with pytest.raises(TrainError, match="gradient of step 1 are not finite"):
        optimizer.step(1, 1e-2)
    assert torch.equal(weights.master_P, before[0])
    assert all(torch.equal(value, before[1][name]) for name, value in optimizer.state().items())


def test_a_norm_left_on_the_device_skips_the_step_and_is_told_of_one_later(monkeypatch):
    """As on CUDA, where nobody waits for the norm: the step itself must leave everything as it is."""
    _, weights, optimizer = make()
    before = weights.master_P.clone()
    real = optimizer.settle
    monkeypatch.setattr(optimizer, "settle", lambda: None)
    gradient(weights, 0)
    weights.grad_P[3] = float("nan")
    optimizer.step(0, 1e-2)
    assert torch.equal(weights.master_P, before)
    monkeypatch.setattr(optimizer, "settle", real)
    gradient(weights, 1)
    with pytest.raises(TrainError, match="gradient of step 0 are not finite"):
        optimizer.step(1, 1e-2)
    assert torch.equal(weights.master_P, before)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_orthogonal_matrices_have_singular_values_near_one(shape):
    """The iteration's limits are 0.7 and 1.2; directions are those of the matrix."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrix).float()
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ found @ v.T
    assert torch.linalg.svdvals(found).min() > 0.3
    assert torch.linalg.svdvals(found).max() < 1.3
    off = inside - torch.diag(torch.diagonal(inside))
    assert off.abs().max() < 0.05  # products are bfloat16


def test_muon_moves_hidden_matrices_by_its_formula_and_the_rest_by_adamw():
    drafter, weights, muon = make(optimizer="muon", train_head=True, max_grad_norm=1e9)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    _, adamw_weights, adamw = make(max_grad_norm=1e9)
    gradient(weights, 3)
    gradients = {name: view.clone() for name, view in weights.grad_views.items()}
    gradient(adamw_weights, 3)
    muon.step(0, 1e-2)
    adamw.step(0, 1e-2)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1 or name == "lm_head.weight":
            assert torch.equal(parameter, adamw_weights.views[name]), name
            continue
        gradient_XY = gradients[name]
        update = orthogonal(0.05 * gradient_XY + 0.95 * (0.05 * gradient_XY))
        expected = before[name] - 1e-2 * 0.2 * max(parameter.shape) ** 0.5 * update.float()
        assert torch.allclose(parameter, expected, atol=1e-5), name


def test_muon_on_parts_of_matrices_is_refused(monkeypatch):
    monkeypatch.setenv("EYAS_TRAIN_SHARD", "1")
    with pytest.raises(ConfigError, match="muon with EYAS_TRAIN_SHARD=1") as refused:
        make(optimizer="muon")
    assert refused.value.hint == "unset EYAS_TRAIN_SHARD, or set `train.optimizer: adamw` with `train.lr: 0.001`"
    monkeypatch.setenv("EYAS_TRAIN_SHARD", "yes")
    with pytest.raises(ConfigError, match="expected 0 or 1"):
        make()
