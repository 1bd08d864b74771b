"""A training whose states are captured while it goes on: what the ring must hold, and what was done in the end.

tokens + the stored part's manifest → plan of the whole set → pinned samples, size of the ring → reader and feed
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.batches.capturing import Launch
from eyas.batches.demand import Demand
from eyas.batches.feed import Feed
from eyas.batches.loader import order_of
from eyas.batches.order import BatchOrder, Cursor
from eyas.batches.split import split_samples
from eyas.batches.stream import StoppedError, StreamReader
from eyas.config.schema import TrainConfig
from eyas.contracts import CapturePlan, ShardManifest, StoredSample, payload_bytes
from eyas.errors import ConfigError, DiskError, EyasError, TrainError
from eyas.plan.budget import HEADER_BYTES_PER_SAMPLE, HEADER_BYTES_PER_SHARD
from eyas.plan.build import streamed_plan
from eyas.shards.handover import HOME, LOCK_NAME
from eyas.shards.ring import SPARE_BYTES, Ring, shard_disk_bytes
from eyas.tokens.dataset import read_index, read_lengths, read_names
from eyas.tokens.part import calibration_samples
from eyas.train.distributed import World

RING_BYTES = "EYAS_RING_BYTES"
RING_LOCK = "ring.lock"
SPREAD = 1.1
"""A single shard may be that much larger than the stored part's average foretells."""
WINDOWS = 2
"""Of which a ring of the usual size holds so many: one is read while the next is captured."""
PATIENCE_S = 60.0
"""For a capturing process whose training was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNeed:
    """Bytes of a ring."""

    pinned_bytes: int
    window_bytes: int
    """The shards that one step and those around it need at once."""
    set_bytes: int
    """Every shard that is trained on: such a ring captures once."""

    @property
    def least_bytes(self) -> int:
        """Less does not train."""
        return self.pinned_bytes + self.window_bytes + SPARE_BYTES

    @property
    def usual_bytes(self) -> int:
        """What is taken when nobody says: reading and capturing overlap."""
        return self.pinned_bytes + min(WINDOWS * self.window_bytes, self.set_bytes) + SPARE_BYTES


@dataclass(frozen=True, slots=True)
class StreamedSet:
    """What a stream is made of."""

    plan: CapturePlan
    samples: Sequence[StoredSample]
    pinned: dict[str, frozenset[str]]
    need: RingNeed


def streamed_set(tokens: Path, manifest: ShardManifest, settings: TrainConfig) -> StreamedSet:
    """Plan, samples, pinned samples and the room they take.

    Args:
        tokens: The token dataset.
        manifest: Of the stored part.
        settings: ``train`` section.

    Raises:
        TrainError: The stored part is of other tokens, or it is no part but the whole set.
    """
    if manifest.capture.stored != "judging":
        raise TrainError(
            "train.source is stream, the stored states are those of a whole set",
            "`make plan` and `make extract` store what an evaluation reads; or set train.source to store",
        )
    found = read_index(tokens).tokens_sha256
    if found != manifest.capture.tokens:
        raise TrainError(
            f"{tokens} is {found[:16]}, the stored states are of tokens {manifest.capture.tokens[:16]}",
            "`dvc repro train` makes what is out of date first",
        )
    plan = streamed_plan(manifest.capture, read_lengths(tokens), manifest.hidden_size)
    samples = read_names(tokens)
    shard_of = {sample.sample_id: shard.path for shard in plan.shards for sample in shard.samples}
    ordered = {sample.sample_id: sample for sample in samples}
    in_plan = [ordered[sample_id] for sample_id in shard_of]
    training, validation = split_samples(in_plan, settings.validation_share, settings.seed)
    kept = calibration_samples(tokens, samples) | {sample.sample_id for sample in validation}
    pinned: dict[str, set[str]] = {}
    for sample_id in sorted(kept):
        pinned.setdefault(shard_of[sample_id], set()).add(sample_id)
    size = _size_of(manifest)
    lengths = {sample.sample_id: sample.num_tokens for sample in in_plan}
    sizes = {
        shard.path: size(len(shard.samples), sum(sample.num_tokens for sample in shard.samples))
        for shard in plan.shards
    }
    order = order_of(_Places(shard_of), training, settings.batch_tokens, settings.seed, settings.shuffle_shards)  # type: ignore[arg-type]
    demand = Demand(order, Cursor())
    need = RingNeed(
        pinned_bytes=sum(size(len(some), sum(lengths[name] for name in some)) for some in pinned.values()),
        window_bytes=demand.peak_bytes(sizes, settings.packs_per_step, settings.num_steps * settings.packs_per_step),
        set_bytes=sum(sizes[path] for path in demand.uses(0)),
    )
    return StreamedSet(plan, in_plan, {path: frozenset(some) for path, some in pinned.items()}, need)


@dataclass(frozen=True, slots=True)
class _Places:
    """As much of a reader as an order asks for."""

    shards: dict[str, str]

    def shard_of(self, sample_id: str) -> str:
        return self.shards[sample_id]


def _size_of(manifest: ShardManifest) -> Any:
    """Expected bytes of a shard by its samples and tokens, from what the stored part's tokens take."""
    D, streams = manifest.hidden_size, len(manifest.boundaries) + 1
    payload = payload_bytes(manifest.num_stored_tokens, D, streams)
    ratio = min(manifest.stored_bytes / payload * SPREAD, 1.0)

    def size(num_samples: int, num_tokens: int) -> int:
        headers = HEADER_BYTES_PER_SHARD + HEADER_BYTES_PER_SAMPLE * num_samples
        return shard_disk_bytes(math.ceil(payload_bytes(num_tokens, D, streams) * ratio) + headers)

    return size


def ring_bytes(need: RingNeed, room_bytes: int) -> int:
    """Size of the ring: ``EYAS_RING_BYTES``, or the usual one as far as there is room.

    Args:
        need: Of the set.
        room_bytes: Free above the reserve, what lies in the ring included.

    Raises:
        ConfigError: The wanted size is none, or too small for this set.
        DiskError: The volume has no room for it.
    """
    said = os.environ.get(RING_BYTES)
    size = config.knob(RING_BYTES, max(1, min(need.usual_bytes, max(room_bytes, need.least_bytes))))
    shown = console.human_bytes
    if size < need.least_bytes:
        raise ConfigError(
            f"{RING_BYTES}: {said}, expected {need.least_bytes} or more: {shown(need.pinned_bytes)} for calibration and "
            f"validation and {shown(need.window_bytes)} for the shards that are shuffled together",
            "a smaller train.shuffle_shards or extract.shard_bytes needs less (both decide the result)",
        )
    if size > room_bytes:
        raise DiskError(
            f"the ring takes {shown(size)}, the volume has {shown(max(room_bytes, 0))} above extract.reserve_bytes",
            f"free space (`make budget` says how), or set {RING_BYTES} to {need.least_bytes} or more",
        )
    return size


@contextlib.contextmanager
def open_stream(
    streamed: StreamedSet, command: Sequence[str], world: World, home: Path = HOME
) -> Iterator[StreamReader]:
    """The reader of a streamed set; in the first process it is fed.

    Args:
        streamed: Plan, samples, pinned samples.
        command: Starts the capturing process; the ring's folder is added.
        world: The processes of the training.
        home: Working folder: lock and ring.

    Raises:
        EyasError: Another capture holds the volume's lock.
        StoreError: The ring holds states of another capture.
        ConfigError, DiskError: The ring is too small, or does not fit.
    """
    plan, reserve_bytes = streamed.plan, config.load().extract.reserve_bytes  # decides nothing
    ring = Ring(home, plan.identity)
    with contextlib.ExitStack() as held:

        def feed() -> Feed:
            held.enter_context(fs.volume_lock(home / LOCK_NAME, f"streamed training of {plan.identity[:16]}"))
            lock = held.enter_context(_when_free(home / RING_LOCK))
            there = sum(p.stat().st_size for p in ring.folder.rglob("*") if p.is_file()) if ring.folder.is_dir() else 0
            size = ring_bytes(streamed.need, fs.free_bytes(home) - reserve_bytes + there)
            console.log(
                f"stream: a ring of {console.human_bytes(size)} in {ring.folder}; "
                f"{console.human_bytes(streamed.need.least_bytes)} are needed at once"
            )
            one = Feed(ring, plan, Launch([*command, str(ring.folder)], lock), size, streamed.pinned)
            one.start()
            return one

        own: list[Feed] = []
        world.on_first(lambda: own.append(feed()))
        reader = StreamReader(ring, plan, streamed.samples, streamed.pinned, own[0] if own else None)
        held.callback(reader.end)
        yield reader


@contextlib.contextmanager
def following(
    stream: StreamReader | None,
    order: BatchOrder,
    start: Cursor,
    packs_per_step: int,
    num_steps: int,
    is_stopping: Callable[[], bool] | None,
    save: Callable[[], None],
) -> Iterator[None]:
    """Around the steps: a stream captures what they need, and ends before the threads that wait for it are awaited.

    Args:
        stream: None leaves everything as it is.
        order: Of the batches.
        start: Where they go on.
        packs_per_step: Batches of a step.
        num_steps: Left to do.
        is_stopping: Whether a signal came; None where a wait must not end by it, as all processes stop together.
        save: Saves the state between two steps, and ends the run: a signal came while states were awaited.
    """
    if stream is None:
        yield
        return
    if is_stopping is not None:
        stream.is_stopping = is_stopping
    stream.follow(order, start, packs_per_step, num_steps)
    try:
        yield
    except StoppedError:
        if is_stopping is not None and is_stopping():
            save()
        raise
    finally:
        stream.end()


@contextlib.contextmanager
def _when_free(path: Path) -> Iterator[int]:
    """The ring's lock; a capturing process whose training was killed holds it for some seconds more."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(fs.volume_lock(path, "ring"))
            except EyasError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)
                continue
            yield lock
            return


def stream_facts(reader: StreamReader) -> dict[str, Any]:
    """What the feed did, for the run record."""
    feed = reader.feed
    if feed is None:
        return {}
    return {
        "peak_bytes": feed.peak_bytes,
        "ring_bytes": feed.ring_bytes,
        "num_captured_tokens": feed.num_captured_tokens,
        "capture_s": round(feed.capture_s, 3),
        "wait_s": round(reader.wait_s, 3),
        "epochs": [dataclasses.asdict(account) for account in feed.accounts],
    }
