"""Finished answers on disk, so that an interrupted run goes on and no prompt is answered twice.

One JSON line per answer, appended and made durable in groups. A line carries a checksum of itself: a
torn end is cut off and a damaged line is forgotten, and both are simply answered again. Only offsets are
held in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.canonical import canonical_json, digest
from eyas.conversations.generation import Generated, GenerateRequest

SYNC_EVERY = 64
"""Answers that a power cut may cost; a killed process loses none of those written."""
CHECK_DIGITS = 16


def request_id(prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, top_p: float, seed: int) -> str:
    """Identity of an answer: the content of its request, not its place in any list."""
    return digest([list(prompt_ids), max_new_tokens, temperature, top_p, seed])[:32]


class Journal:
    """Answers of one target, engine and numerics; use inside ``with``.

    Args:
        path: The file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}
        self._unsynced = 0

    def __enter__(self) -> Journal:
        with fs.disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+b")
        self._scan()
        return self

    def __exit__(self, *exc: object) -> None:
        self.sync()
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def _scan(self) -> None:
        self._file.seek(0)
        offset = num_damaged = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                # A kill in the middle of a write: cut it, or the next line would be glued to it.
                self._file.truncate(offset)
                break
            entry = _parse(line)
            if entry is None:
                num_damaged += 1
            else:
                self._offsets[entry["request"]] = offset
            offset += len(line)
        if num_damaged:
            console.log(f"respond: {num_damaged} damaged lines in {self._path} are answered again")

    def get(self, name: str) -> Generated:
        """The answer to a request that is in the journal."""
        self._file.seek(self._offsets[name])
        entry = _parse(self._file.readline())
        assert entry is not None
        return Generated(request_id=name, ids=tuple(entry["ids"]), finish=entry["finish"])

    def append(self, answer: Generated) -> None:
        """Add an answer; it survives this process at once and the machine after the next sync."""
        entry = {"request": answer.request_id, "ids": answer.ids, "finish": answer.finish}
        line = canonical_json(entry | {"check": digest(entry)[:CHECK_DIGITS]}) + "\n"
        with fs.disk_errors(self._path):
            self._file.seek(0, os.SEEK_END)
            offset = self._file.tell()
            self._file.write(line.encode())
            self._file.flush()
        self._offsets[answer.request_id] = offset
        self._unsynced += 1
        if self._unsynced >= SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """Make all answers durable."""
        with fs.disk_errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._unsynced = 0


def make_request(prompt_ids: Sequence[int], max_new_tokens: int, sampling: tuple[float, float, int]) -> GenerateRequest:
    """A request named by its content; ``sampling`` is (temperature, top_p, seed)."""
    temperature, top_p, seed = sampling
    return GenerateRequest(
        request_id=request_id(prompt_ids, max_new_tokens, temperature, top_p, seed),
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        check = entry.pop("check")
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return entry if check == digest(entry)[:CHECK_DIGITS] else None
