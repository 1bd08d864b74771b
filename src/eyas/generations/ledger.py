"""``.eyas/ledger.jsonl``: what was adopted, retired, pinned and deleted, one JSON line an event, for ever.

It answers "where did those 828 GB go" after every other trace is gone. Lines are only appended.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.canonical import canonical_json
from eyas.shards.handover import HOME

LEDGER = HOME / "ledger.jsonl"


def append(root: Path, event: dict[str, Any]) -> None:
    """Append an event durably; ``when`` (UTC) is added.

    Args:
        root: The repository.
        event: ``event`` names its kind; sizes are in bytes, hashes as DVC writes them.

    Raises:
        DiskError: The volume is full.
    """
    path = root / LEDGER
    line = canonical_json(event | {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}) + "\n"
    with fs.disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab+") as handle:
            # A line that a full disk or a power cut tore stays as it is; ours begins on a line of its own.
            if handle.tell() and _last_byte(handle.fileno()) != b"\n":
                handle.write(b"\n")
            handle.write(line.encode())
            handle.flush()
            os.fsync(handle.fileno())
    if is_new:
        fs.fsync_dir(path.parent)


def _last_byte(fd: int) -> bytes:
    return os.pread(fd, 1, os.fstat(fd).st_size - 1)


def read(root: Path) -> list[dict[str, Any]]:
    """All events in order; a torn line is passed over."""
    path = root / LEDGER
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            events.append(value)
    return events
