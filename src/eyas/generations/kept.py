"""Which objects of the cache are in use: everything that a kept revision names, folder by folder.

A folder's list (its ``.dir`` object) names its files. Where the list of a kept folder is lost, nobody can say which
objects it named: DVC would delete them. Here it is a problem, and nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import StoreError
from eyas.generations.objects import DIR_SUFFIX, Cache
from eyas.generations.revisions import Revision
from eyas.generations.snapshot import TrackedOut


@dataclass(frozen=True)
class Kept:
    """Objects in use, and what makes that uncertain."""

    names: frozenset[str]
    """Hashes of files and of lists, whether or not the cache has them."""
    problems: tuple[str, ...]
    """Each a reason not to delete anything."""


def kept_objects(revisions: Iterable[Revision], cache: Cache) -> Kept:
    """Objects that the kept revisions name."""
    names: set[str] = set()
    problems: dict[str, None] = {}
    for revision in (r for r in revisions if r.is_kept):
        if revision.problem:
            problems[f"{revision}: {revision.problem}"] = None
        for out in cached_outs(revision):
            if out.name in names:
                continue
            names.add(out.name)
            if out.name.endswith(DIR_SUFFIX):
                try:
                    names.update(cache.read_tree(out.name).values())
                except StoreError as error:
                    problems[f"{revision} keeps {out.path} ({out.name}), but {error.message}"] = None
    return Kept(frozenset(names), tuple(problems))


def cached_outs(revision: Revision) -> list[TrackedOut]:
    """Outputs of a revision that DVC's cache holds."""
    return [out for stage in revision.stages for out in stage.outs if out.is_cached]


def projects_kept(projects: Sequence[Path], cache: Cache) -> Kept:
    """Objects that other repositories sharing the cache keep.

    Raises:
        StoreError: One of them is no git repository.
    """
    from eyas.generations.revisions import read_revisions

    names: set[str] = set()
    problems: list[str] = []
    for project in projects:
        kept = kept_objects(read_revisions(project, commits=False), cache)
        names |= kept.names
        problems += [f"{project}: {problem}" for problem in kept.problems]
    return Kept(frozenset(names), tuple(problems))
