"""Every revision that may name hidden states: the workspace, branches, tags, experiments and, on demand, all commits.

Git's objects are read in place; a file that did not change between two commits is parsed once. 200 commits take a
second.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
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
    is_lost: bool = False
    """No reference leads to this commit any more, only git's reflog: amended, reset, or made on a detached HEAD."""
    problem: str = ""
    """Why gc must not rely on it; where its files could not be read, ``stages`` is empty."""

    @property
    def is_kept(self) -> bool:
        """Whether gc keeps what it names."""
        return self.kind in KEPT_KINDS

    def __str__(self) -> str:
        return self.name if self.kind == "workspace" else f"{self.kind} {self.name}"


def read_revisions(root: Path, *, commits: bool) -> list[Revision]:
    """Read the workspace and every named revision, then, if asked, every commit that a reference or a reflog leads to.

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
        revisions += [reader.revision("commit", str(c.id)[:10], c, is_lost=lost) for c, lost in _all_commits(repo)]
    return revisions


def _named(repo: pygit2.Repository) -> Iterator[tuple[RevisionKind, str, pygit2.Commit | None]]:
    """Kind, name and commit; None for a tag on a file or a folder, with which DVC's gc fails."""
    import pygit2

    for full in sorted(repo.references):
        try:
            commit = repo.references[full].peel(pygit2.Commit)
        except (pygit2.GitError, pygit2.InvalidSpecError, KeyError):
            commit = None
        if commit is None:
            if full.startswith("refs/tags/"):
                yield "tag", full.removeprefix("refs/tags/"), None
        elif full.startswith("refs/heads/"):
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


def _all_commits(repo: pygit2.Repository) -> Iterator[tuple[pygit2.Commit, bool]]:
    """Every commit that a reference leads to, then those that only the reflogs lead to, and which of the two."""
    import pygit2

    references = [repo.references[name] for name in repo.references]
    heads = [] if repo.head_is_unborn else [repo.head]
    seen: set[pygit2.Oid] = set()
    queue = []
    for reference in [*heads, *references]:
        try:
            queue.append(reference.peel(pygit2.Commit))
        except (pygit2.GitError, pygit2.InvalidSpecError, KeyError):
            continue
    for commit in _ancestors(repo, queue, seen):
        yield commit, False
    logged = {entry.oid_new for ref in [repo.lookup_reference("HEAD"), *references] for entry in ref.log()}
    lost = [repo[oid] for oid in logged if oid not in seen and oid in repo]
    for commit in _ancestors(repo, [found for found in lost if isinstance(found, pygit2.Commit)], seen):
        yield commit, True


def _ancestors(repo: pygit2.Repository, queue: list[pygit2.Commit], seen: set[pygit2.Oid]) -> Iterator[pygit2.Commit]:
    """Commits and what they came from, each that was not seen yet."""
    import pygit2

    while queue:
        commit = queue.pop()
        if commit.id not in seen:
            seen.add(commit.id)
            yield commit
            # A shallow clone names parents that it does not have.
            parents = [repo[parent] for parent in commit.parent_ids if parent in repo]
            queue += [parent for parent in parents if isinstance(parent, pygit2.Commit)]


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

    def revision(
        self, kind: RevisionKind, name: str, commit: pygit2.Commit | None, *, is_lost: bool = False
    ) -> Revision:
        import pygit2

        if commit is None:
            problem = "it is on no commit, and DVC's gc fails on such a tag (`git tag -d` removes it)"
            return Revision(kind=kind, name=name, commit="", when_s=0, stages=(), problem=problem)
        try:
            stages, problem = self._stages(commit)
        except (KeyError, pygit2.GitError) as error:
            stages, problem = (), f"git lacks objects of it ({error}); `git fetch --refetch --no-filter` fetches them"
        if kind in ("branch", "tag") and not self._is_meant(name, commit):
            problem = "git and DVC's gc take this name for another commit; give the branch or tag a name of its own"
        return Revision(
            kind=kind,
            name=name,
            commit=str(commit.id),
            when_s=commit.commit_time,
            stages=stages,
            is_lost=is_lost,
            problem=problem,
        )

    def _is_meant(self, name: str, commit: pygit2.Commit) -> bool:
        """Whether the short name, by which DVC's gc asks git for a branch or tag, leads to its commit."""
        import pygit2

        try:
            return self._repo.resolve_refish(name)[0].id == commit.id
        except (pygit2.GitError, pygit2.InvalidSpecError, KeyError):
            return False

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
