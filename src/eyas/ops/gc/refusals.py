"""When nothing may be deleted: whatever makes it uncertain what is in use, each with what to do about it."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from eyas import fs
from eyas.config import dvc
from eyas.generations.listing import Situation
from eyas.generations.snapshot import LOCK, PIPELINE
from eyas.generations.trees import ADOPTED, RETIRED_HOME, is_imported, is_retired
from eyas.plan.cache import cache_dir
from eyas.plan.volume import holding, mounts
from eyas.shards.handover import HOME, LOCK_NAME

UNFINISHED = (
    ("rebase-merge", "rebase"),
    ("rebase-apply", "rebase"),
    ("MERGE_HEAD", "merge"),
    ("CHERRY_PICK_HEAD", "cherry-pick"),
    ("REVERT_HEAD", "revert"),
)
NO_PROJECTS = "none"
NOTES_BYTES = 1 << 20
"""That DVC's state, its locks and the lock's own text take, with room to spare (measured: 256 kB)."""
NOTES_BYTES_A_NAME = 300
"""Of the plan and of the intent, in which every object and name stands once."""


class Refusal(NamedTuple):
    """A reason not to delete anything."""

    what: str
    hint: str


def refusals(found: Situation, projects: Sequence[Path] | None, *, is_locked: bool) -> list[Refusal]:
    """Everything that speaks against a gc, in the order in which to deal with it.

    Args:
        found: The situation, projects included.
        projects: Others that share the cache; None when nobody said.
        is_locked: Whether this process holds the lock itself.
    """
    root = found.root
    listed = [] if is_locked else list(_running(root))
    listed += _room(found)
    if not (root / "dvc.lock").exists():
        listed.append(Refusal("dvc.lock is missing: DVC would take every output for unused", _lost_lock(root)))
    listed += _git_state(root)
    listed += _uncommitted(root)
    listed += _passed_over(root)
    listed += [Refusal(problem, _mend(problem)) for problem in found.kept.problems]
    listed += _unrecorded(found)
    listed += _unrecorded_imports(found)
    if projects is None:
        listed += _shared_cache(root)
    listed += _worktrees(root, projects or ())
    listed += [refusal for project in (root, *(projects or ())) for refusal in _experiments(project)]
    return listed


def _running(root: Path) -> Iterator[Refusal]:
    if holder := fs.lock_holder(root / HOME / LOCK_NAME):
        yield Refusal(f"{root / HOME / LOCK_NAME} is locked by {holder}", "wait for it, or stop that process")


def _room(found: Situation) -> Iterator[Refusal]:
    """A gc writes down what goes before anything does; so a disk that is full to the last byte stands in its way."""
    stat = os.statvfs(found.root)
    free_bytes = (stat.f_bavail if os.geteuid() else stat.f_bfree) * stat.f_frsize
    num_names = len(found.cache.objects) + sum(len(tree.files) for tree in found.trees)
    needed_bytes = NOTES_BYTES + NOTES_BYTES_A_NAME * num_names
    if free_bytes < needed_bytes:
        yield Refusal(
            f"{free_bytes:,} bytes are free on this volume, and gc writes up to {needed_bytes:,} before it deletes: its "
            "list, DVC's state",
            "move or delete so much by hand (`du -xahd2 . | sort -h` shows what is small), then the same command",
        )


def _git_state(root: Path) -> Iterator[Refusal]:
    import pygit2

    repo = pygit2.Repository(os.fspath(root))
    for name, what in UNFINISHED:
        if (Path(repo.path) / name).exists():
            hint = f"`git {what} --continue` or `git {what} --abort`"
            yield Refusal(f"a git {what} is under way: what its commits will name is not known yet", hint)
            return
    if repo.head_is_unborn:
        yield Refusal("there is no commit yet that names anything", "git add . && git commit")


def _uncommitted(root: Path) -> Iterator[Refusal]:
    """Files that say what is in use, changed and not committed: a mistake in them costs what they no longer name."""
    globs = ("dvc.yaml", "dvc.lock", "*.dvc", "params.yaml")
    command = [
        "git",
        "--no-optional-locks",
        "status",
        "--porcelain",
        "-z",
        "--untracked-files=all",
        "--no-renames",
        "--",
    ]
    patterns = [pattern for glob in globs for pattern in (glob, f":(glob)**/{glob}")]
    done = subprocess.run([*command, *patterns], cwd=root, capture_output=True, check=False)
    if done.returncode:
        yield Refusal(f"`git status` failed: {done.stderr.decode(errors='replace').strip()}", "git status")
    lines = [line for line in done.stdout.decode("utf-8", "replace").split("\0") if line]
    changed = sorted(line[3:] for line in lines if not line[3:].startswith(".dvc/"))
    if changed:
        named = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        yield Refusal(
            f"not committed: {named}; gc would delete what an unfinished edit no longer names",
            _commit_it([line[3:] for line in lines if line.startswith("??")]),
        )


def _passed_over(root: Path) -> Iterator[Refusal]:
    """Files of DVC's that git ignores: DVC does not read those either, and what they name would go."""
    files = [path for path in (root / PIPELINE, root / LOCK, *(root / ADOPTED).glob("*.dvc")) if path.exists()]
    names = [path.relative_to(root).as_posix() for path in files]
    command, listed = ["git", "check-ignore", "-z", "--stdin"], "\0".join(names).encode()
    done = subprocess.run(command, cwd=root, input=listed, capture_output=True, check=False)
    for name in filter(None, done.stdout.decode("utf-8", "replace").split("\0")):
        yield Refusal(
            f"{name} is passed over by git's rules: DVC does not see it, and what it names would go",
            f"`git check-ignore -v {name}` names the rule; take the file out of it (`!{name}`) and commit, or remove it",
        )


def _commit_it(unknown: Sequence[str]) -> str:
    """What to do about files that are not committed; ``unknown`` are those that git never saw."""
    if unknown:
        return f"git add {' '.join(sorted(unknown)[:5])} && git commit; `git diff` shows what else was changed"
    return "`git diff` shows it; `git commit` it, or `git checkout` it"


def _lost_lock(root: Path) -> str:
    command = ["git", "cat-file", "-e", "HEAD:./dvc.lock"]
    is_known = subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0
    return (
        "git checkout dvc.lock"
        if is_known
        else "make extract (records what lies there), then git add dvc.lock && git commit"
    )


def _mend(problem: str) -> str:
    if "missing from DVC's cache" in problem:
        return (
            "where the files lie in the workspace, `make extract` (of another output `dvc commit -f STAGE`) writes the list "
            "again; else `dvc fetch`; else delete the branch or tag that names it"
        )
    if "is damaged" in problem:
        return "remove that file, then `dvc fetch`; else delete the branch or tag that names it"
    return "put it right and commit, or delete the branch or tag that has it"


def _unrecorded(found: Situation) -> Iterator[Refusal]:
    """Finished states of the set that is wanted, which no ``dvc.lock`` names: a kill came before DVC wrote it."""
    seen = set[str]()
    for tree in found.trees:
        is_wanted = bool(found.wanted_identity) and tree.identity == found.wanted_identity
        is_ours = tree.kind in ("workspace", "spool") and is_wanted and bool(tree.generation)
        is_given_up = tree.is_retired or is_retired(found.root, tree.generation)
        if is_ours and tree.generation not in found.kept.names and not is_given_up and tree.generation not in seen:
            seen.add(tree.generation)
            yield Refusal(
                f"{tree.folder} holds the finished states that data/plan.json wants ({tree.identity[:10]}…), and no "
                "dvc.lock that is kept names them",
                f"record them first: make extract (or give them up: make retire GEN={tree.generation[:10]})",
            )


def _unrecorded_imports(found: Situation) -> Iterator[Refusal]:
    """Imported states that DVC's cache has and no ``dvc.lock`` names: a kill came before DVC wrote it."""
    for tree in found.trees:
        path = os.path.relpath(tree.folder, found.root)
        is_ours = tree.kind == "workspace" and is_imported(path) and tree.generation in found.cache.objects
        is_given_up = (found.root / RETIRED_HOME / tree.generation).exists()
        if is_ours and tree.generation not in found.kept.names and not is_given_up:
            yield Refusal(
                f"{path} holds finished states, and no dvc.lock that is kept names them",
                f"record them first: make train-from GEN={tree.folder.parent.name} (or give them up: make retire "
                f"GEN={tree.generation[:10]})",
            )


def _shared_cache(root: Path) -> Iterator[Refusal]:
    cache = cache_dir(root)
    why = ""
    if not Path(_real(cache)).is_relative_to(os.path.realpath(root)):
        why = "lies outside this repository"
    elif holding(Path(_real(cache)), found := mounts()) != holding(root.resolve(), found):
        why = "is a mount of its own"  # a bind mount of a cache that others have too looks like any folder
    elif dvc.settings(root, "cache").get("shared"):
        why = "is shared (cache.shared)"
    if why:
        yield Refusal(
            f"DVC's cache {cache} {why}: another project may use what this one does not",
            f"name the others: PROJECTS='/path /path', or PROJECTS={NO_PROJECTS} when there are none",
        )


def _real(cache: Path) -> str:
    """Where objects really lie: the folder itself may be a link, or the one below it."""
    return os.path.realpath(cache / "files/md5")


def _worktrees(root: Path, projects: Sequence[Path]) -> Iterator[Refusal]:
    """Other worktrees of this git repository on the same cache: what their workspaces name, no branch need name."""
    command = ["git", "worktree", "list", "--porcelain"]
    done = subprocess.run(command, cwd=root, capture_output=True, check=False)
    lines = done.stdout.decode("utf-8", "surrogateescape").splitlines()
    tops = [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
    own = root.resolve()
    below = next((own.relative_to(top.resolve()) for top in _innermost(tops) if own.is_relative_to(top.resolve())), "")
    others = {top.resolve() / below for top in tops} - {own, *projects}
    sharing = sorted(o for o in others if (o / ".dvc").is_dir() and _real(cache_dir(o)) == _real(cache_dir(root)))
    if sharing:
        named = " ".join(shlex.quote(os.fspath(project)) for project in (*projects, *sharing))
        yield Refusal(
            f"{sharing[0]}, a worktree of this git repository, uses this cache too: what is checked out there may be "
            "named by no branch",
            f'name it: PROJECTS="{named}"',
        )


def _innermost(folders: Sequence[Path]) -> list[Path]:
    """A worktree may lie below another one."""
    return sorted(folders, key=lambda folder: len(folder.parts), reverse=True)


def _experiments(root: Path) -> Iterator[Refusal]:
    """Experiments that run in folders of their own: their stages fill this cache before any reference names it."""
    exps = root / ".dvc/tmp/exps"
    running = sorted(folder for pattern in ("tmp*", "*/tmp*") for folder in exps.glob(pattern) if folder.is_dir())
    if running:
        yield Refusal(
            f"an experiment of DVC's runs in {running[0]}, or was killed there: what it has made is named nowhere yet",
            f"wait for it (`dvc queue status`); a killed one is given up by: rm -rf {shlex.quote(os.fspath(running[0]))}",
        )
