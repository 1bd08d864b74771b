"""Where our default conventions differ from the peers', each difference by itself.

That the rules below are the peers' is what the parity tests show.
"""

import pytest
import torch
from peer_rules import specforge_trains, speculators_trains
from test_ttt import D2T_W, head_of, make_documents, make_drafter

from eyas.drafter.loss import head_loss, ttt_loss
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.ttt import unroll
from eyas.drafter.weights import plain_weights

MASK = [0, 0, 0, 0, 1, 1, 1]
"""A prompt of 4 tokens and an answer of 3: tokens 4, 5, 6."""


def ours(mask, steps, in_vocab=None):
    T = len(mask)
    states_TD = torch.zeros(T, 1)
    in_vocab_T = None if in_vocab is None else torch.tensor(in_vocab).bool()
    pack = pack_documents(
        [Document(torch.zeros(T, dtype=torch.int64), torch.tensor(mask), states_TD[:, None], states_TD, in_vocab_T)],
        steps,
    )
    return pack, {(int(pack.rows_R[r]), k) for r, k in pack.trains_RS.nonzero().tolist()}


def pairs(trains_TS):
    return {(t, k) for t, k in trains_TS.nonzero().tolist()}


def test_the_mask_ends_where_the_answer_ends():
    """Ours: tokens t+1 … t+k+2 all lie in the answer. Row 3 is the last of the prompt, which drafts token 5."""
    mask_T = torch.tensor(MASK).bool()
    right = {(3, 0), (4, 0), (3, 1)}
    assert ours(MASK, 2)[1] == right
    specforge = pairs(specforge_trains(mask_T, torch.ones(7, dtype=torch.bool), 2))
    # row 3 is missing at step 0; row 5 drafts token 7 and row 4 token 7 at step 1, which the answer does not have
    assert specforge == {(4, 0), (5, 0), (3, 1), (4, 1)}
    speculators = pairs(speculators_trains(mask_T, 2))
    # right at the head at step 0, too long at the tail; row 2 starts a chain before the prompt has ended
    assert speculators == {(3, 0), (4, 0), (5, 0), (2, 1), (3, 1), (4, 1)}
    assert speculators > right


def test_a_row_whose_target_is_out_of_vocab_trains_nothing_and_is_counted():
    """SpecForge masks it too, speculators trains it on what is left of the distribution."""
    in_vocab = [1, 1, 1, 1, 0, 1, 1]  # row 3 at step 0 takes its target from place 4
    pack, trained = ours(MASK, 2, in_vocab)
    assert trained == {(4, 0), (3, 1)}
    assert pack.num_oov == 1
    mask_T = torch.tensor(MASK).bool()
    assert (3, 0) in pairs(speculators_trains(mask_T, 2))
    shifted = [1, 1, 1, 1, 1, 0, 1]
    everything = torch.ones(7, dtype=torch.bool)
    lost = pairs(specforge_trains(mask_T, everything, 2)) - pairs(
        specforge_trains(mask_T, torch.tensor(shifted).bool(), 2)
    )
    assert lost == {(4, 0), (3, 1)}, "targets at place 5"


@pytest.mark.parametrize("num_tail", [3, 14])
def test_tokens_that_train_nothing_do_not_weaken_the_loss(num_tail):
    """Ours is the mean over trained rows; SpecForge's over all positions, so a tail scales its gradient down."""

    def gradients(mask, per_position):
        drafter = make_drafter()
        (document,) = make_documents([[*MASK, *[0] * 14]])  # the same random states, cut to length
        ids_T, _, *states = (tensor[: len(mask)] for tensor in document[:4])
        pack = pack_documents([Document(ids_T, torch.tensor(mask), *states)], 2)
        teacher_WD = head_of(drafter)[torch.arange(20) + D2T_W]
        if per_position:
            scales = [0.8**k / len(mask) for k in range(2)]
            layer = plain_weights(drafter)
            total, _ = head_loss(unroll(drafter, pack, weights=layer), layer.head, pack, teacher_WD, scales, False)
        else:
            total, _ = ttt_loss(drafter, pack, teacher_WD, 0.8, measure=False)
        total.backward()
        return drafter.fc.weight.grad

    torch.testing.assert_close(gradients([*MASK, *[0] * num_tail], False), gradients(MASK, False))
    torch.testing.assert_close(gradients([*MASK, *[0] * num_tail], True) * (7 + num_tail) / 7, gradients(MASK, True))
