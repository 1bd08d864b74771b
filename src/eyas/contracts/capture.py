"""Records of the capture: identity, plan, shards, manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.canonical import ADDED_LATER, digest, to_plain
from eyas.contracts.data import BYTES_PER_STATE, SCHEMA_VERSION, FinalHidden, LastRows, Split, StoredPart


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureIdentity:
    """Everything that decides the bytes of the hidden states; its digest names them."""

    target: str
    tokens: str
    """SHA-256 of the token dataset, as ``target`` is the digest of the target identity."""
    boundaries: tuple[int, ...]
    final_hidden: FinalHidden
    dtype: Literal["bfloat16"]
    codec: str
    engine: str
    engine_version: str
    engine_options: dict[str, Any]
    """Only options that touch numerics."""
    image: str
    shard_bytes: int
    batch_tokens: int
    revision: int
    last_rows: LastRows = "all"
    """``trained``: only rows that a training can read are stored (``eyas.rows``)."""
    stored: StoredPart = field(default="all", metadata=ADDED_LATER)
    """``judging``: samples that an evaluation reads; those of the training are streamed (``train.source``)."""

    @property
    def digest(self) -> str:
        """SHA-256 of the identity."""
        return digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """A sample's place in a shard."""

    sample_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    """One shard file: its samples in stored order, cut into the batches the engine runs."""

    path: str
    """Below the states folder: ``000/shard-00000.safetensors``, at most 64 per folder."""
    payload_bytes: int
    batches: tuple[tuple[PlannedSample, ...], ...]

    @property
    def samples(self) -> tuple[PlannedSample, ...]:
        """All samples in stored order."""
        return tuple(sample for batch in self.batches for sample in batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """``data/plan.json``: which samples go where, how large it becomes, under which identity."""

    identity: str
    capture: CaptureIdentity
    hidden_size: int
    num_streams: int
    num_samples: int
    num_tokens: int
    payload_bytes: int
    """Bytes of hidden states before the codec: tokens x streams x hidden x 2."""
    trained_payload_bytes: int
    """The same when only the rows that a training can read are stored."""
    token_bytes: int
    """Ids and masks that travel along: tokens x 5."""
    shards: tuple[PlannedShard, ...]
    schema_version: int = SCHEMA_VERSION


def payload_bytes(num_tokens: int, hidden_size: int, num_streams: int) -> int:
    """Bytes of bf16 hidden states before any codec."""
    return num_tokens * num_streams * hidden_size * BYTES_PER_STATE


BLOCK_BYTES = 4096
RING_SPARE_BYTES = 64 << 10
"""Of a ring's size, for its folders and a record in the making."""


def ring_disk_bytes(size_bytes: int) -> int:
    """What a shard of so many bytes takes in a ring on a volume of usual blocks, its record included."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A sample as its shard's header lists it, so that a shard is usable alone."""

    sample_id: str
    num_tokens: int
    conversation_id: str
    source: str
    split: Split
    variant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One published shard."""

    path: str
    size_bytes: int
    md5: str
    """Of the whole file, computed while writing; DVC's hash."""
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSample:
    """A planned sample that is not stored, and why."""

    sample_id: str
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself."""

    name: str
    version: str
    options: dict[str, Any]
    deterministic: bool
    """Equal inputs on the same machine type give equal bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """``data/hidden_states.json``, published last: readers trust nothing that it does not list."""

    identity: str
    capture: CaptureIdentity
    engine: EngineFacts
    hidden_size: int
    num_planned_samples: int
    num_planned_tokens: int
    num_stored_samples: int
    num_stored_tokens: int
    stored_bytes: int
    shards: tuple[ShardEntry, ...]
    failed: tuple[FailedSample, ...] = ()
    calibration: str = ""
    """SHA-256 of the channel scales of a lossy codec; empty for a lossless one."""
    schema_version: int = 2

    @property
    def capture_digest(self) -> str:
        """Digest of the capture as this schema version spells it: version 1 had no ``last_rows``."""
        plain = to_plain(self.capture)
        if self.schema_version == 1:
            del plain["last_rows"]
        return digest(plain)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Aux boundaries in stored order."""
        return self.capture.boundaries
