"""``eyas doctor``: each thing the pipeline leans on, as found / not found / problem, with a hint.

Nothing here imports torch: the answer takes a second.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas import console, fs
from eyas.config import PARAMS_PATH, load
from eyas.errors import ConfigError, DiskError
from eyas.generations.working import read_working, working_values
from eyas.plan.budget import HARDLINK_FIX
from eyas.plan.cache import SITE_CACHE, cache_dir, check_links, copying_types, site_cache_dir

MINIMUM_FREE_BYTES = 5_000_000_000
MINIMUM_MEMORY_BYTES = 4 << 30
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
LOCK_LINE = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)(?: ; (.*?))? \\$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One probe's answer."""

    name: str
    state: Literal["found", "not found", "problem"]
    value: str
    hint: str = ""


def examine(root: Path) -> list[Finding]:
    """Probe this machine and the repository in ``root``, in reading order."""
    return [
        _python(),
        _packages(root),
        _torch(),
        _cores(),
        _bf16(),
        _gpu(),
        _memory(),
        _disk(root),
        hardlinks(root),
        dvc_state(root),
        _program("git", "--version", "apt-get install git"),
        _repository(root),
        _program("make", "--version", "apt-get install make"),
        _dvc(root),
        *_working(root),
        *_asked_for(root),
    ]


def _asked_for(root: Path) -> list[Finding]:
    """What SGLang and Ray need, where the parameters ask for them."""
    if not (root / PARAMS_PATH).is_file():
        return []
    try:
        params = load(root / PARAMS_PATH)
    except ConfigError as error:
        return [Finding(str(PARAMS_PATH), "problem", error.message, error.hint or "")]
    rows: list[tuple[str, str, str, str]] = []
    if "sglang" in (params.extract.engine, params.respond.engine if params.respond.enabled else ""):
        from eyas.engines.sglang import preflight

        tp_size = int(params.extract.engine_options.get("tp_size", 1))
        rows += preflight.findings(params.target.device, tp_size)
    if params.extract.executor == "ray":
        from eyas.engines.ray import cluster

        rows += cluster.findings()
    return [
        Finding(name, "problem" if state == "problem" else "found", value, hint) for name, state, value, hint in rows
    ]


def _working(root: Path) -> list[Finding]:
    """What trainings have left in their working folders."""
    return [
        Finding(
            one["path"],
            "problem" if one["state"] == "unclear" else "found",
            f"{console.human_bytes(one['disk_bytes'])}; {one['note']}",
            "`make gc-plan` offers it, once no training needs it" if one["state"] == "idle" else "",
        )
        for one in working_values(read_working(root))
    ]


def _python() -> Finding:
    right = sys.version_info >= (3, 11)
    hint = "" if right else "make clean && make setup PYTHON=python3.11"
    return Finding("python", "found" if right else "problem", platform.python_version(), hint)


def _packages(root: Path) -> Finding:
    from packaging.markers import Marker

    lock = root / "requirements/cpu.lock"
    if not lock.is_file():
        return Finding("packages", "not found", f"{lock} is missing", "git checkout requirements")
    wanted = [(n, v) for n, v, marker in LOCK_LINE.findall(lock.read_text()) if not marker or Marker(marker).evaluate()]
    wrong = []
    for name, version in wanted:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "missing"
        if installed != version:
            wrong.append(f"{name} {installed} (lock: {version})")
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        return Finding("packages", "problem", shown, "rm -f .venv/.ready-* && make setup")
    return Finding("packages", "found", f"all {len(wanted)} as locked")


def _torch() -> Finding:
    try:
        return Finding("torch", "found", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", "not found", "", "make setup")


def _cores() -> Finding:
    return Finding("cores", "found", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")


def _bf16() -> Finding:
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags.update(line.split(":", 1)[1].split())
                break
    found = [flag for flag in BF16_FLAGS if flag in flags]
    if found:
        return Finding("bfloat16 in the processor", "found", ", ".join(found))
    hint = "everything works, some three times slower; train.dtype=float32 may be faster here"
    return Finding("bfloat16 in the processor", "not found", "", hint)


def _gpu() -> Finding:
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return Finding("NVIDIA devices", "found" if devices else "not found", ", ".join(devices))


def _memory() -> Finding:
    values = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            values[key] = int(rest.split()[0]) * 1024
    available = values.get("MemAvailable", 0)
    text = f"{console.human_bytes(available)} available of {console.human_bytes(values.get('MemTotal', 0))}"
    if available < MINIMUM_MEMORY_BYTES:
        return Finding("memory", "problem", text, "the default target needs 4 GiB: end other programs")
    return Finding("memory", "found", text)


def _disk(root: Path) -> Finding:
    free = fs.free_bytes(root)
    text = f"{console.human_bytes(free)} free"
    if free < MINIMUM_FREE_BYTES:
        return Finding("disk", "problem", text, f"the default target needs {console.human_bytes(MINIMUM_FREE_BYTES)}")
    return Finding("disk", "found", text)


def hardlinks(root: Path) -> Finding:
    """Whether DVC commits by links: its types, and one real link into its cache."""
    name, types = "links to the cache", copying_types(root)
    try:
        check_links(root)
    except DiskError as error:
        return Finding(name, "problem", error.message, error.hint or "")
    if types:
        text = f"cache.type {','.join(types)} copies: every artifact lies on the disk twice"
        return Finding(name, "problem", text, HARDLINK_FIX)
    return Finding(name, "found", os.fspath(cache_dir(root)))


def dvc_state(root: Path) -> Finding:
    """Whether DVC keeps its state, by which it knows files without hashing them, on the repository's volume."""
    name, folder = "DVC's state", site_cache_dir(root)
    hint = f"dvc config --local core.site_cache_dir {root.resolve() / SITE_CACHE}"
    if not (root / ".dvc").is_dir():
        return Finding(name, "not found", "no DVC repository here")
    if folder is None:
        return Finding(
            name, "problem", "in DVC's own place, outside the repository: another machine hashes all anew", hint
        )
    if not folder.is_absolute():
        return Finding(name, "problem", f"{folder} is relative: each working folder has its own", hint)
    if fs.device(folder) != fs.device(root):
        return Finding(name, "problem", f"{folder} is on another volume than {root.resolve()}", hint)
    if folder.parts[-3:] == SITE_CACHE.parts and folder != root.resolve() / SITE_CACHE:
        return Finding(name, "problem", f"{folder} is of the place where this repository was before", hint)
    return Finding(name, "found", os.fspath(folder))


def _program(name: str, flag: str, hint: str) -> Finding:
    if shutil.which(name) is None:
        return Finding(name, "not found", "", hint)
    done = subprocess.run([name, flag], capture_output=True, text=True, check=False)
    return Finding(name, "found", done.stdout.split("\n")[0])


def _repository(root: Path) -> Finding:
    if (root / ".git").exists():
        return Finding("git repository", "found", os.fspath(root.resolve()))
    hint = "`make smoke` and DVC's experiments need one: git init && git add . && git commit -m start"
    return Finding("git repository", "not found", "", hint)


def _dvc(root: Path) -> Finding:
    try:
        version = importlib.metadata.version("dvc")
    except importlib.metadata.PackageNotFoundError:
        return Finding("dvc", "not found", "", "make setup")
    if not (root / ".dvc" / "config").is_file():
        return Finding("dvc", "problem", f"{version}, but {root / '.dvc/config'} is missing", "git checkout .dvc")
    return Finding("dvc", "found", version)
