"""What the target says at a position: its argmax over the full vocab, from post-norm states.

The distribution itself is taken inside the loss, over the draft vocab; only the question whether the
argmax is inside the draft vocab needs all V columns, once per position and run. So a GPU does not keep the whole
head: its rows come by in pieces.

Letters: T tokens, R rows at a time, D target hidden, V target vocab.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from eyas.drafter.precision import wide_product

CHUNK_LOGITS = 1 << 24
"""Logits in memory at a time: 64 MiB in float32."""
PIECE_LOGITS = 1 << 23
"""Likewise beside a piece of the head: 32 MiB."""
PIECE_BYTES = 1 << 26
"""Of the head on a GPU at a time; a power of two, to which pinned memory is rounded up."""

FILL_MULTIPLE = 64
"""Rows are filled up to a multiple of this: few sizes of products (see ``drafter.precision``)."""


@torch.no_grad()
def teacher_ids(last_TD: torch.Tensor, head_VD: torch.Tensor) -> torch.Tensor:
    """Argmax [T] of the target's logits at each position, over the whole vocab, in chunks of rows.

    Args:
        last_TD: Post-norm states, any float dtype.
        head_VD: The target's head; the products are of its dtype.
    """
    T, rows = len(last_TD), _rows_at_a_time(CHUNK_LOGITS, len(head_VD))
    filled_TD = F.pad(last_TD.to(head_VD.dtype), (0, 0, 0, -T % FILL_MULTIPLE))
    parts = [F.linear(part_RD, head_VD).argmax(-1) for part_RD in filled_TD.split(rows)]
    return torch.cat(parts)[:T] if parts else torch.empty(0, dtype=torch.int64)


@torch.no_grad()
def streamed_ids(last_TD: torch.Tensor, pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """``teacher_ids`` of a head that comes to the device piece by piece, through room for one of them.

    Logits are float32, also of bfloat16 factors. Kernels and copies run on the stream of the calling thread.

    Args:
        last_TD: Post-norm states, in host memory or on the device.
        pieces: Rows of the head in order, in host memory, pinned for a GPU; the first is the longest.
        device: Where the products are made.
    """
    last_TD = last_TD.to(device, pieces[0].dtype)
    best_T = torch.full((len(last_TD),), -torch.inf, device=device)
    ids_T = torch.zeros(len(last_TD), dtype=torch.int64, device=device)
    room_VD, first = torch.empty_like(pieces[0], device=device), 0
    for piece_VD in pieces if len(last_TD) else ():
        head_VD = room_VD[: len(piece_VD)].copy_(piece_VD, non_blocking=True)
        rows = _rows_at_a_time(PIECE_LOGITS, len(piece_VD))
        for x_RD, best_R, ids_R in zip(*(whole.split(rows) for whole in (last_TD, best_T, ids_T)), strict=True):
            value_R, place_R = wide_product(x_RD, head_VD).max(-1)
            better_R = value_R > best_R  # of equal logits the first id is the argmax
            ids_R.copy_(torch.where(better_R, place_R + first, ids_R))
            best_R.copy_(torch.where(better_R, value_R, best_R))
        first += len(piece_VD)
    return ids_T.cpu()


def _rows_at_a_time(num_logits: int, vocab_size: int) -> int:
    return max(FILL_MULTIPLE, num_logits // vocab_size // FILL_MULTIPLE * FILL_MULTIPLE)


class TargetHead:
    """The target's head, asked for its choice over the whole vocab; safe to call from several threads.

    On a CPU it is one float32 tensor. For a GPU it stays in pinned host memory, in bfloat16 when that holds its values
    exactly, and is streamed once a call: ask for many documents at a time.

    Args:
        head_VD: In host memory, any float dtype.
        device: Where the products are made.
    """

    def __init__(self, head_VD: torch.Tensor, device: torch.device) -> None:
        self.device = device
        self._lock, self._pinned = threading.Lock(), False
        self._pieces = cut_head(_narrowed(head_VD)) if device.type == "cuda" else [head_VD.float()]

    def ids(self, documents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Argmax [T] of each document's post-norm states [T,D], in host memory."""
        if self.device.type != "cuda":
            return [teacher_ids(last_TD, self._pieces[0]) for last_TD in documents]
        with self._lock:  # one piece on the device, whoever asks
            if not self._pinned:
                self._pieces, self._pinned = [piece_VD.pin_memory() for piece_VD in self._pieces], True
            ids = streamed_ids(torch.cat(list(documents)), self._pieces, self.device)
        return list(ids.split([len(last_TD) for last_TD in documents]))


def cut_head(head_VD: torch.Tensor) -> list[torch.Tensor]:
    """The head's rows in pieces of at most ``PIECE_BYTES``, and short enough for ``PIECE_LOGITS``."""
    rows = min(PIECE_BYTES // (head_VD.shape[1] * head_VD.element_size()), PIECE_LOGITS // FILL_MULTIPLE)
    return list(head_VD.split(max(1, rows)))


def _narrowed(head_VD: torch.Tensor) -> torch.Tensor:
    """The head in bfloat16 when no value changes, else in float32."""
    narrow_VD = head_VD.to(torch.bfloat16)
    is_exact = head_VD.dtype == torch.bfloat16 or torch.equal(narrow_VD.to(head_VD.dtype), head_VD)
    return narrow_VD if is_exact else head_VD.float()
