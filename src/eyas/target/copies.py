"""The target's files on a node that did not fetch them: another copy under the same path, or the volume of the fetch.

Files that are by size and mtime as the note of the fetch beside them says are trusted, as where they were fetched. Others
are hashed, once a node: whoever comes second waits, and finds what the first one noted in the node's own temporary folder.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

from eyas import console, fs
from eyas.canonical import digest, to_plain
from eyas.contracts import TargetIdentity
from eyas.errors import StoreError, TargetError
from eyas.target import store


def check_copy(identity: TargetIdentity, folder: Path) -> None:
    """Refuse files that are not this target's.

    Raises:
        TargetError: One is missing, half copied or of another revision; host, file, expected and found are named.
    """
    wrong = store.first_missing(identity, folder)
    if wrong is None and not store.is_noted(identity, folder):
        wrong = _hashed_once(identity, folder)
    if wrong is not None:
        raise TargetError(
            f"node {socket.gethostname()}: {folder}: {wrong}",
            "copy the files of the fetch to that node anew (`rsync -a`, the note beside the folder too), or let all "
            "nodes see one volume; then run the same command again",
        )


def _hashed_once(identity: TargetIdentity, folder: Path) -> str | None:
    notes = Path(tempfile.gettempdir()) / f"eyas-{os.getuid()}"
    notes.mkdir(mode=0o700, exist_ok=True)
    name = digest([identity.digest, os.fspath(folder.resolve())])[:16]
    with open(notes / f"{name}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now, note = to_plain(store.stamps(identity, folder)), notes / f"{name}.json"
        if _read(note) == now:
            return None
        console.log(f"target: hashing {len(identity.files)} files, they are not as the note of a fetch says")
        wrong = store.first_difference(identity, folder)
        if wrong is None:
            fs.write_record(note, now)
        return wrong


def _read(note: Path) -> object:
    try:
        return fs.read_json(note)
    except StoreError:
        return None
