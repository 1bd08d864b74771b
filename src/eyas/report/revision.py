"""The records of another revision, from git and DVC's cache, laid into a folder of their own.

    revision → git's files of it; dvc.lock of it → objects of DVC's cache → links

The workspace is not touched, nothing is hashed, no large file is read: links lead to the cache.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import StoreError
from eyas.plan.cache import cache_object, hashes, read_yaml

RECORDS = (
    "params.yaml",
    "dvc.lock",
    "models/target.json",
    "reports/tokens.json",
    "data/plan.json",
    "data/hidden_states.json",
    "models/drafter/checkpoint.json",
    "reports/acceptance.json",
    "models/export/export.json",
    "reports/throughput.json",
    "reports/runs/",
    "reports/train/plots/metrics/",
)
"""What the report reads; a folder ends in a slash."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit that a user named."""

    name: str
    commit: str
    subject: str

    @property
    def label(self) -> str:
        """As people know it, with the first digits of its commit."""
        short = self.commit[:10]
        return short if short.startswith(self.name[:10]) else f"{self.name} ({short})"


def find(root: Path, name: str) -> Revision:
    """The commit of a branch, tag, commit or DVC experiment.

    Raises:
        StoreError: There is none, or ``root`` is in no git repository.
    """
    found = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").decode().strip()
    if not found:
        listed = _git(root, "for-each-ref", "--format=%(objectname) %(refname)", "refs/exps").decode()
        experiments = [line.split(" ", 1) for line in listed.splitlines()]
        found = next((commit for commit, ref in experiments if ref.rsplit("/", 1)[-1] == name), "")
    if not name or not found:
        raise StoreError(
            f"{name!r} is no revision, expected a branch, a tag, a commit or an experiment",
            "`git log --oneline` and `dvc exp list` name them",
        )
    return Revision(name, found, _git(root, "log", "-1", "--format=%s", found).decode().strip())


def lay_out(root: Path, revision: Revision, folder: Path) -> tuple[str, ...]:
    """Write the revision's records below ``folder``.

    Args:
        root: The repository.
        revision: Which one.
        folder: Empty.

    Returns:
        Records that the revision has by its ``dvc.lock``, and neither git nor DVC's cache here.
    """
    listed = _git(root, "ls-tree", "-r", "-z", "--name-only", revision.commit).decode("utf-8", "surrogateescape")
    wanted = [name for name in listed.split("\0") if name and _is_record(name)]
    if wanted:
        packed = _git(root, "archive", "--format=tar", revision.commit, "--", *wanted)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:  # Python 3.11 before .4 knows no filter; git has no name that leads outside
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    (folder / member.name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / member.name).write_bytes(file.read())
    missing = []
    for name, place in _locked(root, folder):
        if (folder / name).exists():
            continue
        if place is None or not place.is_file():
            missing.append(name)
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(place.resolve())
    return tuple(missing)


def _is_record(name: str) -> bool:
    return any(name == record or (record.endswith("/") and name.startswith(record)) for record in RECORDS)


def _locked(root: Path, folder: Path) -> Iterator[tuple[str, Path | None]]:
    """Record and object of what ``dvc.lock`` names; no object where a folder's list is not in the cache."""
    stages = read_yaml(folder / "dvc.lock").get("stages")
    for stage in stages.values() if isinstance(stages, dict) else ():
        for path, md5 in hashes(stage if isinstance(stage, dict) else {}, "outs").items():
            if _is_record(path):
                yield path, cache_object(root, md5)
            elif any(record.startswith(f"{path}/") for record in RECORDS):
                yield from _inside(root, path, md5)


def _inside(root: Path, path: str, md5: str) -> Iterator[tuple[str, Path | None]]:
    try:
        entries = json.loads(cache_object(root, md5).read_bytes())
        named = [(f"{path}/{entry['relpath']}", str(entry["md5"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError):
        yield path, None
        return
    for name, inner in named:
        if _is_record(name) and ".." not in Path(name).parts:
            yield name, cache_object(root, inner)


def _git(root: Path, *words: str) -> bytes:
    """Output of git; empty where it has no answer."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(["git", *words], cwd=root, env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        raise StoreError("git is missing, expected it on PATH", "apt-get install git") from None
    return done.stdout if done.returncode == 0 else b""
