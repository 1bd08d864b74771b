"""What a streamed training reads, and the room that it needs: arithmetic over tokens and order, no state is read.

tokens + capture of the stored part → plan of the whole set → order → pinned samples, bytes of the ring
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.batches.demand import Demand
from eyas.batches.loader import order_of
from eyas.batches.order import Cursor
from eyas.batches.split import split_samples
from eyas.config.schema import TrainConfig
from eyas.contracts import (
    RING_SPARE_BYTES,
    CaptureIdentity,
    CapturePlan,
    ShardManifest,
    StoredSample,
    payload_bytes,
    ring_disk_bytes,
)
from eyas.errors import TrainError
from eyas.plan.budget import HEADER_BYTES_PER_SAMPLE, HEADER_BYTES_PER_SHARD
from eyas.plan.build import streamed_plan
from eyas.tokens.dataset import read_index, read_lengths, read_names
from eyas.tokens.part import calibration_samples

SPREAD = 1.1
"""A single shard may be that much larger than the stored part's average foretells."""
WINDOWS = 2
"""Of which a ring of the usual size holds so many: one is read while the next is captured."""


RING_BYTES = "EYAS_RING_BYTES"
"""Most that the ring of a streamed training takes on the disk."""


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
        return self.pinned_bytes + self.window_bytes + RING_SPARE_BYTES

    @property
    def usual_bytes(self) -> int:
        """What is taken when nobody says: reading and capturing overlap."""
        return self.pinned_bytes + min(WINDOWS * self.window_bytes, self.set_bytes) + RING_SPARE_BYTES


@dataclass(frozen=True, slots=True)
class StreamedSet:
    """What a stream is made of."""

    plan: CapturePlan
    samples: Sequence[StoredSample]
    pinned: dict[str, frozenset[str]]
    need: RingNeed
    packs_per_epoch: int


def streamed_set(
    tokens: Path, capture: CaptureIdentity, hidden_size: int, settings: TrainConfig, ratio: float
) -> StreamedSet:
    """Plan, samples, pinned samples and the room they take.

    Args:
        tokens: The token dataset.
        capture: Of the stored part.
        hidden_size: D of the target.
        settings: ``train`` section.
        ratio: Expected bytes of stored states by those of every row in bf16.

    Raises:
        TrainError: The stored part is of other tokens, or it is no part but the whole set.
    """
    if capture.stored != "judging":
        raise TrainError(
            "train.source is stream, the stored states are those of a whole set",
            "`make plan` and `make extract` store what an evaluation reads; or set train.source to store",
        )
    found = read_index(tokens).tokens_sha256
    if found != capture.tokens:
        raise TrainError(
            f"{tokens} is {found[:16]}, the stored states are of tokens {capture.tokens[:16]}",
            "`dvc repro train` makes what is out of date first",
        )
    plan = streamed_plan(capture, read_lengths(tokens), hidden_size)
    samples = read_names(tokens)
    shard_of = {sample.sample_id: shard.path for shard in plan.shards for sample in shard.samples}
    ordered = {sample.sample_id: sample for sample in samples}
    in_plan = [ordered[sample_id] for sample_id in shard_of]
    training, validation = split_samples(in_plan, settings.validation_share, settings.seed)
    kept = calibration_samples(tokens, samples) | {sample.sample_id for sample in validation}
    pinned: dict[str, set[str]] = {}
    for sample_id in sorted(kept):
        pinned.setdefault(shard_of[sample_id], set()).add(sample_id)
    size = _size_of(len(capture.boundaries) + 1, hidden_size, ratio)
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
    members = {path: frozenset(some) for path, some in pinned.items()}
    return StreamedSet(plan, in_plan, members, need, len(order.epoch(0)))


@dataclass(frozen=True, slots=True)
class _Places:
    """As much of a reader as an order asks for."""

    shards: dict[str, str]

    def shard_of(self, sample_id: str) -> str:
        return self.shards[sample_id]


def _size_of(num_streams: int, hidden_size: int, ratio: float) -> Callable[[int, int], int]:
    """Expected bytes in a ring of a shard by its samples and tokens."""

    def size(num_samples: int, num_tokens: int) -> int:
        headers = HEADER_BYTES_PER_SHARD + HEADER_BYTES_PER_SAMPLE * num_samples
        states = math.ceil(payload_bytes(num_tokens, hidden_size, num_streams) * min(ratio * SPREAD, 1.0))
        return ring_disk_bytes(states + headers)

    return size


def stored_ratio(manifest: ShardManifest) -> float:
    """Bytes of a stored part by those of every row of it in bf16."""
    num_streams = len(manifest.boundaries) + 1
    return manifest.stored_bytes / payload_bytes(manifest.num_stored_tokens, manifest.hidden_size, num_streams)
