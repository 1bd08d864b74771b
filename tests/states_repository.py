"""A git and DVC repository whose objects are laid down by hand, in DVC's layout, without eyas' code.

DVC would take a second per command; what it would leave behind is a few files: an object per content under its md5, a
list per folder, hard links in the workspace, ``dvc.lock``. ``gc_would_remove`` asks the real DVC.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

STATES, MANIFEST = "data/hidden_states", "data/hidden_states.json"
WHO = {
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip
PIPELINE = {
    "stages": {
        "extract": {"cmd": "true", "params": ["extract"], "outs": [STATES, MANIFEST]},
        "train": {"cmd": "true", "deps": [STATES], "outs": ["models/drafter"]},
    }
}


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def dir_list(files: Mapping[str, str]) -> bytes:
    """A folder's list as DVC writes it: path → md5."""
    return json.dumps([{"md5": files[path], "relpath": path} for path in sorted(files)], sort_keys=True).encode()


class StatesRepository:
    """``root``: the DVC project; ``git_root``: where ``.git`` lies, the same unless it is put into a sub-folder."""

    def __init__(self, root: Path, git_root: Path | None = None) -> None:
        self.root, self.git_root = root, git_root or root
        (root / ".dvc").mkdir(parents=True)
        (root / ".dvc/config").write_text(
            f"[core]\n    analytics = false\n    site_cache_dir = {root}/.dvc/tmp/site\n[cache]\n    type = hardlink\n"
        )
        (root / ".dvc/.gitignore").write_text("/config.local\n/tmp\n/cache\n")
        (root / ".gitignore").write_text("/data\n/.eyas\n/models\n")
        self.git("init", "-q", "-b", "main", cwd=self.git_root)

    # ── git ───────────────────────────────────────────────────────────────────────────────────

    def git(self, *words: str, cwd: Path | None = None, text: str | None = None) -> str:
        done = subprocess.run(
            ["git", *words], cwd=cwd or self.root, env=os.environ | WHO, capture_output=True, text=True, input=text
        )
        assert done.returncode == 0, f"git {words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def commit(self, message: str = "c") -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    # ── objects ───────────────────────────────────────────────────────────────────────────────

    @property
    def cache(self) -> Path:
        return self.root / ".dvc/cache/files/md5"

    def object_path(self, name: str, *, legacy: bool = False) -> Path:
        return (self.root / ".dvc/cache" if legacy else self.cache) / name[:2] / name[2:]

    def put(self, data: bytes, *, suffix: str = "", legacy: bool = False) -> str:
        name = md5(data) + suffix
        path = self.object_path(name, legacy=legacy)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o444)
        return name

    def put_folder(self, files: Mapping[str, bytes], *, legacy: bool = False) -> str:
        listed = {path: self.put(data, legacy=legacy) for path, data in files.items()}
        return self.put(dir_list(listed), suffix=".dir", legacy=legacy)

    def objects(self) -> set[Path]:
        """Every object, both of DVC 3 and of DVC 2."""
        folders = [*self.cache.glob("??"), *(self.root / ".dvc/cache").glob("??")]
        return {path for folder in folders if len(folder.name) == 2 for path in folder.iterdir() if path.is_file()}

    # ── DVC's files ───────────────────────────────────────────────────────────────────────────

    def write_yaml(self, path: str, value: Any) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(yaml.safe_dump(value, sort_keys=False))

    def publish(self, files: Mapping[str, bytes], *, engine: str = "fake", drafter: bytes = b"") -> str:
        """States in the workspace, linked from the cache, with manifest and ``dvc.lock``; returns their hash."""
        states = self.root / STATES
        shutil.rmtree(states, ignore_errors=True)
        name = self.put_folder(files)
        manifest = json.dumps(manifest_of(files, engine), sort_keys=True).encode()
        for path, data in files.items():
            self.link(states / path, md5(data))
        self.link(self.root / MANIFEST, self.put(manifest))
        size, outs = sum(map(len, files.values())), []
        outs.append({"path": STATES, "hash": "md5", "md5": name, "size": size, "nfiles": len(files)})
        outs.append({"path": MANIFEST, "hash": "md5", "md5": md5(manifest), "size": len(manifest)})
        params = {"params.yaml": {"extract": {"engine": engine, "codec": "raw"}}}
        lock = {"schema": "2.0", "stages": {"extract": {"cmd": "true", "params": params, "outs": outs}}}
        if drafter:
            trained = {"path": "models/drafter", "hash": "md5", "md5": self.put(drafter), "size": len(drafter)}
            lock["stages"]["train"] = {"cmd": "true", "deps": [dict(outs[0])], "outs": [trained]}
            self.link(self.root / "models/drafter", md5(drafter))
        self.write_yaml("dvc.yaml", PIPELINE)
        self.write_yaml("dvc.lock", lock)
        (self.root / "params.yaml").write_text(yaml.safe_dump({"extract": {"engine": engine, "codec": "raw"}}))
        return name

    def link(self, path: Path, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.link(self.object_path(name), path)

    # ── the real DVC ──────────────────────────────────────────────────────────────────────────

    def gc_would_remove(self) -> set[Path]:
        """What ``dvc gc --workspace --all-branches --all-tags --all-experiments --dry`` would remove."""
        return dvc_gc(self.root, dry=True)


def dvc_gc(root: Path, *, dry: bool) -> set[Path]:
    """``dvc gc --workspace --all-branches --all-tags --all-experiments`` in this process; what it would remove if dry."""
    from dvc.repo import Repo

    with _records("dvc_data.hashfile.gc") as lines, Repo(os.fspath(root)) as repo:
        repo.gc(workspace=True, all_branches=True, all_tags=True, all_experiments=True, dry=dry, force=True)
    return {Path(line.removeprefix("Removing ")) for line in lines if line.startswith("Removing ")}


@contextlib.contextmanager
def _records(name: str) -> Iterator[list[str]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, talker, handler = logging.getLogger(name), logging.getLogger("dvc"), Keep()
    before = logger.level, talker.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # DVC prints what it logs
    talker.setLevel(logging.ERROR)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        logger.setLevel(before[0])
        talker.setLevel(before[1])


def manifest_of(files: Mapping[str, bytes], engine: str = "fake") -> dict[str, Any]:
    """As much of a manifest as a list needs, in the manifest's own spelling."""
    shards = [
        {"path": path, "size_bytes": len(data), "md5": md5(data), "num_samples": 2, "num_tokens": 10}
        for path, data in sorted(files.items())
    ]
    capture = {"target": "1" * 64, "boundaries": [1, 2], "codec": "raw", "engine": engine, "engine_version": "7"}
    return {
        "identity": hashlib.sha256(engine.encode()).hexdigest(),
        "capture": capture,
        "hidden_size": 4,
        "num_stored_samples": 2 * len(shards),
        "num_stored_tokens": 10 * len(shards),
        "stored_bytes": sum(map(len, files.values())),
        "shards": shards,
    }
