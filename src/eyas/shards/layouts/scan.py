"""Looking through a foreign folder before anything is planned: every file read, hashed and judged.

A file is good or has one reason; nothing is dropped in silence. The import reads a file a second time when it stores it
and compares the hash, so what is stored is what was judged.

Letters: T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas import console
from eyas.errors import DataError
from eyas.shards.layouts.base import LayoutSource, hash_layout_file, sample_problem
from eyas.shards.layouts.torch_files import zip_problem

TORCH_SUFFIXES = (".pt", ".ckpt", ".gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of the source, whose tokens are good unless ``problem`` says why not."""

    path: str
    size_bytes: int
    xxh3: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A good file with its ids and mask (int64), or a bad one without."""

    file: SourceFile
    input_ids_T: torch.Tensor | None = None
    loss_mask_T: torch.Tensor | None = None


def scan(source: LayoutSource, folder: Path, num_aux: int, hidden_size: int, vocab_size: int) -> Iterator[ScannedFile]:
    """Judge every file of a source, in its order.

    Args:
        source: The layout's reader over ``folder``.
        folder: Of the source.
        num_aux: Aux streams that are expected.
        hidden_size: D of the target.
        vocab_size: V of the target.
    """
    paths = source.paths
    progress = console.Progress(f"scan {source.name}", len(paths), unit="files")
    for path in paths:
        yield _scan_file(source, folder, path, num_aux, hidden_size, vocab_size)
        progress.advance(1)
    progress.close()


def _scan_file(
    source: LayoutSource, folder: Path, path: str, num_aux: int, hidden_size: int, vocab_size: int
) -> ScannedFile:
    there = folder / path
    if not there.is_file():
        return ScannedFile(SourceFile(path=path, size_bytes=0, xxh3="", problem="is missing"))
    size_bytes, xxh3 = there.stat().st_size, hash_layout_file(there)
    problem = zip_problem(there) if there.suffix in TORCH_SUFFIXES else None
    if problem is None:
        try:
            sample = source.read(path)
        except DataError as error:
            problem = error.message
        else:
            problem = sample_problem(sample, num_aux, hidden_size, vocab_size)
            if problem is None:
                file = SourceFile(path=path, size_bytes=size_bytes, xxh3=xxh3)
                # Clones: the tensors are mapped, and thousands of open maps would stay.
                return ScannedFile(file, sample.input_ids_T.clone(), sample.loss_mask_T.clone())
    return ScannedFile(SourceFile(path=path, size_bytes=size_bytes, xxh3=xxh3, problem=problem))
