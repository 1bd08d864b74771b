"""Which rows of a sample are worth their disk: what a training can read, and not a row more.

Row ``t`` of a sample trains at some step when tokens ``t+1`` and ``t+2`` both lie in one assistant span;
its teachers are rows of ``last``: row ``p`` (from 1) is one when tokens ``p`` and ``p+1`` are the
assistant's. Attention is causal, so nothing of ``aux`` behind the last trained row is ever read.

Letters: T tokens of the sample, L rows of ``last`` that are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.contracts import LastRows

CALIBRATION_ROWS = 4096
"""Rows of aux states that a new drafter's first weights are made from."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of one sample that are stored: aux rows 0 to ``num_aux`` - 1, and of ``last`` these."""

    num_aux: int
    last_L: np.ndarray
    """Int64, rising."""

    @property
    def counts(self) -> tuple[int, int]:
        """(rows of aux, rows of last)."""
        return self.num_aux, len(self.last_L)


def stored_rows(loss_mask: Sequence[int] | np.ndarray, last_rows: LastRows) -> StoredRows:
    """Rows of a sample that ``extract.last_rows`` stores.

    Args:
        loss_mask: T values, 1 where the assistant wrote the token.
        last_rows: ``all``: every row of both. ``trained``: the teachers of trained rows, and aux up to the
            last trained row; none of either when no row trains.
    """
    mask_T = np.asarray(loss_mask, dtype=bool)
    if last_rows == "all":
        return StoredRows(len(mask_T), np.arange(len(mask_T)))
    teachers_L = np.flatnonzero(mask_T[1:-1] & mask_T[2:]) + 1
    # The last teacher p belongs to row p - 1, the last that trains: p rows in all.
    return StoredRows(int(teachers_L[-1]) if len(teachers_L) else 0, teachers_L)
