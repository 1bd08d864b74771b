"""Fused head and KL loss over all TTT steps: logits exist for one chunk of teacher positions at a time.

    L_k = mean over the rows that train at step k of KL(target || draft), both over the draft vocab
    loss = sum over k of decay^k L_k                                       (weights are not normalised)

Row t at step k has its teacher at position u = t+k+1, so the steps share the teacher: a chunk of
positions u takes its distribution once, and the rows of all steps are aligned to those positions. The
gradient of the hidden states, q - p, is made in the same pass, so nothing of width W outlives a chunk. The
gradient needs no loss value: losses and hits are measured only when asked for, which saves a quarter of
the work at width W. Softmax, log-softmax, KL and their gradients are float32 (float64 when the model is).

Letters: R rows of a step, C teacher positions of a chunk, S steps, X = S C, N rows of all steps, E drafter
hidden, D target hidden, W draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eyas.drafter.model import Drafter
from eyas.drafter.objective import Objective, entropy
from eyas.drafter.precision import reduced_dtype
from eyas.drafter.rows import Pack
from eyas.drafter.ttt import unroll

CHUNK_LOGITS = 1 << 24
"""Logits of one chunk, teacher and all steps together: 64 MiB in float32."""


class Workspace:
    """Memory that every step uses again: fresh pages cost more than the arithmetic at this width."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, name: str, rows: int, columns: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised [rows, columns] that lives until the name is taken again."""
        memory, size = self._memory.get(name), rows * columns
        if memory is None or memory.numel() < size or memory.dtype != dtype or memory.device != like.device:
            self._memory[name] = memory = torch.empty(size, dtype=dtype, device=like.device)
        return memory[:size].view(rows, columns)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one pack's loss consists of, per step; detached."""

    losses_S: torch.Tensor
    """Mean of the rows' losses; 0 where no row trains."""
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
    """Teacher positions of one chunk, and which row of each step belongs to each of them."""

    positions_C: torch.Tensor
    rows_X: torch.Tensor
    """Index into the rows of all steps, step by step; 0 where there is none, with weight 0."""
    weights_X: torch.Tensor
    """Float64: step weight / trained rows of the step, or 0."""


def plan_chunks(pack: Pack, step_weights: Sequence[float], size: int, multiple: int) -> list[Chunk]:
    """Cut the teacher positions that some training row needs into chunks of ``size``.

    Args:
        pack: Documents and rows.
        step_weights: Weight of each step's mean loss.
        size: Most positions of a chunk.
        multiple: Chunks are filled up to a multiple of this, see ``rows.pack_documents``.
    """
    S, T = len(step_weights), len(pack.ids_T)
    row_at_ST = torch.full((S, T), -1, device=pack.rows_R.device)
    first = 0
    for k in range(S):
        trains_R = pack.trains_RS[: pack.num_rows[k], k].nonzero()[:, 0]
        row_at_ST[k, pack.rows_R[trains_R] + k + 1] = trains_R + first
        first += pack.num_rows[k]
    counts_S = pack.trains_RS[:, :S].sum(0).clamp_min(1)
    scale_S1 = (row_at_ST.new_tensor(step_weights, dtype=torch.float64) / counts_S)[:, None]
    chunks = []
    for part_C in (row_at_ST >= 0).any(0).nonzero()[:, 0].split(size):
        # what fills the chunk up has no row and weight 0; it reads a teacher's state, because others may not be stored
        fill = -len(part_C) % multiple
        positions_C = torch.cat([part_C, part_C[:1].expand(fill)])
        rows_SC = F.pad(row_at_ST[:, part_C], (0, fill), value=-1)
        weights_SC = (rows_SC >= 0) * scale_S1
        chunks.append(Chunk(positions_C, rows_SC.clamp_min(0).flatten(), weights_SC.flatten()))
    return chunks


@dataclass
class Sums:
    """Filled by the forward pass when measuring."""

    losses_N: torch.Tensor
    """Loss of each row of all steps; 0 where it does not train."""
    hits_N: torch.Tensor


class _HeadLoss(torch.autograd.Function):
    """Loss of hidden states [N,E] of all steps; the gradient is ready when the forward pass ends.

    The value returned is 0: only its gradient means anything. ``sums`` takes the values when given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        head_WE: torch.Tensor,
        chunks: Sequence[Chunk],
        last_TD: torch.Tensor,
        teacher_WD: torch.Tensor,
        workspace: Workspace,
        sums: Sums | None,
        objective: Objective,
    ) -> torch.Tensor:
        W, dtype = len(head_WE), head_WE.dtype
        product_dtype = reduced_dtype() or dtype
        grad_NE = torch.zeros_like(hidden_NE)
        grad_head_WE = torch.zeros_like(head_WE) if ctx.needs_input_grad[1] else None
        gradient_head_WE = head_WE.to(product_dtype)
        for chunk in chunks:
            C, X = len(chunk.positions_C), len(chunk.rows_X)
            p_CW = workspace.take("teacher", C, W, head_WE, dtype)
            torch.mm(last_TD[chunk.positions_C].to(dtype), teacher_WD.t(), out=p_CW)
            hidden_XE = hidden_NE[chunk.rows_X]
            q_XW = workspace.take("draft", X, W, head_WE, dtype)
            torch.mm(hidden_XE, head_WE.t(), out=q_XW)
            objective.teacher_(p_CW)
            if sums is not None:
                _measure(sums, chunk, objective, p_CW, q_XW)
            torch.softmax(q_XW, -1, out=q_XW)
            for q_CW in q_XW.view(-1, C, W):
                objective.gradient_(p_CW, q_CW)  # before the row's weight
            grad_XW = q_XW
            if product_dtype != dtype:
                grad_XW = workspace.take("gradient", X, W, head_WE, product_dtype).copy_(q_XW)
            weights_X1 = chunk.weights_X.to(dtype)[:, None]
            grad_NE.index_add_(0, chunk.rows_X, (grad_XW @ gradient_head_WE).to(dtype).mul_(weights_X1))
            if grad_head_WE is not None:
                grad_head_WE.addmm_(q_XW.t(), hidden_XE * weights_X1)
        ctx.save_for_backward(grad_NE)
        ctx.grad_head_WE = grad_head_WE
        return hidden_NE.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> Any:  # type: ignore[override]
        (grad_NE,) = ctx.saved_tensors
        grad_head_WE = None if ctx.grad_head_WE is None else ctx.grad_head_WE * grad_total
        return grad_NE * grad_total, grad_head_WE, None, None, None, None, None, None


def _measure(sums: Sums, chunk: Chunk, objective: Objective, p_CW: torch.Tensor, logits_XW: torch.Tensor) -> None:
    """Loss and hit of every training row of a chunk."""
    logits_SCW = logits_XW.view(-1, *p_CW.shape)
    entropy_C = entropy(p_CW)
    loss_SC = torch.stack([objective.values(p_CW, entropy_C, logits_CW) for logits_CW in logits_SCW])
    hit_SC = logits_SCW.argmax(-1) == p_CW.argmax(-1)
    trains_X = chunk.weights_X > 0
    rows_Y = chunk.rows_X[trains_X]
    sums.losses_N[rows_Y], sums.hits_N[rows_Y] = loss_SC.flatten()[trains_X], hit_SC.flatten()[trains_X]


def ttt_loss(
    drafter: Drafter,
    pack: Pack,
    teacher_WD: torch.Tensor,
    step_decay: float,
    ttt_steps: int | None = None,
    measure: bool = True,
    workspace: Workspace | None = None,
    objective: Objective = Objective(),  # noqa: B008 - frozen
) -> tuple[torch.Tensor, Measured | None]:
    """Unroll a pack and make its loss.

    Args:
        drafter: The model; ``lm_head`` gets a gradient when it requires one.
        pack: Documents and rows; at least one row must train.
        teacher_WD: The target head's rows of the draft vocab, in the model's dtype.
        step_decay: Weight of step k is ``step_decay ** k``.
        ttt_steps: Steps to unroll; all of the pack's by default.
        measure: Take the loss values and hits too.
        workspace: Memory to use again; keep one per run.
        objective: What a row's loss is.

    Returns:
        A scalar whose ``backward`` gives the loss's gradients (its own value is 0), and the values.
    """
    hidden = unroll(drafter, pack, ttt_steps)
    weights = [step_decay**k for k in range(len(hidden))]
    return head_loss(hidden, drafter.lm_head.weight, pack, teacher_WD, weights, measure, workspace, objective)


def head_loss(
    hidden: Sequence[torch.Tensor],
    head_WE: torch.Tensor,
    pack: Pack,
    teacher_WD: torch.Tensor,
    step_weights: Sequence[float],
    measure: bool,
    workspace: Workspace | None = None,
    objective: Objective = Objective(),  # noqa: B008 - frozen
) -> tuple[torch.Tensor, Measured | None]:
    """Loss of ``unroll``'s outputs with given step weights; see ``ttt_loss``."""
    hidden_NE = torch.cat(list(hidden))
    size = max(1, CHUNK_LOGITS // (len(head_WE) * (len(hidden) + 1)) // pack.multiple) * pack.multiple
    chunks = plan_chunks(pack, step_weights, size, pack.multiple)
    sums = None
    if measure:
        losses_N = hidden_NE.new_zeros(len(hidden_NE), requires_grad=False)
        sums = Sums(losses_N, torch.zeros_like(losses_N, dtype=torch.bool))
    total = _HeadLoss.apply(
        hidden_NE, head_WE, chunks, pack.last_TD, teacher_WD, workspace or Workspace(), sums, objective
    )
    return total, _summed(sums, pack, [len(h) for h in hidden]) if sums else None


def _summed(sums: Sums, pack: Pack, num_rows: Sequence[int]) -> Measured:
    """Per-step sums of per-row values."""
    trains_RS = pack.trains_RS[:, : len(num_rows)]
    losses_S = torch.stack([part.sum() for part in sums.losses_N.split(list(num_rows))])
    hits_RS = torch.zeros_like(trains_RS)
    for k, part in enumerate(sums.hits_N.split(list(num_rows))):
        hits_RS[: len(part), k] = part
    chain_RS = (trains_RS & hits_RS).int().cumprod(1).bool()
    before_RS = torch.cat([torch.ones_like(trains_RS[:, :1]), chain_RS[:, :-1]], 1)
    num_trained_S = trains_RS.sum(0)
    return Measured(
        losses_S=losses_S / num_trained_S.clamp_min(1),
        num_trained_S=num_trained_S,
        num_hits_S=(trains_RS & hits_RS).sum(0),
        num_chained_S=(trains_RS & before_RS).sum(0),
        num_chain_hits_S=chain_RS.sum(0),
    )
