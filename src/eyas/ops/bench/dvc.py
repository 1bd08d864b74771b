"""What DVC costs on top of an extraction, measured with the real dvc: bytes read back, disk at its peak, a no-op.

Shards of random bytes stand in for states: DVC never looks inside. What is counted:

* bytes read and written: ``read_bytes`` and ``write_bytes`` of ``/proc/self/io`` over the commit's process tree, that is
  what came from the disk and what goes there. The shards are put out of the page cache before; programs are warm, so
  that imports do not count. The run without the handover, over the same files, shows that reading would be seen.
* disk: the blocks of all files below the folder, every inode once, asked again and again while states are published,
  handed over, committed and settled.
* no-op: the wall time of what ``make extract`` runs, over 80,000 shards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from eyas import fs
from eyas.contracts import CaptureIdentity, CapturePlan, EngineFacts, PlannedShard, ShardEntry, ShardManifest
from eyas.errors import EyasError
from eyas.ops.published import MANIFEST, OUTS, PLAN, STATES
from eyas.plan.cache import SITE_CACHE, hashes, locked_stage, object_finder, read_yaml
from eyas.shards.handover import HOME, hand_over, settle
from eyas.shards.spool import Spool

NUM_SHARDS = 32
NOOP_FILES, NOOP_BYTES = 80_000, 1024
FILES_PER_FOLDER = 64
POLL_S = 0.05


def measure(folder: Path, num_bytes: int, noop_files: int = NOOP_FILES) -> dict[str, float]:
    """Measure in new repositories below ``folder``; to be run from the root of the repository.

    Args:
        folder: On the file system in question; what is made there is removed.
        num_bytes: Of all shards together; 1 GB and more makes what DVC reads besides negligible.
        noop_files: Shards of the set that is looked at without anything to do.

    Returns:
        ``commit_read_fraction`` and ``commit_read_fraction_without_handover``: bytes read by the commit per shard
        byte; ``commit_write_fraction``: bytes it wrote; ``disk_peak_ratio``: most bytes on the disk per shard byte; ``noop_seconds_80k``.

    Raises:
        EyasError: A command failed, or the no-op was none.
    """
    with _repository(folder / "with") as root, _repository(folder / "without") as other:
        spool, manifest = _fill(root, NUM_SHARDS, num_bytes // NUM_SHARDS)
        with _disk_peak(root) as peak:
            spool.publish(manifest, root / STATES, root / MANIFEST)
            hand_over(root, manifest, root / STATES, root / MANIFEST)
            read_bytes, written_bytes = _commit(root)
            _settle(root)
        states = Spool(other / HOME, manifest.capture).states
        states.parent.mkdir(parents=True)
        (root / STATES).rename(states)
        Spool(other / HOME, manifest.capture).publish(manifest, other / STATES, other / MANIFEST)
        _write_plan(other, manifest)
        read_bytes_without, _ = _commit(other)
    return {
        "commit_read_fraction": read_bytes / manifest.stored_bytes,
        "commit_read_fraction_without_handover": read_bytes_without / manifest.stored_bytes,
        "commit_write_fraction": written_bytes / manifest.stored_bytes,
        "disk_peak_ratio": max(peak) / manifest.stored_bytes,
        "noop_seconds_80k": noop_seconds(folder / "noop", noop_files),
    }


def noop_seconds(folder: Path, num_files: int) -> float:
    """Wall seconds of ``make extract``'s command over a finished set of ``num_files`` shards.

    Raises:
        EyasError: A command failed, or DVC ran the stage.
    """
    with _repository(folder) as root:
        spool, manifest = _fill(root, num_files, NOOP_BYTES)
        spool.publish(manifest, root / STATES, root / MANIFEST)
        hand_over(root, manifest, root / STATES, root / MANIFEST)
        _commit(root)
        _guard(root)  # the first look asks DVC and notes its answer
        start_s = time.perf_counter()
        said = _guard(root)
        seconds = time.perf_counter() - start_s
        if "up to date" not in said or "Running stage" in said:
            raise EyasError(f"the no-op was none: {said}", "report it")
    return seconds


def _guard(root: Path) -> str:
    return _run(root, sys.executable, "-m", "eyas.cli", "guard", "dvc", "repro", "extract")


def _run(root: Path, *command: str) -> str:
    programs = os.pathsep.join((os.fspath(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {name: value for name, value in os.environ.items() if name != "DVC_SITE_CACHE_DIR"}
    environment |= {"PATH": programs, "PYTHONPATH": os.fspath(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EyasError(f"{' '.join(command)} ended with {done.returncode} in {root}: {done.stderr.strip()[-2000:]}")
    return done.stdout + done.stderr


@contextlib.contextmanager
def _repository(folder: Path) -> Iterator[Path]:
    """A DVC repository with the pipeline's own ``plan`` and ``extract``, removed at the end."""
    from ruamel.yaml import YAML

    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("data", "models", ".dvc"):
        (folder / name).mkdir(parents=True)
    try:
        stages = read_yaml(Path("dvc.yaml"))["stages"]
        with (folder / "dvc.yaml").open("w") as handle:
            YAML().dump({"stages": {name: stages[name] for name in ("plan", "extract")}}, handle)
        for name in ("params.yaml", ".dvcignore", ".dvc/config"):
            shutil.copy(name, folder / name)
        local = f"[core]\n    no_scm = true\n    site_cache_dir = {folder / SITE_CACHE}\n"
        (folder / ".dvc/config.local").write_text(local)
        for name in ("models/target.json", "data/tokens"):
            (folder / name).write_text("{}\n")
        _run(folder, sys.executable, "-m", "dvc", "status", "-q", "--json")  # warm: imports come from memory now
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(root: Path, num_shards: int, shard_bytes: int) -> tuple[Spool, ShardManifest]:
    """Shards in the spool, as a finished extraction leaves them there, out of the page cache."""
    capture = CaptureIdentity(
        target="", tokens="", boundaries=(1,), final_hidden="post_norm", dtype="bfloat16", codec="raw", engine="none",
        engine_version="", engine_options={}, image="", shard_bytes=shard_bytes, batch_tokens=1, revision=1,
    )  # fmt: skip
    spool = Spool(root / HOME, capture)
    spool.prepare()
    entries = tuple(_shard(spool.states, index, shard_bytes) for index in range(num_shards))
    manifest = ShardManifest(
        identity=capture.digest, capture=capture, hidden_size=1, shards=entries, stored_bytes=num_shards * shard_bytes,
        engine=EngineFacts(name="none", version="", options={}, deterministic=True),
        num_planned_samples=num_shards, num_planned_tokens=num_shards,
        num_stored_samples=num_shards, num_stored_tokens=num_shards,
    )  # fmt: skip
    _write_plan(root, manifest)
    return spool, manifest


def _shard(states: Path, index: int, num_bytes: int) -> ShardEntry:
    import hashlib

    path = f"{index // FILES_PER_FOLDER:03d}/shard-{index:05d}.safetensors"
    (states / path).parent.mkdir(parents=True, exist_ok=True)
    md5 = hashlib.md5(usedforsecurity=False)
    with (states / path).open("wb") as handle:
        for start in range(0, num_bytes, fs.CHUNK_BYTES):
            data = os.urandom(min(fs.CHUNK_BYTES, num_bytes - start))
            md5.update(data)
            handle.write(data)
        if num_bytes > fs.CHUNK_BYTES:
            handle.flush()
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return ShardEntry(path=path, size_bytes=num_bytes, md5=md5.hexdigest(), num_samples=1, num_tokens=1)


def _write_plan(root: Path, manifest: ShardManifest) -> None:
    shards = tuple(
        PlannedShard(path=entry.path, payload_bytes=entry.size_bytes, batches=()) for entry in manifest.shards
    )
    plan = CapturePlan(
        identity=manifest.identity, capture=manifest.capture, hidden_size=1, num_streams=2,
        num_samples=manifest.num_planned_samples, num_tokens=manifest.num_planned_tokens,
        payload_bytes=manifest.stored_bytes, trained_payload_bytes=0, token_bytes=0, shards=shards,
    )  # fmt: skip
    fs.write_record(root / PLAN, plan)


def _commit(root: Path) -> tuple[int, int]:
    """Commit plan and states; gives the bytes that came from the disk for it and those that go there."""
    before = _disk_traffic()
    _run(root, sys.executable, "-m", "dvc", "commit", "-q", "-f", "plan", "extract")
    read_bytes, written_bytes = (now - then for now, then in zip(_disk_traffic(), before, strict=True))
    return read_bytes, written_bytes


def _disk_traffic() -> tuple[int, int]:
    """Bytes that this process and its ended children fetched from disks and gave them to write."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def _settle(root: Path) -> None:
    locked = hashes(locked_stage(root, "extract"), "outs")
    if not settle(root / HOME, locked, OUTS, object_finder(root)):
        raise EyasError(f"DVC does not hold what was committed in {root}", "report it")


@contextlib.contextmanager
def _disk_peak(root: Path) -> Iterator[list[int]]:
    """Sizes of the tree while the block runs, from a thread."""
    sizes, ended = [_disk_bytes(root)], threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_S):
            sizes.append(_disk_bytes(root))

    thread = threading.Thread(target=poll, name="disk-peak")
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()
        sizes.append(_disk_bytes(root))


def _disk_bytes(root: Path) -> int:
    """Bytes in blocks of all files below a folder, an inode with several names once."""
    blocks: dict[int, int] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                stat = (Path(folder) / name).lstat()
                blocks[stat.st_ino] = stat.st_blocks * 512
    return sum(blocks.values())
