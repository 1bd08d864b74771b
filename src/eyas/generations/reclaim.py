"""What gc could give back, for the budget: now, and after retiring what is stale."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from eyas.errors import StoreError
from eyas.generations.freed import freed_bytes
from eyas.generations.generation import Generation
from eyas.generations.listing import Situation, list_generations, read_situation
from eyas.generations.objects import CachedObject
from eyas.generations.trees import NameTree, TreeFile


@dataclass(frozen=True, kw_only=True)
class Reclaimable:
    """Bytes that gc could give back."""

    free_now_bytes: int = 0
    """``make gc-plan`` would free them as things are."""
    retirable: tuple[tuple[str, str, int], ...] = ()
    """(hash, name, bytes) of generations that only the workspace and its branch name, and nobody plans."""
    problem: str = ""
    """Why gc would refuse, or what could not be read."""

    @property
    def retirable_bytes(self) -> int:
        """Sum over ``retirable``."""
        return sum(num_bytes for _, _, num_bytes in self.retirable)


def reclaimable(root: Path) -> Reclaimable:
    """Look at what gc keeps; nothing without a git and DVC repository."""
    if not (root / ".dvc").is_dir():
        return Reclaimable(problem="no DVC repository here")
    try:
        found = read_situation(root)
    except StoreError as error:
        return Reclaimable(problem=error.message)
    if found.kept.problems:
        return Reclaimable(problem=found.kept.problems[0])
    generations = list_generations(found)
    branch = f"branch {current_branch(root)}"
    retirable = tuple(
        (g.hash, g.name, g.freed_bytes)
        for g in generations
        if g.freed_bytes and _is_retirable(g, branch) and not g.is_retired
    )
    return Reclaimable(
        free_now_bytes=freed_bytes([*removed_objects(found), *removed_files(found)], found.shared),
        retirable=retirable,
    )


def _is_retirable(generation: Generation, branch: str) -> bool:
    if generation.kind == "spool":
        return generation.is_stale
    is_ours = generation.is_kept and set(generation.named_by) <= {"workspace", branch}
    if generation.kind == "unrecorded" or not is_ours:
        return False
    # An import that has no drafter yet or any more is as little planned as what was adopted.
    is_idle = generation.kind == "imported" and not generation.is_needed
    return generation.is_stale or generation.kind == "adopted" or is_idle


def current_branch(root: Path) -> str:
    """Name of the branch that is checked out; empty where none is."""
    import pygit2

    repo = pygit2.Repository(os.fspath(root))
    return "" if repo.head_is_unborn or repo.head_is_detached else repo.head.shorthand


def removed_objects(found: Situation) -> list[CachedObject]:
    """Objects of the cache that nothing kept names."""
    return [stat for name, stat in found.cache.objects.items() if name not in found.kept.names]


def removed_trees(found: Situation) -> list[NameTree]:
    """Names outside the cache that go: those of generations that nothing keeps, and of retired spools."""
    stays = kept_places(found)
    return [_without(tree, stays) for tree in found.trees if _goes(found, tree)]


def _without(tree: NameTree, stays: frozenset[str]) -> NameTree:
    base = os.path.realpath(tree.folder)
    return replace(tree, files={path: stat for path, stat in tree.files.items() if f"{base}/{path}" not in stays})


def _goes(found: Situation, tree: NameTree) -> bool:
    if tree.generation in found.kept.names:
        return False
    if tree.kind == "spool" and tree.is_retired:
        return True
    # Only what the cache still has under that name was ever recorded; the rest is not gc's.
    return bool(tree.generation) and tree.generation in found.cache.objects


def kept_places(found: Situation) -> frozenset[str]:
    """Absolute names of files that belong to a kept generation: folders that were adopted can overlap."""
    kept = [tree for tree in found.trees if tree.generation in found.kept.names]
    return frozenset(
        f"{base}/{path}" for tree in kept for base in (os.path.realpath(tree.folder),) for path in tree.files
    )


def removed_files(found: Situation) -> list[TreeFile]:
    """``stat`` of everything outside the cache that goes: of their names, and of rings that nobody holds."""
    return [file for one in (*removed_trees(found), *found.working.idle) for file in one.files.values()]
