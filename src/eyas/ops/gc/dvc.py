"""``dvc gc`` itself: what it would remove, and the removal. It never waits for an answer."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import EyasError

KEEP = ("--workspace", "--all-branches", "--all-tags", "--all-experiments")
_REMOVING = "Removing "
_TAIL_LINES = 15


def would_remove(root: Path, projects: Sequence[Path]) -> set[str]:
    """Absolute paths of everything that ``dvc gc`` would remove from the cache.

    Raises:
        EyasError: DVC failed.
    """
    lines = _gc(root, projects, "--dry", lock=None).splitlines()
    return {real_path(line.removeprefix(_REMOVING)) for line in lines if line.startswith(_REMOVING)}


def real_path(path: str | Path) -> str:
    """A file of the cache without links in its folder's path; folders are asked once, files never."""
    folder, name = os.path.split(path)
    return f"{_real_folder(str(Path(folder).absolute()))}/{name}"


_real_folder = functools.lru_cache(maxsize=4096)(os.path.realpath)


def remove(root: Path, projects: Sequence[Path], lock: int) -> None:
    """Run ``dvc gc``.

    Args:
        root: The repository.
        projects: Others that share the cache.
        lock: Descriptor of our own lock: DVC holds it too, for the case that this process is killed meanwhile.

    Raises:
        EyasError: DVC failed.
    """
    _gc(root, projects, lock=lock)


def _gc(root: Path, projects: Sequence[Path], *options: str, lock: int | None) -> str:
    named = ["--projects", *map(str, projects)] if projects else []
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "gc", *KEEP, "--force", *options, *named],
        cwd=root,
        env=os.environ | {"DVC_NO_ANALYTICS": "1", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        pass_fds=() if lock is None else (lock,),
        check=False,
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_TAIL_LINES:])
        raise EyasError(
            f"`dvc gc {' '.join((*KEEP, *options))}` ended with {done.returncode}, expected 0:\n{tail}",
            "what it says above has to be put right; then the same command goes on from here",
        )
    return done.stdout
