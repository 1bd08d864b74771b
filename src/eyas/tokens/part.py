"""Which samples of a token dataset are stored, and which first weights are calibrated on.

Of a streamed set only the ``judging`` part is stored: every held-out sample, the samples that first weights are
calibrated on, and one training sample of each source, which says what was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.contracts import StoredPart, StoredSample
from eyas.rows import CALIBRATION_ROWS, stored_rows
from eyas.tokens.dataset import iter_masks, read_index, read_lengths, read_names


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """What a plan is made of."""

    lengths: list[tuple[str, int]]
    """(sample id, number of tokens)."""
    trained_rows: tuple[int, int]
    """Rows of each aux stream and of ``last`` that a training can read."""


def planned_part(folder: Path, stored: StoredPart) -> PlannedPart:
    """The samples of a token dataset that are stored.

    Raises:
        DataError: The dataset is missing, damaged, or not what its index says.
    """
    if stored == "all":
        return PlannedPart(read_lengths(folder), read_index(folder).trained_rows)
    samples = read_names(folder)
    chosen = {s.sample_id for s in samples if s.split == "held_out"} | calibration_samples(folder, samples)
    first = {s.source: s.sample_id for s in sorted(samples, key=lambda s: s.sample_id, reverse=True) if _trains(s)}
    chosen |= set(first.values())
    counts = [stored_rows(mask_T, "trained").counts for name, mask_T in iter_masks(folder) if name in chosen]
    return PlannedPart(
        [(s.sample_id, s.num_tokens) for s in samples if s.sample_id in chosen],
        (sum(aux for aux, _ in counts), sum(last for _, last in counts)),
    )


def calibration_samples(folder: Path, samples: Sequence[StoredSample]) -> set[str]:
    """The training samples whose states first weights are made from: the first by id, up to ``CALIBRATION_ROWS``."""
    first = sorted(s.sample_id for s in samples if _trains(s))[:CALIBRATION_ROWS]
    wanted = set(first)
    rows = {name: stored_rows(mask_T, "trained").num_aux for name, mask_T in iter_masks(folder) if name in wanted}
    chosen, num_rows = set(), 0
    for name in first:
        chosen.add(name)
        num_rows += rows[name]
        if num_rows >= CALIBRATION_ROWS:
            break
    return chosen


def _trains(sample: StoredSample) -> bool:
    return sample.split == "train"
