"""Fused head and KL loss over all TTT steps: logits exist for one chunk of teacher positions at a time.

    L_k = mean over the rows that train at step k of KL(target || draft), both over the draft vocab
    loss = sum over k of decay^k L_k                                       (weights are not normalised)

Row t at step k has its teacher at position u = t+k+1, so the steps share the teacher: a chunk of
positions u takes its distribution once, then every step aligns its rows to those positions. The
gradient of the hidden states is made in the same pass, so nothing of width W outlives a chunk. Softmax,
log-softmax, KL and their gradients are float32 (float64 when the model is).

Letters: R rows of a step, C teacher positions of a chunk, U teacher positions, S steps, N rows of all
steps, E drafter hidden, D target hidden, W draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eyas.drafter.model import Drafter
from eyas.drafter.rows import Pack
from eyas.drafter.ttt import unroll

CHUNK_LOGITS = 1 << 22
"""Logits of one chunk (16 MiB in float32); three such tensors live at a time."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one pack's loss consists of; everything but ``total`` is detached."""

    total: torch.Tensor
    losses_S: torch.Tensor
    """Mean KL per step; 0 where no row trains."""
    num_trained_S: torch.Tensor
    num_hits_S: torch.Tensor
    """Trained rows whose draft argmax is the teacher's argmax over the draft vocab."""
    num_chained_S: torch.Tensor
    """Rows that train at this step and hit at every earlier one."""
    num_chain_hits_S: torch.Tensor
    """Those that hit here too: over ``num_chained_S`` this is alpha_k."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Teacher positions of one chunk, and which row of each step belongs to each of them."""

    positions_C: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    """Per step the index [C] into the step's rows; 0 where there is none, with weight 0."""
    weights: tuple[torch.Tensor, ...]
    """Per step the weight [C] of the row: 1 / trained rows, or 0."""


def plan_chunks(pack: Pack, num_steps: int, size: int) -> list[Chunk]:
    """Cut the teacher positions that some training row needs into chunks of ``size``."""
    T = len(pack.ids_T)
    row_at = torch.full((num_steps, T + 1), -1, device=pack.rows_R.device)
    for k in range(num_steps):
        trains_R = pack.trains_RS[: pack.num_rows[k], k].nonzero()[:, 0]
        row_at[k, pack.rows_R[trains_R] + k + 1] = trains_R
    positions_U = (row_at >= 0).any(0).nonzero()[:, 0]
    counts = [max(1, int(pack.trains_RS[:, k].sum())) for k in range(num_steps)]
    chunks = []
    for positions_C in positions_U.split(size):
        rows_SC = row_at[:, positions_C]
        weights = tuple((rows_SC[k] >= 0).double() / counts[k] for k in range(num_steps))
        chunks.append(Chunk(positions_C, tuple(rows_SC.clamp_min(0)), weights))
    return chunks


class _HeadLoss(torch.autograd.Function):
    """(chunks, last_TD, teacher head, step weights, hits_RS, draft head, hidden of each step) → (total, losses_S).

    Fills ``hits_RS`` in place. The gradient is ready when the forward pass ends.
    """

    @staticmethod
    def forward(
        ctx: Any,
        chunks: Sequence[Chunk],
        last_TD: torch.Tensor,
        teacher_WD: torch.Tensor,
        step_weights: Sequence[float],
        hits_RS: torch.Tensor | None,
        head_WE: torch.Tensor,
        *hidden: torch.Tensor,
    ) -> Any:
        losses_S = head_WE.new_zeros(len(hidden))
        grads = [torch.zeros_like(hidden_RE) for hidden_RE in hidden]
        grad_head_WE = torch.zeros_like(head_WE) if ctx.needs_input_grad[5] else None
        for chunk in chunks:
            last_CD = last_TD[chunk.positions_C].to(head_WE.dtype)
            log_p_CW = F.log_softmax(F.linear(last_CD, teacher_WD), -1)
            minus_p_CW = log_p_CW.exp().neg_()
            entropy_C = torch.linalg.vecdot(minus_p_CW, log_p_CW)
            top_C1 = log_p_CW.argmax(-1, keepdim=True) if hits_RS is not None else None
            del log_p_CW
            for k, hidden_RE in enumerate(hidden):
                rows_C, weights_C = chunk.rows[k], chunk.weights[k].to(head_WE.dtype)
                hidden_CE = hidden_RE[rows_C]
                log_q_CW = F.log_softmax(F.linear(hidden_CE, head_WE), -1)
                losses_S[k] += ((torch.linalg.vecdot(minus_p_CW, log_q_CW) - entropy_C) * weights_C).sum()
                if hits_RS is not None and top_C1 is not None:
                    hit_C = log_q_CW.gather(1, top_C1)[:, 0] >= log_q_CW.amax(-1)
                    trained_C = weights_C > 0
                    hits_RS[rows_C[trained_C], k] = hit_C[trained_C]
                # d KL / d logits = q - p, before the row's weight
                grad_CW = torch.ops.aten._log_softmax_backward_data(minus_p_CW, log_q_CW, -1, head_WE.dtype)
                scaled_C1 = (weights_C * step_weights[k])[:, None]
                grads[k].index_add_(0, rows_C, grad_CW @ head_WE * scaled_C1)
                if grad_head_WE is not None:
                    grad_head_WE.addmm_(grad_CW.t(), hidden_CE * scaled_C1)
        ctx.save_for_backward(*grads)
        ctx.grad_head_WE = grad_head_WE
        ctx.mark_non_differentiable(losses_S)
        return (losses_S * losses_S.new_tensor(step_weights)).sum(), losses_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, _: torch.Tensor) -> Any:  # type: ignore[override]
        grad_head_WE = None if ctx.grad_head_WE is None else ctx.grad_head_WE * grad_total
        return None, None, None, None, None, grad_head_WE, *(grad * grad_total for grad in ctx.saved_tensors)


def ttt_loss(
    drafter: Drafter,
    pack: Pack,
    teacher_WD: torch.Tensor,
    step_decay: float,
    ttt_steps: int | None = None,
    count_hits: bool = True,
) -> Report:
    """Unroll a pack and take its loss.

    Args:
        drafter: The model; ``lm_head`` gets a gradient when it requires one.
        pack: Documents and rows; at least one row must train.
        teacher_WD: The target head's rows of the draft vocab, in the model's dtype.
        step_decay: Weight of step k is ``step_decay ** k``.
        ttt_steps: Steps to unroll; all of the pack's by default.
        count_hits: Fill the hit counts; they stay 0 otherwise, which saves two passes over the logits.
    """
    hidden = unroll(drafter, pack, ttt_steps)
    num_steps = len(hidden)
    hits_RS = torch.zeros_like(pack.trains_RS[:, :num_steps]) if count_hits else None
    chunks = plan_chunks(pack, num_steps, max(1, CHUNK_LOGITS // teacher_WD.shape[0]))
    weights = [step_decay**k for k in range(num_steps)]
    total, losses_S = _HeadLoss.apply(  # type: ignore[misc]
        chunks, pack.last_TD, teacher_WD, weights, hits_RS, drafter.lm_head.weight, *hidden
    )
    trains_RS = pack.trains_RS[:, :num_steps]
    if hits_RS is None:
        hits_RS = torch.zeros_like(trains_RS)
    chain_RS = (trains_RS & hits_RS).int().cumprod(1).bool()
    before_RS = torch.cat([torch.ones_like(trains_RS[:, :1]), chain_RS[:, :-1]], 1)
    return Report(
        total=total,
        losses_S=losses_S.detach(),
        num_trained_S=trains_RS.sum(0),
        num_hits_S=(trains_RS & hits_RS).sum(0),
        num_chained_S=(trains_RS & before_RS).sum(0),
        num_chain_hits_S=chain_RS.sum(0),
    )
