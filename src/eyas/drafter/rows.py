"""Packing documents and choosing rows: which row runs how many TTT steps, and against what.

    documents (ids, mask, aux, last) → Pack: tokens side by side, rows ordered so that step k runs on a prefix

Row ``t`` at step ``k`` predicts token ``t+k+2``; its teacher is the target at ``last[t+k+1]``. It trains
when tokens ``t+1 … t+k+2`` all lie in one assistant span, and, in training, when the teacher's argmax is
inside the draft vocab. A row must *run* at step j when it trains at any step ≥ j. Rows that train at no
step give step-0 keys and values only.

Letters: T tokens of the pack, R rows that run, S TTT steps, A aux streams, D target hidden, L teachers of a
document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from eyas.drafter.anchors import anchored_TS
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
class Span:
    """Where a document lies in a pack."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents side by side that never see each other, and the rows to run.

    Rows are sorted by how many steps they run (most first), then by place: step k runs on the first
    ``num_rows[k]`` of them.
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
    trains_RS: torch.Tensor
    """Bool: row trains at step k."""
    num_oov: int
    """(row, step) pairs inside a span that do not train because the teacher's argmax is out of vocab, whether their
    row is an anchor or not."""
    multiple: int = 1
    """Tokens and rows were filled up to a multiple of this."""

    @property
    def num_trained(self) -> tuple[int, ...]:
        """Trained rows per step."""
        return tuple(self.trains_RS.sum(0).tolist())

    def to(self, device: str) -> Pack:
        """The same pack with its tensors on a device."""
        names = ("ids_T", "aux_TAD", "last_TD", "positions_T", "rows_R", "trains_RS")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})


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
            "`eyas verify` compares the states with their tokens",
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


def _trains_TS(document: Document, ttt_steps: int, anchors: int) -> tuple[torch.Tensor, int]:
    """Which rows train at which steps, and the pairs that do not because they are out of vocab."""
    inside_TS = torch.arange(ttt_steps) < steps_in_span_T(document.mask_T)[:, None]
    trains_TS = inside_TS
    if document.in_vocab_T is not None:
        T = inside_TS.shape[0]
        known_X = torch.cat([document.in_vocab_T.bool(), torch.zeros(ttt_steps, dtype=torch.bool)])
        trains_TS = inside_TS & known_X[torch.arange(T)[:, None] + torch.arange(ttt_steps) + 1]
    num_oov = int(inside_TS.sum() - trains_TS.sum())
    return anchored_TS(trains_TS, anchors, document.anchor_key) if anchors else trains_TS, num_oov


def steps_to_run_T(trains_TS: torch.Tensor) -> torch.Tensor:
    """Steps that each row runs: up to the last at which it trains, whether it trains before or not."""
    return (trains_TS * torch.arange(1, trains_TS.shape[1] + 1)).amax(1)


def _check(document: Document) -> None:
    T = document.ids_T.shape[0]
    for name in ("ids_T", "mask_T", "aux_TAD", "last_TD"):
        tensor = getattr(document, name)
        if tensor.shape[0] != T or tensor.ndim != len(name.rsplit("_", 1)[1]):
            raise DataError(f"{name} has shape {tuple(tensor.shape)}, expected {T} tokens as in ids_T")


def pack_documents(documents: Sequence[Document], ttt_steps: int, multiple: int = 1, anchors: int = 0) -> Pack:
    """Lay documents side by side and order the rows that run.

    Args:
        documents: Whole documents.
        ttt_steps: S.
        multiple: Tokens and the rows of each step are filled up to a multiple of this, with padding that no
            document sees and rows that do not train. A matrix product of a new size costs its library
            milliseconds and megabytes to prepare, so a trainer wants few sizes.
        anchors: Most rows of a document that train, see ``drafter.anchors``; 0 trains all.

    Raises:
        DataError: A document's tensors disagree in length or rank.
    """
    for document in documents:
        _check(document)
    lengths = [document.ids_T.shape[0] for document in documents]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    chosen = [_trains_TS(document, ttt_steps, anchors) for document in documents]
    trains_TS = torch.cat([trains for trains, _ in chosen])
    reach_T = steps_to_run_T(trains_TS)
    order_T = torch.sort(reach_T, descending=True, stable=True).indices
    num_needed = [int((reach_T > k).sum()) for k in range(ttt_steps)]
    num_rows = tuple(_filled(count, multiple) for count in num_needed)
    T, R = len(order_T), num_needed[0]
    num_padding = _filled(T + (num_rows[0] > R), multiple) - T
    rows_R = torch.cat([order_T[:R], torch.full((num_rows[0] - R,), T)])
    trains_RS = torch.zeros(num_rows[0], ttt_steps, dtype=torch.bool)
    trains_RS[:R] = trains_TS[order_T[:R]]
    return Pack(
        ids_T=_padded([d.ids_T.to(torch.int64) for d in documents], num_padding),
        aux_TAD=_padded([d.aux_TAD for d in documents], num_padding),
        last_TD=_padded([d.last_TD for d in documents], num_padding),
        positions_T=_padded([torch.arange(length) for length in lengths], num_padding),
        documents=tuple(Span(end - length, end) for length, end in zip(lengths, ends, strict=True)),
        rows_R=rows_R,
        num_rows=num_rows,
        trains_RS=trains_RS,
        num_oov=sum(count for _, count in chosen),
        multiple=multiple,
    )


def _filled(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _padded(parts: Sequence[torch.Tensor], num_padding: int) -> torch.Tensor:
    """Parts in a row, then zeros."""
    first = parts[0]
    return torch.cat([*parts, first.new_zeros(num_padding, *first.shape[1:])])
