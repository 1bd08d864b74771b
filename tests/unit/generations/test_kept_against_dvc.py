"""Objects in use, against the real ``dvc gc --dry`` over many random repositories."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from random_projects import grow

from eyas.generations.listing import read_situation


def unused(root: Path) -> set[Path]:
    """What the room takes for unused, as paths."""
    found = read_situation(root)
    assert not found.kept.problems
    return {found.cache.path(name) for name in found.cache.objects if name not in found.kept.names}


def compare(root: Path, seed: int) -> None:
    repository = grow(root, random.Random(seed))
    expected = repository.gc_would_remove()
    assert unused(repository.root) == expected
    assert expected < repository.objects(), "a history in which gc removes everything says little"


@pytest.mark.parametrize("seed", range(8))
def test_what_gc_keeps_is_what_the_room_keeps(tmp_path, seed):
    compare(tmp_path / "r", seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_what_gc_keeps_is_what_the_room_keeps_many_times(tmp_path, block):
    for seed in range(1000 + 40 * block, 1040 + 40 * block):
        compare(tmp_path / f"r{seed}", seed)
