"""All generations of a repository, read from git, DVC's lists and ``stat``: nothing is hashed, no shard is read."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eyas.errors import StoreError
from eyas.generations import ledger
from eyas.generations.extents import SHARING_FILE_SYSTEMS, Key, SharedBlocks, read_shared
from eyas.generations.freed import freed_bytes
from eyas.generations.generation import (
    Facts,
    Generation,
    GenerationKind,
    adopted_facts,
    manifest_facts,
    objects_of,
    param_facts,
    read_manifest,
)
from eyas.generations.kept import Kept, kept_objects
from eyas.generations.objects import Cache, scan_cache
from eyas.generations.revisions import Revision, read_revisions
from eyas.generations.snapshot import TrackedOut, TrackedStage
from eyas.generations.trees import ADOPTED, RETIRED_HOME, STATES_NAME, NameTree, is_imported, read_trees
from eyas.generations.working import WorkingFolders, read_working
from eyas.plan.volume import file_system

MIN_PREFIX = 6
DRAFTER = "drafter"
PLAN = Path("data/plan.json")
PLAN_HEAD_BYTES = 1 << 16
IDENTITY = re.compile(rb'"identity":\s*"([0-9a-f]{64})"')


@dataclass(frozen=True)
class Situation:
    """Everything that was read once, for the list, the budget and the plan of gc."""

    root: Path
    revisions: list[Revision]
    cache: Cache
    trees: list[NameTree]
    kept: Kept
    wanted_identity: str
    """Of ``data/plan.json``; empty without one."""
    working: WorkingFolders

    @functools.cached_property
    def shared(self) -> SharedBlocks:
        """Blocks that known files have in common; asked once, and only where the file system shares any."""
        files: dict[Key, tuple[str, str]] = {}
        kind, volume = file_system(self.cache.folder)
        if kind in SHARING_FILE_SYSTEMS:
            for name, stat in self.cache.objects.items():
                files[stat.device, stat.inode] = volume, self.cache.place(name)
        for tree in self.trees:
            kind, volume = file_system(tree.folder)
            if kind in SHARING_FILE_SYSTEMS:
                base = f"{tree.folder}{os.sep}"
                files |= {(f.device, f.inode): (volume, base + path) for path, f in tree.files.items()}
        return read_shared(files)


def read_situation(root: Path, *, commits: bool = False) -> Situation:
    """Read revisions, cache and names.

    Args:
        root: The repository.
        commits: Look at every commit, not only at what gc keeps.

    Raises:
        StoreError: ``root`` is in no git repository.
    """
    revisions, cache = read_revisions(root, commits=commits), scan_cache(root)
    return Situation(
        root=root,
        revisions=revisions,
        cache=cache,
        trees=read_trees(root, revisions),
        kept=kept_objects(revisions, cache),
        wanted_identity=_wanted(root / PLAN),
        working=read_working(root),
    )


def _wanted(plan: Path) -> str:
    """Identity of the plan. Keys are sorted, so it stands at the beginning: a plan of 600,000 samples is not parsed."""
    try:
        with plan.open("rb") as handle:
            head = handle.read(PLAN_HEAD_BYTES)
    except OSError:
        return ""
    found = IDENTITY.search(head)
    return found[1].decode() if found else ""


def list_generations(found: Situation) -> list[Generation]:
    """Every generation, what can be freed first."""
    named = _named_states(found.revisions)
    drafters = _drafters(found.revisions)
    needed = _read_by_drafters(found.revisions)
    generations = [
        _named(found, name, uses, drafters.get(name, ()), is_needed=name in needed) for name, uses in named.items()
    ]
    known = {generation.hash for generation in generations}
    unnamed = [tree for tree in found.trees if tree.generation not in known]
    cached = dict.fromkeys(tree.generation for tree in unnamed if tree.generation in found.cache.objects)
    generations += [_forgotten(found, name, [t for t in unnamed if t.generation == name]) for name in cached]
    generations += [
        _unnamed(found, tree)
        for tree in unnamed
        if tree.generation not in cached and tree.kind in ("workspace", "spool")
    ]
    return sorted(generations, key=lambda g: (-g.freed_now_bytes, -g.freed_bytes, -g.when_s, g.hash))


def find(root: Path, name: str) -> Generation:
    """The generation that a user means: a hash's first digits, or an adopted one's name.

    Raises:
        StoreError: None or several are meant.
    """
    generations = list_generations(read_situation(root, commits=True))
    exact = [g for g in generations if name in (g.name, g.hash, g.hash.removesuffix(".dir"))]
    if len(exact) > 1:  # a name given again: old commits name for ever what was deleted under it
        exact = [g for g in exact if g.is_kept] or [g for g in exact if g.disk_bytes] or exact
    meant = exact or [g for g in generations if len(name) >= MIN_PREFIX and g.hash.startswith(name)]
    if len(meant) == 1:
        return meant[0]
    listed = ", ".join(_listed(g) for g in meant or generations) or "none"
    if not name:
        what = "no generation was named (GEN=)"
    elif meant:
        what = f"{name!r} means {len(meant)} generations"
    elif any(generation.hash.startswith(name) for generation in generations):
        what = f"{name!r} is too short: {MIN_PREFIX} digits at least"
    else:
        what = f"{name!r} is no generation"
    raise StoreError(
        f"{what}, expected one of: {listed}",
        "`make generations ALL=1` lists them; six digits of a hash will do",
    )


def _listed(generation: Generation) -> str:
    own = generation.hash[:10]
    return own if generation.name == own else f"{generation.name} ({own})"


# ── named by a revision ───────────────────────────────────────────────────────────────────────

_Use = tuple[Revision, TrackedStage, TrackedOut]


def _named_states(revisions: Iterable[Revision]) -> dict[str, list[_Use]]:
    """Hash of a generation → where it is named."""
    named: dict[str, list[_Use]] = {}
    for revision in revisions:
        for stage in revision.stages:
            for out in stage.outs:
                if out.is_cached and (out.path.rpartition("/")[2] == STATES_NAME or _is_adopted(stage, out)):
                    named.setdefault(out.name, []).append((revision, stage, out))
    return named


def _is_adopted(stage: TrackedStage, out: TrackedOut) -> bool:
    return stage.file.endswith(".dvc") and out.path.startswith(f"{ADOPTED}/")


def _drafters(revisions: Iterable[Revision]) -> dict[str, tuple[str, ...]]:
    """Hash of a generation → drafters trained from it, or from what was imported from it."""
    found: dict[str, dict[str, None]] = {}
    sources: dict[str, set[str]] = {}
    stages = [stage for revision in revisions for stage in revision.stages]
    for stage in stages:
        states = [out.name for out in stage.outs if out.path.rpartition("/")[2] == STATES_NAME]
        adopted = {name for path, name in stage.deps.items() if path.startswith(f"{ADOPTED}/")}
        for name in states if adopted else []:
            sources.setdefault(name, set()).update(adopted)
    for stage in stages:
        made = [out for out in stage.outs if out.path.rpartition("/")[2] == DRAFTER]
        read = {name for path, name in stage.deps.items() if path.rpartition("/")[2] == STATES_NAME}
        for name in {*read, *(source for one in read for source in sources.get(one, ()))} if made else ():
            found.setdefault(name, {})[f"{made[0].path} {made[0].name[:10]}"] = None
    return {name: tuple(drafters) for name, drafters in found.items()}


def _read_by_drafters(revisions: Iterable[Revision]) -> set[str]:
    """Hashes of states from which a drafter of the workspace was trained."""
    stages = [stage for revision in revisions if revision.kind == "workspace" for stage in revision.stages]
    return {
        name
        for stage in stages
        if any(out.path.rpartition("/")[2] == DRAFTER for out in stage.outs)
        for path, name in stage.deps.items()
        if path.rpartition("/")[2] == STATES_NAME
    }


def _kind(path: str, *, is_adopted: bool = False) -> GenerationKind:
    return "adopted" if is_adopted else "imported" if is_imported(path) else "pipeline"


def _named(found: Situation, name: str, uses: list[_Use], used_by: tuple[str, ...], *, is_needed: bool) -> Generation:
    _, stage, out = uses[0]
    is_adopted = _is_adopted(stage, out)
    facts = adopted_facts(stage.meta) if is_adopted else _pipeline_facts(found.cache, uses)
    objects = objects_of(found.cache, name)
    trees = [tree for tree in found.trees if tree.generation == name]
    is_kept = name in found.kept.names  # also by an output of another name
    in_workspace = any(revision.kind == "workspace" for revision, _, _ in uses)
    is_planned = any(r.kind == "workspace" and not is_imported(o.path) for r, _, o in uses)
    free = freeable(found, objects, trees, {name})
    return Generation(
        kind=_kind(out.path, is_adopted=is_adopted),
        hash=name,
        path=out.path,
        facts=facts,
        when_s=_when(found.cache, name, [revision.when_s for revision, _, _ in uses if revision.when_s]),
        stored_bytes=out.size_bytes,
        disk_bytes=_disk_bytes(found.cache, objects, trees),
        num_objects=len(objects) or out.num_files + 1,
        num_missing=sum(one not in found.cache.objects for one in objects) if objects else out.num_files + 1,
        is_kept=is_kept,
        is_stale=is_planned and bool(facts.identity and found.wanted_identity not in ("", facts.identity)),
        # `git checkout` takes a retirement back, and knows nothing of the mark.
        is_retired=not in_workspace and (found.root / RETIRED_HOME / name).exists(),
        freed_now_bytes=0 if is_kept else free,
        freed_bytes=free,
        named_by=_named_by(uses),
        used_by=used_by,
        is_needed=is_needed,
        objects=objects,
    )


def _pipeline_facts(cache: Cache, uses: list[_Use]) -> Facts:
    facts = Facts()
    for _, stage, out in uses:
        manifests = [other for other in stage.outs if other.path == f"{out.path}.json"]
        facts = next((f for f in (read_manifest(cache, m.name) for m in manifests) if f.identity), facts)
        if facts.identity:
            break
    noted = param_facts(uses[0][1].params)
    # The manifest has the target's digest, the parameters its name.
    return replace(facts, target=noted.target or facts.target[:10]) if facts.identity else noted


def _named_by(uses: list[_Use]) -> tuple[str, ...]:
    """What keeps it; where nothing does, the newest of the commits that name it and their number."""
    kept = dict.fromkeys(str(revision) for revision, _, _ in uses if revision.is_kept)
    commits = sorted({(r.when_s, r.name) for r, _, _ in uses if r.kind == "commit"}, reverse=True)
    if kept or not commits:
        return tuple(kept)
    more = f" and {len(commits) - 1} more" if len(commits) > 1 else ""
    return (f"commit {commits[0][1]}{more}",)


def _when(cache: Cache, name: str, commits: Sequence[int]) -> int:
    try:
        return int(cache.path(name).stat().st_mtime)
    except FileNotFoundError:
        return min(commits, default=0)


def _disk_bytes(cache: Cache, objects: Iterable[str], trees: Iterable[NameTree]) -> int:
    present = [cache.objects[name] for name in objects if name in cache.objects]
    files = [file for tree in trees for file in tree.files.values()]
    return sum({(f.device, f.inode): f.disk_bytes for f in (*present, *files)}.values())


def freeable(found: Situation, objects: Iterable[str], trees: Iterable[NameTree], dropped: set[str]) -> int:
    """Bytes that deleting a generation gives back; what a kept generation shares with it stays.

    Args:
        found: The situation.
        objects: Of the generation.
        trees: Names outside the cache that go with it.
        dropped: Hashes of generations that are taken for unnamed although something keeps them.
    """
    owners = Counter(one for name in dropped & found.kept.names for one in {name, *objects_of(found.cache, name)})
    kept = found.kept.owners
    gone = [
        found.cache.objects[name]
        for name in objects
        if name in found.cache.objects and kept.get(name, 0) <= owners.get(name, 0)
    ]
    return freed_bytes([*gone, *(file for tree in trees for file in tree.files.values())], found.shared)


# ── named by nothing ──────────────────────────────────────────────────────────────────────────


def _forgotten(found: Situation, name: str, trees: list[NameTree]) -> Generation:
    """A generation that DVC's cache has and no revision names: adopted or made, and given up before a commit."""
    tree = next((tree for tree in trees if tree.kind != "origin"), trees[0])
    is_adopted = tree.kind in ("adopted", "origin")
    objects = objects_of(found.cache, name)
    sizes = [found.cache.objects[one].size_bytes for one in objects - {name} if one in found.cache.objects]
    is_kept = name in found.kept.names
    free = freeable(found, objects, trees, {name})
    return Generation(
        kind=_kind(os.path.relpath(tree.folder, found.root), is_adopted=is_adopted),
        hash=name,
        path=os.path.relpath(tree.folder, found.root),
        facts=_noted_facts(found.root, name) if is_adopted else _tree_facts(tree),
        when_s=_when(found.cache, name, ()),
        stored_bytes=sum(sizes),
        disk_bytes=_disk_bytes(found.cache, objects, trees),
        num_objects=len(objects) or tree.num_listed + 1,
        num_missing=sum(one not in found.cache.objects for one in objects) if objects else tree.num_listed + 1,
        is_kept=is_kept,
        is_stale=False,
        is_retired=(found.root / RETIRED_HOME / name).exists(),
        freed_now_bytes=0 if is_kept else free,
        freed_bytes=free,
        named_by=(),
        used_by=(),
        is_needed=False,
        objects=objects,
    )


def _noted_facts(root: Path, name: str) -> Facts:
    """What the ledger tells of an adoption whose ``.dvc`` file is gone."""
    told = [event for event in ledger.read(root) if event.get("event") == "adopt" and event.get("hash") == name]
    return Facts(engine=str(told[-1].get("engine", "")), note=str(told[-1].get("note", ""))) if told else Facts()


def _tree_facts(tree: NameTree) -> Facts:
    manifest = tree.manifest if tree.kind == "workspace" else tree.folder.parent / "manifest.json"
    facts = Facts(identity=tree.identity)
    with contextlib.suppress(OSError, ValueError):
        facts = manifest_facts(json.loads((manifest or tree.folder).read_bytes()))
    return facts if facts.identity else Facts(identity=tree.identity)


def _unnamed(found: Situation, tree: NameTree) -> Generation:
    """States that no revision names: published and not recorded, or a spool."""
    path = tree.folder.relative_to(found.root).as_posix()
    twin = any(t.kind == "workspace" and t.generation == tree.generation for t in found.trees)
    free = 0 if tree.kind == "spool" and twin else freed_bytes(tree.files.values(), found.shared)
    newest = max((int(p.stat().st_mtime) for p in (tree.folder, tree.folder.parent) if p.exists()), default=0)
    return Generation(
        kind="unrecorded" if tree.kind == "workspace" else "spool",
        hash=tree.generation or tree.identity,
        path=path,
        facts=_tree_facts(tree),
        when_s=newest,
        stored_bytes=sum(file.size_bytes for file in tree.files.values()),
        disk_bytes=tree.disk_bytes,
        num_objects=tree.num_listed,
        num_missing=tree.num_listed - len(tree.files),
        is_kept=not tree.is_retired,
        is_stale=not is_imported(path) and tree.identity != found.wanted_identity,
        is_retired=tree.is_retired,
        freed_now_bytes=free if tree.is_retired else 0,
        freed_bytes=free,
        named_by=(),
        used_by=(),
        is_needed=False,
        objects=frozenset(),
    )
