"""A scratch copy of the repository that runs the pipeline at small size.

The copy holds the files that git knows or would add, as they are now; parameters, data, DVC cache and results are
its own, so that nothing of the user's is touched. Downloaded wheels and converted targets are shared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from eyas import console, fs
from eyas.errors import EyasError
from eyas.ops.params import write_params
from eyas.plan import interpreter

SMALL = ("DRAFTER=smoke",)
SHARED = {"EYAS_TARGETS_DIR": ".eyas/targets", "EYAS_WHEELS": ".eyas/wheels"}
PYTHONS = {interpreter.VARIABLE: interpreter.OWN, interpreter.VLLM_VARIABLE: interpreter.VLLM_OWN}
LEFT_OUT = ("data/raw/", "dvc.lock", "reports/", "tests/")
KEPT = ("data/raw/README.md",)


def run_small(root: Path, folder: Path) -> None:
    """Copy ``root`` to ``folder``, anew, and run every stage there at small size; then nothing may be out of date.

    Raises:
        EyasError: ``root`` is no git repository, ``folder`` holds something else, a stage failed, or DVC would run one
            again at once.
    """
    copy_tree(root, folder)
    write_params(folder, SMALL)
    console.log(f"smoke: the pipeline at small size in {folder}")
    programs = environment(root, folder)
    done = subprocess.run(["dvc", "repro"], cwd=folder, env=programs, check=False)
    if done.returncode:
        raise EyasError(
            f"{folder}: `dvc repro` ended with {done.returncode}, expected 0",
            f"read the messages above; the copy is kept in {folder}",
        )
    if subprocess.run(["dvc", "status", "--quiet"], cwd=folder, env=programs, check=False).returncode:
        raise EyasError(
            f"{folder}: something is out of date right after `dvc repro`, expected nothing",
            f"`dvc status` in {folder} names it: a stage changes what another one wrote or reads",
        )


def environment(root: Path, folder: Path) -> dict[str, str]:
    """Environment in which stages run the copy's code with the original's targets, wheels and servers."""
    shared = {name: os.environ.get(name, os.fspath((root / path).resolve())) for name, path in SHARED.items()}
    for name, path in PYTHONS.items():
        if (root / path).exists():  # absolute, not resolved: a virtual environment's python is a link
            shared[name] = os.environ.get(name) or os.fspath((root / path).absolute())
    programs = os.pathsep.join((os.fspath(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return os.environ | shared | {"PATH": programs, "PYTHONPATH": os.fspath((folder / "src").resolve())}


def copy_tree(root: Path, folder: Path) -> None:
    """Replace ``folder`` by a copy of the files in ``root`` that git knows or would add.

    Raises:
        EyasError: ``root`` is no git repository, or ``folder`` exists and is no such copy.
    """
    marker = folder / ".eyas-scratch"
    if folder.exists() and not marker.is_file() and any(folder.iterdir()):
        raise EyasError(f"{folder} exists and is no scratch copy, expected an empty or new folder", "name another one")
    shutil.rmtree(folder, ignore_errors=True)
    for name in _files(root):
        source = root / name
        if source.is_file() and (name in KEPT or not name.startswith(LEFT_OUT)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    (folder / "data/raw").mkdir(parents=True, exist_ok=True)
    fs.write_text(folder / ".dvc/config.local", "[core]\n    no_scm = true\n")
    fs.write_text(marker, "Made by `make smoke` or `make reproduce`; may be deleted.\n")


def _files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EyasError(
            f"{root.resolve()} is no git repository: {done.stderr.strip()}",
            "git init && git add . && git commit -m start",
        )
    return sorted(name for name in done.stdout.split("\0") if name)
