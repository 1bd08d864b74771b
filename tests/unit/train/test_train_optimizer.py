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


def test_an_unknown_value_of_the_knob_is_refused(monkeypatch):
    monkeypatch.setenv("EYAS_TRAIN_SHARD", "yes")
    with pytest.raises(ConfigError, match="expected 0 or 1"):
        make()
