"""SpecForge's offline files: ``rows_{g}-{g+2000}/data_{i}.ckpt``, three aux streams side by side, ``last`` post-norm.

Its capture pads batches with zeros (ids and mask), runs the target over the padding and stores it. Rule here: trailing
tokens of id 0 outside the loss mask are padding, whatever their states; one token stays. Nothing that a drafter learns
from is lost by it: no row after the last masked token is read.

Letters: T tokens of a sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from eyas import fs
from eyas.contracts import FinalHidden
from eyas.errors import DataError, StoreError
from eyas.shards.layouts.base import ExportFacts, LayoutSample, RowsRead, Spelling, this_token_rows
from eyas.shards.layouts.torch_files import OVERHEAD_BYTES, flat_ids, load_tensors, owned, save_tensors

NAME = "specforge"
GROUP_ROWS = 2000
NUM_AUX = 3
PAD_ID = 0
MAPPING_NAME = "vocab_mapping/vocab_mapping.pt"
FILE_NAME = re.compile(r"data_(\d+)\.ckpt(?:\.gz)?")


class SpecForgeWriter:
    """Writes ``rows_{g}-{g+2000}/data_{i}.ckpt``.

    Args:
        d2t_W: Offsets of the draft vocab, written beside the samples with ``t2d_V`` when it is there.
        t2d_V: Which target ids have a draft id.
    """

    name = NAME
    final_hidden: FinalHidden = "post_norm"
    spelling: Spelling = "output_of_layer"

    def __init__(self, d2t_W: torch.Tensor | None = None, t2d_V: torch.Tensor | None = None) -> None:
        self._mapping = None if d2t_W is None or t2d_V is None else {"d2t": d2t_W, "t2d": t2d_V}

    def check(self, boundaries: Sequence[int]) -> None:
        """Refuse any other number of aux streams than three."""
        if len(boundaries) != NUM_AUX:
            raise StoreError(
                f"the set has {len(boundaries)} aux streams (boundaries {list(boundaries)}), specforge reads exactly "
                f"{NUM_AUX}",
                "set extract.boundaries to three boundaries and extract again, or export to another layout",
            )

    def path(self, index: int) -> str:
        """2,000 samples a folder."""
        group = index // GROUP_ROWS * GROUP_ROWS
        return f"rows_{group}-{group + GROUP_ROWS}/data_{index}.ckpt"

    def file_bytes(self, num_tokens: int, num_aux: int, hidden_size: int) -> int:
        """States, int64 ids and mask, the zip's overhead."""
        return num_tokens * ((num_aux + 1) * hidden_size * 2 + 16) + OVERHEAD_BYTES

    def write(self, handle: BinaryIO, sample: LayoutSample) -> None:
        """One dict of plain tensors; states carry a leading 1."""
        value = {
            "input_ids": owned(sample.input_ids_T),
            "loss_mask": owned(sample.loss_mask_T),
            "hidden_state": owned(sample.last_TD)[None],
            "aux_hidden_state": owned(sample.aux_TAD.flatten(1))[None],
        }
        save_tensors(value, handle)

    def rows_read(self, loss_mask_T: torch.Tensor) -> RowsRead:
        """See ``this_token_rows``."""
        return this_token_rows(loss_mask_T)

    def is_side_file(self, path: str) -> bool:
        """The vocab mapping."""
        return path == MAPPING_NAME

    def is_unfinished(self, path: str) -> bool:
        """Half files go by their own names."""
        return False

    def write_side_files(
        self, folder: Path, facts: ExportFacts, tokens: Iterator[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[str]:
        """``vocab_mapping/vocab_mapping.pt`` when there is a draft vocab."""
        if self._mapping is None:
            return []
        with fs.atomic_writer(folder / MAPPING_NAME) as handle:
            save_tensors({key: owned(value) for key, value in self._mapping.items()}, handle)
        return [MAPPING_NAME]


class SpecForgeSource:
    """Reads a folder of ``data_{i}.ckpt`` or ``.ckpt.gz``, in any sub-folders.

    Args:
        folder: As the capture wrote it.
        keep_padding: For an export of eyas, whose samples end where they end.
    """

    name = NAME
    final_hidden: FinalHidden | None = "post_norm"
    boundaries: tuple[int, ...] | None = None

    def __init__(self, folder: Path, *, keep_padding: bool = False) -> None:
        self._folder, self._keep_padding = folder, keep_padding
        found = [
            (int(match[1]), path.relative_to(folder).as_posix())
            for path in folder.rglob("data_*")
            if (match := FILE_NAME.fullmatch(path.name)) and path.is_file()
        ]
        self.paths = tuple(path for _, path in sorted(found))

    def read(self, path: str) -> LayoutSample:
        """One sample without its padding; see ``LayoutSource.read``."""
        keys = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
        value = load_tensors(self._folder / path, dict.fromkeys(keys, torch.Tensor))
        shapes = [tuple(value[key].shape) for key in ("aux_hidden_state", "hidden_state")]
        if any(len(shape) != 3 or shape[0] != 1 for shape in shapes) or shapes[0][2] != NUM_AUX * shapes[1][2]:
            raise DataError(
                f"aux_hidden_state {shapes[0]} and hidden_state {shapes[1]}, expected (1, T, 3 D) and (1, T, D)"
            )
        aux_TF, last_TD = value["aux_hidden_state"][0], value["hidden_state"][0]
        sample = LayoutSample(
            input_ids_T=flat_ids(value["input_ids"], "input_ids"),
            loss_mask_T=flat_ids(value["loss_mask"], "loss_mask"),
            aux_TAD=aux_TF.unflatten(1, (NUM_AUX, last_TD.shape[1])),
            last_TD=last_TD,
        )
        return sample if self._keep_padding else without_padding(sample)


def without_padding(sample: LayoutSample) -> LayoutSample:
    """A sample up to its last token that has another id than 0 or lies in the loss mask.

    Raises:
        DataError: The counts of ids, mask and states differ, so that no row can be called padding.
    """
    counts = {len(sample.input_ids_T), len(sample.loss_mask_T), len(sample.aux_TAD), len(sample.last_TD)}
    if len(counts) != 1:
        raise DataError(
            f"{len(sample.input_ids_T)} ids, {len(sample.loss_mask_T)} mask values, {len(sample.aux_TAD)} aux rows, "
            f"{len(sample.last_TD)} last rows, expected one number"
        )
    real = ((sample.input_ids_T != PAD_ID) | (sample.loss_mask_T != 0)).nonzero()
    length = int(real[-1]) + 1 if len(real) else 1
    return LayoutSample(
        input_ids_T=sample.input_ids_T[:length],
        loss_mask_T=sample.loss_mask_T[:length],
        aux_TAD=sample.aux_TAD[:length],
        last_TD=sample.last_TD[:length],
    )
