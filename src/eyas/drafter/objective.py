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

Letters: C teacher positions, X rows of the draft with their teachers beside them, W draft vocab.
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

    def restrict_(self, logits_CW: torch.Tensor) -> torch.Tensor:
        """Leave of the target's logits those whose softmax is p, in place; the others become -inf."""
        if self.kind == "ce":
            choice_C1 = logits_CW.argmax(-1, keepdim=True)
            return logits_CW.fill_(-torch.inf).scatter_(-1, choice_C1, 0.0)
        if 0 < self.top_k < logits_CW.shape[-1]:
            smallest_C1 = logits_CW.topk(self.top_k, -1).values[:, -1:]
            logits_CW.masked_fill_(logits_CW < smallest_C1, -torch.inf)
        return logits_CW

    def gradient_(self, p_XW: torch.Tensor, q_XW: torch.Tensor) -> torch.Tensor:
        """Turn the draft's distribution q into the gradient of each row's loss by the draft's logits, in place.

        Args:
            p_XW: Softmax of the target's logits after ``restrict_``.
            q_XW: Softmax of the draft's.
        """
        if self.kind != "lk":
            return q_XW.sub_(p_XW)
        weight_X1 = _kl_weight(_accepted(p_XW, q_XW))[:, None]
        below_XW = q_XW * (q_XW < p_XW)
        through_XW = (q_XW * below_XW.sum(-1, keepdim=True)).sub_(below_XW)
        return q_XW.sub_(p_XW).mul_(weight_X1).addcmul_(through_XW, 1 - weight_X1)

    def values(self, p_XW: torch.Tensor, entropy_X: torch.Tensor, logits_XW: torch.Tensor) -> torch.Tensor:
        """Loss [X] of every row.

        Args:
            p_XW: Softmax of the target's logits after ``restrict_``.
            entropy_X: Of each p, which many rows share.
            logits_XW: The draft's logits.
        """
        log_q_XW = F.log_softmax(logits_XW, -1)
        kl_X = -entropy_X - torch.linalg.vecdot(p_XW, log_q_XW)
        if self.kind != "lk":
            return kl_X
        accepted_X = _accepted(p_XW, log_q_XW.exp_())
        weight_X = _kl_weight(accepted_X)
        return weight_X * kl_X + (1 - weight_X) * (1 - accepted_X)


KL = Objective()


def entropy(p_CW: torch.Tensor) -> torch.Tensor:
    """Entropy [C] in nats; a token without any share adds none."""
    return torch.special.entr(p_CW).sum(-1)


def _accepted(p_XW: torch.Tensor, q_XW: torch.Tensor) -> torch.Tensor:
    return torch.minimum(p_XW, q_XW).sum(-1)


def _kl_weight(accepted_X: torch.Tensor) -> torch.Tensor:
    return torch.exp(-LK_DECAY * accepted_X)
