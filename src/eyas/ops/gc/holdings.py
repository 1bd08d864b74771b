"""What each remote holds: what is in use, what old commits alone name, and what no commit names. Nothing is deleted there.

eyas deletes on no remote: others push to it whose branches this clone has not seen. What is told here is what
``dvc gc --cloud`` would take with each of its two choices, so that whoever knows all clones can decide.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.errors import StoreError
from eyas.generations.kept import cached_outs
from eyas.generations.listing import Situation
from eyas.generations.objects import DIR_SUFFIX, LEGACY, scan_folder
from eyas.generations.trees import ADOPTED, STATES_NAME
from eyas.ops.gc.groups import last_names
from eyas.ops.gc.remote import Remote, ask_dvc, remote_folder, remotes

GC_OLD = "dvc gc --workspace --all-branches --all-tags --all-experiments --cloud --remote"
"""Keeps what this repository's workspace, branches, tags and experiments name."""
GC_UNNAMED = "dvc gc --workspace --all-commits --all-experiments --cloud --remote"
"""Keeps what any commit names."""
_LIST = f"""
import json, sys
from dvc.repo import Repo
name, lists = sys.argv[1], json.load(sys.stdin)
with Repo(".") as repo:
    odb = repo.cloud.get_remote_odb(name, hash_name="md5-dos2unix")  # lies at the root of the remote, the new one below
    fs, start = odb.fs.fs, odb.path.rstrip("/")
    sizes, texts = {{}}, {{}}
    found = fs.find(odb.path, detail=True)
    # A bucket's listing has the sizes; DVC's own local file system lists names alone.
    for path, info in found.items() if isinstance(found, dict) else ((path, fs.info(path)) for path in found):
        parts = path[path.index(start) + len(start):].strip("/").split("/")
        prefix = "" if parts[:2] == ["files", "md5"] else "{LEGACY}"
        parts = parts[2:] if prefix == "" else parts
        if len(parts) == 2 and len(parts[0]) == 2:
            oid = prefix + "".join(parts)
            sizes[oid] = info["size"]
            if oid in lists:
                texts[oid] = fs.cat_file(path).decode(errors="replace")
    print(json.dumps([sizes, texts]))
"""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Objects of a remote that have something in common."""

    title: str
    num_objects: int
    num_bytes: int
    last_named_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One remote."""

    remote: str
    is_known: bool
    """Whether it answered, and every list of what is in use could be read."""
    needed: Share
    """Named by the workspace, a branch, a tag, an experiment, an adopted set, or a project that was named."""
    old: tuple[Share, ...]
    """Named by older commits alone: generations one by one, other outputs by their path."""
    unnamed: Share
    """Named by no commit that a reference leads to."""
    num_lost_lists: int
    """Folders of older commits whose list is nowhere: what they named counts as unnamed."""
    projects: tuple[str, ...] = ()
    """Other repositories whose objects count as needed: DVC must be told of them, or it takes them away."""

    @property
    def old_bytes(self) -> int:
        """What older commits alone name."""
        return sum(share.num_bytes for share in self.old)

    @property
    def commands(self) -> tuple[str, str]:
        """DVC's, which delete there and here: what old commits name as well, and only what no commit names."""
        name = shlex.join([self.remote, *(["--projects", *self.projects] if self.projects else [])])
        return f"{GC_OLD} {name}", f"{GC_UNNAMED} {name}"


def holdings(found: Situation, projects: Sequence[Path] = ()) -> tuple[Holding, ...]:
    """Every remote of a repository; ``found`` has all commits, and what the projects keep."""
    named = tuple(map(str, projects))
    return tuple(replace(_holding(found, remote), projects=named) for remote in remotes(found.root))


def _holding(found: Situation, remote: Remote) -> Holding:
    wanted = _old_lists(found)
    answer = _objects(found.root, remote, wanted)
    if answer is None or found.kept.problems:
        nothing = Share(title="", num_objects=0, num_bytes=0)
        return Holding(remote=remote.name, is_known=False, needed=nothing, old=(), unnamed=nothing, num_lost_lists=0)
    sizes, lists = answer
    rest = {name: size for name, size in sizes.items() if name not in found.kept.names}
    old = tuple(_old(found, rest, lists))
    needed_bytes = sum(size for name, size in sizes.items() if name in found.kept.names)
    num_needed = sum(name in found.kept.names for name in sizes)
    return Holding(
        remote=remote.name,
        is_known=True,
        needed=Share(title="in use", num_objects=num_needed, num_bytes=needed_bytes),
        old=tuple(sorted(old, key=lambda share: -share.num_bytes)),
        unnamed=Share(title="named by no commit here", num_objects=len(rest), num_bytes=sum(rest.values())),
        num_lost_lists=len(wanted - lists.keys()),
    )


def _old_names(found: Situation) -> dict[str, str]:
    """Hash → path of every output that nothing kept names and a commit does, the newest commit first."""
    commits = [r for r in found.revisions if r.kind == "commit" and not r.is_lost]
    names: dict[str, str] = {}
    for revision in sorted(commits, key=lambda revision: -revision.when_s):
        for out in cached_outs(revision):
            if out.name not in found.kept.names:
                names.setdefault(out.name, out.path)
    return names


def _old_lists(found: Situation) -> set[str]:
    """Lists of such folders that this cache lacks."""
    folders = [name for name in _old_names(found) if name.endswith(DIR_SUFFIX)]
    return {name for name in folders if _local_list(found, name) is None}


def _local_list(found: Situation, name: str) -> dict[str, str] | None:
    try:
        return found.cache.read_tree(name)
    except StoreError:
        return None


def _objects(root: Path, remote: Remote, wanted: set[str]) -> tuple[dict[str, int], dict[str, list[str]]] | None:
    """Size of every object of a remote, and the wanted lists that it has; None when it does not answer."""
    folder = remote_folder(remote)
    if folder is None:
        answer = ask_dvc(root, remote, _LIST, sorted(wanted))
        return None if answer is None else (answer[0], _parsed(answer[1]))
    if not folder.is_dir():
        return None
    there = scan_folder(folder)
    texts = {name: there.path(name).read_bytes().decode(errors="replace") for name in wanted if name in there.objects}
    return {name: one.size_bytes for name, one in there.objects.items()}, _parsed(texts)


def _parsed(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of a folder's files, of every list that is what its name says."""
    lists = {}
    for name, text in texts.items():
        if fs.hash_bytes(text.encode(), "md5") == name.removeprefix(LEGACY).removesuffix(DIR_SUFFIX):
            prefix = LEGACY if name.startswith(LEGACY) else ""
            lists[name] = [prefix + entry["md5"] for entry in json.loads(text)]
    return lists


def _old(found: Situation, rest: dict[str, int], lists: Mapping[str, list[str]]) -> Iterator[Share]:
    """Shares of what commits name; takes them out of ``rest``."""
    last, members = last_names(found), dict[str, tuple[str, dict[str, int]]]()
    for name, path in _old_names(found).items():
        named = [name, *((_local_list(found, name) or {}).values() if name not in lists else lists[name])]
        is_states = path.rpartition("/")[2] == STATES_NAME or path.startswith(f"{ADOPTED}/")
        title = f"{path} {name.removeprefix(LEGACY)[:10]}" if is_states else path
        _, mine = members.setdefault(title, (name, {}))
        mine.update({one: rest.pop(one) for one in named if one in rest})
    for title, (name, mine) in members.items():
        if mine:
            yield Share(
                title=title, num_objects=len(mine), num_bytes=sum(mine.values()), last_named_by=last.get(name, "")
            )


def holding_values(one: Holding) -> dict[str, Any]:
    """For machines."""
    old, unnamed = one.commands
    return asdict(one) | {"old_bytes": one.old_bytes, "commands": {"old": old, "unnamed": unnamed}}
