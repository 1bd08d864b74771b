"""Fused head and loss over all TTT steps: logits exist for one chunk of teacher positions at a time.

    L_k = sum over the rows that train at step k of their loss (``objective``: KL(target || draft) by default)
          / number of such rows (of this pack, or of all packs that make one optimizer step)
    loss = sum over k of decay^k L_k                                       (weights are not normalised)

Row t at step k has its teacher at position u = t+k+1, so the steps share the teacher: a chunk of
positions u takes its distribution once, for the rows of all steps that read it. The gradient of the hidden
states is made in the same pass, so nothing of width W outlives a chunk. Softmax, log-softmax, losses and their
gradients are float32 (float64 when the model is), also where products are bfloat16.

Letters: R rows of a step, C teacher positions of a chunk, S steps, X pairs (row, step) of a chunk, E drafter
hidden, D target hidden, W draft vocab.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from eyas.drafter.differentiable import add_weight_gradient
from eyas.drafter.model import Drafter
from eyas.drafter.objective import KL, Objective, entropy
from eyas.drafter.precision import reduced_dtype, wide_dtype, widened
from eyas.drafter.rows import Pack
from eyas.drafter.ttt import unroll
from eyas.drafter.weights import FlatWeights, Weight, plain_weights

CHUNK_LOGITS, GPU_CHUNK_LOGITS = 1 << 23, 1 << 26
"""Logits of one chunk, teacher and all steps together: 32 MiB and 256 MiB in float32."""
SLICE_LOGITS = 1 << 18
"""Logits that a CPU takes through softmax, loss and gradient at a time: 1 MiB."""
GPU_CHUNK_MULTIPLE = 256
"""Teacher positions of a chunk on a GPU: whole tiles of its products."""


class Workspace:
    """Memory that every step uses again on a CPU: fresh pages cost more than the arithmetic at this width."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, name: str, rows: int, columns: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised [rows, columns] that lives until the name is taken again."""
        memory, size = self._memory.get(name), rows * columns
        if memory is None or memory.numel() < size or memory.dtype != dtype or memory.device != like.device:
            self._memory.pop(name, None)
            self._memory[name] = memory = torch.empty(size, dtype=dtype, device=like.device)
        return memory[:size].view(rows, columns)

    def clear(self) -> None:
        """Let go of everything: a GPU's allocator hands the same memory to the backward pass."""
        self._memory.clear()


@dataclass(frozen=True, slots=True)
class Measured:
    """What one pack's loss consists of, per step; detached."""

    losses_S: torch.Tensor
    """Mean loss of the rows that train; 0 where none does."""
    num_trained_S: torch.Tensor
    num_hits_S: torch.Tensor
    """Trained rows whose draft argmax is the teacher's argmax over the draft vocab."""
    num_chained_S: torch.Tensor
    """Rows that train at this step and hit at every earlier one."""
    num_chain_hits_S: torch.Tensor
    """Those that hit here too: over ``num_chained_S`` this is alpha_k."""

    def total(self, step_decay: float) -> float:
        """The loss that was minimised."""
        return sum(step_decay**k * loss for k, loss in enumerate(self.losses_S.tolist()))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Teachers ``first … last - 1`` of a pack, and per step which of its trained rows they teach."""

    first: int
    last: int
    pairs: tuple[tuple[int, int], ...]
    """Per step, places in ``pack.loss_rows``."""

    @property
    def num_pairs(self) -> int:
        """X."""
        return sum(last - first for first, last in self.pairs)


def plan_chunks(pack: Pack, num_steps: int, size: int) -> list[Chunk]:
    """Cut the teachers into chunks of at most ``size``."""
    edges = [*range(0, len(pack.teachers_U), size), len(pack.teachers_U)]
    cuts = [np.searchsorted(pack.host_teachers[k], edges).tolist() for k in range(num_steps)]
    return [
        Chunk(first, last, tuple((cut[i], cut[i + 1]) for cut in cuts))
        for i, (first, last) in enumerate(itertools.pairwise(edges))
        if last > first
    ]


@dataclass
class Values:
    """Per step, value and hit of each trained row, in the order of ``pack.loss_rows``."""

    losses: list[torch.Tensor]
    hits: list[torch.Tensor]


class _HeadLoss(torch.autograd.Function):
    """Loss of ``unroll``'s outputs; the gradient is ready when the forward pass ends.

    The value returned is 0: only its gradient means anything. ``values`` takes the values when given.
    """

    @staticmethod
    def forward(
        ctx: Any, settings: _Settings, values: Values | None, head_WE: torch.Tensor, *hidden: torch.Tensor
    ) -> torch.Tensor:
        pack, head = settings.pack, settings.head
        grads = [torch.zeros_like(hidden_RE) for hidden_RE in hidden]
        head_sink_WE = None
        if head_WE.requires_grad:
            head_sink_WE = head.sink
            if head_sink_WE is None:
                head_sink_WE = torch.zeros_like(head.value, dtype=wide_dtype(head.value.dtype))
        for chunk in plan_chunks(pack, len(hidden), settings.chunk_size(len(hidden))):
            if chunk.num_pairs:
                _chunk_gradients(chunk, settings, hidden, grads, head_sink_WE, values)
        ctx.grad_head_WE = head_sink_WE if head.sink is None else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*grads)
        return hidden[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> Any:  # type: ignore[override]
        # the total is the end of the graph, so its gradient is 1
        return None, None, ctx.grad_head_WE, *ctx.saved_tensors


@dataclass(frozen=True, slots=True)
class _Settings:
    pack: Pack
    head: Weight
    logit_head_WE: torch.Tensor
    """The head as logits are made with it."""
    teacher_WD: torch.Tensor
    """Likewise."""
    scales_S: Sequence[float]
    """Weight of one row of a step in the loss."""
    workspace: Workspace
    objective: Objective

    def chunk_size(self, num_steps: int) -> int:
        """Teacher positions at a time."""
        head_WE = self.head.value
        per_teacher = len(head_WE) * (num_steps + 1)
        if head_WE.is_cuda:
            return max(1, GPU_CHUNK_LOGITS // per_teacher // GPU_CHUNK_MULTIPLE) * GPU_CHUNK_MULTIPLE
        return max(1, CHUNK_LOGITS // per_teacher // self.pack.multiple) * self.pack.multiple


def _logits(workspace: Workspace, name: str, x_XE: torch.Tensor, weight_WE: torch.Tensor) -> torch.Tensor:
    """``x W^T`` [X,W], float32 also for bfloat16 inputs."""
    wide = wide_dtype(weight_WE.dtype)
    out_XW = workspace.take(name, len(x_XE), len(weight_WE), weight_WE, wide)
    if weight_WE.dtype == wide:
        return torch.mm(widened(x_XE), weight_WE.t(), out=out_XW)
    return torch.mm(x_XE, weight_WE.t(), out_dtype=wide, out=out_XW)


def _chunk_gradients(
    chunk: Chunk,
    settings: _Settings,
    hidden: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    head_sink_WE: torch.Tensor | None,
    values: Values | None,
) -> None:
    """Logits of one chunk, their gradient, and what follows from it for hidden states and head."""
    pack, head_WE, workspace = settings.pack, settings.head.value, settings.workspace
    dtype, W, multiple = head_WE.dtype, len(head_WE), pack.multiple
    C, X = chunk.last - chunk.first, chunk.num_pairs
    filled_C, filled_X = (-(-count // multiple) * multiple for count in (C, X))
    last_CD = hidden[0].new_empty(filled_C, pack.last_TD.shape[1])
    last_CD[C:] = 0
    last_CD[:C] = pack.last_TD[pack.teachers_U[chunk.first : chunk.last]]
    hidden_XE = hidden[0].new_empty(filled_X, hidden[0].shape[1])
    hidden_XE[X:] = 0
    parts, at = [], 0
    for k, (first, last) in enumerate(chunk.pairs):
        rows = pack.loss_rows[k][first:last]
        if last > first:
            torch.index_select(hidden[k], 0, rows, out=hidden_XE[at : at + last - first])
        parts.append(Part(k, rows, pack.loss_teachers[k][first:last] - chunk.first, slice(at, at + last - first)))
        at += last - first
    teacher_CW = _logits(workspace, "teacher", last_CD, settings.teacher_WD)
    logits_XW = _logits(workspace, "draft", hidden_XE, settings.logit_head_WE)
    found = [(values.losses[k][a:b], values.hits[k][a:b]) for k, (a, b) in enumerate(chunk.pairs)] if values else None
    product_dtype = reduced_dtype() or dtype
    grad_XW = logits_XW
    if product_dtype != logits_XW.dtype:
        grad_XW = workspace.take("gradient", filled_X, W, head_WE, product_dtype)
    gradient_of_logits(teacher_CW[:C], logits_XW, parts, found, grad_XW, settings.objective)
    grad_XW[X:] = 0
    grad_XE = (grad_XW @ head_WE.to(product_dtype)).to(hidden[0].dtype)
    scale_X1 = hidden[0].new_zeros(filled_X, 1)
    for part in parts:
        scale_X1[part.at] = settings.scales_S[part.step]
    grad_XE.mul_(scale_X1)
    for part in parts:
        grads[part.step].index_copy_(0, part.rows, grad_XE[part.at])
    if head_sink_WE is not None:
        add_weight_gradient(head_sink_WE, grad_XW.to(dtype), hidden_XE * scale_X1)


@dataclass(frozen=True, slots=True)
class Part:
    """The pairs of one step in a chunk."""

    step: int
    rows: torch.Tensor
    """Index into the step's hidden states."""
    teachers: torch.Tensor
    """Index into the chunk's teachers, rising."""
    at: slice
    """Where they lie among the chunk's pairs."""


def gradient_of_logits(
    teacher_CW: torch.Tensor,
    logits_XW: torch.Tensor,
    parts: Sequence[Part],
    found: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
    grad_XW: torch.Tensor,
    objective: Objective = KL,
) -> None:
    """Gradient of every pair's loss by the draft's logits, before its weight.

    Args:
        teacher_CW: Logits of the target over the draft vocab; destroyed.
        logits_XW: Logits of the draft; destroyed.
        parts: Which pair belongs to which teacher.
        found: Per step, where value and hit of its pairs go.
        grad_XW: Result; may be ``logits_XW`` itself. Rows of no pair are left as finite numbers.
        objective: What a pair's loss is. All but ``lk`` are a KL, for which there is a kernel on a GPU.
    """
    if logits_XW.is_cuda and objective.kind != "lk":
        from eyas.drafter.kernels.divergence import divergence

        divergence(objective.restrict_(teacher_CW), logits_XW, parts, found, grad_XW)
        return
    p_CW = _distribution(teacher_CW, objective)
    best_C, entropy_C = (p_CW.argmax(-1), entropy(p_CW)) if found is not None else (None, None)
    for index, part in enumerate(parts):
        for rows_Y in _slices(len(part.rows), logits_XW):
            teachers_Y = part.teachers[rows_Y]
            p_YW = _taught(p_CW, teachers_Y)
            at_Y = slice(part.at.start + rows_Y.start, part.at.start + rows_Y.stop)
            logits_YW = logits_XW[at_Y]
            if found is not None and best_C is not None and entropy_C is not None:
                losses, hits = found[index]
                losses[rows_Y] = objective.values(p_YW, entropy_C[teachers_Y], logits_YW)
                hits[rows_Y] = logits_YW.argmax(-1) == best_C[teachers_Y]
            grad_XW[at_Y] = objective.gradient_(p_YW, torch.softmax(logits_YW, -1, out=logits_YW))


def _distribution(teacher_CW: torch.Tensor, objective: Objective) -> torch.Tensor:
    """The target's distribution, in place of its logits."""
    for rows_Y in _slices(len(teacher_CW), teacher_CW):
        torch.softmax(objective.restrict_(teacher_CW[rows_Y]), -1, out=teacher_CW[rows_Y])
    return teacher_CW


def _taught(p_CW: torch.Tensor, teachers_Y: torch.Tensor) -> torch.Tensor:
    """Distributions of some teachers, rising; neighbours are not copied."""
    first, last = (int(teacher) for teacher in teachers_Y[[0, -1]])
    return p_CW[first : last + 1] if last - first == len(teachers_Y) - 1 else p_CW[teachers_Y]


def _slices(count: int, logits_XW: torch.Tensor) -> list[slice]:
    """Rows at a time: on a CPU as many as stay in a core's cache through all the arithmetic."""
    size = max(1, count if logits_XW.is_cuda else SLICE_LOGITS // logits_XW.shape[1])
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def ttt_loss(
    drafter: Drafter,
    pack: Pack,
    teacher_WD: torch.Tensor,
    step_decay: float,
    *,
    weights: FlatWeights | None = None,
    num_trained_S: Sequence[int] | None = None,
    measure: bool = True,
    workspace: Workspace | None = None,
    objective: Objective = KL,
) -> tuple[torch.Tensor, Measured | None]:
    """Unroll a pack and make its loss.

    Args:
        drafter: The model.
        pack: Documents and rows; at least one row must train.
        teacher_WD: The target head's rows of the draft vocab, in the dtype of products.
        step_decay: Weight of step k is ``step_decay ** k``.
        weights: Where products read weights and add gradients; by default the drafter's own parameters, whose
            ``grad`` autograd sets (``lm_head`` included, when it requires one).
        num_trained_S: Rows that train at each step over everything that makes one optimizer step, the divisors
            of the means; this pack's own by default.
        measure: Take the loss values and hits too.
        workspace: Memory to use again; keep one per run.
        objective: What a row's loss is.

    Returns:
        A scalar whose ``backward`` gives the loss's gradients (its own value is 0), and the values.
    """
    layer = weights.products() if weights else plain_weights(drafter)
    hidden = unroll(drafter, pack, weights=layer)
    counts_S = num_trained_S or pack.num_trained
    scales = [step_decay**k / max(1, counts_S[k]) for k in range(len(hidden))]
    return head_loss(hidden, layer.head, pack, teacher_WD, scales, measure, workspace, objective)


def head_loss(
    hidden: Sequence[torch.Tensor],
    head: Weight,
    pack: Pack,
    teacher_WD: torch.Tensor,
    scales_S: Sequence[float],
    measure: bool,
    workspace: Workspace | None = None,
    objective: Objective = KL,
) -> tuple[torch.Tensor, Measured | None]:
    """Loss of ``unroll``'s outputs with a given weight of one row of each step; see ``ttt_loss``."""
    values = None
    if measure:
        wide = wide_dtype(head.value.dtype)
        empty = [torch.zeros(len(rows), dtype=wide, device=rows.device) for rows in pack.loss_rows[: len(hidden)]]
        values = Values(empty, [torch.zeros_like(part, dtype=torch.bool) for part in empty])
    logit_head_WE, teacher_WD = head.value.detach(), teacher_WD.to(head.value.dtype)
    if not head.value.is_cuda:  # torch has products of bfloat16 into float32 on CUDA alone
        logit_head_WE, teacher_WD = widened(logit_head_WE), widened(teacher_WD)
    workspace = workspace or Workspace()
    settings = _Settings(pack, head, logit_head_WE, teacher_WD, scales_S, workspace, objective)
    total = _HeadLoss.apply(settings, values, head.value, *hidden)
    if head.value.is_cuda:
        workspace.clear()
    return total, _summed(values, pack) if values else None


def _summed(values: Values, pack: Pack) -> Measured:
    """Per-step sums of per-row values."""
    S, trains_RS = len(values.losses), pack.trains_RS[:, : len(values.losses)]
    hits_RS = torch.zeros_like(trains_RS)
    for k in range(S):
        hits_RS[pack.loss_rows[k], k] = values.hits[k]
    chain_RS = (trains_RS & hits_RS).int().cumprod(1).bool()
    before_RS = torch.cat([torch.ones_like(trains_RS[:, :1]), chain_RS[:, :-1]], 1)
    losses_S = torch.stack([part.sum() for part in values.losses])
    num_trained_S = trains_RS.sum(0)
    return Measured(
        losses_S=losses_S / num_trained_S.clamp_min(1),
        num_trained_S=num_trained_S,
        num_hits_S=(trains_RS & hits_RS).sum(0),
        num_chained_S=(trains_RS & before_RS).sum(0),
        num_chain_hits_S=chain_RS.sum(0),
    )
