"""The final norm between two conventions: ``last`` after it (eyas, SpecForge) or before it (speculators from 0.4).

RMSNorm ignores its input's length, so ``x' = y / scale`` is a valid pre-norm state of a post-norm ``y``:
``RMSNorm(x') = y`` up to eps and one rounding. The scale is ``weight_offset + w``: 1 + w for Gemma types.

Letters: T tokens of a sample, N rows of several samples, D target hidden size, V target vocab.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eyas.contracts import FinalHidden, FinalNorm
from eyas.errors import StoreError
from eyas.shards.layouts.base import LayoutSample

SAME_TOP1 = 0.02
"""Difference of two top-1 shares that says nothing."""
UNIT_TOLERANCE = 0.01
"""Rows after the norm have a root mean square of exactly 1 per scale; bf16 leaves under 0.002."""
JUDGED_ROWS = 2048
ROWS_PER_CHUNK = 256


@dataclass(frozen=True, slots=True)
class FinalScale:
    """The target's final RMSNorm: scale_D float32, with the offset, and its eps."""

    scale_D: torch.Tensor
    eps: float


def final_scale(norm: FinalNorm, weight_D: torch.Tensor) -> FinalScale:
    """Scale of the target's final norm.

    Raises:
        StoreError: The norm is no RMSNorm, so states cannot be moved across it.
    """
    if norm.kind != "rms_norm":
        raise StoreError(
            f"the target's final norm is {norm.kind!r}: states cannot be moved across it, expected 'rms_norm'",
            "export to a layout of post-norm states (specforge, or speculators_v1 for trainer 0.3.0)",
        )
    return FinalScale(weight_D.float() + norm.weight_offset, norm.eps)


def to_pre_norm(last_TD: torch.Tensor, final: FinalScale) -> torch.Tensor:
    """Pre-norm states x' = y / scale of post-norm states, computed in float32, rounded to bf16 once.

    Raises:
        StoreError: A scale is zero: that channel's state before the norm is lost.
    """
    zeros = (final.scale_D == 0).nonzero().flatten()
    if len(zeros):
        raise StoreError(
            f"the target's final norm has {len(zeros)} zero scales, the first in channel {int(zeros[0])}: "
            "states before the norm cannot be found from those after it",
            "export to a layout of post-norm states (specforge, or speculators_v1 for trainer 0.3.0)",
        )
    return (last_TD.float() / final.scale_D).bfloat16()


def to_post_norm(last_TD: torch.Tensor, final: FinalScale) -> torch.Tensor:
    """The target's final norm, computed in float32, rounded to bf16 once."""
    last_TD = last_TD.float()
    inverse_T1 = torch.rsqrt(last_TD.square().mean(dim=-1, keepdim=True) + final.eps)
    return (last_TD * inverse_T1 * final.scale_D).bfloat16()


@dataclass(frozen=True, slots=True, kw_only=True)
class NormReading:
    """Both readings of foreign ``last`` states beside the tokens that follow."""

    num_rows: int
    top1_as_post: float
    """Share of rows whose argmax under the target's head is the next token, taken as they are."""
    top1_as_pre: float
    """The same after the final norm."""
    unit_error: float
    """Median over rows of |rms(last / scale) - 1|: near 0 only for states that were normed."""

    @property
    def verdict(self) -> FinalHidden | None:
        """What the states are; None when the two signs contradict each other."""
        is_unit = self.unit_error < UNIT_TOLERANCE
        lead = self.top1_as_post - self.top1_as_pre
        if is_unit and lead > -SAME_TOP1:
            return "post_norm"
        if not is_unit and lead < -SAME_TOP1:
            return "pre_norm"
        return None

    @property
    def text(self) -> str:
        """One line for people."""
        return (
            f"{self.num_rows:,} rows: top-1 is the next token in {self.top1_as_post:.3f} as post-norm, "
            f"{self.top1_as_pre:.3f} as pre-norm; rms(last / scale) is {self.unit_error:.4f} off 1"
        )


def read_norm(samples: Iterable[LayoutSample], final: FinalScale, head_VD: torch.Tensor) -> NormReading | None:
    """Read the ``last`` states of some samples both ways; None when they hold no row with a next token."""
    rows, following = [], []
    for sample in samples:
        wanted_T = sample.loss_mask_T[1:].bool()
        wanted_T = wanted_T if wanted_T.any() else torch.ones_like(wanted_T)
        rows.append(sample.last_TD[:-1][wanted_T].float())
        following.append(sample.input_ids_T[1:][wanted_T])
    last_ND = torch.cat(rows)[:JUDGED_ROWS] if rows else torch.empty(0)
    if not len(last_ND):
        return None
    ids_N = torch.cat(following)[:JUDGED_ROWS]
    used_D = final.scale_D != 0
    unit_N = (last_ND[:, used_D] / final.scale_D[used_D]).square().mean(dim=1).sqrt()
    return NormReading(
        num_rows=len(last_ND),
        top1_as_post=_top1(last_ND, ids_N, head_VD),
        top1_as_pre=_top1(to_post_norm(last_ND, final), ids_N, head_VD),
        unit_error=float((unit_N - 1).abs().median()),
    )


def _top1(last_ND: torch.Tensor, ids_N: torch.Tensor, head_VD: torch.Tensor) -> float:
    hits = 0
    for start in range(0, len(last_ND), ROWS_PER_CHUNK):
        chunk = slice(start, start + ROWS_PER_CHUNK)
        hits += int(((last_ND[chunk].to(head_VD.dtype) @ head_VD.T).argmax(dim=1) == ids_N[chunk]).sum())
    return hits / len(last_ND)
