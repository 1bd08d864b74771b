"""Every revision that may name hidden states: the workspace, branches, tags, experiments and, on demand, all commits.

Git's objects are read in place; a file that did not change between two commits is parsed once. 200 commits take a
second.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eyas.errors import StoreError
from eyas.generations.snapshot import Snapshot, is_metafile, parse_snapshot

if TYPE_CHECKING:
    import pygit2

RevisionKind = Literal["workspace", "branch", "tag", "experiment", "commit"]
KEPT_KINDS: tuple[RevisionKind, ...] = ("workspace", "branch", "tag", "experiment")
"""What ``dvc gc --workspace --all-branches --all-tags --all-experiments`` keeps."""
PIN_PREFIX = "keep/"
"""Of the tags that pin a generation."""
_EXPERIMENTS = "refs/exps/"
_NO_EXPERIMENTS = ("apply", "celery", "exec", "stash", "temp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One name for one state of DVC's files."""

    kind: RevisionKind
    name: str
    """Of the branch, tag or experiment; the short hash of a commit."""
    commit: str
    """Full hash; of the workspace, HEAD's."""
    when_s: int
    """Seconds since 1970, of the commit; of the workspace 0."""
    stages: Snapshot
    problem: str = ""
    """Why the files could not be read; then ``stages`` is empty."""

    @property
    def is_kept(self) -> bool:
        """Whether gc keeps what it names."""
        return self.kind in KEPT_KINDS

    def __str__(self) -> str:
        return self.name if self.kind == "workspace" else f"{self.kind} {self.name}"


def read_revisions(root: Path, *, commits: bool) -> list[Revision]:
    """Read the workspace and every named revision, then, if asked, every commit that any reference leads to.

    Raises:
        StoreError: ``root`` is in no git repository.
    """
    import pygit2

    try:
        repo = pygit2.Repository(os.fspath(root))
    except (pygit2.GitError, KeyError) as error:
        raise StoreError(
            f"{root.resolve()} is in no git repository that can be read: {error}",
            "generations are what git's revisions name: `git init && git add . && git commit`",
        ) from None
    reader = _Reader(repo, root)
    revisions = [reader.workspace()]
    revisions += [reader.revision(kind, name, commit) for kind, name, commit in _named(repo)]
    if commits:
        starts = [repo.references[name] for name in repo.references]
        revisions += [reader.revision("commit", str(c.id)[:10], c) for c in _reachable(repo, starts)]
    return revisions


def _named(repo: pygit2.Repository) -> Iterator[tuple[RevisionKind, str, pygit2.Commit]]:
    import pygit2

    for full in sorted(repo.references):
        try:
            commit = repo.references[full].peel(pygit2.Commit)
        except (pygit2.GitError, pygit2.InvalidSpecError, KeyError):
            continue  # a tag on a file, or a reference to nothing: DVC finds no stages there either
        if full.startswith("refs/heads/"):
            yield "branch", full.removeprefix("refs/heads/"), commit
        elif full.startswith("refs/tags/"):
            yield "tag", full.removeprefix("refs/tags/"), commit
        elif full.startswith(_EXPERIMENTS) and full.split("/")[2] not in _NO_EXPERIMENTS:
            for one in _experiment(full, commit):
                yield "experiment", full.split("/")[-1], one


def _experiment(full: str, commit: pygit2.Commit) -> Iterator[pygit2.Commit]:
    """An experiment's commits down to the one that it started from, which its reference names."""
    baseline = "".join(full.split("/")[2:4])
    while str(commit.id) != baseline:
        yield commit
        if not commit.parents:
            return
        commit = commit.parents[0]


def _reachable(repo: pygit2.Repository, starts: Iterable[pygit2.Reference]) -> Iterator[pygit2.Commit]:
    import pygit2

    seen: set[pygit2.Oid] = set()
    heads = [] if repo.head_is_unborn else [repo.head]
    queue = []
    for reference in [*heads, *starts]:
        try:
            queue.append(reference.peel(pygit2.Commit))
        except (pygit2.GitError, pygit2.InvalidSpecError, KeyError):
            continue
    while queue:
        commit = queue.pop()
        if commit.id not in seen:
            seen.add(commit.id)
            yield commit
            # A shallow clone names parents that it does not have.
            queue += [repo[parent] for parent in commit.parent_ids if parent in repo]


class _Reader:
    """Reads metafiles of trees, each distinct tree and each distinct set of files once."""

    def __init__(self, repo: pygit2.Repository, root: Path) -> None:
        self._repo, self._root = repo, root
        workdir = repo.workdir
        if workdir is None:
            raise StoreError(f"{root.resolve()} is a bare git repository, expected one with files")
        below = os.path.relpath(os.path.realpath(root), os.path.realpath(workdir))
        self._below = "" if below == "." else Path(below).as_posix()
        self._trees: dict[pygit2.Oid, tuple[tuple[str, pygit2.Oid], ...]] = {}
        self._parsed: dict[object, tuple[Snapshot, str]] = {}

    def workspace(self) -> Revision:
        names = _workspace_metafiles(self._root)
        files = {name: (self._root / name).read_bytes() for name in names if (self._root / name).is_file()}
        head = "" if self._repo.head_is_unborn else str(self._repo.head.target)
        stages, problem = _parse(files)
        return Revision(kind="workspace", name="workspace", commit=head, when_s=0, stages=stages, problem=problem)

    def revision(self, kind: RevisionKind, name: str, commit: pygit2.Commit) -> Revision:
        stages, problem = self._stages(commit)
        return Revision(
            kind=kind, name=name, commit=str(commit.id), when_s=commit.commit_time, stages=stages, problem=problem
        )

    def _stages(self, commit: pygit2.Commit) -> tuple[Snapshot, str]:
        import pygit2

        tree = _subtree(commit, self._below)
        if tree is None:
            return (), ""
        listed = self._metafiles(tree)
        if listed not in self._parsed:
            blobs = [(path, self._repo[oid]) for path, oid in listed]
            self._parsed[listed] = _parse({path: blob.data for path, blob in blobs if isinstance(blob, pygit2.Blob)})
        return self._parsed[listed]

    def _metafiles(self, tree: pygit2.Tree) -> tuple[tuple[str, pygit2.Oid], ...]:
        """Path below the tree and blob of every metafile."""
        import pygit2

        if tree.id not in self._trees:
            found: list[tuple[str, pygit2.Oid]] = []
            for entry in tree:
                name = entry.name or ""
                if isinstance(entry, pygit2.Tree):
                    if name != ".dvc":
                        found += [(f"{name}/{path}", oid) for path, oid in self._metafiles(entry)]
                elif isinstance(entry, pygit2.Blob) and is_metafile(name):
                    found.append((name, entry.id))
            self._trees[tree.id] = tuple(found)
        return self._trees[tree.id]


def _subtree(commit: pygit2.Commit, below: str) -> pygit2.Tree | None:
    """The tree of a folder; None where the commit has no such folder."""
    import pygit2

    try:
        found = commit.tree[below] if below else commit.tree
    except KeyError:
        return None
    return found if isinstance(found, pygit2.Tree) else None


def _parse(files: dict[str, bytes]) -> tuple[Snapshot, str]:
    try:
        return parse_snapshot(files), ""
    except StoreError as error:
        return (), error.message


def _workspace_metafiles(root: Path) -> list[str]:
    """DVC's files in the workspace, tracked by git or not, but not ignored: data folders are not walked."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    patterns = ["dvc.yaml", "dvc.lock", ":(glob)**/dvc.yaml", ":(glob)**/dvc.lock", ":(glob)**/*.dvc"]
    done = subprocess.run([*command, *patterns], cwd=root, capture_output=True, check=False)
    if done.returncode:
        raise StoreError(f"`git ls-files` failed: {done.stderr.decode(errors='replace').strip()}")
    names = {name for name in done.stdout.decode("utf-8", "surrogateescape").split("\0") if name}
    return sorted(name for name in names if not name.startswith(".dvc/"))
