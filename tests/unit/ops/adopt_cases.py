"""A real git and DVC repository, made once and copied, and folders to adopt into it."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from eyas import fs
from eyas.ops.adopt.folder import Adopted, AdoptRequest, adopt

REPOSITORY = Path(__file__).parents[3]
WHO = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
FILES = {"a": b"first", "b": b"second", "sub/c": b"third" * 1000, "sub-1/d": b"", "sub/é x": b"fifth"}


def environment() -> dict[str, str]:
    names = {name: value for name, value in os.environ.items() if name != "DVC_SITE_CACHE_DIR"}
    path = os.pathsep.join((os.fspath(Path(sys.executable).parent), names.get("PATH", os.defpath)))
    return names | WHO | {"PATH": path, "PYTHONPATH": f"{REPOSITORY}/src", "DVC_NO_ANALYTICS": "1"}


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True)


def ok(root: Path, *command: str) -> str:
    done = run(root, *command)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def eyas(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(root, sys.executable, "-m", "eyas.cli", *arguments)


@functools.cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="eyas-adopt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ok(folder, "git", "init", "-q", "-b", "main")
    ok(folder, "dvc", "init", "-q")
    for name in (".dvc/config", ".dvcignore", ".gitignore", "params.yaml"):
        shutil.copy(REPOSITORY / name, folder / name)
    ok(folder, "git", "add", "-A")
    ok(folder, "git", "commit", "-qm", "base")
    return folder


def make_repository(root: Path) -> Path:
    """``root`` as a repository with one commit and eyas' own settings."""
    shutil.copytree(_template(), root, symlinks=True)
    (root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {root}/.dvc/tmp/site\n")
    return root


def make_folder(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def adopt_other(root: Path, folder: Path, **changes: str) -> Adopted:
    """Adopted without a layout: no torch."""
    return adopt(root, AdoptRequest(folder=folder, engine="vllm", layout=changes.pop("layout", "other"), **changes))


def is_clean(root: Path, target: str) -> bool:
    """DVC's own answer."""
    return ok(root, "dvc", "status", "--json", target).strip() == "{}"


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a child that kills itself before its ``number``-th change of the file system.

    Returns:
        Whether it was killed; False when it came to its end.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.addaudithook(_Killer(number))
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


class _Killer:
    """Counts what changes names, modes or contents."""

    EVENTS = ("os.link", "os.rename", "os.chmod", "os.mkdir", "os.remove", "os.truncate", "os.rmdir")

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in self.EVENTS or writes:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), 9)


def has_md5_names(root: Path) -> bool:
    """Whether every object of the cache is what its name says."""
    objects = [p for p in (root / ".dvc/cache/files/md5").rglob("*") if p.is_file() and p.suffix != ".part"]
    return all(fs.hash_file(p, "md5") == (p.parent.name + p.name).removesuffix(".dir") for p in objects)
