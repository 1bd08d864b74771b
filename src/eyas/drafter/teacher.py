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


@torch.no_grad()
def teacher_ids(last_TD: torch.Tensor, head_VD: torch.Tensor) -> torch.Tensor:
    """Argmax [T] of the target's logits at each position, over the whole vocab, in chunks of rows.

    Args:
        last_TD: Post-norm states, any float dtype.
        head_VD: The target's head in float32.
    """
    rows = max(1, CHUNK_LOGITS // head_VD.shape[0])
    parts = [F.linear(part_RD.to(head_VD.dtype), head_VD).argmax(-1) for part_RD in last_TD.split(rows)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
