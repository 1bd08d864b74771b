"""What a row's loss is: functions of the target's logits and the draft's, both over the draft vocab.

    kl  sum p log(p / q)                     p: the target's softmax, or that of its ``top_k`` largest logits
    ce  -log q[c]                            c: the target's choice, the first of its largest logits
    lk  w KL + (1 - w) (1 - a)               a = sum min(p, q), the rate at which sampling accepts; w = exp(-3 a)

``lk`` is the hybrid of arXiv 2602.23881 with the decay that its authors found best. KL leads while the draft is
far off, where the gradient of ``a`` vanishes (so it does in the paper's other form, -log a, when q prefers a
token that p gives some share); what is accepted leads once it is near. w is taken row by row and as a
constant: no gradient flows through it.

Gradients of the draft's logits: q - p for kl, and for ce with p[c] = 1; for lk
``w (q - p) + (1 - w) q (Q - below)``, below = [q < p], Q = sum of q where below.

Letters: C teacher positions, S steps, W draft vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

KINDS = ("kl", "ce", "lk")
LK_DECAY = 3.0
"""w = exp(-LK_DECAY a): 1 where nothing is accepted, 0.05 where all is."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a row."""

    kind: str = "kl"
    """``kl``, ``ce`` or ``lk``."""
    top_k: int = 0
    """The target's distribution keeps its largest logits, this many and all that equal the last of them, and
    is normalised again; 0 keeps all. The draft's is never cut."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    def teacher_(self, logits_CW: torch.Tensor) -> torch.Tensor:
        """Turn the target's logits into its distribution p, in place."""
        if self.kind == "ce":
            choice_C1 = logits_CW.argmax(-1, keepdim=True)
            return logits_CW.zero_().scatter_(-1, choice_C1, 1.0)
        if 0 < self.top_k < logits_CW.shape[-1]:
            smallest_C1 = logits_CW.topk(self.top_k, -1).values[:, -1:]
            logits_CW.masked_fill_(logits_CW < smallest_C1, -torch.inf)
        return torch.softmax(logits_CW, -1, out=logits_CW)

    def gradient_(self, p_CW: torch.Tensor, q_SCW: torch.Tensor) -> torch.Tensor:
        """Turn the draft's distribution q into the gradient of the row's loss by the draft's logits, in place."""
        if self.kind != "lk":
            return q_SCW.sub_(p_CW)
        for q_CW in q_SCW:  # step by step: what it takes beside q is as wide as the teacher
            accepted_C1 = torch.minimum(p_CW, q_CW).sum(-1, keepdim=True)
            below_CW = q_CW * (q_CW < p_CW)
            through_CW = (q_CW * below_CW.sum(-1, keepdim=True)).sub_(below_CW)
            weight_C1 = _kl_weight(accepted_C1)
            q_CW.sub_(p_CW).mul_(weight_C1).add_(through_CW.mul_(1 - weight_C1))
        return q_SCW

    def values(self, p_CW: torch.Tensor, logits_SCW: torch.Tensor) -> torch.Tensor:
        """Loss [S,C] of every row.

        Args:
            p_CW: From ``teacher_``.
            logits_SCW: The draft's logits.
        """
        log_q_SCW = F.log_softmax(logits_SCW, -1)
        kl_SC = -torch.special.entr(p_CW).sum(-1) - torch.linalg.vecdot(p_CW, log_q_SCW)
        if self.kind != "lk":
            return kl_SC
        accepted_SC = torch.stack([torch.minimum(p_CW, log_q_CW.exp()).sum(-1) for log_q_CW in log_q_SCW])
        weight_SC = _kl_weight(accepted_SC)
        return weight_SC * kl_SC + (1 - weight_SC) * (1 - accepted_SC)


def _kl_weight(accepted: torch.Tensor) -> torch.Tensor:
    return torch.exp(-LK_DECAY * accepted)
