"""What a history of a repository leaves behind, in plain sets: no idea of eyas' is used here but DVC's layout."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from states_repository import dir_list, md5

Files = dict[str, bytes]
Outs = dict[str, Files | bytes]
"""What one state of DVC's files names: path → files of a folder, or one file."""


@dataclass
class Model:
    """What is named, by whom, and what lies where."""

    outs: Outs = field(default_factory=dict)
    """Of the workspace's files."""
    commits: dict[str, Outs] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    experiments: dict[str, str] = field(default_factory=dict)
    head: str = "main"
    objects: set[str] = field(default_factory=set)
    """In the cache."""
    laid: Files | None = None
    """States in the workspace, whoever names them."""
    adopted: dict[str, tuple[Path, Files]] = field(default_factory=dict)
    """Name → where it came from, and what."""
    spools: dict[str, bool] = field(default_factory=dict)
    """Identity → retired."""

    def kept(self) -> list[Outs]:
        named = [*self.branches.values(), *self.tags.values(), *self.experiments.values()]
        return [self.outs, *(self.commits[sha] for sha in named)]

    def used(self) -> set[str]:
        return {name for outs in self.kept() for value in outs.values() for name in objects_of(value)}


def folder_hash(files: Files) -> str:
    return md5(dir_list({path: md5(data) for path, data in files.items()})) + ".dir"


def objects_of(value: Files | bytes) -> set[str]:
    if isinstance(value, bytes):
        return {md5(value)}
    return {folder_hash(value), *map(md5, value.values())}


def content_bytes(*folders: Path) -> int:
    """Allocated bytes below folders, each inode once: what ``du`` says."""
    seen: dict[tuple[int, int], int] = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                found = (Path(parent) / name).lstat()
                seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())
