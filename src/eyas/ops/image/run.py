"""A command of this repository in a container: the same paths, the same user, one mount.

One mount, because hard links between two of them do not exist even on one file system: DVC's cache and the workspace
must come in together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import ConfigError
from eyas.ops.image.builder import Builder, RunOptions, caller

HOME = Path(".eyas/container/home")
PASSED = ("ARGS", "EYAS_", "HF_TOKEN", "NCCL_", "OMP_NUM_THREADS", "TORCH_")
"""Variables whose names begin so go in; those that say where things lie on the host do not."""
KEPT_OUT = ("EYAS_CONTAINER_TOOL", "EYAS_IMAGE", "EYAS_SGLANG_PYTHON", "EYAS_VLLM_PYTHON")
TOO_WIDE = tuple(map(Path, ("/", "/home", "/mnt", "/root")))
"""Nobody means to give a container all of that."""
LEAST_SHM_BYTES = 2 << 30
SHM = Path("/dev/shm")  # noqa: S108 - shared memory, not a temporary file


def run(root: Path, builder: Builder, name: str, command: Sequence[str]) -> int:
    """Run a command in an image, with this repository at its own path; the exit code.

    Raises:
        ConfigError: Something of this machine is in the way; every fault is named at once, each with its fix.
        ImageError: There is no such image.
    """
    root = root.resolve()
    must_be_clear(root, builder)
    image = builder.inspect(name)
    home = root / HOME
    home.mkdir(parents=True, exist_ok=True)
    # DVC looks at owners through its own git library, which reads this file and no environment.
    (home / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")
    options = RunOptions(
        user=caller(),
        folder=root,
        mounts=(common_mount(root),),
        environment=environment(root, home, name, image.digest),
        gpus=wants_gpu(root),
    )
    return builder.run(name, command, options)


def environment(root: Path, home: Path, name: str, digest: str) -> dict[str, str]:
    """What a container sees of the host's environment, and what it must know."""
    passed = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(PASSED) and key not in KEPT_OUT and _means_the_same(value, common_mount(root))
    }
    return passed | {
        "EYAS_IMAGE": f"{name}@{digest}",
        "HOME": str(home),
        "PYTHONPATH": str(root / "src"),
        "DVC_SITE_CACHE_DIR": str(root / ".dvc/tmp/site"),
    }


def _means_the_same(value: str, mount: Path) -> bool:
    """Whether a path of the host is there inside too; what is no path always is."""
    return not value.startswith("/") or Path(value).is_relative_to(mount)


def common_mount(root: Path) -> Path:
    """The folder that holds the repository and DVC's cache."""
    cache = _cache(root)
    return root if cache.is_relative_to(root) else Path(os.path.commonpath([root, cache]))


def _cache(root: Path) -> Path:
    """DVC's cache; a relative place is relative to the file that sets it."""
    return (root / ".dvc" / os.path.expanduser(_written_cache(root))).resolve()  # noqa: PTH111 - as DVC reads it


def _written_cache(root: Path) -> str:
    """The cache's place, as git's own reader of such files finds it in the repository's settings."""
    for name in (".dvc/config.local", ".dvc/config"):
        done = subprocess.run(
            ["git", "config", "--file", str(root / name), "cache.dir"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return "cache"


def wants_gpu(root: Path) -> bool:
    """Whether the parameters ask for CUDA anywhere."""
    params = root / "params.yaml"
    return params.is_file() and any(
        line.split("#")[0].strip().rstrip(",}").endswith("device: cuda") for line in params.read_text().splitlines()
    )


def must_be_clear(root: Path, builder: Builder) -> None:
    """Refuse what would go wrong in a container; raises ``ConfigError`` with every fault and its fix."""
    faults = preflight(root, builder)
    if faults:
        raise ConfigError("in the way of a container:\n" + "\n".join(f"  {fault}" for fault in faults))


def preflight(root: Path, builder: Builder) -> list[str]:
    """What stands in the way, one line each with its fix; empty when nothing does."""
    checks = (_one_mount(root), _links(root), _owners(root), _gpu(root, builder), _shared_memory(root))
    return [fault for fault in checks if fault]


def _one_mount(root: Path) -> str:
    mount = common_mount(root)
    if _written_cache(root).startswith("~"):
        return (
            f"DVC's cache is set below ~, which is another folder in a container: dvc cache dir --local {_cache(root)}"
        )
    if mount in TOO_WIDE:
        return (
            f"{root} and DVC's cache {_cache(root)} share no folder below {mount}, and two mounts know no hard links: "
            "move the cache beside the repository (`dvc cache dir`), or the repository to the cache's volume"
        )
    return ""


def _links(root: Path) -> str:
    cache = _cache(root)
    if not cache.is_dir():
        return ""
    here, there = root / f".eyas-link-{os.getpid()}", cache / f".eyas-link-{os.getpid()}"
    try:
        there.touch()
        os.link(there, here)
    except OSError as error:
        return (
            f"no hard link from {cache} into {root} ({error.strerror}): both must lie on one volume, or every state "
            "is kept twice"
        )
    finally:
        here.unlink(missing_ok=True)
        there.unlink(missing_ok=True)
    return ""


def _owners(root: Path) -> str:
    """Files of somebody else where the container's user must write: a run as root leaves them."""
    uid, owner = os.getuid(), _owner(root)
    if uid == 0 != owner:
        return (
            f"{root} belongs to user {owner}, and this is root, whose files that user could not change: "
            f"sudo -u '#{owner}' make …"
        )
    if uid == 0:
        return ""
    places = [root / name for name in (".dvc/tmp", ".dvc/cache", ".dvc/tmp/lock", ".eyas", "data", "models", "reports")]
    foreign = [str(place) for place in places if place.exists() and _owner(place) != uid]
    return f"{', '.join(foreign)} belong to another user: sudo chown -R {uid}:{os.getgid()} {root}" if foreign else ""


def _owner(path: Path) -> int:
    return path.stat().st_uid


def _gpu(root: Path, builder: Builder) -> str:
    if not wants_gpu(root):
        return ""
    if builder.tool == "buildah":
        return "params.yaml asks for a GPU, and buildah gives none to a container: use docker or podman"
    if not Path("/dev/nvidiactl").exists():
        return "params.yaml asks for a GPU, and this machine has no /dev/nvidiactl: install NVIDIA's driver"
    if shutil.which("nvidia-ctk") is None and shutil.which("nvidia-container-cli") is None:
        return "params.yaml asks for a GPU, and containers get none: install nvidia-container-toolkit"
    return ""


def _shared_memory(root: Path) -> str:
    params = root / "params.yaml"
    if not params.is_file() or "engine: sglang" not in params.read_text():
        return ""
    found = os.statvfs(SHM)  # the container shares it (--ipc=host)
    size = found.f_blocks * found.f_frsize
    if size < LEAST_SHM_BYTES:
        return (
            f"{SHM} has {size / 1e9:.1f} GB, states go through at least {LEAST_SHM_BYTES / 1e9:.1f} GB of it: "
            f"mount -o remount,size=16G {SHM}"
        )
    return ""
