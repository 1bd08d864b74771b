"""``eyas retire`` and ``eyas keep``: take a generation's name out of the workspace, or pin it with a tag.

Neither deletes a byte. Retiring edits what git tracks (``dvc.lock``, or the ``.dvc`` file of an adopted one), so that
``git checkout`` undoes it; whatever branch or tag still names the generation keeps it from gc.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas import console, fs
from eyas.errors import ConfigError, EyasError, StoreError
from eyas.generations import ledger
from eyas.generations.generation import Generation
from eyas.generations.listing import find
from eyas.generations.reclaim import current_branch
from eyas.generations.revisions import PIN_PREFIX, Revision, read_revisions
from eyas.generations.trees import RETIRED_HOME, mark_retired
from eyas.shards.handover import HOME, LOCK_NAME, RETIRED_MARK, SPOOL

LOCK_SUFFIX = "dvc.lock"
AGAIN = {"adopted": "`make adopt` again", "imported": "`make train-from` records what lies there"}
LINES = tuple(re.compile(f"[^{ends}]*(?:\r\n|[{ends}])|[^{ends}]+\\Z") for ends in ("\n\r", "\n\r\x85\u2028\u2029"))
"""A line as YAML 1.2 counts it, and as YAML 1.1 does: parsers differ, also from one version to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """What was taken away, and what is left."""

    name: str
    hash: str
    kind: str
    edited: tuple[str, ...]
    """Files of the workspace that no longer name it."""
    named_by: tuple[str, ...]
    """Branches, tags and experiments that still do, and so keep it."""
    awaits_commit: str
    """The branch that is checked out, if it is among them: a commit ends that. Else empty."""
    freed_bytes: int
    """What gc frees once nothing keeps it."""
    is_committed: bool
    """Whether git's last commit has the edited files as they were, so that `git checkout` brings the name back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A pin."""

    name: str
    hash: str
    tag: str
    commit: str


def retire(root: Path, name: str) -> Retired:
    """Take a generation's name away from the workspace.

    Args:
        root: The repository.
        name: First digits of its hash, or an adopted one's name.

    Raises:
        StoreError: No generation, or several, are meant.
        EyasError: An extraction runs.
    """
    with fs.volume_lock(root / HOME / LOCK_NAME, f"retire of {name}"):
        generation = find(root, name)
        names = _names(root, generation)
        is_committed = _is_committed(root, [file for file, _ in names])
        if generation.kind == "spool":
            edited = _mark_spool(root, generation)
        else:
            edited = _drop_names(root, names)
            mark_retired(root, generation.hash)
        left = tuple(str(revision) for revision, _ in _naming(root, generation, commits=False) if revision.is_kept)
        branch = f"branch {current_branch(root)}"
        event = {"event": "retire", "name": generation.name, "hash": generation.hash, "bytes": generation.stored_bytes}
        ledger.append(root, event | {"edited": edited, "named_by": left})
    return Retired(
        name=generation.name,
        hash=generation.hash,
        kind=generation.kind,
        edited=tuple(edited),
        named_by=left,
        awaits_commit=branch if branch in left else "",
        freed_bytes=generation.freed_bytes,
        is_committed=is_committed,
    )


def _mark_spool(root: Path, generation: Generation) -> list[str]:
    folder = root / HOME / SPOOL / generation.facts.identity
    if not folder.is_dir():
        raise StoreError(f"{folder} is gone", "`make generations` lists what is there now")
    fs.write_bytes(folder / RETIRED_MARK, b"")
    return [(folder / RETIRED_MARK).relative_to(root).as_posix()]


def _naming(root: Path, generation: Generation, *, commits: bool) -> list[tuple[Revision, list[tuple[str, str]]]]:
    """Revisions that name a generation, each with the files and stages that do."""
    found = []
    for revision in read_revisions(root, commits=commits):
        stages = [
            (stage.file, stage.name)
            for stage in revision.stages
            if any(out.is_cached and out.name == generation.hash for out in stage.outs)
        ]
        if stages:
            found.append((revision, stages))
    return found


def _names(root: Path, generation: Generation) -> list[tuple[str, str]]:
    """Files and stages of the workspace that name it."""
    naming = _naming(root, generation, commits=False)
    return [name for revision, names in naming if revision.kind == "workspace" for name in names]


def _is_committed(root: Path, files: Sequence[str]) -> bool:
    """Whether git's last commit has these files as they are."""
    return bool(files) and all(
        _git(root, *words, "--", *files).returncode == 0
        for words in (("ls-files", "--error-unmatch"), ("diff", "--quiet", "HEAD"))
    )


def _drop_names(root: Path, names: Iterable[tuple[str, str]]) -> list[str]:
    """Remove every name that the workspace has for it; gives the files that were edited or removed."""
    edited = []
    for file, stage in names:
        path = root / file
        if Path(file).name == LOCK_SUFFIX:
            fs.write_bytes(path, without_stage(path.read_bytes(), stage, file))
        else:
            path.unlink()
            fs.fsync_dir(path.parent)
        edited.append(file)
    return edited


def without_stage(lock: bytes, stage: str, file: str = LOCK_SUFFIX) -> bytes:
    """A ``dvc.lock`` without one stage's entry, every other byte as it was.

    Raises:
        StoreError: It has no such entry, or is no lock of DVC's.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        document = YAML().load(lock)
        stages = document["stages"]
        first = stages.lc.key(stage)[0]
        starts = sorted(stages.lc.key(name)[0] for name in stages)
        ends = [document.lc.key(key)[0] for key in document]
    except (YAMLError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{file} has no entry of stage {stage}: {error!r}", f"`git diff {file}`") from None
    end = min((line for line in (*starts, *ends) if line > first), default=None)
    only_at = document.lc.key("stages")[0] if len(stages) == 1 else None
    del stages[stage]
    for line in LINES:
        lines = line.findall(lock.decode())
        # An empty mapping has another spelling.
        head = lines[:first] if only_at is None else [*lines[:only_at], "stages: {}\n"]
        left = "".join(head + (lines[end:] if end is not None else [])).encode()
        with contextlib.suppress(YAMLError):
            if YAML().load(left) == document:
                return left
    raise StoreError(f"{file} is not laid out as DVC lays it out", f"dvc commit writes it anew; `git diff {file}`")


def keep(root: Path, name: str, pin: str) -> Kept:
    """Pin a generation against gc: tag ``keep/<pin>`` on the newest commit that names it.

    Raises:
        StoreError: No generation is meant, no commit names it, or the tag is there.
        ConfigError: Git takes no such name for a tag.
    """
    tag = f"{PIN_PREFIX}{pin}"
    if _git(root, "check-ref-format", f"refs/tags/{tag}").returncode or pin.startswith("-") or not pin:
        raise ConfigError(
            f"{pin!r} is no name for a tag", "letters, digits, '-' and '_': make keep GEN=… KEEP=before_v2"
        )
    generation = find(root, name)
    commits = [revision for revision, _ in _naming(root, generation, commits=True) if revision.kind == "commit"]
    if not commits:
        raise StoreError(
            f"no commit names generation {generation.name}, and a tag is on a commit",
            f"git add {generation.path}.dvc && git commit"
            if generation.kind == "adopted"
            else "git add dvc.lock && git commit",
        )
    newest = max(commits, key=lambda revision: (revision.when_s, revision.commit))
    there = _git(root, "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}").stdout.strip()
    if there not in ("", newest.commit):
        raise StoreError(
            f"tag {tag} is on {there[:10]} already", "take another name: KEEP=, or remove it: git tag -d " + tag
        )
    if not there:
        done = _git(root, "tag", "--no-sign", tag, newest.commit)
        if done.returncode:
            raise EyasError(f"git tag failed: {done.stderr.strip()}", "`git status` shows what git is busy with")
        (root / RETIRED_HOME / generation.hash).unlink(missing_ok=True)
        event = {"event": "keep", "name": generation.name, "hash": generation.hash, "tag": tag, "commit": newest.commit}
        ledger.append(root, event)
    return Kept(name=generation.name, hash=generation.hash, tag=tag, commit=newest.commit)


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)


def retired_text(done: Retired) -> str:
    """A retirement for people."""
    size = console.human_bytes(done.freed_bytes)
    short = "" if done.hash.startswith(done.name) else f" ({done.hash[:10]})"
    lines = [f"retired: {done.name}{short}, {done.kind}; no byte was deleted"]
    marked = "marked as given up:" if done.kind == "spool" else "no longer named in"
    lines += [f"{marked} {file}" for file in done.edited] or ["the workspace did not name it"]
    if done.named_by == (done.awaits_commit,):
        lines.append(f"{done.awaits_commit} keeps it until you commit; then gc frees {size}")
    elif done.named_by:
        lines.append(f"STILL KEPT by {', '.join(done.named_by)}: gc frees nothing of it while they name it")
    elif done.kind == "spool":
        lines.append(f"gc frees {size}; `make extract` takes it up again if that capture is wanted before")
    else:
        lines.append(f"nothing else keeps it: gc frees {size}")
    files = [file for file in done.edited if not file.startswith(f"{HOME}/")]
    if files and done.is_committed:
        undo = f"git checkout {shlex.join(files)}"
    else:
        again = AGAIN.get(done.kind, "`make extract` records what lies there")
        undo = f"the last commit does not have it, so git cannot; {again}"
    if files:
        # What git never saw needs no commit to be gone from it.
        commit = f"git commit -am 'retire {done.name}', " if done.is_committed or done.kind != "adopted" else ""
        lines.append(f"undo: {undo}    go on: {commit}make gc-plan")
    return "\n".join(lines)
