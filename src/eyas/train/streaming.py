"""A training whose states are captured while it goes on: how large its ring is, who fills it, what was done.

tokens + the stored part's manifest → plan of the whole set → pinned samples, size of the ring → reader and feed
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.batches.capturing import Launch
from eyas.batches.feed import Feed
from eyas.batches.order import BatchOrder, Cursor
from eyas.batches.stream import StoppedError, StreamReader
from eyas.batches.streamed_set import RING_BYTES, RingNeed, StreamedSet
from eyas.errors import ConfigError, DiskError, EyasError
from eyas.shards.handover import HOME, LOCK_NAME, RING_LOCK
from eyas.shards.ring import Ring
from eyas.train.distributed import World

PATIENCE_S = 60.0
"""For a capturing process whose training was killed."""


def ring_bytes(need: RingNeed, free_bytes: int, token_bytes: int) -> int:
    """Size of the ring: ``EYAS_RING_BYTES``, or the usual one as far as there is room.

    Args:
        need: Of the set.
        free_bytes: Above the reserve, what lies in the ring included.
        token_bytes: Of ids and masks, which the capturing process has in a file beside it.

    Raises:
        ConfigError: The wanted size is none, or too small for this set.
        DiskError: The volume has no room for it.
    """
    said, room_bytes = os.environ.get(RING_BYTES), free_bytes - token_bytes
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
            f"the ring takes {shown(size)} and the ids of its tokens {shown(token_bytes)}, the volume has "
            f"{shown(max(free_bytes, 0))} above extract.reserve_bytes",
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
            size = ring_bytes(streamed.need, fs.free_bytes(home) - reserve_bytes + there, plan.token_bytes)
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
