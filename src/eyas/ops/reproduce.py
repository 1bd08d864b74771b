"""``eyas reproduce``: the small pipeline twice from nothing, in two folders; every hash must be the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas import fs
from eyas.canonical import digest
from eyas.errors import StoreError
from eyas.ops.scratch import run_small

ARTIFACTS = (
    "models/target.json",
    "data/conversations",
    "data/responses",
    "data/tokens",
    "data/draft_vocab",
    "data/plan.json",
    "data/hidden_states",
    "data/hidden_states.json",
    "models/drafter",
    "reports/acceptance.json",
    "models/export",
    "reports/metrics.json",
)
FOLDERS = ("first", "the-second")
"""Of different lengths, so that a path that got into an artifact shows."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """SHA-256 of one artifact in both runs; of a folder: over its (path, size, SHA-256) list."""

    artifact: str
    first: str
    second: str

    @property
    def equal(self) -> bool:
        """Whether both runs gave the same bytes."""
        return self.first == self.second


def reproduce(root: Path, folder: Path) -> list[Comparison]:
    """Run the small pipeline in two fresh copies below ``folder`` and compare.

    Raises:
        EyasError: A run failed, or left an artifact out.
    """
    copies = [folder / name for name in FOLDERS]
    for copy in copies:
        run_small(root, copy)
    return compare(*copies)


def compare(first: Path, second: Path) -> list[Comparison]:
    """Compare the artifacts of two finished runs.

    Raises:
        StoreError: An artifact is missing.
    """
    return [Comparison(name, content_digest(first / name), content_digest(second / name)) for name in ARTIFACTS]


def content_digest(path: Path) -> str:
    """SHA-256 of a file, or over the (path, size, SHA-256) list of a folder.

    Raises:
        StoreError: Nothing is there.
    """
    if path.is_dir() and (files := fs.tree_digests(path)):
        return digest(files)
    if not path.is_file():
        raise StoreError(f"{path} is missing or empty", "run `make reproduce` again and read what its stages say")
    return fs.hash_file(path)
