"""What every foreign layout shares: a sample as it lies in a file, its checks, and which rows a peer reads.

Letters: T tokens of a sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import torch
import xxhash

from eyas.contracts import SCHEMA_VERSION, FinalHidden, StoredSample
from eyas.shards.values import row_faults

RECORD_NAME = "eyas-export.json"
JOURNAL_NAME = "eyas-export.jsonl"
CHUNK_BYTES = 1 << 22
Spelling = Literal["vllm", "output_of_layer"]


@dataclass(frozen=True, slots=True)
class LayoutSample:
    """One sample as a layout holds it.

    Shapes: input_ids_T and loss_mask_T int64, aux_TAD and last_TD bf16. Whether ``last`` is pre- or post-norm is the
    layout's affair.
    """

    input_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    aux_TAD: torch.Tensor
    last_TD: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowsRead:
    """What a peer's loss reads of one sample: rows of ``last``, and how many aux rows from the first."""

    last_T: torch.Tensor
    num_aux_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts:
    """What is the same for all samples of an export."""

    layout: str
    trainer_version: str
    """Of the peer that will read it; decides the norm state."""
    capture_identity: str
    boundaries: tuple[int, ...]
    layer_ids: tuple[int, ...]
    """The aux boundaries and the last layer in the layout's own spelling."""
    final_hidden: FinalHidden
    hidden_size: int
    is_lossy: bool = False
    """The set's codec had rounded the states: they are near the target's, not equal to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFile:
    """One file of an export."""

    path: str
    size_bytes: int
    xxh3: str
    sample_id: str = ""
    """Empty for files that belong to no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """``eyas-export.json``, written last: what an exported folder holds. Peers ignore it."""

    facts: ExportFacts
    num_samples: int
    num_tokens: int
    num_train_samples: int
    """The first ones; the rest is held out."""
    samples: tuple[StoredSample, ...]
    """In file order."""
    files: tuple[LayoutFile, ...]
    schema_version: int = SCHEMA_VERSION


class LayoutWriter(Protocol):
    """How samples are laid out for one peer."""

    name: str
    final_hidden: FinalHidden
    spelling: Spelling

    def check(self, boundaries: Sequence[int]) -> None:
        """Refuse a capture that the layout cannot hold, with ``StoreError``."""
        ...

    def path(self, index: int) -> str:
        """Path of the file of sample ``index`` below the folder."""
        ...

    def file_bytes(self, num_tokens: int, num_aux: int, hidden_size: int) -> int:
        """Most bytes that a sample takes on disk, its share of side files included."""
        ...

    def write(self, handle: BinaryIO, sample: LayoutSample) -> None:
        """Write one sample's file."""
        ...

    def rows_read(self, loss_mask_T: torch.Tensor) -> RowsRead:
        """Which rows the peer's loss reads."""
        ...

    def is_side_file(self, path: str) -> bool:
        """Whether a path below the folder is one of the layout's other files."""
        ...

    def is_unfinished(self, path: str) -> bool:
        """Whether a path is what a killed run left of the other files."""
        ...

    def write_side_files(
        self, folder: Path, facts: ExportFacts, tokens: Iterator[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[str]:
        """Write what lies beside the samples (``tokens``: ids and mask in file order); gives the paths."""
        ...


class LayoutSource(Protocol):
    """A folder in a peer's layout, to be imported."""

    name: str
    final_hidden: FinalHidden | None
    """Norm state that the layout prescribes; None when it cannot tell."""
    boundaries: tuple[int, ...] | None
    """Aux boundaries, where the layout says them."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Every sample's file below the folder, in the layout's order; files that are missing included."""
        ...

    def read(self, path: str) -> LayoutSample:
        """One sample, its tensors mapped where the container allows.

        Raises:
            DataError: The file is not what the layout prescribes; says found and expected.
        """
        ...


class HashingHandle:
    """A binary handle that hashes and counts what passes through."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle, self._xxh3, self.size_bytes = handle, xxhash.xxh3_64(), 0

    def write(self, data: bytes) -> int:
        """Write, hash, count."""
        self._handle.write(data)
        self._xxh3.update(data)
        self.size_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Flush the handle behind."""
        self._handle.flush()

    @property
    def xxh3(self) -> str:
        """XXH3-64 of all that was written, 16 hex digits."""
        return self._xxh3.hexdigest()


def hash_layout_file(path: Path) -> str:
    """XXH3-64 of a file's content, 16 hex digits."""
    xxh3 = xxhash.xxh3_64()
    with path.open("rb") as handle:
        while data := handle.read(CHUNK_BYTES):
            xxh3.update(data)
    return xxh3.hexdigest()


def next_token_rows(loss_mask_T: torch.Tensor) -> RowsRead:
    """speculators: row j (of ids[1:], aux[:-1], last[1:], mask[1:]) trains where mask[j+1] and reads last[j+1]."""
    read_T = loss_mask_T.bool().clone()
    read_T[:1] = False
    return _rows(read_T)


def this_token_rows(loss_mask_T: torch.Tensor) -> RowsRead:
    """SpecForge: row j trains where mask[j], the last row never, and reads last[j+1]."""
    read_T = torch.zeros_like(loss_mask_T, dtype=torch.bool)
    read_T[1:] = loss_mask_T[:-1].bool()
    return _rows(read_T)


def _rows(read_T: torch.Tensor) -> RowsRead:
    rows = read_T.nonzero().flatten()
    return RowsRead(read_T, int(rows[-1]) if len(rows) else 0)


def sample_problem(sample: LayoutSample, num_aux: int, hidden_size: int, vocab_size: int) -> str | None:
    """What is wrong with a foreign sample, or None: counts, shapes, dtypes, ids, mask, values."""
    num_tokens = len(sample.input_ids_T)
    for kind, states, shape in (
        ("aux", sample.aux_TAD, (num_tokens, num_aux, hidden_size)),
        ("last", sample.last_TD, (num_tokens, hidden_size)),
    ):
        if tuple(states.shape) != shape:
            return f"{kind}: shape {tuple(states.shape)}, expected {shape} for {num_tokens} ids"
        if not states.is_floating_point():
            return f"{kind}: dtype {states.dtype}, expected floating point"
    if num_tokens == 0:
        return "no tokens"
    if len(sample.loss_mask_T) != num_tokens:
        return f"loss_mask: {len(sample.loss_mask_T)} values, expected {num_tokens}"
    low, high = int(sample.input_ids_T.min()), int(sample.input_ids_T.max())
    if low < 0 or high >= vocab_size:
        return f"token ids {low} to {high}, expected 0 to {vocab_size - 1}"
    if not bool(((sample.loss_mask_T == 0) | (sample.loss_mask_T == 1)).all()):
        return "loss_mask holds other values than 0 and 1"
    return _value_problem(sample)


def _value_problem(sample: LayoutSample) -> str | None:
    streams = {f"aux stream {a}": sample.aux_TAD[:, a] for a in range(sample.aux_TAD.shape[1])}
    for name, states_TD in (streams | {"last": sample.last_TD}).items():
        broken, empty = (rows_T.nonzero() for rows_T in row_faults(states_TD))
        if len(broken):
            return f"{name}: {len(broken)} rows are not finite, the first is row {int(broken[0])}"
        if len(empty):
            return f"{name}: {len(empty)} rows are all zero, the first is row {int(empty[0])}"
    return None
