"""From drafts and target states of one document to its walk.

What counts as the target's choice for a token:

- On the target's own greedy text (variant ``greedy``) it is the token in the text: the target chose it
  while decoding. Recomputed from the stored states the argmax differs at the few places where bf16 ties, so
  comparing with that would miss drafts that a server accepts. ``coverage`` says how often the two agree.
- On any other text it is the argmax of the stored last hidden state, and only where the text has the same
  token: elsewhere no draft can be accepted, the text has left the target's path.

Marginal step accuracy and the share outside the draft vocab always go by the argmax over the full vocab.

Letters: T rows of the document, S draft steps, D target hidden, V target vocab.
"""

from __future__ import annotations

import numpy as np
import torch

from eyas.contracts import StoredSample
from eyas.conversations.loops import loop_share
from eyas.evaluate.summary import WalkedDocument
from eyas.evaluate.walk import spans, trained_rows, walk

UNKNOWN = -1
ROWS_PER_CHUNK = 256


def target_argmax(last_TD: torch.Tensor, head_VD: torch.Tensor, wanted_T: np.ndarray) -> np.ndarray:
    """The target's argmax for every wanted token, from the row before it.

    Args:
        last_TD: Final hidden states after the norm.
        head_VD: The target's head, in the dtype the target runs it in.
        wanted_T: Bool; tokens to judge. Token 0 has no row before it and stays unknown.

    Returns:
        Int64 [T] of token ids, ``UNKNOWN`` where nothing is wanted.
    """
    argmax_T = np.full(len(wanted_T), UNKNOWN, dtype=np.int64)
    tokens = np.flatnonzero(wanted_T)
    tokens = tokens[tokens > 0]
    with torch.inference_mode():
        for begin in range(0, len(tokens), ROWS_PER_CHUNK):
            chunk = tokens[begin : begin + ROWS_PER_CHUNK]
            logits_RV = last_TD[torch.from_numpy(chunk - 1)].to(head_VD.dtype) @ head_VD.T
            argmax_T[chunk] = logits_RV.argmax(-1).numpy()
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
