"""What to know before a gc: nothing here forbids it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyas.console import human_bytes
from eyas.generations.extents import Key
from eyas.generations.listing import Situation
from eyas.generations.objects import CachedObject
from eyas.generations.trees import TreeFile
from eyas.ops.gc.going import Going, stats
from eyas.ops.gc.groups import NEVER_NAMED, REPORTS, GroupRow
from eyas.ops.gc.remote import remotes


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that would go but stay on the disk: names that nobody knows have them too."""

    num_files: int
    num_bytes: int
    example: str
    """An object, to look for the other names of."""


def held(found: Situation, gone: Going) -> Held:
    """Inodes that lose their known names and live on under unknown ones."""
    going: Counter[Key] = Counter((stat.device, stat.inode) for stat in stats(gone))
    known: Counter[Key] = Counter((stat.device, stat.inode) for stat in _all(found))
    unknown: dict[Key, int] = {}
    example = ""
    for name, stat in gone.objects.items():
        key = (stat.device, stat.inode)
        if stat.num_links > max(known[key], going[key]):
            unknown[key] = stat.disk_bytes
            example = example or found.cache.place(name)
    return Held(num_files=len(unknown), num_bytes=sum(unknown.values()), example=example)


def _all(found: Situation) -> Iterator[CachedObject | TreeFile]:
    yield from found.cache.objects.values()
    for tree in found.trees:
        yield from tree.files.values()


def warnings(found: Situation, gone: Going, listed: Sequence[GroupRow]) -> Iterator[str]:
    """One sentence each."""
    if not (gone.objects or gone.names):
        return
    states = [row for row in listed if row.hash]
    has_remote = bool(remotes(found.root))
    if states and not has_remote:
        yield "DVC has no remote: for what goes, this is the only copy"
    for row in states:
        if has_remote and row.num_pushed is not None and row.num_pushed < row.num_objects:
            missing = row.num_objects - row.num_pushed
            yield f"{row.title}: {missing:,} of {row.num_objects:,} objects are in no remote that answers"
        if row.used_by:
            yield f"{row.title}: {', '.join(row.used_by)} was trained from it; no other can be, once it is gone"
        if not row.last_named_by and row.kind != "spool":
            yield f"{row.title}: no commit that is left ever named it; once it is gone nothing tells how it was made"
    for row in listed:
        if row.title == NEVER_NAMED:
            count = "1 object is" if row.num_objects == 1 else f"{row.num_objects:,} objects are"
            yield f"{count} named by no commit that is left ({human_bytes(row.stored_bytes)})"
        if row.title == REPORTS:
            yield "with these reports goes a shortcut: if dvc.lock is ever lost, the stages that made them run again"
    yield from _wanted_rings(found)
    if gone.changed:
        yield (
            f"{len(gone.changed):,} names hold something else than was recorded and stay ({gone.changed[0]}); "
            "look at them and remove them by hand"
        )
    if found.shared.has_encoded:
        yield "the file system compresses: what is freed can be less than the plan says"
    yield from _only_elsewhere(found, states)
    yield from _only_lost(found, states)


def _wanted_rings(found: Situation) -> Iterator[str]:
    for ring in found.working.idle:
        if ring.is_wanted:
            yield (
                f"ring {ring.identity[:10]}: the training of data/plan.json would go on with it; without it, it captures "
                f"{ring.num_shards:,} shards again"
            )


def _only_elsewhere(found: Situation, states: Sequence[GroupRow]) -> Iterator[str]:
    """Generations that a branch of a git remote names and no local one: DVC does not keep those."""
    import pygit2

    repo = pygit2.Repository(os.fspath(found.root))
    tips: dict[str, str] = {}
    for name in repo.references:
        if name.startswith("refs/remotes/") or name == "refs/stash":
            target = repo.references[name].resolve().target
            tips.setdefault(str(target), name.removeprefix("refs/").removeprefix("remotes/"))
    for row in states if tips else ():
        naming = {
            revision.commit
            for revision in found.revisions
            for s in revision.stages
            for o in s.outs
            if o.name == row.hash
        }
        if where := sorted({name for commit, name in tips.items() if commit in naming}):
            yield f"{row.title}: {', '.join(where)} names it, but no local branch or tag does: DVC does not keep it"


def _only_lost(found: Situation, states: Sequence[GroupRow]) -> Iterator[str]:
    """Generations of commits that were amended, reset or dropped: git forgets those too, in some weeks."""
    for row in states:
        naming = [r for r in found.revisions if any(out.name == row.hash for stage in r.stages for out in stage.outs)]
        if naming and all(revision.is_lost for revision in naming):
            yield (
                f"{row.title}: only commit {naming[0].name} names it, and no branch or tag leads there any more "
                "(git's reflog does); `make keep` pins it"
            )
