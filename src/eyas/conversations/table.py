"""``conversations.parquet``: the one file format of ``data/conversations`` and ``data/responses``.

Rows are sorted by (split, source, conversation_id, variant) and written with fixed options, so that equal
rows are equal bytes whatever order they came in. The sort spools through SQLite beside the output: a data
set larger than memory costs disk, not memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas import fs
from eyas.canonical import canonical_json, digest, from_plain
from eyas.contracts import Conversation
from eyas.errors import DataError, DiskError

FILE_NAME = "conversations.parquet"
DIGEST_KEY = "eyas.rows_sha256"
"""Key of the file's metadata: digest of all rows in order, checked when the last row is read."""
GROUP_ROWS = 4096
GROUP_TEXT_BYTES = 16 << 20
"""A row group is closed at either limit, so that readers hold little at a time."""

SCHEMA = pa.schema(
    [
        pa.field("split", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("variant", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("tools", pa.string(), nullable=False),
        pa.field("answers", pa.string(), nullable=False),
    ]
)
"""The last three hold canonical JSON, so that rows of any shape share one schema."""


def conversation_id(messages: Iterable[dict[str, Any]], tools: Iterable[dict[str, Any]] = ()) -> str:
    """First 16 hex digits of the digest of (messages, tools).

    Raises:
        ValueError: A text is no valid Unicode or a number is not finite.
    """
    return digest([list(messages), list(tools)])[:16]


def write_conversations(folder: Path, rows: Iterable[Conversation]) -> None:
    """Publish a folder with ``conversations.parquet``, whole or not at all.

    Raises:
        DataError: Two rows have the same split, source, conversation_id and variant, or there is no row.
        DiskError: The volume is full.
    """
    with fs.atomic_dir(folder) as part:
        write_table(part / FILE_NAME, rows)


def write_table(path: Path, rows: Iterable[Conversation]) -> None:
    """Write the sorted parquet file; the caller publishes its folder."""
    with scratch_database(path.with_suffix(".sqlite")) as database:
        database.execute(
            "CREATE TABLE rows (split TEXT, source TEXT, id TEXT, variant TEXT, messages TEXT, tools TEXT, answers TEXT,"
            " PRIMARY KEY (split, source, id, variant)) WITHOUT ROWID"
        )
        for row in rows:
            _insert(database, row)
        _write_sorted(path, database.execute("SELECT * FROM rows ORDER BY split, source, id, variant"))


@contextlib.contextmanager
def scratch_database(path: Path) -> Iterator[sqlite3.Connection]:
    """A throw-away SQLite file for sorting and deduplication with bounded memory; removed at the end.

    Raises:
        DiskError: The volume is full.
    """
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path, isolation_level=None)
    try:
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "temp_store=FILE", "cache_size=-65536"):
            database.execute(f"PRAGMA {pragma}")
        database.execute("BEGIN")
        yield database
    except sqlite3.OperationalError as error:
        if "full" not in str(error):
            raise
        raise DiskError(
            f"disk full while sorting in {path.parent}; nothing was published", "free space, then run it again"
        ) from error
    finally:
        database.close()
        path.unlink(missing_ok=True)


def _insert(database: sqlite3.Connection, row: Conversation) -> None:
    values = (
        row.split,
        row.source,
        row.conversation_id,
        row.variant,
        canonical_json(row.messages),
        canonical_json(row.tools),
        canonical_json(row.answers),
    )
    try:
        database.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    except sqlite3.IntegrityError:
        raise DataError(
            f"conversation {row.conversation_id} ({row.source}, {row.split}, {row.variant}) comes twice, expected once"
        ) from None


def _write_sorted(path: Path, rows: Iterable[tuple[str, ...]]) -> None:
    group: list[tuple[str, ...]] = []
    group_bytes = num_rows = 0
    digest_of_rows = hashlib.sha256()
    with pq.ParquetWriter(
        path, SCHEMA, compression="zstd", compression_level=3, use_dictionary=False, write_statistics=False
    ) as writer:
        for row in rows:
            group.append(row)
            digest_of_rows.update(canonical_json(row).encode())
            num_rows += 1
            group_bytes += sum(map(len, row))
            if len(group) == GROUP_ROWS or group_bytes >= GROUP_TEXT_BYTES:
                _write_group(writer, group)
                group, group_bytes = [], 0
        if group:
            _write_group(writer, group)
        writer.add_key_value_metadata({DIGEST_KEY: digest_of_rows.hexdigest()})
    if not num_rows:
        raise DataError("no conversation to write, expected at least one", "see the counts of rejected rows above")


def _write_group(writer: pq.ParquetWriter, group: list[tuple[str, ...]]) -> None:
    columns = [pa.array(column, pa.string()) for column in zip(*group, strict=True)]
    writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=GROUP_ROWS)


def read_conversations(folder: Path) -> Iterator[Conversation]:
    """Rows in stored order, one row group in memory at a time.

    Raises:
        DataError: The file is missing, damaged, or holds no conversations; other rows than those written are
            known when the last one was read.
    """
    path = folder / FILE_NAME
    hint = "run `make repro`, or `dvc checkout` if it was made before"
    if not path.is_file():
        raise DataError(f"{path} is missing", hint)
    num_read, digest_of_rows = 0, hashlib.sha256()
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(SCHEMA):
                raise DataError(
                    f"{path} has columns {', '.join(file.schema_arrow.names)}, expected {', '.join(SCHEMA.names)}", hint
                )
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    digest_of_rows.update(canonical_json(list(row.values())).encode())
                    yield _to_conversation(row)
                    num_read += 1
            stored = (file.metadata.metadata or {}).get(DIGEST_KEY.encode(), b"").decode()
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is damaged after {num_read:,} rows: {reason}", hint) from error
    if stored != digest_of_rows.hexdigest():
        raise DataError(
            f"{path} is damaged: its {num_read:,} rows have digest {digest_of_rows.hexdigest()[:16]}, "
            f"expected {stored[:16] or 'one in its metadata'}",
            hint,
        )


def _to_conversation(row: dict[str, Any]) -> Conversation:
    nested = {name: json.loads(row[name]) for name in ("messages", "tools", "answers")}
    return from_plain(Conversation, row | nested)
