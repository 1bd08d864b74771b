"""``eyas bench gc``: bytes promised and measured on this volume, and the time of a plan over 80,000 objects.

Both on repositories made for it by script: objects, lists and ``dvc.lock`` laid down as DVC lays them down, 200 commits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.ops.gc.collect import collect
from eyas.ops.gc.intent import write_plan
from eyas.ops.gc.plan import make_plan

STATES, MANIFEST = "data/hidden_states", "data/hidden_states.json"
NUM_OBJECTS, NUM_COMMITS = 80_000, 200
MEASURED_SIZES = (20_000_000,) * 12
SMALL_BYTES = 64
PIPELINE = f"stages:\n  extract:\n    cmd: stands for the capture\n    outs: [{STATES}, {MANIFEST}]\n"
LOCK = """schema: '2.0'
stages:
  extract:
    cmd: stands for the capture
    outs:
    - {{path: {states}, hash: md5, md5: {name}, size: {size}, nfiles: {num}}}
    - {{path: {manifest}, hash: md5, md5: {manifest_md5}, size: {manifest_size}}}
"""


def measure(scratch: Path) -> dict[str, Any]:
    """Promise and measure one gc, then plan over many objects.

    Args:
        scratch: Folder for the repositories, on the volume that counts.

    Returns:
        ``promised_bytes``, ``measured_bytes``, ``num_freed_objects``, ``block_bytes``, ``seconds_80k_objects`` (a plan in
        a process of its own) and what was planned over.
    """
    project = ScriptedProject(scratch / "measured")
    project.commit_states("a", MEASURED_SIZES, is_linked=False)
    project.commit_states("b", (SMALL_BYTES,), is_linked=True)
    plan = make_plan(project.root, None)
    write_plan(project.root, plan.plan_id, plan.projects, plan.snapshot)
    event = collect(project.root, plan.plan_id)
    shutil.rmtree(project.root)
    seconds, planned = _time_plan(scratch / "many")
    return {
        "promised_bytes": event["promised_bytes"],
        "measured_bytes": event["measured_bytes"],
        "num_freed_objects": event["num_objects"],
        "block_bytes": os.statvfs(scratch).f_frsize,
        "seconds_80k_objects": seconds,
        "num_objects": NUM_OBJECTS,
        "num_commits": NUM_COMMITS,
        "num_going_objects": planned["objects"]["num"],
    }


def _time_plan(root: Path) -> tuple[float, dict[str, Any]]:
    make_many(root)
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "eyas.cli", "gc-plan", "--json"], cwd=root, capture_output=True, text=True, check=True
    )
    seconds = time.monotonic() - start_s
    shutil.rmtree(root)
    return seconds, json.loads(done.stdout)


def make_many(root: Path, num_objects: int = NUM_OBJECTS, num_commits: int = NUM_COMMITS) -> None:
    """A repository with so many objects in so many generations, a commit each; the last one is in use."""
    project = ScriptedProject(root)
    sizes = (SMALL_BYTES,) * (num_objects // num_commits)
    for index in range(num_commits):
        project.commit_states(f"{index}", sizes, is_linked=index == num_commits - 1)


class ScriptedProject:
    """A git and DVC repository that is written without running DVC."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self._git("init", "-q", "-b", "main")
        for path, text in (
            (".dvc/config", "[core]\n    analytics = false\n[cache]\n    type = hardlink\n"),
            (".dvc/config.local", f"[core]\n    site_cache_dir = {root}/.dvc/tmp/site\n"),
            (".dvc/.gitignore", "/config.local\n/tmp\n/cache\n"),
            (".gitignore", "/data\n/.eyas\n"),
            ("dvc.yaml", PIPELINE),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

    def _git(self, *arguments: str) -> None:
        who = {f"GIT_{role}_{key}": "eyas" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
        subprocess.run(["git", *arguments], cwd=self.root, env=os.environ | who, check=True, capture_output=True)

    def commit_states(self, name: str, sizes: Sequence[int], *, is_linked: bool) -> None:
        """One generation in the cache and in ``dvc.lock``; in the workspace too when it is linked there."""
        shards = [self._object(f"{name}-{index}", size) for index, size in enumerate(sizes)]
        for index, shard in enumerate(shards):
            shard["path"] = f"shards-{index // 64:03d}/{index}.safetensors"
        identity = hashlib.sha256(name.encode()).hexdigest()
        manifest_md5 = self.record(shards, json.dumps({"identity": identity, "shards": shards}).encode())
        for shard in shards if is_linked else []:
            self._link(shard["md5"], f"{STATES}/{shard['path']}")
        if is_linked:
            self._link(manifest_md5, MANIFEST)
        self.commit(name)

    def record(self, shards: Sequence[Mapping[str, Any]], manifest: bytes) -> str:
        """Name a generation in ``dvc.lock``, its list and its manifest in the cache; the manifest's md5."""
        listed = sorted(({"md5": s["md5"], "relpath": s["path"]} for s in shards), key=lambda entry: entry["relpath"])
        folder = self._store(json.dumps(listed).encode(), ".dir")
        manifest_md5 = self._store(manifest)
        (self.root / "dvc.lock").write_text(
            LOCK.format(
                states=STATES, name=folder, size=sum(s["size_bytes"] for s in shards), num=len(shards),
                manifest=MANIFEST, manifest_md5=manifest_md5, manifest_size=len(manifest),
            )
        )  # fmt: skip
        return manifest_md5

    def commit(self, name: str) -> None:
        """Commit everything that git sees."""
        self._git("add", "-A")
        self._git("commit", "-qm", name)

    def _object(self, name: str, size: int) -> dict[str, Any]:
        begin = name.encode()
        return {"md5": self._store(begin + bytes(size - len(begin))), "size_bytes": size}

    def _store(self, data: bytes, suffix: str = "") -> str:
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest() + suffix
        path = self.cached(md5)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o444)
        return md5

    def _link(self, md5: str, place: str) -> None:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(self.cached(md5), path)

    def cached(self, md5: str) -> Path:
        """Where the cache keeps an object."""
        return self.root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
