"""Files written by ``torch.save``: loaded as plain tensors only, and checked against the zip's own CRC-32.

Peers load these files mapped, which checks no CRC; a flipped bit passes them in silence.
"""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from eyas.errors import DataError

OVERHEAD_BYTES = 8192
"""Allowance for the zip's entries and paddings of one sample; 3 to 5 kB in fact."""
FAULTS = (
    OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, zlib.error,
    pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip


def save_tensors(value: Mapping[Any, Any], handle: BinaryIO) -> None:
    """``torch.save`` of plain tensors; equal tensors give equal bytes under one version of torch."""
    torch.save(dict(value), cast("Any", handle))


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous and alone in its storage: ``torch.save`` writes whole storages."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def load_tensors(path: Path, expected: dict[str, type]) -> dict[str, Any]:
    """The dict of a file, tensors mapped (``.gz``: in memory), with at least the expected keys.

    Raises:
        DataError: No such file, a pickle that holds more than plain tensors, or another content.
    """
    source: Any = path
    try:
        if path.suffix == ".gz":
            source = io.BytesIO(gzip.decompress(path.read_bytes()))
        value = torch.load(source, map_location="cpu", weights_only=True, mmap=path.suffix != ".gz" or None)
    except FAULTS as error:
        raise DataError(f"cannot be loaded as tensors: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise DataError(f"holds a {type(value).__name__}, expected a dict")
    for key, kind in expected.items():
        if not isinstance(value.get(key), kind):
            raise DataError(f"{key} is {type(value.get(key)).__name__}, expected {kind.__name__}")
    return value


def zip_problem(path: Path) -> str | None:
    """What the zip's checksums say of the file's bytes, or None; reads all of it."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as handle:
                while handle.read(1 << 22):
                    pass
            return None
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except FAULTS as error:
        return f"is no whole archive: {_first_line(error)}"
    return None if bad is None else f"CRC-32 of {bad} differs: its bytes are not those that were written"


def flat_ids(value: torch.Tensor, name: str) -> torch.Tensor:
    """Ids or mask as int64 [T].

    Raises:
        DataError: Another number of dimensions, or no whole numbers.
    """
    if value.ndim != 1 or value.is_floating_point() or value.is_complex():
        raise DataError(f"{name}: {value.dtype} {tuple(value.shape)}, expected whole numbers [T]")
    return value.long()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
