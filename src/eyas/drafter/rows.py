"""Packing documents and choosing rows: which row runs how many TTT steps, and against what.

    documents (ids, mask, aux, last) → Pack: tokens side by side, rows ordered so that step k runs on a prefix

Row ``t`` at step ``k`` predicts token ``t+k+2``; its teacher is the target at ``last[t+k+1]``. It trains
when tokens ``t+1 … t+k+2`` all lie in one assistant span, and, in training, when the teacher's argmax is
inside the draft vocab. A row must *run* at step j when it trains at any step ≥ j. Rows that train at no
step give step-0 keys and values only.

Letters: T tokens of the pack, R rows that run, S TTT steps, A aux streams, D target hidden, L teachers of a
document, U tokens in a list of some of them, X trained rows of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eyas.drafter.anchors import anchored_TS
from eyas.drafter.spans import AttentionPlan, Span, plan_attention
from eyas.errors import DataError, StoreError
from eyas.rows import StoredRows, stored_rows

if TYPE_CHECKING:
    from eyas.shards.reader import StoredStates


@dataclass(frozen=True, slots=True)
class Document:
    """One sample as the drafter reads it.

    Shapes: ids_T, mask_T any integer dtype; aux_TAD, last_TD any float dtype. in_vocab_T bool: the
    teacher's argmax at this position is inside the draft vocab; None when OOV rows are not masked
    (evaluation). anchor_key decides which rows are anchors, see ``drafter.anchors``.
    """

    ids_T: torch.Tensor
    mask_T: torch.Tensor
    aux_TAD: torch.Tensor
    last_TD: torch.Tensor
    in_vocab_T: torch.Tensor | None = None
    anchor_key: str = ""


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents side by side that never see each other, the rows to run, and all that a step needs to know.

    Rows are sorted by how many steps they run (most first), then by place: step k runs on the first
    ``num_rows[k]`` of them. Everything is planned on the CPU, so that a step on a GPU never waits for it.
    """

    ids_T: torch.Tensor
    aux_TAD: torch.Tensor
    last_TD: torch.Tensor
    positions_T: torch.Tensor
    """Position inside the document."""
    documents: tuple[Span, ...]
    rows_R: torch.Tensor
    """Place t of each row in the pack."""
    num_rows: tuple[int, ...]
    """Rows that run at step k, for every k below S; a multiple of ``pack_documents``' argument."""
    num_trained: tuple[int, ...]
    """Trained rows per step."""
    num_oov: int
    """(row, step) pairs inside a span that do not train because the teacher's argmax is out of vocab."""
    num_in_span: int
    """All pairs inside a span. Both are facts of the documents: whether a row is an anchor does not matter."""
    multiple: int
    """Tokens and rows were filled up to a multiple of this."""
    num_positions: int
    """Positions that any row takes at any step."""
    next_places_T: torch.Tensor
    """Place of the token that follows each token."""
    q_tokens_U: torch.Tensor
    """Places of the tokens that some row reads with a query, at any step."""
    q_places_SR: torch.Tensor
    """Index into ``q_tokens_U`` of the token that a row reads at a step; -1 where that row does not matter."""
    kv_places_SR: torch.Tensor
    """Place of that token."""
    attention: tuple[AttentionPlan, ...]
    """Per step."""
    teachers_U: torch.Tensor
    """Places whose ``last`` some trained row takes its target from, rising."""
    loss_rows: tuple[torch.Tensor, ...]
    """Per step the rows that train, by rising place."""
    loss_teachers: tuple[torch.Tensor, ...]
    """Per step index into ``teachers_U`` of each of them, rising."""
    host_teachers: tuple[np.ndarray, ...]
    """The same in host memory, where chunks are cut."""
    embedding_TE: torch.Tensor | None = None
    """Embedding of every token, when the table itself stays elsewhere."""

    @property
    def trains_RS(self) -> torch.Tensor:
        """Bool: row trains at step k."""
        trains_RS = torch.zeros(len(self.rows_R), len(self.num_rows), dtype=torch.bool, device=self.rows_R.device)
        for k, rows in enumerate(self.loss_rows):
            trains_RS[rows, k] = True
        return trains_RS

    def q_places(self, step: int) -> torch.Tensor:
        """``q_places_SR`` of the rows that run at a step."""
        return self.q_places_SR[step, : self.num_rows[step]]

    def kv_places(self, step: int) -> torch.Tensor:
        """``kv_places_SR`` of the rows that run at a step."""
        return self.kv_places_SR[step, : self.num_rows[step]]

    def with_embedding(self, table_VE: torch.Tensor) -> Pack:
        """The same pack carrying the embedding of its tokens, so that the table need not be on its device."""
        return dataclasses.replace(self, embedding_TE=table_VE[self.ids_T])

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Pack:
        """The same pack with a function applied to every tensor (a move, a pin)."""
        changed: dict[str, Any] = {}
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, torch.Tensor):
                changed[spec.name] = function(value)
            elif spec.name in ("loss_rows", "loss_teachers"):
                changed[spec.name] = tuple(function(tensor) for tensor in value)
        plans: dict[int, AttentionPlan] = {}
        for plan in self.attention:  # steps of equal rows share one
            plans.setdefault(id(plan), plan.map(function))
        return dataclasses.replace(self, **changed, attention=tuple(plans[id(plan)] for plan in self.attention))

    def to(self, device: str, non_blocking: bool = False) -> Pack:
        """The same pack with its tensors on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))


def rows_to_read(stored: StoredStates) -> StoredRows:
    """Rows of a sample that training and evaluation read, checked to be there.

    The same rows whatever else is stored: so a set of ``last_rows: trained`` gives what one of ``all`` gives.

    Raises:
        StoreError: A teacher's row of ``last`` or a row of ``aux`` up to the last trained one is not stored; the
            sample and the row are named.
    """
    rows = stored_rows(stored.loss_mask_T.numpy(), "trained")
    # rows that are not stored are NaN through and through, and a stored one nowhere: one channel tells
    gone_L = ~stored.has_last_T[rows.last_L] | stored.last_TD[rows.last_L, 0].isnan()
    missing = [f"row {row} of last" for row in rows.last_L[np.flatnonzero(gone_L)][:1].tolist()]
    missing += [f"row {row} of aux" for row in range(stored.num_aux_rows, rows.num_aux)[:1]]
    if missing:
        raise StoreError(
            f"sample {stored.sample.sample_id}: {missing[0]} is not stored, expected {len(rows.last_L):,} rows of last "
            f"and {rows.num_aux:,} of aux: those that its loss mask trains",
            "`make verify` compares the states with their tokens",
        )
    return rows


def steps_in_span_T(mask_T: torch.Tensor) -> torch.Tensor:
    """At how many steps each row may train, before OOV and S: ones from t+1 to the end of that span, less one.

    Raises:
        DataError: The mask is not one-dimensional.
    """
    if mask_T.ndim != 1:
        raise DataError(f"loss mask has shape {tuple(mask_T.shape)}, expected one dimension: [T]")
    T = mask_T.shape[0]
    places_T = torch.arange(T)
    # first zero at or after each place, T when there is none
    zeros_T = torch.where(mask_T.bool(), T, places_T)
    run_end_T = zeros_T.flip(0).cummin(0).values.flip(0)
    run_T = torch.zeros(T, dtype=torch.int64)
    run_T[:-1] = (run_end_T - places_T)[1:]
    return (run_T - 1).clamp_min(0)


def _trains_TS(document: Document, ttt_steps: int, anchors: int) -> tuple[torch.Tensor, int, int]:
    """Which rows train at which steps; pairs out of vocab; all pairs inside a span."""
    inside_TS = torch.arange(ttt_steps) < steps_in_span_T(document.mask_T)[:, None]
    trains_TS = inside_TS
    if document.in_vocab_T is not None:
        T = inside_TS.shape[0]
        known_X = torch.cat([document.in_vocab_T.bool(), torch.zeros(ttt_steps, dtype=torch.bool)])
        trains_TS = inside_TS & known_X[torch.arange(T)[:, None] + torch.arange(ttt_steps) + 1]
    num_in_span, num_dense = int(inside_TS.sum()), int(trains_TS.sum())
    if anchors:
        trains_TS = anchored_TS(trains_TS, anchors, document.anchor_key)
    return trains_TS, num_in_span - num_dense, num_in_span


def steps_to_run_T(trains_TS: torch.Tensor) -> torch.Tensor:
    """Steps that each row runs: up to the last at which it trains, whether it trains before or not."""
    return (trains_TS * torch.arange(1, trains_TS.shape[1] + 1)).amax(1)


def _check(document: Document) -> None:
    T = document.ids_T.shape[0]
    for name in ("ids_T", "mask_T", "aux_TAD", "last_TD"):
        tensor = getattr(document, name)
        if tensor.shape[0] != T or tensor.ndim != len(name.rsplit("_", 1)[1]):
            raise DataError(f"{name} has shape {tuple(tensor.shape)}, expected {T} tokens as in ids_T")


def pack_documents(
    documents: Sequence[Document], ttt_steps: int, multiple: int = 1, anchors: int = 0, pinned: bool = False
) -> Pack:
    """Lay documents side by side and order the rows that run.

    Args:
        documents: Whole documents.
        ttt_steps: S.
        multiple: Tokens and the rows of each step are filled up to a multiple of this, with padding that no
            document sees and rows that do not train. A matrix product of a new size costs its library
            milliseconds and megabytes to prepare, so a trainer wants few sizes.
        anchors: Most rows of a document that train, see ``drafter.anchors``; 0 trains all.
        pinned: States are joined in pinned memory, from which a GPU copies them.

    Raises:
        DataError: A document's tensors disagree in length or rank.
    """
    for document in documents:
        _check(document)
    lengths = [document.ids_T.shape[0] for document in documents]
    chosen = [_trains_TS(document, ttt_steps, anchors) for document in documents]
    return plan_pack(
        ids_T=torch.cat([d.ids_T.to(torch.int64) for d in documents]),
        aux_TAD=[d.aux_TAD for d in documents],
        last_TD=[d.last_TD for d in documents],
        lengths=lengths,
        trains_TS=torch.cat([trains for trains, _, _ in chosen]),
        num_oov=sum(num_oov for _, num_oov, _ in chosen),
        num_in_span=sum(num_in_span for _, _, num_in_span in chosen),
        multiple=multiple,
        pinned=pinned,
    )


def plan_pack(
    *,
    ids_T: torch.Tensor,
    aux_TAD: Sequence[torch.Tensor],
    last_TD: Sequence[torch.Tensor],
    lengths: Sequence[int],
    trains_TS: torch.Tensor,
    num_oov: int = 0,
    num_in_span: int = 0,
    multiple: int = 1,
    pinned: bool = False,
) -> Pack:
    """A pack of documents whose trained (row, step) pairs are given; ``pack_documents`` decides them.

    Args:
        ids_T: Tokens of all documents.
        aux_TAD: Aux states, document by document.
        last_TD: Last states, likewise.
        lengths: Tokens of each document.
        trains_TS: Bool [T,S].
        num_oov: For the record.
        num_in_span: Likewise.
        multiple: See ``pack_documents``.
        pinned: Likewise.
    """
    T, S = trains_TS.shape
    reach_T = steps_to_run_T(trains_TS)
    order_T = torch.sort(reach_T, descending=True, stable=True).indices
    num_needed = [int((reach_T > k).sum()) for k in range(S)]
    num_rows = tuple(_filled(count, multiple) for count in num_needed)
    R = num_needed[0]
    num_padding = _filled(T + (num_rows[0] > R), multiple) - T
    rows_R = torch.cat([order_T[:R], torch.full((num_rows[0] - R,), T)])
    ends = np.cumsum(lengths).tolist()
    spans = tuple(Span(end - length, end) for length, end in zip(lengths, ends, strict=True))
    filled = [*spans, Span(T, T + num_padding)] if num_padding else spans
    plans = {n: plan_attention(rows_R[:n], filled, T + num_padding) for n in set(num_rows)}
    reads = _plan_reads(rows_R, num_rows, T, T + num_padding)
    return Pack(
        ids_T=_padded([ids_T], num_padding),
        aux_TAD=_padded(aux_TAD, num_padding, pinned),
        last_TD=_padded(last_TD, num_padding, pinned),
        positions_T=_padded([torch.arange(length) for length in lengths], num_padding),
        documents=spans,
        rows_R=rows_R,
        num_rows=num_rows,
        num_trained=tuple(trains_TS.sum(0).tolist()),
        num_oov=num_oov,
        num_in_span=num_in_span,
        multiple=multiple,
        num_positions=max([*lengths, num_padding]) + S,
        next_places_T=torch.arange(1, T + num_padding + 1).clamp_max(T + num_padding - 1),
        **reads,
        attention=tuple(plans[n] for n in num_rows),
        **_plan_loss(order_T[:R], trains_TS),
    )


def _plan_reads(rows_R: torch.Tensor, num_rows: Sequence[int], num_tokens: int, num_filled: int) -> dict[str, Any]:
    """Which token each row reads at each step; rows that read past the last document read none."""
    S = len(num_rows)
    read_SR = rows_R + torch.arange(1, S + 1)[:, None]
    runs_SR = torch.arange(len(rows_R)) < torch.tensor(num_rows)[:, None]
    read_SR = torch.where(runs_SR & (read_SR < num_tokens), read_SR, -1)
    used_T = torch.zeros(num_filled, dtype=torch.bool)
    used_T[read_SR[read_SR >= 0]] = True
    used_T[-1] |= not used_T.any()  # never none: an empty product has no shape
    index_T = used_T.cumsum(0) - 1
    return {
        "q_tokens_U": used_T.nonzero()[:, 0],
        "q_places_SR": torch.where(read_SR >= 0, index_T[read_SR.clamp_min(0)], -1),
        "kv_places_SR": read_SR,
    }


def _plan_loss(rows_R: torch.Tensor, trains_TS: torch.Tensor) -> dict[str, Any]:
    """Which rows train at each step, and where in the list of teachers theirs stands."""
    T, S = trains_TS.shape
    row_at_T = torch.full((T,), -1)
    row_at_T[rows_R] = torch.arange(len(rows_R))
    places = [trains_TS[:, k].nonzero()[:, 0] for k in range(S)]
    is_teacher_T = torch.zeros(T, dtype=torch.bool)
    for k, places_X in enumerate(places):
        is_teacher_T[places_X + k + 1] = True
    index_T = is_teacher_T.cumsum(0) - 1
    teachers = tuple(index_T[places_X + k + 1] for k, places_X in enumerate(places))
    return {
        "teachers_U": is_teacher_T.nonzero()[:, 0],
        "loss_rows": tuple(row_at_T[places_X] for places_X in places),
        "loss_teachers": teachers,
        "host_teachers": tuple(teachers_X.numpy() for teachers_X in teachers),
    }


def _filled(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _padded(parts: Sequence[torch.Tensor], num_padding: int, pinned: bool = False) -> torch.Tensor:
    """Parts in a row, then zeros."""
    first = parts[0]
    padded = [*parts, first.new_zeros(num_padding, *first.shape[1:])]
    if not pinned:
        return torch.cat(padded)
    size = sum(map(len, padded)), *first.shape[1:]
    return torch.cat(padded, out=torch.empty(size, dtype=first.dtype, pin_memory=True))
