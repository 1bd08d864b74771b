"""What the target says at a position: its argmax over the full vocab, from post-norm states.

The distribution itself is taken inside the loss, over the draft vocab; only the question whether the
argmax is inside the draft vocab needs all V columns, once per position and run.

Letters: T tokens, D target hidden, V target vocab.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK_LOGITS = 1 << 24
"""Logits in memory at a time: 64 MiB in float32."""

FILL_MULTIPLE = 64
"""Rows are filled up to a multiple of this: few sizes of products (see ``drafter.precision``)."""


@torch.no_grad()
def teacher_ids(last_TD: torch.Tensor, head_VD: torch.Tensor) -> torch.Tensor:
    """Argmax [T] of the target's logits at each position, over the whole vocab, in chunks of rows.

    Args:
        last_TD: Post-norm states, any float dtype.
        head_VD: The target's head; the products are of its dtype.
    """
    T, rows = len(last_TD), max(FILL_MULTIPLE, CHUNK_LOGITS // len(head_VD) // FILL_MULTIPLE * FILL_MULTIPLE)
    filled_TD = F.pad(last_TD.to(head_VD.dtype), (0, 0, 0, -T % FILL_MULTIPLE))
    parts = [F.linear(part_RD, head_VD).argmax(-1) for part_RD in filled_TD.split(rows)]
    return torch.cat(parts)[:T] if parts else torch.empty(0, dtype=torch.int64)
