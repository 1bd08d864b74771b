"""Where fetched targets live, and whether one is still what was fetched.

``.eyas/targets/<first 16 digits of the identity>/`` holds the files, ``<the same>.json`` beside it the identity,
what it was fetched from, and each file's size and mtime as hashed. Unchanged sizes and mtimes are trusted;
anything else is hashed again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from eyas import console, fs
from eyas.canonical import digest
from eyas.config import TargetConfig
from eyas.contracts import SCHEMA_VERSION, TargetIdentity
from eyas.errors import StoreError, TargetError

DEFAULT_TARGETS = ".eyas/targets"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """A file as it was when its hash was taken."""

    path: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedTarget:
    """The note beside a fetched target's folder; never part of an artifact."""

    request: str
    """Digest of the parameters that decided what was fetched."""
    identity: TargetIdentity
    stamps: tuple[FileStamp, ...]
    schema_version: int = SCHEMA_VERSION


def targets_dir() -> Path:
    """``$EYAS_TARGETS_DIR``, by default ``.eyas/targets``."""
    return Path(os.environ.get("EYAS_TARGETS_DIR", DEFAULT_TARGETS))


def target_dir(identity: TargetIdentity) -> Path:
    """Folder of a fetched target's files, there or not."""
    return targets_dir() / identity.digest[:16]


def request_digest(config: TargetConfig) -> str:
    """Digest of what decides a fetch's result; names its unfinished folder."""
    return digest([config.source, config.location, config.revision, config.member])


def source_label(config: TargetConfig) -> str:
    """``TargetIdentity.source`` of a configuration; holds no path of this machine."""
    return "directory:" if config.source == "directory" else f"{config.source}:{config.location}"


def note_path(identity: TargetIdentity) -> Path:
    """The note beside the target's folder."""
    return target_dir(identity).with_suffix(".json")


def write_note(config: TargetConfig, identity: TargetIdentity) -> None:
    """Remember a target as whole: its files were hashed just now."""
    folder = target_dir(identity)
    note = FetchedTarget(request=request_digest(config), identity=identity, stamps=stamps(identity, folder))
    fs.write_record(note_path(identity), note)


def read_note(path: Path) -> FetchedTarget | None:
    """A note, or None when it is missing or unreadable: it can always be made again."""
    try:
        return fs.read_record(FetchedTarget, path)
    except StoreError:
        return None


def find_fetched(config: TargetConfig) -> TargetIdentity | None:
    """Identity of a whole target that this configuration fetched before, if there is one."""
    wanted = request_digest(config)
    for path in sorted(targets_dir().glob("*.json")):
        note = read_note(path)
        if note and note.request == wanted and damage(config, note.identity) is None:
            return note.identity
    return None


def damage(config: TargetConfig, identity: TargetIdentity) -> str | None:
    """What is wrong with a fetched target's files, or None.

    Cheap when sizes and mtimes are those of the note; hashes every file otherwise and renews the note.
    """
    folder = target_dir(identity)
    if missing := first_missing(identity, folder):
        return missing
    if is_noted(identity, folder):
        return None
    console.log(f"target: hashing {len(identity.files)} files again, they are not as the last fetch left them")
    if wrong := first_difference(identity, folder):
        return wrong
    write_note(config, identity)
    return None


def first_missing(identity: TargetIdentity, folder: Path) -> str | None:
    """A file of the target that is not there, or None."""
    missing = (file.path for file in identity.files if not (folder / file.path).is_file())
    return next((f"{path} is missing" for path in missing), None)


def is_noted(identity: TargetIdentity, folder: Path) -> bool:
    """Whether the files of a folder are, by size and mtime, those that were hashed when the note beside it was written."""
    note = read_note(folder.with_suffix(".json"))
    return note is not None and note.identity == identity and note.stamps == stamps(identity, folder)


def first_difference(identity: TargetIdentity, folder: Path) -> str | None:
    """What is wrong with files that are there, or None: all sizes first, then every byte."""
    for file in identity.files:
        if (size_bytes := (folder / file.path).stat().st_size) != file.size_bytes:
            return f"{file.path} has {size_bytes:,} bytes, expected {file.size_bytes:,}"
    for file in identity.files:
        if (found := fs.hash_file(folder / file.path)) != file.sha256:
            return f"{file.path} has SHA-256 {found}, expected {file.sha256}"
    return None


def require_same(identity: TargetIdentity, fetched: TargetIdentity) -> None:
    """Raise ``TargetError`` when a fetch gave another target than the pipeline was run with."""
    if identity == fetched:
        return
    before = {file.path: file.sha256 for file in identity.files}
    after = {file.path: file.sha256 for file in fetched.files}
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    raise TargetError(
        f"the target is another one: identity {fetched.digest[:16]}, expected {identity.digest[:16]} "
        f"(different: {', '.join(changed[:5]) or 'facts of the model'})",
        "run `dvc repro -f fetch` to take the new one (everything after it runs again), or restore the old files",
    )


def stamps(identity: TargetIdentity, folder: Path) -> tuple[FileStamp, ...]:
    """Sizes and mtimes of the target's files, as they are now."""
    found = ((file.path, (folder / file.path).stat()) for file in identity.files)
    return tuple(FileStamp(path=path, size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns) for path, stat in found)
