"""speculators from 0.5: an Arrow set of ids and masks, and ``hidden_states/hs_{i}.safetensors``, i its row.

``hidden_states`` [T, A + 1, D], the last slot always pre-norm; ``token_ids`` int64 [T]. The reader compares the ids of
row and file, and nothing else.

Letters: T tokens of a sample, A aux streams, D target hidden size, V target vocab, W draft vocab.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from eyas import fs
from eyas.contracts import FinalHidden
from eyas.errors import DataError
from eyas.shards.layouts.base import ExportFacts, LayoutSample, RowsRead, Spelling, next_token_rows
from eyas.shards.layouts.torch_files import flat_ids, save_tensors

NAME = "speculators"
STATES_FOLDER = "hidden_states"
FREQUENCIES_NAME = "token_freq.pt"
ARROW_NAME = re.compile(r"data-\d{5}-of-\d{5}\.arrow|dataset_info\.json|state\.json")
ARROW_PART = f"arrow{fs.PART_SUFFIX}/"
MAP_NAMES = ("d2t.npy", "t2d.npy")
FILE_NAME = re.compile(r"hs_(\d+)\.safetensors")
HEADER_BYTES = 512
ARROW_BYTES_PER_TOKEN = 16
ROWS_PER_BATCH = 1000
MAP_BYTES_PER_SAMPLE = 64


class SpeculatorsWriter:
    """Writes the layout of speculators 0.5 and later.

    Args:
        d2t_W: Offsets of the draft vocab, written beside the samples with ``t2d_V`` when it is there.
        t2d_V: Which target ids have a draft id.
    """

    name = NAME
    final_hidden: FinalHidden = "pre_norm"
    spelling: Spelling = "vllm"

    def __init__(self, d2t_W: torch.Tensor | None = None, t2d_V: torch.Tensor | None = None) -> None:
        self._maps = {} if d2t_W is None or t2d_V is None else dict(zip(MAP_NAMES, (d2t_W, t2d_V), strict=True))

    def check(self, boundaries: Sequence[int]) -> None:
        """Any number of streams fits."""

    def path(self, index: int) -> str:
        """``hidden_states/hs_{index}.safetensors``."""
        return f"{STATES_FOLDER}/hs_{index}.safetensors"

    def file_bytes(self, num_tokens: int, num_aux: int, hidden_size: int) -> int:
        """States, int64 ids, header, and the sample's row of the Arrow set."""
        row_bytes = num_tokens * ARROW_BYTES_PER_TOKEN + MAP_BYTES_PER_SAMPLE
        return num_tokens * ((num_aux + 1) * hidden_size * 2 + 8) + HEADER_BYTES + row_bytes

    def write(self, handle: BinaryIO, sample: LayoutSample) -> None:
        """One safetensors file; its bytes depend on its content alone."""
        from safetensors.torch import save

        states = torch.cat([sample.aux_TAD, sample.last_TD[:, None]], dim=1)
        handle.write(save({"hidden_states": states, "token_ids": sample.input_ids_T.contiguous()}))

    def rows_read(self, loss_mask_T: torch.Tensor) -> RowsRead:
        """See ``next_token_rows``."""
        return next_token_rows(loss_mask_T)

    def is_side_file(self, path: str) -> bool:
        """The Arrow set, the counts, the maps."""
        return bool(ARROW_NAME.fullmatch(path)) or path in (FREQUENCIES_NAME, *MAP_NAMES)

    def is_unfinished(self, path: str) -> bool:
        """Files of an Arrow set that was not moved into place."""
        return path.startswith(ARROW_PART)

    def write_side_files(
        self, folder: Path, facts: ExportFacts, tokens: Iterator[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[str]:
        """Maps, counts over the loss mask, then the Arrow set, its ``state.json`` last."""
        import numpy as np

        paths = []
        for name, values in self._maps.items():
            with fs.atomic_writer(folder / name) as handle:
                np.save(handle, values.numpy())
            paths.append(name)
        counts: Counter[int] = Counter()
        table = _arrow_table(tokens, counts)
        with fs.atomic_writer(folder / FREQUENCIES_NAME) as handle:
            save_tensors({token_id: counts[token_id] for token_id in sorted(counts)}, handle)
        return [*paths, FREQUENCIES_NAME, *_save_arrow(folder, table)]


def _arrow_table(tokens: Iterator[tuple[torch.Tensor, torch.Tensor]], counts: Counter[int]) -> Any:
    """Rows ``input_ids``, ``loss_mask``, ``seq_len`` in file order; counts the masked ids on the way."""
    import pyarrow as pa

    ids = pa.list_(pa.int64())
    schema = pa.schema([("input_ids", ids), ("loss_mask", ids), ("seq_len", pa.int64())])
    batches, rows = [], []
    for ids_T, mask_T in tokens:
        found, number = ids_T[mask_T.bool()].long().unique(return_counts=True)
        counts.update(dict(zip(found.tolist(), number.tolist(), strict=True)))
        rows.append((ids_T.numpy(), mask_T.numpy(), len(ids_T)))
        if len(rows) == ROWS_PER_BATCH:
            batches.append(_record_batch(rows, schema))
            rows = []
    batches += [_record_batch(rows, schema)] if rows else []
    return pa.Table.from_batches(batches, schema)


def _record_batch(rows: list[tuple[Any, Any, int]], schema: Any) -> Any:
    import pyarrow as pa

    columns = zip(*rows, strict=True)
    return pa.record_batch([pa.array(list(c), f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _save_arrow(folder: Path, table: Any) -> list[str]:
    """The set by the peer's own package, file by file into the folder, ``state.json`` last."""
    import datasets
    from datasets.table import InMemoryTable

    part = folder / ARROW_PART
    shutil.rmtree(part, ignore_errors=True)
    # The fingerprint only names caches; drawn by the package it would differ with its version.
    rows = datasets.Dataset(InMemoryTable(table), fingerprint="eyas").with_format("torch")
    was_shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        with fs.disk_errors(folder / "arrow"):
            rows.save_to_disk(str(part))
    finally:
        if was_shown:
            datasets.enable_progress_bars()
    names = sorted((path.name for path in part.iterdir()), key=lambda name: (name == "state.json", name))
    for name in names:
        fs.fsync_file(part / name)
        (part / name).replace(folder / name)
    part.rmdir()
    fs.fsync_dir(folder)
    return names


class SpeculatorsSource:
    """Reads an Arrow set and its ``hs_{i}.safetensors``.

    Args:
        folder: The data folder, with ``hidden_states`` inside.

    Raises:
        DataError: The Arrow set is missing or damaged, or has other columns.
    """

    name = NAME
    final_hidden: FinalHidden | None = "pre_norm"
    boundaries: tuple[int, ...] | None = None

    def __init__(self, folder: Path) -> None:
        import datasets
        import pyarrow as pa

        self._folder = folder
        try:
            self._rows = datasets.load_from_disk(str(folder)).with_format(None)
            wanted: Any = self._rows.select_columns(["input_ids", "loss_mask"])
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise DataError(
                f"{folder} holds no Arrow set with input_ids and loss_mask: {str(error).strip().splitlines()[0]}",
                "give the folder that was written by `save_to_disk`, the one with dataset_info.json",
            ) from None
        self._rows = wanted.with_format("torch")
        states = folder / STATES_FOLDER
        there = {int(m[1]) for p in (states.iterdir() if states.is_dir() else ()) if (m := FILE_NAME.fullmatch(p.name))}
        self.paths = tuple(f"{STATES_FOLDER}/hs_{i}.safetensors" for i in sorted(there | set(range(len(self._rows)))))

    @property
    def num_tokens(self) -> int:
        """Of all rows of the Arrow set."""
        table: Any = self._rows.data
        chunks = table.column("input_ids").chunks
        return sum(int(chunk.offsets[-1].as_py()) - int(chunk.offsets[0].as_py()) for chunk in chunks)

    def read(self, path: str) -> LayoutSample:
        """One sample: states and ids from its file, mask from its row, both ids equal; see ``LayoutSource.read``."""
        match = FILE_NAME.fullmatch(Path(path).name)
        assert match is not None, path
        index = int(match[1])
        if index >= len(self._rows):
            raise DataError(f"no row {index} in the Arrow set of {len(self._rows)} rows")
        tensors = _load_states(self._folder / path)
        row = self._rows[index]
        ids_T = flat_ids(tensors["token_ids"], "token_ids")
        expected_T = flat_ids(torch.as_tensor(row["input_ids"]), "input_ids")
        if not torch.equal(ids_T, expected_T):
            raise DataError(f"token ids are not those of row {index}: {_first_difference(ids_T, expected_T)}")
        states = tensors["hidden_states"]
        if states.ndim != 3 or states.shape[1] < 2:
            raise DataError(f"hidden_states: shape {tuple(states.shape)}, expected [T, aux streams + 1, D]")
        return LayoutSample(
            input_ids_T=ids_T,
            loss_mask_T=flat_ids(torch.as_tensor(row["loss_mask"]).long(), "loss_mask"),
            aux_TAD=states[:, :-1],
            last_TD=states[:, -1],
        )


def _load_states(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            names = set(handle.keys())
            if "hidden_states_scales" in names:
                raise DataError("hidden_states are FP8 with scales: lossy states are not imported, expected bf16")
            if not {"hidden_states", "token_ids"} <= names:
                raise DataError(f"tensors {sorted(names)}, expected hidden_states and token_ids")
            return {name: handle.get_tensor(name) for name in ("hidden_states", "token_ids")}
    except FileNotFoundError:
        raise DataError("is missing") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"is no whole safetensors file: {str(error).strip()[:200]}") from None


def _first_difference(ids_T: torch.Tensor, expected_T: torch.Tensor) -> str:
    if len(ids_T) != len(expected_T):
        return f"{len(ids_T)} ids, the row has {len(expected_T)}"
    at = int((ids_T != expected_T).nonzero()[0])
    return f"id {int(ids_T[at])} at token {at}, the row has {int(expected_T[at])}"
