"""An image looked at: built twice to the same bytes, small, of no root, without secrets, and able to work."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.ops.image.builder import Builder, Image, ImageError, RunOptions
from eyas.ops.image.run import must_be_clear
from eyas.ops.image.smoke import smoke_faults

REPORT = Path("reports/bench/image.json")
SIZE_LIMIT_BYTES = {"cpu": 2_500_000_000, "ci": 2_900_000_000, "cuda": 25_000_000_000}
CONTEXT = ("Dockerfile", ".dockerignore", "LICENSE", "README.md", "pyproject.toml")
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|KEY)(_|$)", re.IGNORECASE)
IMPORTS = {
    "cpu": "torch transformers dvc datasets hydra blosc2 eyas.cli eyas.stages.extract eyas.stages.train",
    "ci": "torch pytest ruff hypothesis eyas.cli",
    "cuda": "torch sglang sgl_kernel dvc datasets hydra blosc2 eyas.cli eyas.stages.extract eyas.stages.train",
}
SELF_TEST = """
import glob, importlib, importlib.metadata, os, shutil, sys
wanted = sys.argv[1].split()
assert os.getuid() != 0, "runs as root"
for name in wanted:
    importlib.import_module(name)
for program in ("git", "make", "dvc", "eyas"):
    assert shutil.which(program), f"{program} is not there"
left = [path for path in ("/var/lib/apt/lists/lock", ".git", *glob.glob("/var/cache/pip/*")) if os.path.exists(path)]
assert not left, f"left over: {left}"
print(" ".join(f"{n}={importlib.metadata.version(n)}" for n in ("torch", "dvc", "eyas")))
"""

# One command a line: `set -e` looks only at the last one of a chain of `&&`.
KERNEL_TEST = """set -e
nvcc --version >/dev/null
c++ --version >/dev/null
ninja --version >/dev/null
python -m eyas.ops.image kernels "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/sgl_kernel"
"""


def structure_faults(image: Image, target: str) -> list[str]:
    """What is wrong with an image's configuration and size."""
    config = image.config
    user, names = str(config.get("User", "")), [entry.partition("=")[0] for entry in config.get("Env") or ()]
    labels = config.get("Labels") or {}
    faults = []
    if not user.partition(":")[0].isdecimal() or user.partition(":")[0] == "0":
        faults.append(f"user {user!r}, expected a number that is not 0: orchestrators refuse names")
    faults += [f"no label org.opencontainers.image.{key}" for key in ("title", "licenses", "version")
               if f"org.opencontainers.image.{key}" not in labels]  # fmt: skip
    faults += [f"variable {name}" for name in names if SECRET.search(name)]
    faults += [f"variable {name}: NCCL's choices are the machine's" for name in names if name.startswith("NCCL_")]
    if not config.get("Entrypoint"):
        faults.append("no entrypoint: nobody reaps the stages' children")
    if image.size_bytes > SIZE_LIMIT_BYTES[target]:
        faults.append(f"{image.size_bytes / 1e9:.2f} GB, expected at most {SIZE_LIMIT_BYTES[target] / 1e9:.2f}")
    return faults


def copied_context(root: Path, folder: Path) -> None:
    """What the Dockerfile copies, elsewhere and with other times."""
    for name in CONTEXT:
        (folder / name).write_bytes((root / name).read_bytes())
    for name in ("src", "requirements"):
        shutil.copytree(root / name, folder / name, copy_function=shutil.copyfile,
                        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))  # fmt: skip


def check(
    root: Path, builder: Builder, target: str, name: str, pins: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Build twice from two folders, compare, look inside, run the small pipeline in it and outside of it.

    Raises:
        ImageError: What is wrong, all of it.
    """
    if target != "cuda":
        must_be_clear(root, builder)  # before the minutes of a build
    begin_s = time.monotonic()
    builder.build(root, target, name, pins)
    build_s = time.monotonic() - begin_s
    first = builder.inspect(name)
    say(f"{name}: {first.digest}, {first.size_bytes / 1e9:.2f} GB, {build_s:.0f} s; once more from another folder")
    with tempfile.TemporaryDirectory() as folder:
        copied_context(root, Path(folder))
        builder.build(Path(folder), target, f"{name}-again", pins, anew=True)
    second = builder.inspect(f"{name}-again")
    faults = structure_faults(first, target)
    if first.digest != second.digest:
        faults.append(
            f"two builds gave {first.digest} and {second.digest}: something of the machine or the time is in it"
        )
    else:
        builder.forget(f"{name}-again")
    options = RunOptions(user="1000:1000", folder=Path("/workspace"), mounts=(), environment={"HOME": "/tmp"})  # noqa: S108
    if builder.run(name, ["python", "-c", SELF_TEST, IMPORTS[target]], options):
        faults.append("the self-test in it failed; its output is above")
    if target == "cuda" and builder.run(name, ["bash", "-c", KERNEL_TEST], options):
        faults.append("SGLang's kernels lack an architecture, or no compiler is there; the output is above")
    # With other packages than ours, other bytes are right.
    smoke = None if target == "cuda" else smoke_faults(root, builder, name, say)
    faults += smoke or []
    figures = {
        "target": target, "tool": builder.tool, "digest_first": first.digest, "digest_second": second.digest,
        "identical": first.digest == second.digest, "size_bytes": first.size_bytes, "build_seconds": round(build_s, 1),
        "smoke_hashes_equal": None if smoke is None else not smoke,
    }  # fmt: skip
    (root / REPORT).parent.mkdir(parents=True, exist_ok=True)
    fs.write_text(root / REPORT, json.dumps(figures, indent=2, sort_keys=True) + "\n")
    if faults:
        raise ImageError(f"{name} is not as it should be:\n" + "\n".join(f"  {fault}" for fault in faults))
    return figures
