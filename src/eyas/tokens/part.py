"""Which samples are stored, and tokens looked up sample by sample: what a streamed training needs of the dataset.

Of a streamed set only the ``judging`` part is stored: every held-out sample, the samples that first weights are
calibrated on, and one training sample of each source, which says what was trained on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.contracts import StoredPart, StoredSample, TokenSample
from eyas.errors import DataError
from eyas.rows import CALIBRATION_ROWS, stored_rows
from eyas.tokens.dataset import (
    REMAKE,
    check_row,
    iter_masks,
    read_group,
    read_group_names,
    read_index,
    read_lengths,
    read_names,
)

CACHED_GROUPS = 16
"""Row groups of a thousand samples that a look-up keeps."""


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


class TokenLookup(Mapping[str, TokenSample]):
    """Samples of a token dataset by id, read when they are asked for; each is checked against its id.

    In memory are the ids of all samples and ``CACHED_GROUPS`` row groups, whatever the size of the set.

    Args:
        folder: Of the dataset.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, tuple[int, int]] = {}
        for group, names in enumerate(read_group_names(folder)):
            self._places.update({name: (group, row) for row, name in enumerate(names)})
        self._groups: OrderedDict[int, list[TokenSample]] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, sample_id: str) -> TokenSample:
        """One sample.

        Raises:
            KeyError: There is none of this id.
            DataError: Its row is damaged.
        """
        group, row = self._places[sample_id]
        with self._lock:
            if group not in self._groups:
                self._groups[group] = read_group(self._folder, group)
                while len(self._groups) > CACHED_GROUPS:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(group)
            sample = self._groups[group][row]
        if sample.sample_id != sample_id:
            raise DataError(f"{self._folder}: sample {sample_id} is not where it was", REMAKE)
        check_row(sample)
        return sample

    def take(self, sample_ids: Iterable[str]) -> dict[str, TokenSample]:
        """Several samples, each row group read once."""
        wanted = sorted(sample_ids, key=lambda name: self._places[name])
        return {name: self[name] for name in wanted}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
