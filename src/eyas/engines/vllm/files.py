"""The files in shared memory that vLLM's side writes and ours reads and removes; standard library only.

    connector: REQUEST.part → rename → REQUEST.safetensors     or REQUEST.failed, when the disk refused

A file is whole as soon as it has its name. It is standard safetensors: ``hidden_states`` [T, N, D] and ``token_ids``
[T] int32, with the request's id and a CRC-32 of all their bytes in the metadata. CRC-32 because it is the one fast
checksum that every Python has: nothing needs to be installed beside a vLLM that is there already.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STATES, IDS = "hidden_states", "token_ids"
SUFFIX, PART, FAILED = ".safetensors", ".part", ".failed"
VALUE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
ID_BYTES = 4
HEADER_BYTES = 512
"""More than the header of any such file."""


class FileError(Exception):
    """A file that is not what the request's states should be; its text says how."""


@dataclass(frozen=True, slots=True)
class StatesFile:
    """What one file holds, verified."""

    dtype: str
    """In safetensors' spelling: BF16, F16, F32."""
    num_rows: int
    num_streams: int
    width: int
    states: memoryview
    ids: memoryview


def path_of(folder: Path, request_id: str) -> Path:
    """Where a request's states come to lie."""
    return folder / (request_id + SUFFIX)


def file_bytes(num_tokens: int, num_streams: int, width: int, value_bytes: int) -> int:
    """Bytes that a request's file takes in shared memory, at most."""
    used = HEADER_BYTES + num_tokens * (num_streams * width * value_bytes + ID_BYTES)
    return -(-used // 4096) * 4096


def write(path: Path, dtype: str, shape: Sequence[int], states: memoryview, ids: memoryview) -> None:
    """Write a request's states under another name, then rename.

    Raises:
        OSError: As the disk says; nothing is left at ``path``.
    """
    checksum = zlib.crc32(ids, zlib.crc32(states))
    entries = {
        "__metadata__": {"request": path.name.removesuffix(SUFFIX), "crc32": f"{checksum:08x}"},
        STATES: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, states.nbytes]},
        IDS: {"dtype": "I32", "shape": [shape[0]], "data_offsets": [states.nbytes, states.nbytes + ids.nbytes]},
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_suffix(PART)
    try:
        with part.open("wb", buffering=0) as file:
            for data in (memoryview(len(text).to_bytes(8, "little") + text), states, ids):
                _write_all(file.fileno(), data)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def write_failure(path: Path, reason: str) -> None:
    """Say that a request's states could not be written; a full disk still has room for the empty file."""
    failed, part = path.with_suffix(FAILED), path.with_suffix(PART)
    try:
        part.write_text(reason)
        os.replace(part, failed)
    except OSError:
        part.unlink(missing_ok=True)
        failed.touch()


def read(path: Path) -> StatesFile:
    """Read a whole file and verify it.

    Raises:
        FileError: It is damaged, of another request, or no states file.
    """
    data = memoryview(bytearray(path.read_bytes()))
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:begin]))
        meta, states, ids = header["__metadata__"], header[STATES], header[IDS]
        request, crc32, num_ids = meta["request"], meta["crc32"], ids["shape"]
        num_rows, num_streams, width = states["shape"]
        cut = begin + num_rows * num_streams * width * VALUE_BYTES[states["dtype"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path.name} has a damaged header: {error!r}") from error
    if request != path.name.removesuffix(SUFFIX):
        raise FileError(f"{path.name} holds the states of request {request}")
    if len(data) != cut + num_rows * ID_BYTES or num_ids != [num_rows]:
        raise FileError(f"{path.name} has {len(data):,} bytes, expected {cut + num_rows * ID_BYTES:,}")
    found = f"{zlib.crc32(data[begin:]):08x}"
    if found != crc32:
        raise FileError(f"{path.name}: checksum {found}, its header says {crc32}")
    return StatesFile(states["dtype"], num_rows, num_streams, width, data[begin:cut], data[cut:])


def failure(path: Path) -> str | None:
    """Why a request's states could not be written, when that was so."""
    try:
        return path.with_suffix(FAILED).read_text() or "no space left in shared memory"
    except FileNotFoundError:
        return None


def remove(path: Path) -> None:
    """Free what a request left."""
    for each in (path, path.with_suffix(FAILED), path.with_suffix(PART)):
        each.unlink(missing_ok=True)
