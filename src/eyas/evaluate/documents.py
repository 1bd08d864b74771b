"""From drafts and target states of one document to its walk.

What counts as the target's choice for a token:

- On the target's own greedy text (variant ``greedy``) it is the token in the text: the target chose it
  while decoding. Recomputed from the stored states the argmax differs at the few places where bf16 ties, so
  comparing with that would miss drafts that a server accepts. ``coverage`` says how often the two agree.
- On any other text it is the argmax of the stored last hidden state, and only where the text has the same
  token: elsewhere no draft can be accepted, the text has left the target's path.

Marginal step accuracy and the share outside the draft vocab always go by the argmax over the full vocab. All
three are of the tokens that a round can emit: every assistant token but the first of its span, which the
prefill emits. Their argmaxes are the teachers of trained rows, so no other row of ``last`` is read.

Letters: T rows of the document, L teachers, S draft steps, V target vocab.
"""

from __future__ import annotations

import numpy as np
import torch

from eyas.contracts import StoredSample
from eyas.conversations.loops import loop_share
from eyas.drafter.rows import rows_to_read
from eyas.drafter.teacher import teacher_ids
from eyas.evaluate.summary import WalkedDocument
from eyas.evaluate.walk import spans, trained_rows, walk
from eyas.shards.reader import StoredStates

UNKNOWN = -1


def target_argmax(stored: StoredStates, head_VD: torch.Tensor) -> np.ndarray:
    """The target's argmax for every token that a round can emit, from the row before it.

    Args:
        stored: The document.
        head_VD: The target's head, in the dtype the target runs it in.

    Returns:
        Int64 [T] of token ids; ``UNKNOWN`` for tokens that are not the assistant's, for the first of a span,
        and for token 1 when the document opens with a span.

    Raises:
        StoreError: A row that is asked is not stored.
    """
    argmax_T = np.full(len(stored.input_ids_T), UNKNOWN, dtype=np.int64)
    rows_L = rows_to_read(stored).last_L
    argmax_T[rows_L + 1] = teacher_ids(stored.last_TD[rows_L], head_VD).numpy()
    return argmax_T


def walk_document(
    sample: StoredSample,
    input_ids_T: np.ndarray,
    loss_mask_T: np.ndarray,
    draft_TS: np.ndarray,
    argmax_T: np.ndarray,
    t2d_V: np.ndarray,
) -> WalkedDocument:
    """Walk every assistant span of one document.

    Args:
        sample: Whose document it is; its variant decides what the target's choice is.
        input_ids_T: Token ids.
        loss_mask_T: 1 at assistant tokens.
        draft_TS: Drafted target id of row t at step k, which stands for token t + k + 2; read only where
            that token lies in the span of token t + 1.
        argmax_T: See ``target_argmax``.
        t2d_V: Bool; ids of the draft vocab.
    """
    found = spans(loss_mask_T)
    choice_T = input_ids_T if sample.variant == "greedy" else np.where(argmax_T == input_ids_T, argmax_T, UNKNOWN)
    asked_TS = trained_rows(found, len(input_ids_T), draft_TS.shape[1])
    agree_TS = asked_TS & (draft_TS == _ahead(choice_T, draft_TS.shape[1]))
    hit_TS = asked_TS & (draft_TS == _ahead(argmax_T, draft_TS.shape[1]))
    judged_T = argmax_T[argmax_T != UNKNOWN]
    return WalkedDocument(
        sample_id=sample.sample_id,
        source=sample.source,
        rounds=tuple(r for start, end in found for r in walk(agree_TS, start, end)),
        loop_share=loop_share(input_ids_T[loss_mask_T.astype(bool)].tolist()),
        num_tokens=len(judged_T),
        num_covered=int((argmax_T == input_ids_T).sum()),
        num_oov=int((~t2d_V[judged_T]).sum()),
        hits_S=tuple(hit_TS.sum(0).tolist()),
        rows_S=tuple(asked_TS.sum(0).tolist()),
    )


def _ahead(token_T: np.ndarray, num_steps: int) -> np.ndarray:
    """[T, S] of token t + k + 2; unknown past the end."""
    padded = np.concatenate([token_T, np.full(num_steps + 1, UNKNOWN, dtype=token_T.dtype)])
    return np.stack([padded[step + 2 : step + 2 + len(token_T)] for step in range(num_steps)], axis=1)
