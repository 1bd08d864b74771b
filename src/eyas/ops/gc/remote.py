"""Which objects a remote of DVC's has too. A folder is asked by ``stat``, anything else through DVC, and not for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.config.dvc import Remote, remotes
from eyas.generations.objects import LEGACY
from eyas.shards.remote import Secrets

TIMEOUT_S = 60
_ASK = """
import json, sys
from dvc.repo import Repo
name, wanted = sys.argv[1], json.load(sys.stdin)
with Repo(".") as repo:
    new = repo.cloud.get_remote_odb(name, hash_name="md5")
    old = repo.cloud.get_remote_odb(name, hash_name="md5-dos2unix")
    print(json.dumps([sorted(new.list_oids_exists(wanted[0])), sorted(old.list_oids_exists(wanted[1]))]))
"""


def pushed_objects(root: Path, sizes: Mapping[str, int]) -> set[str] | None:
    """Objects, named with their bytes, that at least one remote has; None where remotes are set and none answers."""
    answers: list[set[str]] = []
    known = remotes(root)
    if not known:
        return set()
    for remote in known:
        folder = remote_folder(remote)
        answer = _ask(root, remote, list(sizes)) if folder is None else _in_folder(os.fspath(folder), sizes)
        if answer is not None:
            answers.append(answer)
    return set().union(*answers) if answers else None


def _is_folder(url: str) -> bool:
    return "://" not in url and not url.startswith("remote:")


def remote_folder(remote: Remote) -> Path | None:
    """Where a remote lies that is a folder."""
    return Path(os.path.normpath(remote.base / Path(remote.url).expanduser())) if _is_folder(remote.url) else None


def _in_folder(folder: str, sizes: Mapping[str, int]) -> set[str] | None:
    """Those of the right size: DVC's push syncs nothing, and a power loss leaves an empty object under its name."""
    if not os.path.isdir(folder):  # noqa: PTH112 - a string from here on: asked 80,000 times
        return None
    found = set[str]()
    for name, size_bytes in sizes.items():
        md5 = name.removeprefix(LEGACY)
        base = folder if name.startswith(LEGACY) else f"{folder}/files/md5"
        if fs.size_or_none(f"{base}/{md5[:2]}/{md5[2:]}") == size_bytes:
            found.add(name)
    return found


def _ask(root: Path, remote: Remote, names: list[str]) -> set[str] | None:
    """DVC's answer, from a process of its own: one that hangs must not hang a plan."""
    new = [name for name in names if not name.startswith(LEGACY)]
    old = [name.removeprefix(LEGACY) for name in names if name.startswith(LEGACY)]
    found = ask_dvc(root, remote, _ASK, [new, old])
    return None if found is None else {*found[0], *(LEGACY + name for name in found[1])}


def ask_dvc(root: Path, remote: Remote, script: str, question: Any) -> Any:
    """What a script that is given the remote's name says, as JSON; None, and said, when there is no answer in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, remote.name],
            cwd=root,
            env=os.environ | {"DVC_NO_ANALYTICS": "1"},
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        found = None
    if found is None:
        url = Secrets(root).out_of(remote.url)
        console.log(f"gc: remote {remote.name} ({url}) does not answer: what it has is unknown")
    return found
