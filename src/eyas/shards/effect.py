"""What a lossy codec does to states: size, error per stream, and what the target would say from its last states.

    states → encode → decode → relative error;  last, before and after → head → KL, top-1 agreement

Letters: N streams (aux streams, then last), R rows, T tokens, A aux streams, D target hidden size, V target vocab.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.errors import StoreError
from eyas.shards.codecs import Codec

CHUNK_LOGITS = 1 << 24
"""Logits in memory at a time, per distribution: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Rows:
    """States of one sample: aux_TAD and last_RD, bf16; ``last_RD`` holds only the rows that are judged."""

    aux_TAD: torch.Tensor
    last_RD: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What the codec did to the rows it was tried on."""

    state_bytes: int
    """As bf16."""
    encoded_bytes: int
    relative_error: tuple[float, ...]
    """Per stream, last at the end: norm of the difference over norm of the states."""
    kl: float
    """Mean over judged rows of KL(target's distribution from the states ‖ from the decoded ones), nats."""
    top1: float
    """Share of judged rows with the same most likely token."""
    num_aux_rows: int
    num_judged_rows: int

    @property
    def ratio(self) -> float:
        """Encoded over bf16 bytes."""
        return self.encoded_bytes / self.state_bytes

    def __str__(self) -> str:
        errors = " ".join(f"{error:.4f}" for error in self.relative_error)
        return (
            f"{self.ratio:.4f} of bf16; {self.num_judged_rows:,} rows: KL {self.kl:.1e} nats, top-1 agreement "
            f"{self.top1:.2%}; relative error {errors} (aux, last)"
        )


@torch.no_grad()
def measure_effect(codec: Codec, states: Iterable[Rows], head_VD: torch.Tensor) -> Effect:
    """Send states through the codec and compare.

    Args:
        codec: Calibrated for these streams.
        states: Lossless states by sample.
        head_VD: The target's head, any float dtype.

    Raises:
        StoreError: There is no judged row.
    """
    head_VD = head_VD.float()
    state_bytes = encoded_bytes = num_aux_rows = num_judged = num_same = 0
    squares: dict[int, list[float]] = {}
    kl_sum = 0.0
    for rows in states:
        A = rows.aux_TAD.shape[1]
        for stream in range(A + 1):
            rows_RD = (rows.last_RD if stream == A else rows.aux_TAD[:, stream]).contiguous()
            if not len(rows_RD):
                continue
            data = codec.encode(rows_RD, stream)
            decoded_RD = torch.empty_like(rows_RD)
            codec.decode(data, decoded_RD, stream)
            state_bytes, encoded_bytes = state_bytes + rows_RD.nbytes, encoded_bytes + len(data)
            sums = squares.setdefault(stream, [0.0, 0.0])
            sums[0] += float((decoded_RD.double() - rows_RD.double()).square().sum())
            sums[1] += float(rows_RD.double().square().sum())
            if stream == A:
                kl, same = _compare(rows_RD, decoded_RD, head_VD)
                kl_sum, num_same = kl_sum + kl, num_same + same
        num_aux_rows, num_judged = num_aux_rows + len(rows.aux_TAD), num_judged + len(rows.last_RD)
    if not num_judged:
        raise StoreError("no row to judge the codec int8 on, expected answers of two tokens or more")
    return Effect(
        state_bytes=state_bytes,
        encoded_bytes=encoded_bytes,
        relative_error=tuple((error / max(total, 1e-300)) ** 0.5 for _, (error, total) in sorted(squares.items())),
        kl=kl_sum / num_judged,
        top1=num_same / num_judged,
        num_aux_rows=num_aux_rows,
        num_judged_rows=num_judged,
    )


def _compare(last_RD: torch.Tensor, decoded_RD: torch.Tensor, head_VD: torch.Tensor) -> tuple[float, int]:
    """Sum over rows of the KL, and rows whose argmax agrees."""
    kl, same, step = 0.0, 0, max(1, CHUNK_LOGITS // len(head_VD))
    for true_RD, found_RD in zip(last_RD.split(step), decoded_RD.split(step), strict=True):
        true_RV = F.log_softmax(F.linear(true_RD.float(), head_VD), -1)
        found_RV = F.log_softmax(F.linear(found_RD.float(), head_VD), -1)
        same += int((true_RV.argmax(-1) == found_RV.argmax(-1)).sum())
        kl += float(F.kl_div(found_RV, true_RV, reduction="none", log_target=True).sum(-1).double().sum())
    return kl, same
