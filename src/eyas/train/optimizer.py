"""AdamW over flat float32 tensors, with clipping.

Masters, gradients and moments are one tensor each (``drafter.weights``), so a step is a handful of kernels whatever
the number of parameters. Nothing here makes the host wait for a GPU: the gradient's norm stays on the device, a
norm that is not finite lets the step change nothing, and ``settle`` tells of it one step later.

Several processes sum their gradients first. With ``EYAS_TRAIN_SHARD=1`` each of them keeps the moments of its part
only and updates that part: gradients are reduced and scattered, the weights gathered. That is what ZeRO stage 2
and FSDP2 without resharding give; wrapping the layer in FSDP2 itself would gather it anew at
every one of the S uses of a step.

Letters: P values of all trained parameters, Y those of this rank's part.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from eyas.config.schema import TrainConfig
from eyas.drafter.weights import FlatWeights
from eyas.errors import ConfigError, TrainError
from eyas.train.distributed import World
from eyas.train.muon import Muon

EPS = 1e-8
SHARD_KNOB = "EYAS_TRAIN_SHARD"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of values that this rank updates with one weight decay."""

    whole: slice
    """Place in a tensor of P values."""
    own: slice
    """Place in a tensor of Y values."""
    weight_decay: float


def own_parts(num_values: int, rank: int, num_parts: int) -> list[slice]:
    """Values that a rank updates: its equal part, and the rest that does not divide, which every rank updates."""
    size = num_values // num_parts
    parts = [slice(rank * size, (rank + 1) * size), slice(num_parts * size, num_values)]
    return [part for part in parts if part.stop > part.start]


def segments_of(parts: list[slice], num_matrix_values: int, weight_decay: float) -> list[Segment]:
    """Parts cut where the matrices end: only they decay."""
    segments, begin = [], 0
    for part in parts:
        edge = min(max(num_matrix_values, part.start), part.stop)
        for start, stop, decay in ((part.start, edge, weight_decay), (edge, part.stop, 0.0)):
            if stop > start:
                own = begin + start - part.start
                segments.append(Segment(slice(start, stop), slice(own, own + stop - start), decay))
        begin += part.stop - part.start
    return segments


def adamw_(
    master_X: torch.Tensor,
    grad_X: torch.Tensor,
    exp_avg_X: torch.Tensor,
    exp_avg_sq_X: torch.Tensor,
    *,
    products_X: torch.Tensor | None,
    step: int,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    grad_scale: torch.Tensor,
    found_inf: torch.Tensor,
) -> None:
    """One AdamW update in place; on a GPU in one pass that renews the products' copy too.

    Args:
        master_X: Flat float32 weights.
        grad_X: Their gradient; may be changed.
        exp_avg_X: First moments.
        exp_avg_sq_X: Second moments.
        products_X: The products' copy of the weights, renewed on a GPU only.
        step: Number of this update from 1.
        lr: As AdamW's.
        betas: As AdamW's.
        weight_decay: As AdamW's.
        grad_scale: The gradient is divided by it first; on the device.
        found_inf: 1 leaves everything as it is; on the device.
    """
    if master_X.is_cuda:
        from eyas.drafter.kernels.adamw import adamw

        clip = torch.where(found_inf > 0, torch.nan, 1 / grad_scale)
        moments = exp_avg_X, exp_avg_sq_X
        adamw(master_X, moments, grad_X, products_X, clip, step=step, rate=lr, betas=betas, decay=weight_decay, eps=EPS)
        return
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [master_X], [grad_X], [exp_avg_X], [exp_avg_sq_X], [], [torch.tensor(float(step))], lr=lr, beta1=betas[0], beta2=betas[1],
        weight_decay=weight_decay, eps=EPS, amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip


class Optimizer:
    """The state of one run's optimizer.

    Args:
        weights: Flat masters and gradients.
        config: ``train`` section.
        world: Whose gradients are summed.

    Raises:
        ConfigError: The knob's value is unknown, or Muon is asked to work on parts of matrices.
    """

    def __init__(self, weights: FlatWeights, config: TrainConfig, world: World) -> None:
        self._weights, self._config, self._world = weights, config, world
        self._sharded = _sharded(config) and world.size > 1
        rank, num_parts = (world.rank, world.size) if self._sharded else (0, 1)
        self._parts = own_parts(len(weights.master_P), rank, num_parts)
        self._segments = segments_of(self._parts, weights.num_matrix_values, config.weight_decay)
        num_own = sum(part.stop - part.start for part in self._parts)
        self._own = {name: weights.master_P.new_zeros(num_own) for name in ("exp_avg", "exp_avg_sq")}
        self._muon = Muon(weights) if config.optimizer == "muon" else None
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None

    # ── a step ────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, step: int, lr: float) -> None:
        """Sum the gradients over ranks, clip, update.

        Args:
            step: Optimizer step from 0.
            lr: Its learning rate.

        Raises:
            TrainError: The gradient of this step (CPU) or of the last one (CUDA) was not finite.
        """
        weights, config = self._weights, self._config
        self.settle()
        norm = self._summed_norm()
        grad_scale = (norm / config.max_grad_norm).clamp_min(1.0)
        found_inf = 1 - norm.isfinite().float()
        self._pending = (step, *_on_its_way(norm))
        if norm.device.type == "cpu" or self._muon is not None:
            self.settle()
        if self._muon is not None:
            self._muon.step(self._own["exp_avg"], lr, config.weight_decay, grad_scale)
        for segment in self._muon.others(self._segments) if self._muon else self._segments:
            adamw_(
                weights.master_P[segment.whole],
                weights.grad_P[segment.whole],
                self._own["exp_avg"][segment.own],
                self._own["exp_avg_sq"][segment.own],
                products_X=None if weights.products_P is None else weights.products_P[segment.whole],
                step=step + 1,
                lr=lr,
                betas=(config.betas[0], config.betas[1]),
                weight_decay=segment.weight_decay,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
        if self._sharded:
            self._join_(weights.master_P, weights.master_P)
        if self._sharded or self._muon is not None or not norm.is_cuda:
            weights.refresh()

    def settle(self) -> None:
        """Look at the norm that was left on the device.

        Raises:
            TrainError: It is not finite; the weights are those before that step.
        """
        if self._pending is None:
            return
        (step, norm, copied), self._pending = self._pending, None
        if copied is not None:
            copied.synchronize()
        value = float(norm)
        if not math.isfinite(value):
            raise TrainError(
                f"loss and gradient of step {step} are not finite (norm {value})",
                "lower train.lr or train.max_grad_norm, or check the states with `eyas verify`",
            )

    def _summed_norm(self) -> torch.Tensor:
        grad_P = self._weights.grad_P
        if not self._sharded:
            self._world.sum_(grad_P)
            # a CPU adds a million float32 squares up to 1e-4 only
            on_cpu = grad_P.device.type == "cpu"
            return torch.linalg.vector_norm(grad_P, dtype=torch.float64 if on_cpu else None).to(grad_P.dtype)
        size = len(grad_P) // self._world.size
        whole, rest = slice(0, size * self._world.size), slice(size * self._world.size, None)
        own_Y = torch.empty_like(grad_P[:size])
        self._world.sum_part(grad_P[whole], own_Y)
        self._world.sum_(grad_P[rest])
        grad_P[self._world.rank * size : (self._world.rank + 1) * size] = own_Y
        squares = own_Y.square().sum()
        self._world.sum_(squares)
        return (squares + grad_P[rest].square().sum()).sqrt()

    # ── parts and wholes ──────────────────────────────────────────────────────────────────────

    def _cut(self, whole_P: torch.Tensor) -> torch.Tensor:
        """This rank's values of a whole tensor."""
        return torch.cat([whole_P[part] for part in self._parts]) if self._sharded else whole_P

    def _join_(self, out_P: torch.Tensor, own_P: torch.Tensor) -> None:
        """Fill a tensor with what every rank has at its places of ``own_P``."""
        size = len(out_P) // self._world.size
        part_Y = own_P[self._world.rank * size : (self._world.rank + 1) * size].clone()
        self._world.join_parts(part_Y, out_P[: size * self._world.size])

    def _whole(self, name: str) -> torch.Tensor:
        own_Y = self._own[name]
        if not self._sharded:
            return own_Y
        out_P, begin = torch.empty_like(self._weights.master_P), 0
        for part in self._parts:
            out_P[part] = own_Y[begin : begin + part.stop - part.start]
            begin += part.stop - part.start
        self._join_(out_P, out_P)
        return out_P

    # ── what a checkpoint holds ───────────────────────────────────────────────────────────────

    def state(self) -> dict[str, torch.Tensor]:
        """Whole tensors [P] by name; every rank must ask at the same time, and the first has all of them after."""
        if not self._sharded:
            return dict(self._own)
        whole = {}
        for name in self._own:
            gathered_P = self._whole(name)
            if self._world.is_first:
                whole[name] = gathered_P.cpu()
        return whole

    @torch.no_grad()
    def restore(self, name: str, whole_P: torch.Tensor) -> None:
        """Take in what ``state`` gave, in a run of any number of processes."""
        self._own[name].copy_(self._cut(whole_P))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names that ``state`` gives."""
        return tuple(self._own)


def _on_its_way(value: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy in host memory, there when the event has come: reading the device itself waits for all its work."""
    if not value.is_cuda:
        return value, None
    host = torch.empty((), pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def _sharded(config: TrainConfig) -> bool:
    value = os.environ.get(SHARD_KNOB) or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{SHARD_KNOB}: {value!r}, expected 0 or 1", f"unset {SHARD_KNOB}")
    if value == "1" and config.optimizer == "muon":
        raise ConfigError(
            f"train.optimizer: muon with {SHARD_KNOB}=1, expected adamw: Muon works on whole matrices",
            f"unset {SHARD_KNOB}, or set `train.optimizer: adamw` with `train.lr: 0.001`",
        )
    return value == "1"
