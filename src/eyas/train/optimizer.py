"""AdamW, or Muon beside it, over flat float32 tensors, with clipping.

Masters, gradients and moments are one tensor each (``drafter.weights``), so a step is a handful of kernels whatever
the number of parameters. Nothing here makes the host wait for a GPU: the gradient's norm stays on the device, a
norm that is not finite lets the step change nothing, and ``settle`` tells of it one step later.

Several processes sum their gradients first. With ``EYAS_TRAIN_SHARD=1`` each of them keeps the moments of its part
only and updates that part (``parts``): gradients are reduced to it, the weights gathered, in one operation each.
That is ZeRO stage 1 in memory: masters and gradients stay whole.

Letters: P values of all trained parameters, Y those of this rank's part.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from eyas.config.schema import TrainConfig
from eyas.drafter.weights import FlatWeights
from eyas.errors import ConfigError, TrainError
from eyas.train.distributed import World
from eyas.train.muon import Muon
from eyas.train.parts import EqualParts, Everything, WholeMatrices

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
    second: slice | None = None
    """Place among the second moments, which lie without gaps; None: Muon's, which has none."""


def segments_of(
    parts: Sequence[slice], num_matrix_values: int, weight_decay: float, edges: Sequence[int] = ()
) -> list[Segment]:
    """Parts cut at ``edges`` and where the matrices end: only they decay."""
    segments, begin = [], 0
    for part in parts:
        inside = sorted(edge for edge in {num_matrix_values, *edges} if part.start < edge < part.stop)
        for start, stop in pairwise([part.start, *inside, part.stop]):
            own = slice(begin, begin + stop - start)
            segments.append(Segment(slice(start, stop), own, weight_decay if start < num_matrix_values else 0.0))
            begin = own.stop
    return segments


def with_second_moments(segments: Sequence[Segment], without: Sequence[slice]) -> tuple[list[Segment], int]:
    """Segments with the places of their second moments, and how many values these are; those of ``without`` have none."""
    placed, begin = [], 0
    for segment in segments:
        size = 0 if segment.whole in without else segment.own.stop - segment.own.start
        placed.append(replace(segment, second=slice(begin, begin + size) if size else None))
        begin += size
    return placed, begin


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
        ConfigError: The knob's value is unknown.
    """

    def __init__(self, weights: FlatWeights, config: TrainConfig, world: World) -> None:
        self._weights, self._config, self._world = weights, config, world
        self._muon = Muon(weights) if config.optimizer == "muon" else None
        matrices = self._muon.places if self._muon else []
        num_values = len(weights.master_P)
        self._sharded = _sharded() and world.size > 1
        if not self._sharded:
            self._parts = Everything(world, num_values)
        elif self._muon:
            self._parts = WholeMatrices(world, num_values, matrices)
        else:
            self._parts = EqualParts(world, num_values)
        edges = [edge for matrix in matrices for edge in (matrix.start, matrix.stop)]
        segments = segments_of(self._parts.slices, weights.num_matrix_values, config.weight_decay, edges)
        self._segments, num_second = with_second_moments(segments, matrices)
        self._num_own = sum(part.stop - part.start for part in self._parts.slices)
        self._own = {
            "exp_avg": weights.master_P.new_zeros(self._num_own),
            "exp_avg_sq": weights.master_P.new_zeros(num_second),
        }
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
        norm = self._parts.summed_norm(weights.grad_P)
        grad_scale = (norm / config.max_grad_norm).clamp_min(1.0)
        found_inf = 1 - norm.isfinite().float()
        self._pending = (step, *_on_its_way(norm))
        if norm.device.type == "cpu" or self._muon is not None:
            self.settle()
        for segment in self._segments:
            exp_avg_Y = self._own["exp_avg"][segment.own]
            if self._muon is not None and segment.second is None:
                self._muon.step(segment.whole, exp_avg_Y, lr, segment.weight_decay, grad_scale)
                continue
            adamw_(
                weights.master_P[segment.whole],
                weights.grad_P[segment.whole],
                exp_avg_Y,
                self._own["exp_avg_sq"][segment.second],
                products_X=None if weights.products_P is None else weights.products_P[segment.whole],
                step=step + 1,
                lr=lr,
                betas=(config.betas[0], config.betas[1]),
                weight_decay=segment.weight_decay,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
        self._parts.join_(weights.master_P)
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
                "lower train.lr or train.max_grad_norm, or check the states with `make verify`",
            )

    # ── parts and wholes ──────────────────────────────────────────────────────────────────────

    def _cut(self, whole_P: torch.Tensor) -> torch.Tensor:
        """This rank's values of a whole tensor."""
        return torch.cat([whole_P[part] for part in self._parts.slices]) if self._sharded else whole_P

    def _own_values(self, name: str) -> torch.Tensor:
        """A state as [Y]: second moments that are not kept are 0, in host memory if any are not."""
        if name != "exp_avg_sq" or len(self._own[name]) == self._num_own:
            return self._own[name]
        out_Y = torch.zeros(self._num_own, device=self._own[name].device if self._sharded else "cpu")
        for segment in self._segments:
            if segment.second is not None:
                out_Y[segment.own] = self._own[name][segment.second].to(out_Y.device)
        return out_Y

    def _whole(self, name: str) -> torch.Tensor:
        own_Y = self._own_values(name)
        out_P, begin = torch.empty_like(self._weights.master_P), 0
        for part in self._parts.slices:
            out_P[part] = own_Y[begin : begin + part.stop - part.start]
            begin += part.stop - part.start
        self._parts.join_(out_P)
        return out_P

    # ── what a checkpoint holds ───────────────────────────────────────────────────────────────

    def state(self) -> dict[str, torch.Tensor]:
        """Whole tensors [P] by name; every rank must ask at the same time, and the first has all of them after."""
        if not self._sharded:
            return {name: self._own_values(name) for name in self._own}
        whole = {}
        for name in self._own:
            gathered_P = self._whole(name)
            if self._world.is_first:
                whole[name] = gathered_P.cpu()
        return whole

    @torch.no_grad()
    def restore(self, name: str, whole_P: torch.Tensor) -> None:
        """Take in what ``state`` gave, in a run of any number of processes."""
        own_Y = self._cut(whole_P)
        if name != "exp_avg_sq":
            self._own[name].copy_(own_Y)
            return
        for segment in self._segments:
            if segment.second is not None:
                self._own[name][segment.second] = own_Y[segment.own].to(self._own[name].device)

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


def _sharded() -> bool:
    value = os.environ.get(SHARD_KNOB) or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{SHARD_KNOB}: {value!r}, expected 0 or 1", f"unset {SHARD_KNOB}")
    return value == "1"
