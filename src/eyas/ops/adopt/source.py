"""The folder to be adopted, before anything is read: which files it has, and why it may not be taken.

Everything that would fail after hours of hashing is refused here: names that DVC's lists cannot hold, files that DVC
would not see, files that are no files, a folder that is part of the repository's own business.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError, StoreError
from eyas.generations.trees import ADOPTED
from eyas.plan.cache import cache_dir
from eyas.shards.handover import HOME

OTHER = "other"
"""Layout of files that are only hashed and kept: nothing is known of their content."""
SHOWN = 5
_OWN = (".git", ".dvc", HOME.as_posix(), ADOPTED.as_posix())


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file by what DVC too takes an unchanged one for: its inode, mtime and size."""

    path: str
    """Relative to the folder, with slashes."""
    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class FoundFolder:
    """A folder that may be adopted."""

    path: Path
    """Real and absolute."""
    files: tuple[FoundFile, ...]
    """Sorted by path."""
    num_empty_folders: int
    """Stay where they are: DVC knows files only."""

    @property
    def num_bytes(self) -> int:
        """All files together."""
        return sum(file.size_bytes for file in self.files)


def find_files(root: Path, folder: Path) -> FoundFolder:
    """List a folder's files.

    Raises:
        StoreError: The folder, or something in it, cannot be adopted; says what and what helps.
    """
    real = folder.resolve()
    if not real.is_dir():
        raise StoreError(f"{folder} is no folder", "give the folder that holds the files: make adopt DIR=/path/to/them")
    check_place(root, real)
    files, odd, num_empty = _walk(real)
    for what, (paths, hint) in odd.items():
        if paths:
            raise StoreError(f"{len(paths):,} {what} in {real}: {_some(paths)}; nothing was changed", hint)
    if not files:
        raise StoreError(f"{real} holds no file", "is it the right folder? `find DIR -type f | head`")
    found = FoundFolder(real, tuple(sorted(files, key=lambda file: file.path)), num_empty)
    _refuse_tracked_by_git(root, real)
    return found


def check_place(root: Path, real: Path) -> None:
    """Refuse the repository, what holds it, and what it keeps for itself.

    Raises:
        StoreError: Names which.
    """
    root, cache = root.resolve(), cache_dir(root).resolve()
    if root.is_relative_to(real):
        raise StoreError(f"{real} holds this repository itself", "give the folder of the states alone: DIR=")
    if cache.is_relative_to(real) or real.is_relative_to(cache):
        raise StoreError(
            f"{real} is, holds or lies in DVC's cache {cache}: its objects are DVC's already",
            "`make generations` lists what the cache holds",
        )
    own = next((name for name in _OWN if real.is_relative_to(root / name)), None)
    if own is not None:
        raise StoreError(
            f"{real} lies in {own}/, which eyas, git or DVC keep for themselves", "move it out, then adopt"
        )


def _walk(folder: Path) -> tuple[list[FoundFile], dict[str, tuple[list[str], str]], int]:
    """Files, what is in the way by kind with its hint, and the number of empty folders."""
    links, special, names, foreign, unreadable = [], [], [], [], []
    files: list[FoundFile] = []
    num_empty, start = 0, len(os.fspath(folder)) + 1
    queue = [os.fspath(folder)]
    while queue:
        try:
            entries = list(os.scandir(queue[-1]))
        except PermissionError:
            unreadable.append(queue.pop()[start:])
            continue
        inner = queue.pop()
        num_empty += not entries and len(inner) >= start
        for entry in entries:
            path, found = entry.path[start:], entry.stat(follow_symlinks=False)
            if not _is_plain(entry.name):
                names.append(path)
            elif stat.S_ISLNK(found.st_mode):
                links.append(path)
            elif stat.S_ISDIR(found.st_mode):
                queue.append(entry.path)
            elif not stat.S_ISREG(found.st_mode):
                special.append(path)
            elif not os.access(entry.path, os.R_OK):
                unreadable.append(path)
            else:
                if os.geteuid() not in (0, found.st_uid):
                    foreign.append(path)
                files.append(FoundFile(path, found.st_size, found.st_mtime_ns, found.st_ino))
    quoted = f"'{folder}'"
    odd = {
        "names that are no UTF-8 or hold a backslash or a control character": (names, "rename them, then adopt"),
        "symbolic links": (links, "put the files in their place, or move the links away: find DIR -type l"),
        "sockets, pipes or devices": (special, "move them away: find DIR ! -type f ! -type d"),
        "unreadable files or folders": (unreadable, f"sudo chmod -R u+rX {quoted} && sudo chown -R $(id -u) {quoted}"),
        "files of another user, whom alone the system lets link and protect them,": (
            foreign,
            f"sudo chown -R $(id -u) {quoted}, or run as their owner",
        ),
    }
    return files, odd, num_empty


def _is_plain(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\\" not in name and not any(ord(char) < 32 or ord(char) == 127 for char in name)


def _some(paths: Iterable[str]) -> str:
    listed = sorted(paths)
    shown = ", ".join(ascii(path) for path in listed[:SHOWN])
    return f"{shown}, …" if len(listed) > SHOWN else shown


def _refuse_tracked_by_git(root: Path, real: Path) -> None:
    if not real.is_relative_to(root.resolve()):
        return
    done = subprocess.run(["git", "ls-files", "-z", "--", os.fspath(real)], cwd=root, capture_output=True, check=False)
    tracked = [name.decode(errors="replace") for name in done.stdout.split(b"\0") if name]
    if tracked:
        below = real.relative_to(root.resolve())
        raise StoreError(
            f"git tracks {len(tracked):,} files of {real}: {_some(tracked)}; a file is git's or DVC's, not both",
            f"git rm -r --cached {below} && echo /{below} >> .gitignore && git commit",
        )


def refuse_what_dvc_takes_otherwise(root: Path, found: FoundFolder, copy: Path) -> None:
    """Refuse a folder that DVC tracks already, and files that DVC would not see where they will lie.

    Args:
        root: The repository.
        found: The folder.
        copy: Where its files' second names will lie.

    Raises:
        StoreError: There are some.
        EyasError: ``root`` is no DVC repository.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(os.fspath(root)) as repo:
            _refuse_tracked(found.path, [Path(out.fs_path) for out in repo.index.outs if out.protocol == "local"])
            ignored = _ignored(repo.dvcignore.is_ignored_file, repo.dvcignore.is_ignored_dir, found.files, copy)
    except DvcException as error:
        raise EyasError(f"DVC cannot read {root.resolve()}: {error}", "`dvc status` shows what is wrong") from None
    if ignored:
        raise StoreError(
            f"{len(ignored):,} files of {found.path} have names that DVC ignores: {_some(ignored)}; they would be neither "
            "hashed nor kept",
            "move or rename them, or change .dvcignore; `dvc check-ignore -d` says which pattern it is",
        )


def _refuse_tracked(real: Path, outs: Sequence[Path]) -> None:
    for out in outs:
        if real.is_relative_to(out) or out.is_relative_to(real):
            raise StoreError(
                f"{real} is, holds or lies in {out}, which DVC tracks already: it has a hash and a name",
                "`make generations` lists it",
            )


def _ignored(
    is_ignored_file: Callable[[str], bool],
    is_ignored_folder: Callable[[str], bool],
    files: Sequence[FoundFile],
    copy: Path,
) -> list[str]:
    folders = {parent for file in files for parent in Path(file.path).parents} - {Path()}
    hidden = {folder for folder in folders if is_ignored_folder(os.fspath(copy.absolute() / folder))}
    base = os.fspath(copy.absolute())
    return [
        file.path
        for file in files
        if is_ignored_file(f"{base}/{file.path}") or not hidden.isdisjoint(Path(file.path).parents)
    ]
