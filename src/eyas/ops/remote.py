"""``eyas push``, ``eyas pull`` and ``eyas verify --remote``: states and manifest to a DVC remote and back, and proof.

DVC moves the bytes and goes on where it stopped: objects that arrived are not sent again. What it says is shown without
credentials (of its bars the two counts alone), a failed transfer is tried again, and nothing is called done before every object was asked for (after a
push) or read (after a pull).
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from eyas import console, fs
from eyas.errors import StoreError
from eyas.ops.published import MANIFEST, OUTS, Published, read_published
from eyas.shards.handover import HOME, LOCK_NAME, StoredFile
from eyas.shards.remote import RemoteStore, Secrets, check_remote

ATTEMPTS = 5
WAIT_S = 1.0
THREADS = 16
TAIL_LINES = 5
COUNT = r"(\d+(?:\.\d+)?)([kM]?)"
TRANSFER_BAR = re.compile(rf"\b{COUNT}/{COUNT} \[[^\]]*(?:file/s|s/file)\]")
"""DVC's bar over the objects that move; those of single files count bytes."""
SCALE = {"": 1, "k": 10**3, "M": 10**6}
BAR = re.compile(r"^!$|\|.*\[[^\]]*\]$")
"""Any of DVC's bars; it draws a lone exclamation mark before the first."""
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LISTEN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """What was moved, or looked at; ``problems`` are empty when nothing is wrong."""

    remote: str
    num_objects: int
    num_bytes: int
    num_read_bytes: int
    """Of which the md5 was taken."""
    num_attempts: int
    problems: tuple[str, ...] = ()


def push(root: Path, name: str = "") -> Transferred:
    """Send states and manifest, then ask the remote for every object.

    Raises:
        StoreError: There is no manifest or no such remote, or DVC failed several times.
    """
    check_remote(root, name)
    published = _published(root)
    store = RemoteStore(root, name)
    objects = _objects(published)
    num_attempts = _dvc(root, "push", name, OUTS, len(objects))
    return _report(store, objects, num_attempts, share=0.0)


def pull(root: Path, name: str = "") -> Transferred:
    """Fetch manifest and states that ``dvc.lock`` names, then read every file.

    Raises:
        StoreError: There is no such remote, or DVC failed several times.
        EyasError: An extraction, a gc or another of these holds the volume.
    """
    check_remote(root, name)
    with fs.volume_lock(root / HOME / LOCK_NAME, "pull"):  # no extraction publishes, no gc deletes meanwhile
        num_attempts = _dvc(root, "pull", name, OUTS)
    published = _published(root)
    jobs = [(file, file.size_bytes) for file in published.files]
    found = _look(jobs, "pulled", lambda file, _: _local_problem(root / OUTS[0] / file.path, file))
    return Transferred(
        remote=name,
        num_objects=len(found) + 1,
        num_bytes=published.num_bytes,
        num_read_bytes=published.num_bytes,
        num_attempts=num_attempts,
        problems=tuple(problem for problem in found if problem),
    )


def verify_remote(root: Path, name: str = "", share: float = 1.0) -> Transferred:
    """Ask a remote for every object of the published states, and read a share of them.

    Args:
        root: The repository.
        name: Of the remote; empty for DVC's default one.
        share: Of the objects whose bytes are read and hashed.

    Raises:
        StoreError: There is no manifest or no such remote, or it does not answer.
    """
    return _report(RemoteStore(root, name), _objects(_published(root)), 0, share)


def _published(root: Path) -> Published:
    found = read_published(root / MANIFEST)
    if found is None:
        raise StoreError(
            f"{root / MANIFEST} is missing: nothing says which states are meant", "`make extract`, or pull"
        )
    return found


def _objects(published: Published) -> list[StoredFile]:
    """Shards, manifest, and the list by which DVC names the folder."""
    from eyas.shards.handover import dir_object

    listed = StoredFile(OUTS[0], len(dir_object(published.files)), published.states_md5)
    return [*published.all_files, listed]


def _report(store: RemoteStore, objects: Sequence[StoredFile], num_attempts: int, share: float) -> Transferred:
    read = set(random.Random(0).sample(range(len(objects)), round(share * len(objects))))  # noqa: S311
    jobs = [(file, file.size_bytes if index in read else 0) for index, file in enumerate(objects)]
    found = _look(jobs, "remote", lambda file, num_bytes: _far_problem(store, file, num_bytes > 0))
    return Transferred(
        remote=store.name,
        num_objects=len(objects),
        num_bytes=sum(file.size_bytes for file in objects),
        num_read_bytes=sum(objects[index].size_bytes for index in read),
        num_attempts=num_attempts,
        problems=tuple(problem for problem in found if problem),
    )


def _look(jobs: Sequence[tuple[StoredFile, int]], what: str, look: Callable[[StoredFile, int], str]) -> list[str]:
    """What is wrong with each file, by a look that reads so many bytes of it."""
    progress, num_bytes, found = console.Progress(what, len(jobs), unit="objects"), 0, []
    with ThreadPoolExecutor(THREADS, what) as pool:
        for (_, read_bytes), problem in zip(jobs, pool.map(lambda job: look(*job), jobs), strict=True):
            num_bytes += read_bytes
            found.append(problem)
            progress.advance(1, console.human_bytes(num_bytes))
    progress.close()
    return found


def _far_problem(store: RemoteStore, file: StoredFile, is_read: bool) -> str:
    size = store.size(file.md5)
    if size != file.size_bytes:
        return f"{file.path}: {'missing' if size is None else f'{size:,} bytes'}, expected {file.size_bytes:,} bytes"
    if not is_read:
        return ""
    md5 = hashlib.md5(usedforsecurity=False)
    for piece in store.pieces(file.md5, file.size_bytes):
        md5.update(piece)
    expected = file.md5.removesuffix(".dir")
    return "" if md5.hexdigest() == expected else f"{file.path}: md5 {md5.hexdigest()}, expected {expected}"


def _local_problem(path: Path, file: StoredFile) -> str:
    if fs.size_or_none(path) != file.size_bytes:
        return f"{file.path}: {fs.size_or_none(path)} bytes, expected {file.size_bytes:,}"
    found = fs.hash_file(path, "md5")
    return "" if found == file.md5 else f"{file.path}: md5 {found}, expected {file.md5}"


def _dvc(root: Path, verb: str, name: str, outs: Iterable[str], num_objects: int = 0) -> int:
    """Run ``dvc push`` or ``pull`` until it succeeds; how often that took."""
    command = [sys.executable, "-m", "dvc", verb, *(["-r", name] if name else []), *outs]
    secrets, said = Secrets(root), ""
    for attempt in range(1, ATTEMPTS + 1):
        progress = console.Progress(verb, num_objects, unit="objects")
        code, lines = _dvc_once(command, root, progress)
        progress.close()
        if code == 0:
            return attempt
        said = "; ".join(secrets.out_of(line) for line in lines)
        console.log(f"dvc {verb}: attempt {attempt} of {ATTEMPTS} failed: {said}")
        if attempt < ATTEMPTS:
            time.sleep(WAIT_S * attempt)
    raise StoreError(
        f"dvc {verb} failed {ATTEMPTS} times: {said}",
        f"`make {verb}` goes on from here: what arrived is not sent again",
    )


def _dvc_once(command: Sequence[str], root: Path, progress: console.Progress) -> tuple[int, Sequence[str]]:
    """Run DVC; its exit code, and the last lines that are no bars."""
    environment = os.environ | {"DVC_NO_ANALYTICS": "1", "DVC_IGNORE_ISATTY": "1"}  # bars also into a pipe
    lines, rest = deque[str](maxlen=TAIL_LINES), ""
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0
    )
    try:
        assert process.stderr is not None
        with process.stderr as stderr:
            while True:
                if not select.select([stderr], [], [], LISTEN_S)[0]:
                    progress.advance(0)
                elif data := stderr.read(1 << 16):
                    *said, rest = re.split(r"[\r\n]", rest + data.decode(errors="replace"))
                    lines += _without_bars(said, progress)
                else:
                    break
        lines += _without_bars([rest], progress)
        return process.wait(), lines
    finally:  # also when this one is interrupted
        process.kill()
        process.wait()


def _without_bars(said: Iterable[str], progress: console.Progress) -> list[str]:
    """Lines in words; what the bars among them count goes into ours."""
    lines = []
    for text in (ANSI.sub("", raw).strip() for raw in said):
        bar = TRANSFER_BAR.search(text)
        if bar is not None:
            done, progress.total = (
                round(float(number) * SCALE[unit]) for number, unit in (bar.group(1, 2), bar.group(3, 4))
            )
            progress.advance(done - progress.done)
        elif text and not BAR.search(text):
            lines.append(text)
    return lines


def transferred_text(done: Transferred) -> str:
    """The figures, then what is wrong."""
    rows = [
        ("remote", done.remote or "the default one"),
        ("objects", f"{done.num_objects:,}, {console.human_bytes(done.num_bytes)}"),
        ("read", console.human_bytes(done.num_read_bytes)),
        ("wrong", f"{len(done.problems):,}" if done.problems else "nothing"),
    ]
    if done.num_attempts > 1:
        rows.insert(3, ("attempts", f"{done.num_attempts}"))
    return "\n\n".join([console.table(rows), *(f"problem: {problem}" for problem in done.problems)])
