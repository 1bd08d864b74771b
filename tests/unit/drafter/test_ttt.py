"""The unroll and its loss against a float64 restatement, and the row rules of the case list."""

import dataclasses

import drafter_reference as reference
import pytest
import torch
from drafter_world import (
    D2T_W,
    ENDS_OPEN,
    LONG,
    SHAPE,
    TWO_SPANS,
    agree,
    compare,
    head_of,
    make_documents,
    make_drafter,
    ours,
    packed,
    theirs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.drafter import loss, rows, spans
from eyas.drafter.loss import ttt_loss
from eyas.drafter.objective import Objective
from eyas.drafter.precision import matmul_dtype
from eyas.drafter.rows import Document, pack_documents, steps_in_span_T
from eyas.drafter.teacher import teacher_ids
from eyas.drafter.ttt import draft_tokens, unroll
from eyas.drafter.weights import Weight
from eyas.errors import DataError


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("mask_oov", [True, False])
def test_loss_and_gradients_equal_the_restatement(steps, mask_oov):
    agree(make_drafter(), make_documents([TWO_SPANS, ENDS_OPEN, [1] * 6]), steps, mask_oov)


@pytest.mark.parametrize(
    "change",
    [
        {"fc_norm": True},
        {"norm_output": True},
        {"fc_norm": True, "norm_output": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "rope_theta": 100.0},
        {"num_aux": 4},
        {"num_aux": 1},
    ],
)
def test_every_shape_option_equals_the_restatement(change):
    """Case 70: the number of aux streams is free."""
    shape = dataclasses.replace(SHAPE, **change)
    agree(make_drafter(shape), make_documents([TWO_SPANS, ENDS_OPEN], num_aux=shape.num_aux), 3)


@pytest.mark.parametrize("multiple", [2, 8, 64])
def test_filling_up_changes_nothing(multiple):
    """Padding tokens and rows run along and touch neither loss nor gradients."""
    agree(make_drafter(train_head=True), make_documents([TWO_SPANS, ENDS_OPEN, [1] * 6]), 4, multiple=multiple)
    pack = packed(make_drafter(), make_documents([TWO_SPANS]), head_of(make_drafter()), 3, multiple=multiple)
    assert {n % multiple for n in (len(pack.ids_T), len(pack.rows_R), *pack.num_rows)} == {0}


def test_a_trained_head_equals_the_restatement():
    agree(make_drafter(train_head=True), make_documents([TWO_SPANS, ENDS_OPEN]), 3)


@pytest.mark.parametrize("tile", [(1, 1), (2, 3), (5, 4)])
def test_small_chunks_and_tiles_change_nothing(monkeypatch, tile):
    """Case 65: whatever way the attention and the logits are cut, loss and gradients are the same."""
    monkeypatch.setattr(spans, "TILE_ROWS", tile[0])
    monkeypatch.setattr(spans, "TILE_KEYS", tile[1])
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 3 * 20)
    agree(make_drafter(train_head=True), make_documents([TWO_SPANS, ENDS_OPEN, [1] * 6]), 3)


def test_attention_of_a_long_document_is_cut_into_bounded_tiles():
    """Case 27: T = 16,384, S = 7, 32 heads: dense scores would be 32 * T * T * 4 = 34 GB a step, a tile is 2 MiB."""
    T, steps, heads = 16_384, 7, 32
    states = torch.zeros(T, 1)
    pack = pack_documents([Document(torch.zeros(T, dtype=torch.int64), torch.ones(T), states[:, None], states)], steps)
    assert heads * T * T * 4 == 34_359_738_368
    assert heads * spans.TILE_ROWS * spans.TILE_KEYS * 4 == 2 * 2**20
    for plan in pack.attention:
        seen_R = torch.zeros(len(plan.tiles()) * spans.TILE_ROWS, dtype=torch.int64)
        for n, tiles in enumerate(plan.tiles()):
            rows = slice(n * spans.TILE_ROWS, (n + 1) * spans.TILE_ROWS)
            for tile in tiles:
                seen_R[rows] += spans.TILE_KEYS if tile.bias_XY is None else (tile.bias_XY == 0).sum(1)
            assert len(tiles) <= n + 1, "the causal half is left out"
        assert torch.equal(seen_R[: len(plan.places_R)], plan.places_R + 1)
        assert not seen_R[len(plan.places_R) :].any()


def test_the_targets_choice_is_taken_in_chunks(monkeypatch):
    """Case 72: the argmax over a whole vocab of 152,064 never has logits of more than one chunk in memory."""
    generator = torch.Generator().manual_seed(4)
    head_VD = torch.randn(152_064, 4, generator=generator)
    last_TD = torch.randn(300, 4, generator=generator)
    sizes = []
    real = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: (sizes.append(len(x) * len(w)), real(x, w))[1])
    ids_T = teacher_ids(last_TD, head_VD)
    assert len(sizes) >= 4
    assert max(sizes) <= 1 << 24
    assert torch.equal(ids_T, (last_TD @ head_VD.T).argmax(-1))


S = 4
RIGHT_ROWS = {
    "rows that train at this step or later": lambda trains_TS: (trains_TS * torch.arange(1, S + 1)).amax(1),
    "every row at every step": lambda trains_TS: torch.full((len(trains_TS),), S),
    "every row that trains at all, at every step": lambda trains_TS: trains_TS.any(1) * S,
}
WRONG_ROWS = {
    "the supervised rows: those that train at step 0": lambda trains_TS: trains_TS[:, 0] * S,
    "rows that train at this step": lambda trains_TS: trains_TS.int().cumprod(1).sum(1),
    "as many steps as train": lambda trains_TS: trains_TS.sum(1),
    "rows that train at the next step": lambda trains_TS: ((trains_TS * torch.arange(1, S + 1)).amax(1) - 1).clamp_min(
        0
    ),
}


def with_rows(monkeypatch, name, wrapped):
    """Loss and gradients with a part of the plan changed, and the restatement, which runs every row at every step."""
    monkeypatch.setattr(rows, name, wrapped)
    drafter, documents = make_drafter(), make_documents([TWO_SPANS, LONG])
    head_VD = head_of(drafter)
    return ours(drafter, documents, head_VD, S), theirs(drafter, documents, head_VD, S)


def test_the_case_tells_the_choices_of_rows_apart(monkeypatch):
    """Without rows that train late, pause or end early a wrong choice could not show."""
    drafter = make_drafter()
    pack = packed(drafter, make_documents([TWO_SPANS, LONG]), head_of(drafter), S)
    patterns = {tuple(row) for row in pack.trains_RS.int().tolist()}
    assert any(row[0] == 0 for row in patterns)
    assert any(row[0] == 1 and 0 in row[: max(k for k in range(S) if row[k])] for row in patterns)
    assert any(row[0] == 1 and row[-1] == 0 for row in patterns)


@pytest.mark.parametrize("choice", RIGHT_ROWS.values(), ids=RIGHT_ROWS.keys())
def test_rows_that_train_at_a_step_or_later_are_enough(monkeypatch, choice):
    """More rows change nothing: what is left out is read by nobody."""
    compare(*with_rows(monkeypatch, "steps_to_run_T", choice))


@pytest.mark.parametrize("choice", WRONG_ROWS.values(), ids=WRONG_ROWS.keys())
def test_leaving_out_a_needed_row_shows(monkeypatch, choice):
    """Negative control: a trainer that chose the supervised rows was wrong, and its own check shared the mistake."""
    real = rows.plan_pack

    def with_few_rows(*, trains_TS, **others):
        runs_TS = torch.arange(S) < choice(trains_TS)[:, None]
        return real(trains_TS=trains_TS & runs_TS, **others)

    found, expected = with_rows(monkeypatch, "plan_pack", with_few_rows)
    with pytest.raises(AssertionError):
        compare(found, expected)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=3), st.integers(1, 4))
def test_any_masks_equal_the_restatement(masks, steps):
    drafter = make_drafter()
    documents = make_documents(masks)
    if any(reference.trains(m, t, 0) for m in masks for t in range(len(m))):
        agree(drafter, documents, steps, mask_oov=False)
    else:
        assert unroll(drafter, packed(drafter, documents, head_of(drafter), steps)) == []


@given(st.lists(st.integers(0, 1), min_size=1, max_size=20))
def test_rows_follow_the_rule(mask):
    """Row t trains at step k iff tokens t+1 … t+k+2 all lie in one assistant span."""
    counts = steps_in_span_T(torch.tensor(mask)).tolist()
    for t, count in enumerate(counts):
        for k in range(5):
            assert (k < count) == reference.trains(mask, t, k)


def aux_gradient(mask, steps=1):
    """Norm of the loss gradient with respect to each row's aux states, with attention cut to the row itself."""
    drafter = make_drafter()
    with torch.no_grad():  # without values the attention mixes nothing: a row's gradient is its own
        drafter.midlayer.self_attn.v_proj.weight.zero_()
    ids, mask_T, aux, last = make_documents([mask])[0]
    aux.requires_grad_()
    pack = pack_documents([Document(ids, mask_T, aux, last)], steps)
    ttt_loss(drafter, pack, head_of(drafter)[torch.arange(20) + D2T_W], 0.8)[0].backward()
    return aux.grad.flatten(1).norm(dim=1)


def test_both_ends_of_a_span_train_right():
    """Case 62: prompt 4 + answer 3: the last prompt row gets a gradient, the last two rows none."""
    grads = aux_gradient([0, 0, 0, 0, 1, 1, 1])
    assert [bool(g > 0) for g in grads] == [False, False, False, True, True, False, False]


def test_the_last_position_never_trains_and_padding_changes_nothing():
    """Case 63: 5 supervised tokens; the same with an unsupervised tail."""
    drafter = make_drafter()
    head_VD = head_of(drafter)
    ids, mask, aux, last = make_documents([[1] * 5])[0]
    pack = packed(drafter, [(ids, mask, aux, last)], head_VD, 2, mask_oov=False)
    assert sorted(pack.rows_R.tolist()) == [0, 1, 2]
    assert pack.num_trained == (3, 2)
    zeros = (torch.zeros(4, dtype=torch.long), torch.zeros(4), torch.zeros(4, 3, 16), torch.zeros(4, 16))
    longer = tuple(torch.cat([a, b.to(a.dtype)]) for a, b in zip((ids, mask, aux, last), zeros, strict=True))
    report, grads, _ = ours(drafter, [(ids, mask, aux, last)], head_VD, 2, mask_oov=False)
    longer_report, longer_grads, _ = ours(drafter, [longer], head_VD, 2, mask_oov=False)
    torch.testing.assert_close(longer_report.losses_S, report.losses_S, rtol=1e-14, atol=0)
    for name, grad in longer_grads.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-11, atol=1e-14, msg=name)


def test_packed_documents_never_see_each_other():
    drafter = make_drafter()
    first, second = make_documents([TWO_SPANS, ENDS_OPEN])
    alone = unroll(drafter, packed(drafter, [second], head_of(drafter), 3, mask_oov=False))
    pack = packed(drafter, [first, second], head_of(drafter), 3, mask_oov=False)
    for k, both in enumerate(unroll(drafter, pack)):
        place = pack.rows_R[: pack.num_rows[k]]
        torch.testing.assert_close(both[place >= len(first[0])], alone[k], rtol=1e-12, atol=1e-12)


def test_out_of_vocab_argmax_is_masked_and_counted():
    """Case 68: with the argmax of one position outside the draft vocab, that pair trains nothing and is counted."""
    ids, mask, aux, last = make_documents([[0, 1, 1, 1, 1]])[0]
    in_vocab = torch.tensor([True, True, False, True, True])  # teacher of row 1 at step 0, of row 0 at step 1
    pack = pack_documents([Document(ids, mask, aux, last, in_vocab)], 2)
    trained = {(int(t), k) for t, row in zip(pack.rows_R, pack.trains_RS, strict=True) for k in range(2) if row[k]}
    assert trained == {(0, 0), (2, 0), (1, 1)}
    assert pack.num_oov == 2


def test_mask_of_two_dimensions_is_refused():
    """Case 66: a mask [T,1] must not broadcast to [T,T]."""
    ids, mask, aux, last = make_documents([[0, 1, 1]])[0]
    with pytest.raises(DataError, match=r"mask_T has shape \(3, 1\)"):
        pack_documents([Document(ids, mask[:, None], aux, last)], 1)
    with pytest.raises(DataError, match=r"mask_T has shape \(2,\), expected 3 tokens"):
        pack_documents([Document(ids, mask[:2], aux, last)], 1)
    with pytest.raises(DataError, match="expected one dimension"):
        steps_in_span_T(mask[None])


def test_a_pack_without_a_trained_row_gives_no_nan():
    """Case 70: every sample of a batch invalid."""
    drafter = make_drafter()
    pack = packed(drafter, make_documents([[0, 0, 0], [0, 1, 0]]), head_of(drafter), 2)
    assert pack.num_trained == (0, 0)
    assert unroll(drafter, pack) == []
    assert draft_tokens(drafter, pack).shape == (0, 2)


def test_the_loss_reads_the_states_of_teachers_alone():
    """Every other row of ``last`` is NaN. 64 tokens and 44 rows leave no padding behind them, and 43 teachers are
    filled up to 44. Rows that lie one off give a gradient that is not finite.
    """
    drafter = make_drafter()
    documents = make_documents([[0] * 9 + [1] * 20 + [0] * 3, [1] * 14 + [0] * 4 + [1] * 14])
    teacher_WD = head_of(drafter)[torch.arange(20) + D2T_W]

    def gradients(last_of):
        whole = []
        for ids, mask, aux, last in documents:
            in_vocab_T = torch.arange(len(mask)) != 22  # a teacher of the second document's second span
            in_vocab_T |= len(whole) == 0
            whole.append(Document(ids, mask, aux, last_of(mask, last), in_vocab_T))
        pack = pack_documents(whole, 3, multiple=4)
        assert (len(pack.ids_T), len(pack.rows_R), int(pack.rows_R.max())) == (64, 44, 61)
        drafter.zero_grad()
        total, report = ttt_loss(drafter, pack, teacher_WD, 0.8)
        total.backward()
        return report.losses_S, [p.grad for p in drafter.parameters() if p.grad is not None]

    def hollow(mask, last):
        is_teacher_T = torch.tensor([p > 0 and int(mask[p : p + 2].sum()) == 2 for p in range(len(mask))])
        return last.masked_fill(~is_teacher_T[:, None], float("nan"))

    expected_losses_S, expected = gradients(lambda mask, last: last)
    losses_S, found = gradients(hollow)
    assert torch.equal(losses_S, expected_losses_S)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    losses_S, found = gradients(lambda mask, last: hollow(mask, last).roll(1, 0))
    assert not any(bool(gradient.isfinite().all()) for gradient in found)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=["float32 tensors", "bfloat16 tensors"])
@pytest.mark.parametrize("chosen", [Objective(), Objective("ce"), Objective("lk"), Objective(top_k=4)], ids=str)
def test_loss_and_gradient_are_float32_when_products_are_bfloat16(chosen, kept):
    """Case 67: p and q closer than bf16 can tell. All inputs are bf16 numbers, so the products are exact.

    Whether weights and activations are kept in float32 (CPUs without bf16) or as bf16 (all others).
    """
    generator = torch.Generator().manual_seed(0)
    ids, mask, aux, last = make_documents([ENDS_OPEN])[0]
    last, W = last.bfloat16().float(), torch.randn(20, 16, generator=generator).bfloat16().float()
    pack = pack_documents([Document(ids, mask, aux, last)], 1)
    teacher_RE = last[pack.rows_R + 1]
    step = torch.randint(-1, 2, teacher_RE.shape, generator=generator) * 2.0**-8
    nudged = (teacher_RE * (1 + step)).bfloat16().to(kept).requires_grad_()
    with matmul_dtype("bfloat16"):
        scales = [1 / len(pack.rows_R)]
        head = Weight(W.to(kept))
        total, report = loss.head_loss([nudged], head, pack, W.to(kept), scales, measure=True, objective=chosen)
        total.backward()
    exact = nudged.detach().double().requires_grad_()
    pairs = zip(teacher_RE.double() @ W.double().T, exact @ W.double().T, strict=True)
    losses = [reference.row_loss(target, logits, chosen.kind, chosen.top_k)[0] for target, logits in pairs]
    expected = sum(losses) / len(losses)
    expected.backward()
    if chosen == Objective():
        assert 1e-6 < float(expected.detach()) < 1e-3
    assert report.total(1.0) == pytest.approx(float(expected.detach()), rel=1e-2, abs=1e-6)
    allowed = float(exact.grad.abs().max()) * 1e-2
    torch.testing.assert_close(nudged.grad.double(), exact.grad, rtol=1e-2, atol=allowed)


def test_hits_count_agreement_with_the_teacher():
    """A head that says what the teacher says hits everywhere, on every step."""
    drafter = make_drafter()
    head_VD = head_of(drafter)
    report, _, pack = ours(drafter, make_documents([TWO_SPANS, ENDS_OPEN]), head_VD, 3)
    hidden = unroll(drafter, pack)
    expected = []
    for k, normed_RE in enumerate(hidden):
        target = (pack.last_TD[pack.rows_R[: len(normed_RE)] + k + 1] @ head_VD[torch.arange(20) + D2T_W].T).argmax(-1)
        expected.append(
            int(((drafter.logits(normed_RE).argmax(-1) == target) & pack.trains_RS[: len(target), k]).sum())
        )
    assert report.num_hits_S.tolist() == expected
    assert report.num_chained_S[0] == report.num_trained_S[0]
    assert (report.num_chain_hits_S <= report.num_chained_S).all()


def test_measuring_changes_no_gradient():
    drafter = make_drafter(train_head=True)
    head_VD = head_of(drafter)
    pack = packed(drafter, make_documents([TWO_SPANS, ENDS_OPEN]), head_VD, 3)
    grads = []
    for measure in (True, False):
        drafter.zero_grad()
        ttt_loss(drafter, pack, head_VD[torch.arange(20) + D2T_W], 0.8, measure=measure)[0].backward()
        grads.append([p.grad.clone() for p in drafter.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_no_logits_of_all_tokens(monkeypatch):
    """Case 72: logits exist for one chunk at a time, whatever the pack's size."""
    sizes = []
    real = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim, out: (sizes.append(x.numel()), real(x, dim, out=out))[1])
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 3 * 8 * 20)
    drafter = make_drafter()
    ours(drafter, make_documents([[1] * 60]), head_of(drafter), 2)
    assert len(sizes) > 6
    assert max(sizes) <= 2 * 8 * 20
