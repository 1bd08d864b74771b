"""Conversations from any source into ``data/conversations``: checked, deduplicated, chosen, split, counted.

    wheel | JSONL | JSON array | parquet | hub  →  rows.parse_row  →  pool  →  conversations.parquet + rejects.jsonl

Streams: a record at a time in memory, the pool on disk. Nothing is published on any error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from eyas import console, fs, sources
from eyas.canonical import canonical_json
from eyas.config import DataConfig
from eyas.conversations.bundled import bundled_prompts, prompt_set
from eyas.conversations.pool import Pool
from eyas.conversations.readers import DamageError, Record, read_json_records, read_parquet_records
from eyas.conversations.rows import ParsedRow, RowError, parse_row
from eyas.conversations.table import FILE_NAME, scratch_database, write_table
from eyas.errors import DataError

REJECTS_NAME = "rejects.jsonl"
MAX_LISTED = 10_000
MAX_REASONS = 50
EXCERPT_CHARS = 200
LOG_EVERY_S = 15.0
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")


@dataclass
class IngestSummary:
    """Every count of an ingest."""

    num_files: int = 0
    num_records: int = 0
    num_duplicates: int = 0
    num_rows_without_leading_answers: int = 0
    """Kept rows that lost assistant turns before the first user turn."""
    num_left_out: int = 0
    """By ``data.max_conversations``."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""
    damaged: list[str] = field(default_factory=list)
    """Files of which only the whole records before a damage were kept."""
    kept: list[tuple[str, str, int]] = field(default_factory=list)
    """(source, split, conversations)."""


def ingest(config: DataConfig, raw: Path, folder: Path) -> IngestSummary:
    """Write ``conversations.parquet`` and ``rejects.jsonl`` into a folder, whole or not at all.

    The parquet file depends on the rows' content alone, not on their order or on file names.

    Args:
        config: Source, limits, split.
        raw: File or folder of local data.
        folder: To publish.

    Raises:
        DataError: The source cannot be had; a file is cut or damaged and ``data.allow_truncated`` is off; no
            conversation is left.
        ConfigError: A prompt set is unknown, or a revision is no pin.
    """
    summary = IngestSummary()
    with fs.atomic_dir(folder) as part, scratch_database(part / "pool.sqlite") as database:
        pool = Pool(database, config.seed)
        for wanted in config.prompt_sets:
            for text in prompt_set(wanted.name, wanted.num_prompts):
                pool.add(wanted.name, [{"role": "user", "content": text}], [], evaluation=True)
        with fs.atomic_writer(part / REJECTS_NAME) as listed:
            _fill(pool, config, raw, summary, listed)
        num_unique = pool.num_rows()
        if not num_unique:
            raise DataError(f"no conversation is left of {_counted(summary)}", f"check data.format and {raw}")
        pool.choose(config.max_conversations, config.held_out_share)
        summary.num_left_out = num_unique - pool.num_rows()
        summary.kept = pool.counts()
        write_table(part / FILE_NAME, pool.rows())
    return summary


def _counted(summary: IngestSummary) -> str:
    reasons = "".join(f"; {count:,} x {reason}" for reason, count in summary.rejected.most_common(5))
    return f"{summary.num_records:,} records in {summary.num_files:,} files{reasons}"


def _fill(pool: Pool, config: DataConfig, raw: Path, summary: IngestSummary, listed: BinaryIO) -> None:
    shown_s = time.monotonic()
    for name, record in _records(config, raw, summary):
        summary.num_records += 1
        try:
            row = parse_row(record.value)
            if not _add(pool, config.name, row):
                summary.num_duplicates += 1
            elif row.num_dropped_turns:
                summary.num_rows_without_leading_answers += 1
        except RowError as error:
            _reject(summary, listed, name, record, error.reason)
        if time.monotonic() - shown_s > LOG_EVERY_S:
            shown_s = time.monotonic()
            console.log(f"ingest: {summary.num_records:,} records read")


def _add(pool: Pool, source: str, row: ParsedRow) -> bool:
    """Whether it was new; refuses what has no JSON text: parquet and hub rows hold values of any kind."""
    try:
        return pool.add(source, row.messages, row.tools, evaluation=False)
    except ValueError:
        raise RowError("text is no valid Unicode, or a number is not finite") from None
    except TypeError as error:
        raise RowError(f"a value has no JSON spelling: {error}") from None
    except RecursionError:
        raise RowError("nested too deeply") from None


def _reject(summary: IngestSummary, listed: BinaryIO, name: str, record: Record, reason: str) -> None:
    full = len(summary.rejected) >= MAX_REASONS and reason not in summary.rejected
    summary.rejected["other reasons" if full else reason] += 1
    if summary.rejected.total() > MAX_LISTED:
        return
    row = {"file": name, "record": record.place, "reason": reason, "text": _excerpt(record.value)}
    if isinstance(record.value, dict) and isinstance(record.value.get("id"), str | int):
        row["id"] = str(record.value["id"])[:EXCERPT_CHARS]
    text = canonical_json(row)
    listed.write(text.encode("utf-8", "replace") + b"\n")


def _excerpt(value: Any) -> str:
    """The beginning of a row, for the eye."""
    if isinstance(value, dict):
        value = value.get("messages", value.get("conversations", value))
    try:
        return repr(value)[:EXCERPT_CHARS]
    except RecursionError:
        return "nested too deeply"


def _records(config: DataConfig, raw: Path, summary: IngestSummary) -> Iterator[tuple[str, Record]]:
    """Records with the name of the file they are from."""
    if config.format == "bundled":
        summary.num_files = 1
        for number, text in enumerate(bundled_prompts(config.location, config.revision), start=1):
            yield config.location, Record(number, {"messages": [{"role": "user", "content": text}]})
    elif config.format == "hub":
        summary.num_files = 1
        for number, value in enumerate(_hub_rows(config), start=1):
            yield config.location, Record(number, value)
    else:
        read = read_parquet_records if config.format == "parquet" else read_json_records
        for path in _files(config, raw):
            name = path.relative_to(raw).as_posix() if path != raw else path.name
            summary.num_files += 1
            try:
                for record in read(path):
                    yield name, record
            except DamageError as damage:
                _damaged(config, name, damage, summary)


def _damaged(config: DataConfig, name: str, damage: DamageError, summary: IngestSummary) -> None:
    what = f"{name} is cut or damaged at {damage.where}: {damage.reason}"
    if not config.allow_truncated:
        raise DataError(
            f"{what}; {damage.num_whole:,} whole records before it, nothing written",
            "get the file again, or set data.allow_truncated: true to keep the whole records before the damage",
        ) from damage
    console.log(f"{what}; kept the {damage.num_whole:,} whole records before it (data.allow_truncated)")
    summary.damaged.append(f"{name}: {damage.where}, {damage.num_whole:,} records kept")


def _files(config: DataConfig, raw: Path) -> list[Path]:
    if raw.is_file():
        return [raw]
    if not raw.is_dir():
        raise DataError(f"{raw} is missing", "put your data there, or set data.path; see data/raw/README.md")
    suffixes = (".parquet",) if config.format == "parquet" else JSON_SUFFIXES
    files = sorted(path for path in raw.rglob("*") if path.is_file() and path.name.endswith(suffixes))
    if not files:
        raise DataError(
            f"{raw} holds no file that ends in {', '.join(suffixes)}", "put your data there; see its README.md"
        )
    return files


def _hub_rows(config: DataConfig) -> Iterator[Any]:
    """Rows of a hub dataset at its pinned commit, streamed by the ``datasets`` library."""
    sources.require_commit("data.revision", "dataset", config.location, config.revision, DataError)
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        yield from datasets.load_dataset(
            config.location, revision=config.revision, split=config.hub_split, streaming=True
        )
    except (DatasetsError, ValueError, *sources.hub_faults()) as error:
        raise DataError(
            f"{config.location} at {config.revision}, split {config.hub_split!r}, cannot be read: "
            f"{' '.join(str(error).split())[:300]}",
            "check data.location, data.revision and data.hub_split; a gated data set needs `hf auth login`",
        ) from error
