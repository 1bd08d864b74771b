"""From drafts and target states of one document to its walk.

What counts as the target's choice for a token: see ``drafter.judged``. ``coverage`` says how often the text has
the argmax of the stored states.

Marginal step accuracy and the share outside the draft vocab always go by the argmax over the full vocab. All
three are of the tokens that a round can emit: every assistant token but the first of its span, which the
prefill emits. Their argmaxes are the teachers of trained rows, so no other row of ``last`` is read.

Letters: T rows of the document, L teachers, S draft steps, V target vocab.
"""

from __future__ import annotations

import numpy as np

from eyas.contracts import StoredSample
from eyas.conversations.loops import loop_share
from eyas.drafter.judged import UNKNOWN, ahead, target_choice
from eyas.drafter.walk import spans, trained_rows, walk
from eyas.evaluate.summary import WalkedDocument


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
    asked_TS = trained_rows(found, len(input_ids_T), draft_TS.shape[1])
    agree_TS = asked_TS & (draft_TS == ahead(target_choice(sample.variant, input_ids_T, argmax_T), draft_TS.shape[1]))
    hit_TS = asked_TS & (draft_TS == ahead(argmax_T, draft_TS.shape[1]))
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
