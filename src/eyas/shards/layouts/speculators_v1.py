"""speculators 0.3 and 0.4: ``data_{i}.pt`` with ids, mask and a list of states, the last layer at its end.

Its reader takes every file below the folder whose name ends in ``pt``, so nothing else there may. Trainer 0.3 applies
the head to the last entry as it is (post-norm); 0.4 norms it first (pre-norm); no file says which.

Letters: T tokens of a sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from eyas import fs
from eyas.contracts import FinalHidden
from eyas.errors import DataError, StoreError
from eyas.shards.layouts.base import ExportFacts, LayoutSample, RowsRead, Spelling, next_token_rows
from eyas.shards.layouts.torch_files import OVERHEAD_BYTES, flat_ids, load_tensors, owned, save_tensors

NAME = "speculators_v1"
LENGTHS_NAME = "sample_lengths.json"
CONFIG_NAME = "data_config.json"
FILE_NAME = re.compile(r"data_(\d+)\.pt")


class SpeculatorsV1Writer:
    """Writes ``data_{i}.pt``.

    Args:
        final_hidden: What the trainer takes: post_norm for 0.3, pre_norm for 0.4.
    """

    name = NAME
    spelling: Spelling = "output_of_layer"

    def __init__(self, final_hidden: FinalHidden) -> None:
        self.final_hidden: FinalHidden = final_hidden

    def check(self, boundaries: Sequence[int]) -> None:
        """Any number of streams fits."""

    def path(self, index: int) -> str:
        """``data_{index}.pt``, flat."""
        return f"data_{index}.pt"

    def file_bytes(self, num_tokens: int, num_aux: int, hidden_size: int) -> int:
        """States, int64 ids and mask, the zip's overhead."""
        return num_tokens * ((num_aux + 1) * hidden_size * 2 + 16) + OVERHEAD_BYTES

    def write(self, handle: BinaryIO, sample: LayoutSample) -> None:
        """One dict of plain tensors."""
        streams = [owned(sample.aux_TAD[:, a]) for a in range(sample.aux_TAD.shape[1])]
        ids_mask = {"input_ids": owned(sample.input_ids_T), "loss_mask": owned(sample.loss_mask_T)}
        save_tensors({**ids_mask, "hidden_states": [*streams, owned(sample.last_TD)]}, handle)

    def rows_read(self, loss_mask_T: torch.Tensor) -> RowsRead:
        """See ``next_token_rows``."""
        return next_token_rows(loss_mask_T)

    def is_side_file(self, path: str) -> bool:
        """The two JSON files."""
        return path in (LENGTHS_NAME, CONFIG_NAME)

    def is_unfinished(self, path: str) -> bool:
        """Half files go by their own names."""
        return False

    def write_side_files(
        self, folder: Path, facts: ExportFacts, tokens: Iterator[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[str]:
        """``sample_lengths.json`` (0.4 reads it, 0.3 guesses lengths from file sizes), then ``data_config.json``."""
        lengths = {str(index): len(ids_T) for index, (ids_T, _) in enumerate(tokens)}
        fs.write_text(folder / LENGTHS_NAME, json.dumps(lengths) + "\n")
        fs.write_text(folder / CONFIG_NAME, json.dumps(data_config(facts, list(lengths.values())), indent=2) + "\n")
        return [LENGTHS_NAME, CONFIG_NAME]


def data_config(facts: ExportFacts, lengths: Sequence[int]) -> dict[str, object]:
    """``data_config.json`` with the peer's keys; what a capture by eyas has no value for is empty."""
    states = f"list of [seq_len, {facts.hidden_size}]"
    tensor = {"dtype": "torch.long", "shape": "[seq_len]"}
    return {
        "version": "2.0",
        "generated_at": "",
        "speculators_version": facts.trainer_version,
        "reproducibility": {
            "command": f"eyas export-states (capture {facts.capture_identity})",
            "package_versions": {"torch": torch.__version__, "vllm": "", "transformers": "", "speculators": ""},
            "gpu": "",
        },
        "model": {
            "target_model_path": "",
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.0,
            "hidden_size": facts.hidden_size,
        },
        "data": {
            "train_data_path": "",
            "seq_length": max(lengths),
            "max_samples": None,
            "num_samples": len(lengths),
            "seed": 0,
            "chat_template_note": "rendered by eyas with the target's own template",
        },
        "hidden_states": {
            "layer_ids": list(facts.layer_ids),
            "description": f"output of each layer; the last one {facts.final_hidden}",
        },
        "generation": {"cache_dir": ""},
        "format": {
            "file_pattern": "data_{idx}.pt",
            "data_format_version": 1,
            "schema": {
                "input_ids": tensor | {"description": "Token ids"},
                "hidden_states": {
                    "dtype": "list[torch.bfloat16]",
                    "shape": states,
                    "num_tensors": len(facts.layer_ids),
                    "description": "Aux states in rising order, then the last hidden state",
                },
                "loss_mask": tensor | {"description": "1 where the assistant wrote the token"},
            },
        },
    }


class SpeculatorsV1Source:
    """Reads a folder of ``data_{i}.pt``.

    Args:
        folder: As the generator wrote it.
        num_layers: Of the target; the last layer id must be its last layer.

    Raises:
        DataError: ``data_config.json`` names layers that are not the aux layers and the last one.
    """

    name = NAME
    final_hidden: FinalHidden | None = None

    def __init__(self, folder: Path, num_layers: int) -> None:
        self._folder = folder
        found = [(int(match[1]), path.name) for path in folder.iterdir() if (match := FILE_NAME.fullmatch(path.name))]
        self.paths = tuple(name for _, name in sorted(found))
        self.boundaries = _boundaries(folder / CONFIG_NAME, num_layers)

    def read(self, path: str) -> LayoutSample:
        """One sample; see ``LayoutSource.read``."""
        kinds = {"input_ids": torch.Tensor, "loss_mask": torch.Tensor, "hidden_states": list}
        value = load_tensors(self._folder / path, kinds)
        states = value["hidden_states"]
        if len(states) < 2 or not all(isinstance(entry, torch.Tensor) for entry in states):
            raise DataError(f"hidden_states: {len(states)} entries, expected aux tensors and a last one")
        shapes = {tuple(entry.shape) for entry in states}
        if len(shapes) != 1 or states[0].ndim != 2:
            raise DataError(f"hidden_states: shapes {sorted(shapes)}, expected one shape [T, D]")
        return LayoutSample(
            input_ids_T=flat_ids(value["input_ids"], "input_ids"),
            loss_mask_T=flat_ids(value["loss_mask"], "loss_mask"),
            aux_TAD=torch.stack(states[:-1], dim=1),
            last_TD=states[-1],
        )


def _boundaries(path: Path, num_layers: int) -> tuple[int, ...] | None:
    """Aux boundaries from the layer ids, each the output of its layer: boundary b is the output of layer b - 1."""
    if not path.is_file():
        return None
    try:
        ids = fs.read_json(path)["hidden_states"]["layer_ids"]
        boundaries = [int(i) + 1 for i in ids]
    except (StoreError, KeyError, TypeError, ValueError):
        raise DataError(f"{path}: no hidden_states.layer_ids, expected a list of numbers") from None
    if len(boundaries) < 2 or boundaries[-1] != num_layers or sorted(set(boundaries)) != boundaries:
        raise DataError(
            f"{path}: layer_ids {ids}, expected rising ids that end with {num_layers - 1}, the target's last layer",
            "states of another last layer cannot be a teacher; is it another target?",
        )
    return tuple(boundaries[:-1])
