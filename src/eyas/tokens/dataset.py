"""The token dataset: ``data/tokens/``, ids and loss masks of every sample.

::

    data/tokens/tokens.parquet   one row a sample, exact lengths in their own column
    data/tokens/rejects.jsonl    one line a conversation that gave no sample, with its reason
    data/tokens/index.json       counts and content hash, written last

Rows keep the order in which they are written; the tokenize stage writes them in the order of the
conversation table (split, source, conversation id, variant). The content hash does not depend on that
order nor on the parquet library: it is taken over the sorted digests of the rows' values.

Letters: T tokens of one sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas import fs
from eyas.canonical import canonical_json, plain_json
from eyas.contracts import SCHEMA_VERSION, StoredSample, TokenSample
from eyas.errors import DataError, StoreError
from eyas.rows import stored_rows

TOKENS_NAME = "tokens.parquet"
REJECTS_NAME = "rejects.jsonl"
INDEX_NAME = "index.json"
ROW_GROUP_SAMPLES = 1024
REMAKE = "make it again: `dvc repro tokenize`"
SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("variant", pa.string()),
        ("num_tokens", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
)
FACTS = tuple(SCHEMA.names[:6])
"""Columns without ids and mask; the last is ``num_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A conversation that gave no sample."""

    conversation_id: str
    source: str
    variant: str
    reason: str
    """Short key, counted in the report."""
    detail: str
    """What exactly was wrong with this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndex:
    """``index.json`` of the dataset."""

    num_samples: int
    num_tokens: int
    tokens_sha256: str
    num_trained_aux_rows: int
    num_trained_last_rows: int
    """Rows that a training can read (``eyas.rows``): of each aux stream, of ``last``."""
    schema_version: int = SCHEMA_VERSION

    @property
    def trained_rows(self) -> tuple[int, int]:
        """(rows of each aux stream, rows of last) that a training can read."""
        return self.num_trained_aux_rows, self.num_trained_last_rows


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sample as it is stored."""

    facts: dict[str, Any]
    """Columns without ids and mask; ``num_tokens`` among them."""
    input_ids_T: np.ndarray
    loss_mask_T: np.ndarray

    @property
    def sample(self) -> TokenSample:
        """As a record."""
        facts = {name: value for name, value in self.facts.items() if name != "num_tokens"}
        ids, mask = self.input_ids_T.tolist(), self.loss_mask_T.tolist()
        return TokenSample(**facts, input_ids=tuple(ids), loss_mask=tuple(mask))


def sample_id_of(input_ids_T: np.ndarray, loss_mask_T: np.ndarray) -> str:
    """First 16 hex digits of the SHA-256 over (ids as int32 LE, loss mask as uint8)."""
    return _id_of(_content(input_ids_T, loss_mask_T))


def _content(input_ids_T: np.ndarray, loss_mask_T: np.ndarray) -> bytes:
    return input_ids_T.astype("<i4", copy=False).tobytes() + loss_mask_T.astype(np.uint8, copy=False).tobytes()


def _id_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def make_sample(
    input_ids: Sequence[int], loss_mask: Sequence[int], *, conversation_id: str, source: str, split: str, variant: str
) -> TokenSample:
    """A sample under its content's id."""
    return TokenSample(
        sample_id=sample_id_of(np.asarray(input_ids), np.asarray(loss_mask)),
        conversation_id=conversation_id,
        source=source,
        split=cast("Any", split),
        variant=variant,
        input_ids=tuple(input_ids),
        loss_mask=tuple(loss_mask),
    )


def write_tokens(folder: Path, samples: Iterable[TokenSample], rejects: Sequence[Reject] = ()) -> str:
    """Write the dataset as one atomic folder, streaming.

    Args:
        folder: Replaced as a whole when all samples are written.
        samples: Consumed once, in order, at most one row group in memory.
        rejects: Read only after ``samples`` is exhausted, so a generator may fill it on the way.

    Returns:
        ``tokens_sha256``.

    Raises:
        DataError: No sample, two samples of one id, or a sample whose id is not its content's.
    """
    row_digests: dict[str, bytes] = {}
    num_tokens = num_aux_rows = num_last_rows = 0
    with fs.atomic_dir(folder) as part:
        # Statistics and the embedded Arrow schema would add nothing but version-dependent bytes.
        with pq.ParquetWriter(
            part / TOKENS_NAME,
            SCHEMA,
            compression="zstd",
            compression_level=3,
            write_statistics=False,
            store_schema=False,
            write_page_checksum=True,  # lengths are read alone, where the content hash cannot tell
        ) as writer:
            for group in _groups(samples):
                for sample in group:
                    if sample.sample_id in row_digests:
                        raise DataError(f"sample {sample.sample_id} comes twice", "drop duplicates before writing")
                    row_digests[sample.sample_id] = _row_digest(sample)
                    num_tokens += len(sample.input_ids)
                    aux_rows, last_rows = stored_rows(sample.loss_mask, "trained").counts
                    num_aux_rows, num_last_rows = num_aux_rows + aux_rows, num_last_rows + last_rows
                writer.write_table(_table(group))
        if not row_digests:
            raise DataError(f"no sample to write to {folder}", "look at the rejects of the stage before")
        tokens_sha256 = _combine(row_digests.values())
        lines = [canonical_json(reject) + "\n" for reject in rejects]
        fs.write_text(part / REJECTS_NAME, "".join(lines))
        index = TokenIndex(
            num_samples=len(row_digests),
            num_tokens=num_tokens,
            tokens_sha256=tokens_sha256,
            num_trained_aux_rows=num_aux_rows,
            num_trained_last_rows=num_last_rows,
        )
        fs.write_record(part / INDEX_NAME, index)
    return tokens_sha256


def read_tokens(folder: Path) -> list[TokenSample]:
    """All samples, in stored order.

    Raises:
        DataError: The dataset is missing, damaged, or not what its index says.
    """
    return list(iter_tokens(folder))


def iter_tokens(folder: Path) -> Iterator[TokenSample]:
    """Samples in stored order, one row group in memory; checked against the index at the end.

    Raises:
        DataError: The dataset is missing, damaged, or not what its index says.
    """
    for row in iter_rows(folder):
        yield row.sample


def iter_rows(folder: Path) -> Iterator[TokenRow]:
    """The same as rows whose ids and masks stay arrays.

    Raises:
        DataError: The dataset is missing, damaged, or not what its index says.
    """
    index = read_index(folder)
    row_digests = []
    for columns, ids_list, mask_list in _row_groups(folder):
        for i, (ids_T, mask_T) in enumerate(zip(ids_list, mask_list, strict=True)):
            row = TokenRow({name: values[i] for name, values in columns.items()}, ids_T, mask_T)
            _check_lengths(folder, row)
            row_digests.append(_digest_of(row.facts, ids_T, mask_T))
            yield row
    found = _combine(row_digests)
    if found != index.tokens_sha256:
        raise DataError(f"{folder}: content hash {found[:16]}, expected {index.tokens_sha256[:16]}", REMAKE)


def read_lengths(folder: Path) -> list[tuple[str, int]]:
    """(sample id, exact number of tokens) of every sample; reads neither ids nor masks.

    Raises:
        DataError: The dataset is missing, damaged, or not what its index says.
    """
    index = read_index(folder)
    with _open(folder) as file:
        table = file.read(columns=["sample_id", "num_tokens"])
    lengths = list(zip(table["sample_id"].to_pylist(), table["num_tokens"].to_pylist(), strict=True))
    if (len(lengths), sum(n for _, n in lengths)) != (index.num_samples, index.num_tokens):
        raise DataError(
            f"{folder}: {len(lengths):,} samples with {sum(n for _, n in lengths):,} tokens, "
            f"expected {index.num_samples:,} with {index.num_tokens:,}",
            REMAKE,
        )
    return lengths


def read_names(folder: Path) -> list[StoredSample]:
    """What a shard's header says of every sample, in stored order; reads neither ids nor masks.

    Raises:
        DataError: The dataset is missing, damaged, or not what its index says.
    """
    lengths = dict(read_lengths(folder))
    with _open(folder) as file:
        rows = file.read(columns=[*SCHEMA.names[:5]]).to_pylist()
    return [StoredSample(num_tokens=lengths[row["sample_id"]], **row) for row in rows]


def iter_masks(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(sample id, loss mask) of every sample, one row group in memory; ids are not read, so contents are not checked."""
    with _open(folder) as file:
        for i in range(file.num_row_groups):
            table = file.read_row_group(i, columns=["sample_id", "loss_mask"])
            yield from zip(table["sample_id"].to_pylist(), _arrays(table["loss_mask"]), strict=True)


def read_index(folder: Path) -> TokenIndex:
    """Counts and content hash as written.

    Raises:
        StoreError: The index is missing or is none.
    """
    try:
        return fs.read_record(TokenIndex, Path(folder) / INDEX_NAME)
    except StoreError as error:
        raise StoreError(error.message, "make the tokens again: `dvc repro -f -s tokenize`") from None


def tokens_sha256(folder: Path) -> str:
    """Content hash, computed again from the rows and compared with the index.

    Raises:
        DataError: The rows are not what the index says.
    """
    for _ in iter_tokens(folder):
        pass
    return read_index(folder).tokens_sha256


def _groups(samples: Iterable[TokenSample]) -> Iterator[list[TokenSample]]:
    group: list[TokenSample] = []
    for sample in samples:
        group.append(sample)
        if len(group) == ROW_GROUP_SAMPLES:
            yield group
            group = []
    if group:
        yield group


def _table(group: Sequence[TokenSample]) -> pa.Table:
    columns: dict[str, Any] = {name: [getattr(s, name) for s in group] for name in SCHEMA.names if name != "num_tokens"}
    columns["num_tokens"] = [len(sample.input_ids) for sample in group]
    return pa.table(columns, schema=SCHEMA)


def _row_digest(sample: TokenSample) -> bytes:
    """Digest of every value of a row; refuses an id that is not its content's."""
    facts = {name: getattr(sample, name) for name in FACTS if name != "num_tokens"}
    ids_T, mask_T = np.asarray(sample.input_ids, dtype="<i4"), np.asarray(sample.loss_mask, dtype=np.uint8)
    return _digest_of(facts, ids_T, mask_T)


def _digest_of(facts: dict[str, Any], ids_T: np.ndarray, mask_T: np.ndarray) -> bytes:
    content = _content(ids_T, mask_T)
    named = _id_of(content)
    if named != facts["sample_id"] or len(ids_T) != len(mask_T):
        raise DataError(f"sample {facts['sample_id']}: its ids and mask are those of {named}", REMAKE)
    listed = [*(facts[name] for name in FACTS[:-1]), len(ids_T)]
    return hashlib.sha256(plain_json(listed).encode() + b"\n" + content).digest()


def _combine(row_digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(sorted(row_digests))).hexdigest()


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[pq.ParquetFile]:
    """The parquet file; whatever it balks at inside the block is a ``DataError``."""
    path = Path(folder) / TOKENS_NAME
    if not path.is_file():
        raise DataError(f"{path} is missing", REMAKE)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not file.schema_arrow.equals(SCHEMA):
                found = " ".join(str(file.schema_arrow.remove_metadata()).split())
                raise DataError(f"{path}: columns {found}, expected {', '.join(SCHEMA.names)}", REMAKE)
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())}", REMAKE) from error


def _row_groups(folder: Path) -> Iterator[tuple[dict[str, list], list[np.ndarray], list[np.ndarray]]]:
    with _open(folder) as file:
        for i in range(file.num_row_groups):
            yield _columns(folder, file, i)


def _columns(
    folder: Path, file: pq.ParquetFile, group: int
) -> tuple[dict[str, list], list[np.ndarray], list[np.ndarray]]:
    table = file.read_row_group(group)
    if any(column.null_count for column in table.columns):
        raise DataError(f"{folder}: row group {group} has empty fields", REMAKE)
    columns = {name: table[name].to_pylist() for name in FACTS}
    return columns, _arrays(table["input_ids"]), _arrays(table["loss_mask"])


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """The lists of a column, each a view of one array."""
    lists: list[np.ndarray] = []
    for chunk in column.chunks:
        values, bounds = chunk.values.to_numpy(), chunk.offsets.to_numpy().tolist()
        lists += [values[begin:end] for begin, end in itertools.pairwise(bounds)]
    return lists


def _check_lengths(folder: Path, row: TokenRow) -> None:
    num_ids, num_mask, expected = len(row.input_ids_T), len(row.loss_mask_T), row.facts["num_tokens"]
    if not num_ids == num_mask == expected:
        raise DataError(
            f"{folder}: sample {row.facts['sample_id']} has {num_ids} ids and {num_mask} mask values, "
            f"expected {expected}",
            REMAKE,
        )
