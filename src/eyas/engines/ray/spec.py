"""What driver and workers say to each other. Plain records: a worker's process may be on another machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.contracts import CaptureIdentity, EngineFacts, TokenSample
from eyas.engines.registry import EngineSpec

if TYPE_CHECKING:  # a worker reads its spec before its environment stands, and torch looks at that once
    from eyas.shards.writer import FinishedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker is told when it starts."""

    name: str
    engine: EngineSpec
    probe: tuple[TokenSample, ...]
    """Captured and judged before anything is captured for keeps; empty for engines that need it not."""
    capture: CaptureIdentity
    hidden_size: int
    longest_tokens: int
    root: Path
    """The driver's working folder; a worker that has it works there."""
    incoming: Path
    """Of this worker alone, on the volume that driver and workers share."""
    proof: str
    """Content of ``incoming / PROOF``: the worker sees the driver's volume."""
    reserve_bytes: int
    payload_ratio: float
    """Expected bytes of a shard by its payload."""
    max_failed_samples: int
    environment: dict[str, str]


PROOF = "volume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker whose engine is open."""

    host: str
    pid: int
    kernel: str
    """Names the running kernel: two that share it share their page cache."""
    code: str
    """Digest of the eyas that runs there."""
    is_copying: bool
    """Shards are written on the node's own disk first."""
    devices: str
    facts: EngineFacts
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What happened with a worker since it was asked before."""

    ready: Ready | None = None
    begun: tuple[str, ...] = ()
    finished: tuple[FinishedShard, ...] = ()
    num_tokens: int = 0
    error: Exception | None = None
    """It ended by this; nothing more comes."""
    idle_s: float = 0.0
    """Since anything was begun, captured or written, while there is work."""
    num_held: int = 0
    """Shards that it was handed and has not finished."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker whose process or node is gone, or that does not answer."""

    reason: str
    is_node_gone: bool = False
    """All of it is: that says nothing of the worker."""
