"""What goes, sorted by what it is: generations first, then other outputs by their path, then what nobody ever named."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from eyas.errors import StoreError
from eyas.generations.extents import Key
from eyas.generations.generation import Generation
from eyas.generations.kept import cached_outs
from eyas.generations.listing import Situation
from eyas.generations.objects import DIR_SUFFIX, CachedObject
from eyas.generations.runs import run_cache_names
from eyas.generations.trees import TreeFile
from eyas.ops.gc.going import RING_OWNER, Going, GoingName
from eyas.shards.handover import HOME, RING

NEVER_NAMED = "named by no commit"
REPORTS = "reports in DVC's run cache"
STRAYS = "left by a killed DVC"


@dataclass(kw_only=True)
class Group:
    """Objects and names of one kind that go."""

    title: str
    generation: Generation | None = None
    objects: list[str] = field(default_factory=list)
    names: list[GoingName] = field(default_factory=list)
    strays: list[CachedObject] = field(default_factory=list)

    def stats(self, gone: Going) -> Iterator[CachedObject | TreeFile]:
        """``stat`` of every name in it."""
        yield from (gone.objects[name] for name in self.objects)
        yield from self.strays
        yield from (name.stat for name in self.names)


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A group in figures."""

    title: str
    hash: str
    """Of a generation, else empty."""
    kind: str
    engine: str
    identity: str
    """Of the capture."""
    used_by: tuple[str, ...]
    """Drafters that were trained from it."""
    num_samples: int
    when_s: int
    num_objects: int
    num_names: int
    stored_bytes: int
    """Sizes of its objects."""
    freed_bytes: int
    """What goes back to the volume; what two groups share is put down to the first."""
    last_named_by: str
    num_pushed: int | None
    """Objects that a remote has; None where there is no remote or nobody knows."""


def group(found: Situation, gone: Going, generations: Sequence[Generation]) -> list[Group]:
    """Sort what goes."""
    groups = _generation_groups(found, gone, generations)
    for ring in found.working.idle:
        mine = [name for name in gone.names if name.generation == RING_OWNER + ring.identity]
        groups.append(Group(title=f"{HOME / RING / ring.identity[:10]}…: {ring.what}", names=mine))
    owned = {name for one in groups for name in one.objects}
    rest = {name for name in gone.objects if name not in owned}
    others = list(_out_groups(found, rest)) if rest else []
    remembered = rest & run_cache_names(found.cache) if rest else set[str]()
    for title, names in ((REPORTS, remembered), (NEVER_NAMED, rest - remembered)):
        if names:
            others.append(Group(title=title, objects=sorted(names)))
    if gone.strays:
        others.append(Group(title=STRAYS, strays=list(gone.strays.values())))
    return [*groups, *others]


def _generation_groups(found: Situation, gone: Going, generations: Sequence[Generation]) -> list[Group]:
    names: dict[str, list[GoingName]] = {}
    for name in gone.names:
        if not name.generation.startswith(RING_OWNER):
            names.setdefault(name.generation, []).append(name)
    manifests = _manifests(found)
    groups: list[Group] = []
    owned = set[str]()
    for generation in generations:
        wanted = {*_list(found, generation.hash), *manifests.get(generation.hash, ())}
        objects = sorted(name for name in wanted if name in gone.objects and name not in owned)
        mine = names.pop(generation.hash, [])
        if objects or mine:
            owned.update(objects)
            groups.append(Group(title=generation.name, generation=generation, objects=objects, names=mine))
    assert not names, f"names of no generation: {sorted(names)}"
    return groups


def _list(found: Situation, name: str) -> Iterable[str]:
    try:
        return (name, *found.cache.read_tree(name).values()) if name.endswith(DIR_SUFFIX) else (name,)
    except StoreError:
        return (name,)


def _manifests(found: Situation) -> dict[str, set[str]]:
    """Hash of a generation → its manifests."""
    manifests: dict[str, set[str]] = {}
    for revision in found.revisions:
        for stage in revision.stages:
            by_path = {out.path: out.name for out in stage.outs}
            for path, name in by_path.items():
                if f"{path}.json" in by_path:
                    manifests.setdefault(name, set()).add(by_path[f"{path}.json"])
    return manifests


def _out_groups(found: Situation, rest: set[str]) -> Iterator[Group]:
    """Other outputs by path; takes what it finds out of ``rest``."""
    groups: dict[str, Group] = {}
    seen = set[str]()
    for revision in found.revisions:
        for out in cached_outs(revision):
            if out.name not in rest or out.name in seen:
                continue
            seen.add(out.name)
            objects = [name for name in dict.fromkeys(_list(found, out.name)) if name in rest]
            rest.difference_update(objects)
            groups.setdefault(out.path, Group(title=out.path)).objects.extend(objects)
    for _, one in sorted(groups.items()):
        yield one


def last_names(found: Situation) -> dict[str, str]:
    """Hash of an output → the newest commit that names it."""
    newest: dict[str, tuple[int, str]] = {}
    for revision in found.revisions:
        if revision.kind == "commit":
            for out in cached_outs(revision):
                newest[out.name] = max(newest.get(out.name, (0, "")), (revision.when_s, revision.name))
    return {
        name: f"commit {commit} of {time.strftime('%Y-%m-%d', time.gmtime(when_s))}"
        for name, (when_s, commit) in newest.items()
    }


def rows(
    found: Situation, gone: Going, groups: Sequence[Group], freed: dict[Key, int], remote: set[str] | None
) -> list[GroupRow]:
    """The groups in figures; together they free what the whole plan frees."""
    last, credited = last_names(found), set[Key]()
    listed = []
    for one in groups:
        keys = {(stat.device, stat.inode) for stat in one.stats(gone)} - credited
        credited |= keys
        facts = one.generation.facts if one.generation else None
        listed.append(
            GroupRow(
                title=one.title,
                hash=one.generation.hash if one.generation else "",
                kind=one.generation.kind if one.generation else "objects",
                engine=f"{facts.engine} {facts.engine_version}".strip() if facts else "",
                identity=facts.identity if facts else "",
                used_by=one.generation.used_by if one.generation else (),
                num_samples=facts.num_samples if facts else 0,
                when_s=one.generation.when_s if one.generation else 0,
                num_objects=len(one.objects) + len(one.strays),
                num_names=len(one.names),
                stored_bytes=_stored_bytes(one, gone),
                freed_bytes=sum(freed.get(key, 0) for key in keys),
                last_named_by=last.get(one.generation.hash, "") if one.generation else "",
                num_pushed=sum(name in remote for name in one.objects) if remote is not None and one.objects else None,
            )
        )
    return listed


def _stored_bytes(one: Group, gone: Going) -> int:
    """Sizes of the objects; of what the cache does not have, of the names."""
    if one.objects or one.strays:
        return sum(gone.objects[name].size_bytes for name in one.objects) + sum(s.size_bytes for s in one.strays)
    return sum(name.stat.size_bytes for name in one.names)
