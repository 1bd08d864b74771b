"""Real git and DVC repositories with states of a few files, on whatever file system a test wants."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.fs import hash_bytes

SOURCE = Path(__file__).parents[3] / "src"
WHO = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
STATES, MANIFEST = "data/hidden_states", "data/hidden_states.json"
PIPELINE = f"""stages:
  extract:
    cmd: echo stands for the capture
    params: [seed]
    outs: [{STATES}, {MANIFEST}]
"""


def environment() -> dict[str, str]:
    names = {name: value for name, value in os.environ.items() if name != "DVC_SITE_CACHE_DIR"}
    path = os.pathsep.join((os.fspath(Path(sys.executable).parent), names.get("PATH", os.defpath)))
    return names | WHO | {"PATH": path, "PYTHONPATH": os.fspath(SOURCE), "DVC_NO_ANALYTICS": "1"}


class Project:
    """A repository whose only stage is ``extract``; a capture writes its files, DVC commits them."""

    def __init__(self, root: Path, cache_type: str = "hardlink", *, cache_dir: str = "") -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.ok("git", "init", "-q", "-b", "main")
        self.ok("dvc", "init", "-q")
        settings = [f"type = {cache_type}", *([f"dir = {cache_dir}"] if cache_dir else [])]
        (root / ".dvc/config").write_text(
            "[core]\n    analytics = false\n[cache]\n    " + "\n    ".join(settings) + "\n"
        )
        (root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {root}/.dvc/tmp/site\n")
        (root / "dvc.yaml").write_text(PIPELINE)
        (root / ".gitignore").write_text("/data\n/.eyas\n")

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.root, env=environment(), capture_output=True, text=True, **options)

    def ok(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def eyas(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "eyas.cli", *arguments)

    def capture(self, seed: int, sizes: tuple[int, ...] = (5000, 9000, 20_000), *, shared: int = 0) -> str:
        """Write a set of states and its manifest; the first ``shared`` files are those of every other set.

        Returns:
            Its capture identity.
        """
        folder = self.root / STATES
        shutil.rmtree(folder, ignore_errors=True)
        (self.root / MANIFEST).unlink(missing_ok=True)
        shards = []
        for index, size in enumerate(sizes):
            data = random.Random(f"{0 if index < shared else seed} {index}").randbytes(size)
            path = f"shards-{index // 64:03d}/{index}.safetensors"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
            shards.append({"path": path, "size_bytes": size, "md5": hash_bytes(data, "md5")})
        identity = hash_bytes(f"identity {seed}".encode())
        (self.root / MANIFEST).write_text(json.dumps(_manifest(identity, seed, shards)))
        (self.root / "params.yaml").write_text(f"seed: {seed}\n")
        return identity

    def record(self) -> str:
        """What DVC does at the end of a capture; gives the generation's hash."""
        self.ok("dvc", "commit", "-q", "--force", "extract")
        return self.locked()

    def locked(self) -> str:
        """The generation that ``dvc.lock`` names, read without eyas."""
        lines = (self.root / "dvc.lock").read_text().splitlines()
        at = next(index for index, line in enumerate(lines) if line.strip() == f"- path: {STATES}")
        return next(line.split()[-1] for line in lines[at:] if line.strip().startswith("md5:"))

    def commit(self, message: str = "next") -> str:
        self.ok("git", "add", "-A")
        self.ok("git", "commit", "-qm", message)
        return self.ok("git", "rev-parse", "HEAD").strip()

    def generation(self, seed: int, *sizes: int, shared: int = 0) -> str:
        """Capture, record and commit."""
        self.capture(seed, sizes or (5000, 9000, 20_000), shared=shared)
        name = self.record()
        self.commit(f"generation {seed}")
        return name

    def retire_all(self) -> None:
        """Take the workspace's name away: what `eyas retire` and a commit do."""
        done = self.eyas("retire", self.locked()[:10])
        assert done.returncode == 0, done.stderr
        self.commit("retire")

    def plan(self, *options: str, code: int = 0) -> dict[str, Any]:
        done = self.eyas("gc-plan", "--json", *options)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def gc(self, plan_id: str) -> dict[str, Any]:
        done = self.eyas("gc", "--confirm", plan_id, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def refused(self) -> str:
        """What the plan is refused for: messages and hints in one text."""
        plan = self.plan(code=1)
        assert plan["refusals"]
        assert not plan["plan_id"]
        return "\n".join(f"{one['what']} | {one['hint']}" for one in plan["refusals"])

    @property
    def objects(self) -> set[str]:
        """Names of all files of the cache, read by a walk of its own."""
        base = self.root / ".dvc/cache/files/md5"
        return {path.parent.name + path.name for path in base.glob("*/*") if path.is_file()}

    @property
    def ledger(self) -> list[dict[str, Any]]:
        path = self.root / ".eyas/ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def md5s(self) -> set[str]:
        """Hashes that DVC's own list of the generation in ``dvc.lock`` names, itself included."""
        name = self.locked()
        listed = json.loads((self.root / ".dvc/cache/files/md5" / name[:2] / name[2:]).read_text())
        return {name, *(entry["md5"] for entry in listed)}


def _manifest(identity: str, seed: int, shards: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "identity": identity,
        "capture": {
            "engine": f"engine{seed}",
            "engine_version": "1.0",
            "target": "t" * 64,
            "codec": "raw",
            "boundaries": [1, 2, 3],
        },
        "num_planned_samples": 7,
        "num_planned_tokens": 70,
        "num_stored_samples": 7,
        "num_stored_tokens": 70,
        "stored_bytes": sum(shard["size_bytes"] for shard in shards),
        "hidden_size": 8,
        "failed": [],
        "shards": shards,
    }


def make_pivot(root: Path, **options: Any) -> tuple[Project, str, str]:
    """A project with an old generation that only history names, and a new one that is in use."""
    project = Project(root, **options)
    old = project.generation(1)
    new = project.generation(2)
    return project, old, new


@contextlib.contextmanager
def mounted(folder: Path, kind: str, size_mb: int = 400) -> Iterator[Path]:
    """A file system of its own below a folder; skips the test where there can be none.

    Args:
        folder: Holds its image and mount point.
        kind: ``ext4``, ``xfs``, ``btrfs`` or ``tmpfs``.
        size_mb: Of the volume.
    """
    point, image = folder / "mount", folder / "image"
    point.mkdir(parents=True)
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", os.fspath(point)]
    else:
        maker = {
            "ext4": ["mkfs.ext4", "-q"],
            "xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"],
            "btrfs": ["mkfs.btrfs", "-q"],
        }
        if shutil.which(maker[kind][0]) is None:
            pytest.skip(f"no {maker[kind][0]} here")
        with image.open("wb") as handle:
            handle.truncate(size_mb * 1_000_000 // 4096 * 4096)
        subprocess.run([*maker[kind], os.fspath(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop", os.fspath(image), os.fspath(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", os.fspath(point)], check=True, capture_output=True)
        image.unlink(missing_ok=True)
