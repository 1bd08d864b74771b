"""From drafts and target states of one document to its walk.

What counts as the target's choice for a token: see ``drafter.judged``. ``coverage`` says how often the text has
the argmax of the stored states.

Marginal step accuracy and the share outside the draft vocab always go by the argmax over the full vocab. All
three are of the tokens that a round can emit: every assistant token but the first of its span, which the
prefill emits. Their argmaxes are the teachers of trained rows, so no other row of ``last`` is read.

Letters: T rows of the document, L teachers, S draft steps, V target vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eyas.contracts import StoredSample
from eyas.conversations.loops import loop_share
from eyas.drafter.judged import UNKNOWN, ahead, target_choice
from eyas.drafter.walk import spans, trained_rows, walk
from eyas.evaluate.drafting import Shares
from eyas.evaluate.expected import expect
from eyas.evaluate.summary import SampledWalk, WalkedDocument


def walk_document(
    sample: StoredSample,
    input_ids_T: np.ndarray,
    loss_mask_T: np.ndarray,
    draft_TS: np.ndarray,
    argmax_T: np.ndarray,
    t2d_V: np.ndarray,
    *,
    chain_length: int = 0,
    shares: Shares | None = None,
) -> WalkedDocument:
    """Walk every assistant span of one document, with chains of one length and of all shorter and longer ones.

    Args:
        sample: Whose document it is; its variant decides what the target's choice is.
        input_ids_T: Token ids.
        loss_mask_T: 1 at assistant tokens.
        draft_TS: Drafted target id of row t at step k, which stands for token t + k + 2; read only where
            that token lies in the span of token t + 1.
        argmax_T: See ``target_argmax``.
        t2d_V: Bool; ids of the draft vocab.
        chain_length: Of the headline; all of the table's steps by default.
        shares: Acceptance when sampling, if it is judged.
    """
    found = spans(loss_mask_T)
    longest = draft_TS.shape[1]
    chain_length = chain_length or longest
    asked_TS = trained_rows(found, len(input_ids_T), longest)
    agree_TS = asked_TS & (draft_TS == ahead(target_choice(sample.variant, input_ids_T, argmax_T), longest))
    hit_TS = (asked_TS & (draft_TS == ahead(argmax_T, longest)))[:, :chain_length]
    chains = tuple(
        tuple(r for start, end in found for r in walk(agree_TS[:, :length], start, end))
        for length in range(1, longest + 1)
    )
    judged_T = argmax_T[argmax_T != UNKNOWN]
    return WalkedDocument(
        sample_id=sample.sample_id,
        source=sample.source,
        conversation=sample.conversation_id,
        rounds=chains[chain_length - 1],
        chains=chains,
        places=tuple(_place(found, r.row) for r in chains[chain_length - 1]),
        sampled=None if shares is None else _sampled(shares, found, chain_length),
        loop_share=loop_share(input_ids_T[loss_mask_T.astype(bool)].tolist()),
        num_tokens=len(judged_T),
        num_covered=int((argmax_T == input_ids_T).sum()),
        num_oov=int((~t2d_V[judged_T]).sum()),
        hits_S=tuple(hit_TS.sum(0).tolist()),
        rows_S=tuple(asked_TS[:, :chain_length].sum(0).tolist()),
    )


def _place(found: Sequence[tuple[int, int]], row: int) -> int:
    """Place in its answer of the first token that the round of this row drafts."""
    return next(row + 2 - start for start, end in found if row + 2 < end)


def _sampled(shares: Shares, found: Sequence[tuple[int, int]], chain_length: int) -> SampledWalk:
    covered_N = shares.covered_T[~np.isnan(shares.covered_T)]
    lengths = range(1, shares.overlap_TS.shape[1] + 1)
    return SampledWalk(
        chains=tuple(expect(shares.overlap_TS, found, length) for length in lengths),
        greedy_drafts=expect(shares.of_draft_TS, found, chain_length),
        covered_mass=float(covered_N.sum()),
        num_covered=len(covered_N),
    )
