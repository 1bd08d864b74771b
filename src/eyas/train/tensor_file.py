"""Safetensors files written and read piece by piece: no second copy of the tensors in memory.

The library's own writer wants all tensors on the host at once and its bytes a second time; a training state is
three times the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eyas import fs
from eyas.contracts import FileDigest

DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}
PIECE_VALUES = 16 << 20
ALIGN_BYTES = 8


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], root: Path) -> FileDigest:
    """Write tensors in the order given, atomically, hashing on the way.

    Args:
        path: Of the file.
        tensors: (name, tensor) on any device.
        root: The digest's path is relative to it.
    """
    header = _header(tensors)
    sha256, size_bytes = hashlib.sha256(), 0
    with fs.atomic_writer(path) as handle:

        def pieces() -> Iterator[memoryview]:
            nonlocal size_bytes
            for piece in _pieces(header, tensors):
                sha256.update(piece)
                size_bytes += len(piece)
                yield piece

        fs.write_all(handle, pieces())
    return FileDigest(path=path.relative_to(root).as_posix(), size_bytes=size_bytes, sha256=sha256.hexdigest())


def _header(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    entries, offset = {}, 0
    for name, tensor in tensors:
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _pieces(header: bytes, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    yield memoryview(header)
    for _, tensor in tensors:
        for part in tensor.detach().flatten().split(PIECE_VALUES):
            piece: Any = part.cpu().contiguous().view(torch.uint8).numpy()
            yield memoryview(piece)


def read_into(path: Path, places: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of a file into others of their shapes, one after another.

    Args:
        path: A safetensors file.
        places: Where each name goes.
    """
    with safe_open(path, framework="pt") as file:
        for name, place in places.items():
            place.copy_(file.get_tensor(name))
