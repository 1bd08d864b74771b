"""What counts as the target's choice for a token, for the walk of a validation and of an evaluation.

- On the target's own greedy text (variant ``greedy``) it is the token in the text: the target chose it
  while decoding. Recomputed from the stored states the argmax differs at the few places where bf16 ties, so
  comparing with that would miss drafts that a server accepts.
- On any other text it is the argmax of the stored last hidden state, and only where the text has the same
  token: elsewhere no draft can be accepted, the text has left the target's path.

Letters: T rows of the document, S draft steps, V target vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from eyas.drafter.rows import rows_to_read
from eyas.drafter.teacher import TargetHead, teacher_ids

if TYPE_CHECKING:
    from eyas.shards.reader import StoredStates

UNKNOWN = -1


def target_argmax(stored: StoredStates, head_VD: torch.Tensor) -> np.ndarray:
    """The target's argmax for every token that a round can emit, from the row before it.

    Args:
        stored: The document.
        head_VD: The target's head, in the dtype the target runs it in, on the device to run on.

    Returns:
        Int64 [T] of token ids; ``UNKNOWN`` for tokens that are not the assistant's, for the first of a span,
        and for token 1 when the document opens with a span.

    Raises:
        StoreError: A row that is asked is not stored.
    """
    rows_L = rows_to_read(stored).last_L
    return _by_token(stored, rows_L, teacher_ids(stored.last_TD[rows_L].to(head_VD.device), head_VD).cpu())


def target_argmaxes(documents: Sequence[StoredStates], head: TargetHead) -> list[np.ndarray]:
    """``target_argmax`` of many documents, which a GPU is asked for together.

    Raises:
        StoreError: A row that is asked is not stored.
    """
    rows = [rows_to_read(stored).last_L for stored in documents]
    ids = head.ids([stored.last_TD[rows_L] for stored, rows_L in zip(documents, rows, strict=True)])
    return [_by_token(*one) for one in zip(documents, rows, ids, strict=True)]


def _by_token(stored: StoredStates, rows_L: np.ndarray, ids_L: torch.Tensor) -> np.ndarray:
    argmax_T = np.full(len(stored.input_ids_T), UNKNOWN, dtype=np.int64)
    argmax_T[rows_L + 1] = ids_L.numpy()
    return argmax_T


def target_choice(variant: str, input_ids_T: np.ndarray, argmax_T: np.ndarray) -> np.ndarray:
    """What the target chose for each token; ``UNKNOWN`` where the text has left its path."""
    return input_ids_T if variant == "greedy" else np.where(argmax_T == input_ids_T, argmax_T, UNKNOWN)


def ahead(token_T: np.ndarray, num_steps: int) -> np.ndarray:
    """[T, S] of token t + k + 2; unknown past the end."""
    padded = np.concatenate([token_T, np.full(num_steps + 1, UNKNOWN, dtype=token_T.dtype)])
    return np.stack([padded[step + 2 : step + 2 + len(token_T)] for step in range(num_steps)], axis=1)
