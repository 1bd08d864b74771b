"""``eyas adopt``: a folder that another program wrote comes under DVC, by one hashing pass and without a copy.

    DIR → layout and a sample of its files → md5s (journal) → names in DVC's cache and in adopted/<name>/ → <name>.dvc

``adopted/<name>.dvc`` is written last; before it nothing is adopted, and the same command goes on. The bytes of DIR are
only read. Its files become read-only where they are hard-linked, because they then are DVC's objects.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas import config, console, fs
from eyas.canonical import is_utf8, to_plain
from eyas.contracts import payload_bytes
from eyas.errors import ConfigError, StoreError
from eyas.generations import ledger
from eyas.generations.trees import ADOPTED, ADOPTED_HOME, RETIRED_HOME, SOURCE, witness
from eyas.ops.adopt.hashing import JOURNAL, hash_files
from eyas.ops.adopt.place import PROTECTED, Placer, Way, check_unchanged, choose_ways
from eyas.ops.adopt.source import OTHER, FoundFolder, find_files, refuse_what_dvc_takes_otherwise
from eyas.plan.cache import cache_object, read_yaml
from eyas.shards import handover
from eyas.shards.handover import HOME, LOCK_NAME, StoredFile

if TYPE_CHECKING:
    from eyas.ops.adopt.sample import Sampled

FORMATS = ("speculators_v1", "speculators", "specforge", OTHER)
MAX_THREADS = 8
MAX_FINDINGS = 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_HASH = re.compile(r"[0-9a-f]{6,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRequest:
    """What a user says about a folder."""

    folder: Path
    engine: str
    """That captured the states, for the record: ``vllm``."""
    layout: str = ""
    """One of ``FORMATS``; empty: found by the names of the files."""
    note: str = ""
    name: str = ""
    """Of the generation; empty: the folder's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What an adoption did."""

    name: str
    hash: str
    folder: str
    layout: str
    engine: str
    num_files: int
    num_bytes: int
    ways: tuple[Way, Way]
    """Into the cache, out of the cache."""
    shared_bytes: int
    """Of files whose content the cache had already in files of its own."""
    num_named_elsewhere: int
    """Files with more names than DIR, cache and ``adopted/`` account for: they go on living when those are deleted."""
    num_empty_folders: int
    is_known: bool
    """It was adopted before, and nothing changed."""
    sampled: dict[str, Any]


def adopt(root: Path, request: AdoptRequest) -> Adopted:
    """Bring a folder under DVC.

    Args:
        root: The repository.
        request: The folder, and what is known of it.

    Raises:
        StoreError: The folder, or a file in it, cannot be adopted; or the name is taken.
        DataError: Its layout is not known; says how to go on without.
        DiskError: Links are impossible, or the volume is full.
        EyasError: An extraction or another adoption runs.
    """
    _check_request(root, request)
    name = request.name or _default_name(request.folder)
    with fs.volume_lock(root / HOME / LOCK_NAME, f"adopt of {name}"):
        found = find_files(root, request.folder)
        _check_name(root, name, found)
        refuse_what_dvc_takes_otherwise(root, found, root / ADOPTED / name)
        ways = choose_ways(root, found)
        sampled = _sample(root, found, request.layout)
        _claim_name(root, name, found)
        md5s = _hash(root, name, found)
        files = [StoredFile(file.path, file.size_bytes, md5s[file.path]) for file in found.files]
        is_known = _check_same(root, name, handover.dir_md5(files))
        _ignore(root, name)
        placer = Placer(root, found, md5s, ways, root / ADOPTED / name)
        placer.place_all()
        check_unchanged(found, find_files(root, request.folder))
        hashed = _register(root, name, found, files)
        meta = _meta(request, found, sampled)
        if is_known:
            meta = _as_noted(root, name, meta)
        else:
            fs.write_bytes(_dvc_file(root, name), _dvc_text(name, hashed, found, meta))
            (root / RETIRED_HOME / hashed).unlink(missing_ok=True)
            event = {"event": "adopt", "name": name, "hash": hashed, "bytes": found.num_bytes, "files": len(files)}
            ledger.append(root, event | {"folder": str(found.path), "engine": request.engine, "note": request.note})
    return Adopted(
        name=name,
        hash=hashed,
        folder=str(found.path),
        layout=meta["layout"],
        engine=meta["engine"],
        num_files=len(files),
        num_bytes=found.num_bytes,
        ways=ways,
        shared_bytes=placer.num_shared_bytes,
        num_named_elsewhere=_named_elsewhere(root, name, found, md5s),
        num_empty_folders=found.num_empty_folders,
        is_known=is_known,
        sampled=to_plain(sampled) if sampled else {},
    )


def _check_request(root: Path, request: AdoptRequest) -> None:
    if not handover.is_dvc_repository(root):
        raise StoreError(f"{root.resolve()} is no DVC repository", "run it where params.yaml and .dvc lie")
    if not request.engine.strip():
        raise ConfigError("the engine is not named, expected what captured these states", "say it: ENGINE=vllm")
    for what, text in (("folder", str(request.folder.resolve())), ("engine", request.engine), ("note", request.note)):
        if not is_utf8(text):
            raise ConfigError(
                f"the {what} {text!r} is no UTF-8: git and DVC could not write it down",
                "rename the folder" if what == "folder" else "write it anew",
            )
    if request.layout and request.layout not in FORMATS:
        raise ConfigError(f"format {request.layout!r}, expected one of {', '.join(FORMATS)}", "leave FORMAT out")


def _default_name(folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", folder.resolve().name).lstrip("_.-") or "states"


def _check_name(root: Path, name: str, found: FoundFolder) -> None:
    """Refuse a name that is no file name, reads like a hash, or is another folder's."""
    if not _NAME.fullmatch(name) or _HASH.fullmatch(name) or name.endswith((fs.PART_SUFFIX, ".dvc")):
        raise ConfigError(
            f"name {name!r}, expected letters, digits, '_', '.' and '-', and not only hexadecimal digits",
            "give another one: NAME=vllm_2024",
        )
    ignored = _dvc_file(root, name).relative_to(root)
    if subprocess.run(["git", "check-ignore", "-q", ignored], cwd=root, check=False).returncode == 0:
        raise StoreError(
            f"git's rules pass over {ignored}: DVC would not see it, and gc would take its files for unused",
            f"`git check-ignore -v {ignored}` names the rule; `!{ignored}` after it takes the file out",
        )
    home = root / ADOPTED_HOME / name
    origin = fs.read_json(home / "origin.json") if (home / "origin.json").is_file() else None
    if origin is None and _dvc_file(root, name).exists():
        raise StoreError(f"{ADOPTED / name}.dvc exists already", "take another name: NAME=")
    if origin is not None and origin.get("folder") != str(found.path):
        raise StoreError(
            f"{name} is the name of a generation that was adopted from {origin.get('folder')}, this is {found.path}",
            "take another name: NAME=",
        )


def _claim_name(root: Path, name: str, found: FoundFolder) -> None:
    """Note whose journal this is; not before the folder was looked at, so that a refusal leaves nothing."""
    home = root / ADOPTED_HOME / name
    source = home / SOURCE
    other = fs.read_json(source).get("folder", "") if source.is_file() else str(found.path)
    if other != str(found.path):
        if (home / JOURNAL).is_file() and Path(other).is_dir():
            raise StoreError(
                f"an adoption of {other} was begun under the name {name} and waits: what it has hashed would be lost",
                f"take another name: NAME=; or give that one up: rm -r {home}",
            )
        shutil.rmtree(home)  # the journal of a folder that is gone says nothing about this one
    if not source.is_file():
        fs.write_record(source, {"folder": str(found.path)})


def _sample(root: Path, found: FoundFolder, layout: str) -> Sampled | None:
    if layout == OTHER:
        return None
    from eyas.ops.adopt.sample import detect, sample_folder  # torch: for this alone

    sampled = sample_folder(root, found, layout or detect(found))
    for problem in sampled.problems[:MAX_FINDINGS]:
        console.log(f"adopt: warning: {problem}")
    return sampled


def _hash(root: Path, name: str, found: FoundFolder) -> dict[str, str]:
    num_threads = min(config.cores(), MAX_THREADS)
    return hash_files(found.path, found.files, root / ADOPTED_HOME / name / JOURNAL, num_threads)


def _dvc_file(root: Path, name: str) -> Path:
    return root / ADOPTED / f"{name}.dvc"


def _check_same(root: Path, name: str, hashed: str) -> bool:
    """Whether the name stands for exactly this content already.

    Raises:
        StoreError: It stands for another.
    """
    path, origin = _dvc_file(root, name), root / ADOPTED_HOME / name / "origin.json"
    named = [str(out.get("md5")) for out in read_yaml(path).get("outs", [])]
    known = set(named) | ({str(fs.read_json(origin).get("generation"))} if origin.is_file() else set())
    if known - {hashed}:
        raise StoreError(
            f"{name} was adopted as {sorted(known)[0][:10]}; its folder has another content now ({hashed[:10]})",
            "take another name for it as it is now: NAME=",
        )
    return bool(named)


def _ignore(root: Path, name: str) -> None:
    """Let git pass over the files, as ``dvc add`` does; the repository's own ``.gitignore`` may do so already."""
    inside = (ADOPTED / name / "x").as_posix()
    if subprocess.run(["git", "check-ignore", "-q", inside], cwd=root, check=False).returncode == 0:
        return
    path, line = root / ADOPTED / ".gitignore", f"/{name}"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    fs.write_text(path, f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n")


def _register(root: Path, name: str, found: FoundFolder, files: list[StoredFile]) -> str:
    """The folder's list into the cache, its md5s into DVC's state, its origin noted; gives the hash."""
    hashed = handover.dir_md5(files)
    listed = cache_object(root, hashed)
    if not listed.exists() or listed.read_bytes() != handover.dir_object(files):
        fs.write_bytes(listed, handover.dir_object(files))
    listed.chmod(PROTECTED)
    handover.register(root, [(root / ADOPTED / name / file.path, file.md5, file.size_bytes) for file in files])
    home = root / ADOPTED_HOME / name
    origin = {"generation": hashed, "folder": str(found.path), "files": found.files, "witness": witness(home)}
    fs.write_record(home / "origin.json", origin)
    return hashed


def _meta(request: AdoptRequest, found: FoundFolder, sampled: Sampled | None) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "engine": request.engine,
        "layout": sampled.layout if sampled else OTHER,
        "note": request.note,
        "num_files": len(found.files),
    }
    if sampled is None:
        return meta
    streams = sampled.num_aux + 1
    return meta | {
        "num_samples": sampled.num_samples,
        "num_tokens": sampled.num_tokens,
        "tokens_from": sampled.tokens_from,
        "payload_bytes": payload_bytes(sampled.num_tokens, sampled.hidden_size, streams),
        "dtype": sampled.dtype,
        "hidden_size": sampled.hidden_size,
        "num_aux": sampled.num_aux,
        "boundaries": list(sampled.boundaries),
        "final_hidden": sampled.final_hidden or "",
        "num_opened": sampled.num_opened,
        "findings": list(sampled.problems[:MAX_FINDINGS]),
    }


def _as_noted(root: Path, name: str, meta: dict[str, Any]) -> dict[str, Any]:
    """What was written down when it was adopted; says when this call says otherwise."""
    noted = read_yaml(_dvc_file(root, name)).get("meta", {}).get("eyas", {}).get("adopted", {})
    for key in ("engine", "layout", "note"):
        if meta[key] and meta[key] != noted.get(key, meta[key]):
            console.log(
                f"adopt: {key} {meta[key]!r} is not taken: {name} was adopted with {noted[key]!r}; to change that, "
                f"make retire GEN={name}, then adopt it again"
            )
    return meta | {key: noted[key] for key in ("engine", "layout") if key in noted}


def _dvc_text(name: str, hashed: str, found: FoundFolder, meta: dict[str, Any]) -> bytes:
    """The ``.dvc`` file as ``dvc add`` writes it, with what is known of the generation."""
    from ruamel.yaml import YAML

    out = {"md5": hashed, "size": found.num_bytes, "nfiles": len(found.files), "hash": "md5", "path": name}
    text = io.BytesIO()
    # Through JSON: plain values alone reach the file.
    YAML().dump(json.loads(json.dumps({"outs": [out], "meta": {"eyas": {"adopted": meta}}})), text)
    return text.getvalue()


def _named_elsewhere(root: Path, name: str, found: FoundFolder, md5s: dict[str, str]) -> int:
    """Inodes of the three folders that have a name outside of them."""
    names: dict[int, set[Path]] = {}
    num_links: dict[int, int] = {}
    for file in found.files:
        for path in (found.path / file.path, root / ADOPTED / name / file.path, cache_object(root, md5s[file.path])):
            there = path.stat()
            names.setdefault(there.st_ino, set()).add(path.absolute())
            num_links[there.st_ino] = there.st_nlink
    return sum(num_links[inode] > len(paths) for inode, paths in names.items())


def adopted_rows(done: Adopted) -> list[tuple[str, object]]:
    """An adoption for people, line by line."""
    facts = done.sampled
    rows: list[tuple[str, object]] = [
        ("generation", f"{done.name} ({done.hash[:10]}){', adopted before, unchanged' if done.is_known else ''}"),
        ("folder", done.folder),
        ("engine", done.engine),
        (
            "files",
            f"{done.num_files:,}, {console.human_bytes(done.num_bytes)}, by {' and '.join(dict.fromkeys(done.ways))}",
        ),
        ("layout", done.layout),
    ]
    if facts:
        about = "" if facts["tokens_from"] == "counted" else "about "
        rows += [
            ("samples", f"{facts['num_samples']:,}, {about}{facts['num_tokens']:,} tokens"),
            ("states", f"{facts['num_aux']} aux streams and last, {facts['hidden_size']:,} values, {facts['dtype']}"),
            ("boundaries", ", ".join(map(str, facts["boundaries"])) or "the files do not say"),
            ("last", facts["final_hidden"] or "the files do not say"),
            *([("norm", facts["norm_reading"])] if facts["norm_reading"] else []),
            ("opened", f"{facts['num_opened']} files, {len(facts['problems'])} problems"),
        ]
    if done.shared_bytes:
        rows.append(("twice", f"{console.human_bytes(done.shared_bytes)} whose content another file holds too"))
    if done.num_named_elsewhere:
        rows.append(("warning", f"{done.num_named_elsewhere:,} files have names elsewhere; gc cannot free those"))
    owner = next((path for path in Path(done.folder).parents if (path / ".dvc").is_dir()), Path.cwd())
    if owner != Path.cwd():
        rows.append(("warning", f"it lies in {owner}, a repository of DVC's: once retired, gc deletes it there too"))
    if done.num_empty_folders:
        rows.append(("left", f"{done.num_empty_folders:,} empty folders: DVC knows files only"))
    return [*rows, ("next", f"git add {ADOPTED} && git commit")]
