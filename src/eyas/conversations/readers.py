"""Records out of files, streaming, with the exact place of a cut or damage.

JSON files may be JSONL (one record a line) or one JSON array, plain or gzipped; which one is told by the first
character. A record is the only thing that must fit in memory. DamageError raises ``DamageError`` after all whole records
before it were given out.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
GZIP_BITS = 31
SPACE = " \t\r\n"
NOT_SPACE = re.compile(r"[ \t\r\n\ufeff]*")
UNDECIDED_CHARS = 16
"""An error this close to the end of what was read may only mean that more must be read."""
LITERALS = ("null", "true", "false", "NaN", "Infinity", "-Infinity")
LONGEST_ESCAPE = len(r"\ud800\udc00")


@dataclass(frozen=True, slots=True)
class Record:
    """A parsed value and its place: a line of JSONL, else a number from 1."""

    place: int
    value: Any


class DamageError(Exception):
    """A file is cut or damaged.

    Args:
        where: Byte (and line) of the damage, in words.
        reason: What is wrong there.
        num_whole: Records before it.
    """

    def __init__(self, where: str, reason: str, num_whole: int) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason, self.num_whole = where, reason, num_whole


class _Unzip(io.RawIOBase):
    """Gzip members as one stream; a cut or damage ends it and is kept in ``fault``, losing nothing before."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._inflate, self.fault = raw, zlib.decompressobj(GZIP_BITS), ""
        self._ended = False

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Unpack up to the buffer's size; 0 at the end or at a fault."""
        while not self._ended:
            packed = self._inflate.unconsumed_tail or self._inflate.unused_data or self._raw.read(CHUNK_BYTES)
            if self._inflate.eof:
                if not packed.strip(b"\0"):
                    break
                self._inflate = zlib.decompressobj(GZIP_BITS)
            elif not packed:
                self.fault = "the gzip stream is cut"
                break
            try:
                data = self._inflate.decompress(packed, len(buffer))
            except zlib.error as error:
                self.fault = f"gzip: {error}"
                break
            if data:
                buffer[: len(data)] = data
                return len(data)
        self._ended = True
        return 0


def read_json_records(path: Path) -> Iterator[Record]:
    """Records of a JSONL file or a JSON array, gzipped or not.

    Raises:
        DamageError: The file is cut, no JSON, or no UTF-8. Offsets of a gzipped file count unpacked bytes.
    """
    with path.open("rb") as raw:
        zipped = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        unzip = _Unzip(raw) if zipped else None
        handle: BinaryIO = io.BufferedReader(unzip, CHUNK_BYTES) if unzip else raw
        head = handle.peek(64)[:64].decode("utf-8-sig", errors="replace").lstrip(SPACE)  # type: ignore[attr-defined]
        num_whole = offset = 0
        for record, end in _array(handle) if head.startswith("[") else _lines(handle):
            num_whole, offset = num_whole + 1, end
            yield record
        if unzip and unzip.fault:
            raise DamageError(f"byte {offset:,}", unzip.fault, num_whole)


def _lines(handle: BinaryIO) -> Iterator[tuple[Record, int]]:
    """Records and the byte after each."""
    offset = num_whole = 0
    for number, line in enumerate(handle, start=1):
        if line.strip():
            try:
                value = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
            except (ValueError, RecursionError) as error:
                at, reason = _explain(error, line)
                raise DamageError(f"line {number:,}, byte {offset + at:,}", reason, num_whole) from error
            num_whole += 1
            yield Record(number, value), offset + len(line)
        offset += len(line)


def _explain(error: ValueError | RecursionError, line: bytes) -> tuple[int, str]:
    """Byte within the line, and the reason."""
    if isinstance(error, UnicodeDecodeError):
        return error.start, f"no UTF-8 ({error.reason})"
    if isinstance(error, json.JSONDecodeError):
        if not line.endswith(b"\n"):
            return len(line), "the file ends inside a record"
        return len(error.doc[: error.pos].encode("utf-8", "surrogatepass")), f"no JSON ({error.msg})"
    return 0, f"no JSON ({str(error)[:80]})"


class _Text:
    """A window over a UTF-8 file: what is left of it begins at character ``at``, byte ``offset`` of the file."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.offset, self.ended, self.fault = "", 0, 0, False, ""

    @property
    def next(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def more(self) -> None:
        """Read on: as much again as is left, so that a long record costs linear time."""
        self.text, self.at = self.text[self.at :], 0
        try:
            data = self._handle.read(max(CHUNK_BYTES, len(self.text)))
            self.text += self._decoder.decode(data, final=not data)
            self.ended = not data
        except UnicodeDecodeError as error:
            self.text += error.object[: error.start].decode()
            self.ended, self.fault = True, f"no UTF-8 ({error.reason})"

    def move(self, at: int) -> None:
        """Go on at a later character."""
        self.offset, self.at = self.byte_at(at), at

    def byte_at(self, at: int) -> int:
        """Byte offset in the file of a later character."""
        return self.offset + len(self.text[self.at : at].encode("utf-8", "surrogatepass"))

    def skip_space(self) -> None:
        """Go to the next character that is no white space, reading on as needed."""
        while True:
            self.move(NOT_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr] matches anything
            if self.next or self.ended:
                return
            self.more()


def _array(handle: BinaryIO) -> Iterator[tuple[Record, int]]:
    """Records and the byte after each."""
    window, decoder, num_whole = _Text(handle), json.JSONDecoder(), 0
    window.skip_space()
    window.move(window.at + 1)  # [
    window.skip_space()
    while window.next != "]":
        if num_whole:
            if window.next != ",":
                raise _array_damage(window, window.at, "expected , or ] after a record", num_whole)
            window.move(window.at + 1)
            window.skip_space()
        value, end = _next_value(window, decoder, num_whole)
        num_whole += 1
        window.move(end)
        yield Record(num_whole, value), window.offset
        window.skip_space()
    window.move(window.at + 1)
    window.skip_space()
    if window.next or window.fault:
        raise _array_damage(window, window.at, "text after the array's end", num_whole)


def _next_value(window: _Text, decoder: json.JSONDecoder, num_whole: int) -> tuple[Any, int]:
    while True:
        try:
            value, end = decoder.raw_decode(window.text, window.at)
            if end < len(window.text) or window.ended:
                return value, end
        except json.JSONDecodeError as error:
            open_string = error.msg.startswith("Unterminated string")
            if window.ended and (open_string or _is_cut(window.text[error.pos :], error.msg)):
                raise _array_damage(window, len(window.text), "the file ends inside a record", num_whole) from error
            if window.ended or not (open_string or error.pos >= len(window.text) - UNDECIDED_CHARS):
                raise _array_damage(window, error.pos, f"no JSON ({error.msg})", num_whole) from error
        except (ValueError, RecursionError) as error:
            raise _array_damage(window, window.at, f"no JSON ({str(error)[:80]})", num_whole) from error
        window.more()


def _is_cut(rest: str, message: str) -> bool:
    """Whether what the parser balked at, at the very end, is the beginning of something sound."""
    in_escape = message.startswith("Invalid \\u") and len(rest) <= LONGEST_ESCAPE
    return in_escape or any(literal.startswith(rest) for literal in LITERALS)


def _array_damage(window: _Text, at: int, reason: str, num_whole: int) -> DamageError:
    if at >= len(window.text):
        reason = window.fault or ("the file ends inside the array" if at == window.at else reason)
    begins = f" (record {num_whole + 1:,} begins at byte {window.offset:,})" if at > window.at else ""
    return DamageError(f"byte {window.byte_at(at):,}{begins}", reason, num_whole)


def read_parquet_records(path: Path) -> Iterator[Record]:
    """Rows of a parquet file, a batch at a time.

    Raises:
        DamageError: The file is cut (parquet keeps its index at the end: no row can be read), or a page is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_whole = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):  # one by one: a batch over two would hide whole rows
                for batch in file.iter_batches(batch_size=256, row_groups=[group]):
                    for value in batch.to_pylist():
                        num_whole += 1
                        yield Record(num_whole, value)
    # Besides parquet's own: text that is no UTF-8 and dates beyond the calendar become values here.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        size = path.stat().st_size
        reason = " ".join(str(error).split())[:200]
        raise DamageError(f"after row {num_whole:,} ({size:,} bytes)", reason, num_whole) from error
