"""``eyas gc-plan``: what a gc would delete, what that frees, what stays and why; and an id that stands for all of it.

Nothing is deleted here, no state is read and nothing is hashed but lists. The id changes with anything that could
change the outcome: HEAD, a branch, an object, a name. ``gc`` accepts it only while all of that is as it was.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.canonical import digest
from eyas.errors import StoreError
from eyas.generations.extents import Key
from eyas.generations.freed import freed_by_inode
from eyas.generations.generation import Generation
from eyas.generations.kept import projects_kept
from eyas.generations.listing import Situation, list_generations, read_situation
from eyas.generations.working import WorkingFolders
from eyas.ops.gc.going import Going, going
from eyas.ops.gc.groups import GroupRow, group, rows
from eyas.ops.gc.holdings import Holding, holdings
from eyas.ops.gc.intent import Intent, read_intent
from eyas.ops.gc.refusals import NO_PROJECTS, Refusal, refusals
from eyas.ops.gc.remote import pushed_objects
from eyas.ops.gc.warnings import Held, held, warnings

ID_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class GcPlan:
    """A gc that could be run."""

    plan_id: str
    """Empty when something speaks against it, or nothing is to be done."""
    projects: tuple[str, ...] | None
    cache: Path
    going: Going
    freed: dict[Key, int]
    """Bytes by inode."""
    rows: tuple[GroupRow, ...]
    held: Held
    kept: tuple[Generation, ...]
    working: WorkingFolders
    holdings: tuple[Holding, ...]
    """What the remotes hold; not asked by the gc that carries a plan out."""
    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    snapshot: dict[str, Any]
    """What the id stands for."""

    @property
    def freed_bytes(self) -> int:
        """What the volume gets back."""
        return sum(self.freed.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing goes."""
        return not (self.going.objects or self.going.strays or self.going.names)


def parse_projects(text: str | None) -> tuple[Path, ...] | None:
    """``/a '/b c'`` as paths, quoted as in a shell, ``none`` as no paths; None when nothing was said.

    Raises:
        StoreError: One of them is no DVC repository.
    """
    if not text:
        return None
    if text.strip() == NO_PROJECTS:
        return ()
    try:
        projects = tuple(Path(part).resolve() for part in shlex.split(text))
    except ValueError as error:
        raise StoreError(
            f"PROJECTS {text!r}: {error}", "make gc-plan PROJECTS=\"'/path with spaces' /other\""
        ) from None
    for project in projects:
        if not (project / ".dvc").is_dir():
            raise StoreError(
                f"{project} is no DVC repository, expected folders of projects that share the cache, or {NO_PROJECTS}",
                "make gc-plan PROJECTS='/path/to/one /path/to/another'",
            )
    return projects


def make_plan(root: Path, projects: Sequence[Path] | None, *, is_locked: bool = False) -> GcPlan:
    """Work out what a gc would do; nothing is written.

    Args:
        root: The repository.
        projects: Others that share the cache; None when nobody said.
        is_locked: Whether this process holds the lock itself.

    Raises:
        StoreError: There is no git or DVC repository here.
    """
    if not (root / ".dvc").is_dir():
        raise StoreError(f"{root.resolve()} is no DVC repository: there is no .dvc folder", "cd to the repository")
    found = read_with_projects(root, projects, commits=True)
    listed = refusals(found, projects, is_locked=is_locked)
    if (intent := read_intent(root)) is not None:
        listed.insert(0, _interrupted(intent))
    gone = going(found)
    generations = list_generations(found)
    groups = group(found, gone, generations)
    freed = freed_by_inode((stat for one in groups for stat in one.stats(gone)), found.shared)
    sizes = {name: gone.objects[name].size_bytes for one in groups for name in one.objects}
    listed_rows = rows(found, gone, groups, freed, pushed_objects(root, sizes) if sizes else None)
    snapshot = _snapshot(found, gone, projects)
    is_empty = not (gone.objects or gone.strays or gone.names)
    return GcPlan(
        plan_id="" if listed or is_empty else digest(snapshot)[:ID_DIGITS],
        projects=None if projects is None else tuple(map(str, projects)),
        cache=found.cache.folder,
        going=gone,
        freed=freed,
        rows=tuple(listed_rows),
        held=held(found, gone),
        kept=tuple(generation for generation in generations if not _goes(generation, listed_rows)),
        working=found.working,
        holdings=() if is_locked else holdings(found, projects or ()),
        refusals=tuple(listed),
        warnings=tuple(warnings(found, gone, listed_rows)),
        snapshot=snapshot,
    )


def _goes(generation: Generation, listed: Sequence[GroupRow]) -> bool:
    is_there = generation.disk_bytes > 0 or generation.is_kept
    return not is_there or any(row.hash == generation.hash for row in listed)


def read_with_projects(root: Path, projects: Sequence[Path] | None, *, commits: bool) -> Situation:
    """The situation, with what other projects keep in the same cache counted as kept."""
    found = read_situation(root, commits=commits)
    if not projects:
        return found
    return replace(found, kept=found.kept | projects_kept(projects, found.cache))


def _interrupted(intent: Intent) -> Refusal:
    return Refusal(
        f"a gc was interrupted: plan {intent.plan_id} is not finished", f"finish it: make gc CONFIRM={intent.plan_id}"
    )


def _snapshot(found: Situation, gone: Going, projects: Sequence[Path] | None) -> dict[str, Any]:
    """Everything that decides the outcome."""
    refs = {f"{r.kind} {r.name} {r.commit}": r.commit for r in found.revisions if r.is_kept and r.kind != "workspace"}
    return {
        "head": found.revisions[0].commit,
        "refs": sorted(refs),
        "objects": [
            f"{n} {s.size_bytes} {s.device} {s.inode} {s.num_links}" for n, s in sorted(found.cache.objects.items())
        ],
        "removed": digest(sorted(gone.objects)),
        "strays": [
            f"{_text(path)} {s.size_bytes} {s.device} {s.inode} {s.num_links}" for path, s in gone.strays.items()
        ],
        "names": [
            f"{_text(n.path)} {n.stat.size_bytes} {n.stat.inode} {n.stat.num_links} {n.stat.mtime_ns}"
            for n in sorted(gone.names, key=lambda name: name.path)
        ],
        "cache": os.path.realpath(found.cache.folder),
        "projects": sorted(map(str, projects or ())),
    }


def _text(path: str) -> str:
    """A path as JSON can hold it, whatever bytes it has."""
    return path.encode("utf-8", "backslashreplace").decode()
