"""Free space while a capture runs: stop before the reserve is touched, whoever fills the disk.

In flight are one shard in the making, whose size is expected, and those with the writers, whose sizes are known to
the byte from their first one on. The maker looks before each batch, so that no forward is spent on states that cannot
be stored; a writer looks before its first byte and every few MiB after it, and that look is what keeps the reserve.
What stops is the run, by an error: a half-written shard vanishes, finished ones stay, the same command goes on.
"""

from __future__ import annotations

import math
from pathlib import Path

from eyas import fs
from eyas.contracts import BYTES_PER_MASK, BYTES_PER_TOKEN_ID, PlannedShard
from eyas.errors import DiskError
from eyas.plan.budget import HEADER_BYTES_PER_SAMPLE, HEADER_BYTES_PER_SHARD

SPARE_BYTES = 8192
"""A file's last block, the folder's, and the journal's line."""


class Watch:
    """Guards the reserve of one volume.

    Used by the maker and by the writers; a shard's figure is set by the maker when it hands the shard over, and by its
    writer alone from then on.

    Args:
        folder: Any on the volume.
        reserve_bytes: Must stay free.
        ratio: Expected bytes of a shard's states by its payload (``Budget.payload_ratio``).
    """

    def __init__(self, folder: Path, reserve_bytes: int, ratio: float) -> None:
        self.folder, self.reserve_bytes, self.ratio = folder, reserve_bytes, ratio
        self._left_bytes: dict[str, int] = {}

    @property
    def writing_bytes(self) -> int:
        """Still to be written of the shards that are with the writers."""
        return sum(list(self._left_bytes.values()))

    def expected_bytes(self, shard: PlannedShard) -> int:
        """Bytes that a planned shard will probably take, an allowance for its headers included."""
        samples = shard.samples
        ids_bytes = sum(sample.num_tokens for sample in samples) * (BYTES_PER_TOKEN_ID + BYTES_PER_MASK)
        headers = HEADER_BYTES_PER_SAMPLE * len(samples) + HEADER_BYTES_PER_SHARD
        return math.ceil(shard.payload_bytes * self.ratio) + ids_bytes + headers

    def has_room(self, shard: PlannedShard) -> bool:
        """Whether the shard in the making fits beside those that are still being written."""
        return self.expected_bytes(shard) + self.writing_bytes <= fs.free_bytes(self.folder) - self.reserve_bytes

    def check(self, shard: PlannedShard) -> None:
        """Stop the maker when its shard would not fit.

        Raises:
            DiskError: It would not; needed, free and reserve are named.
        """
        if not self.has_room(shard):
            raise self._full(f"{shard.path} needs", self.expected_bytes(shard) + self.writing_bytes)

    def hand_over(self, shard: PlannedShard) -> None:
        """The shard goes to a writer, which has not said its exact size yet."""
        self._left_bytes[shard.path] = self.expected_bytes(shard)

    def write(self, path: str, num_left_bytes: int) -> None:
        """A writer is about to write what is left of its shard.

        Raises:
            DiskError: That, and what the other writers still need, would touch the reserve.
        """
        self._left_bytes[path] = num_left_bytes
        needed_bytes = self.writing_bytes
        if needed_bytes + SPARE_BYTES > fs.free_bytes(self.folder) - self.reserve_bytes:
            raise self._full("shards that are being written still need", needed_bytes)

    def written(self, path: str) -> None:
        """The shard lies there."""
        self._left_bytes.pop(path, None)

    def _full(self, what: str, needed_bytes: int) -> DiskError:
        return DiskError(
            f"{what} {needed_bytes:,} bytes; {fs.free_bytes(self.folder):,} bytes are free and "
            f"extract.reserve_bytes keeps {self.reserve_bytes:,} of them",
            f"free space (`make budget` says how; `df -h {self.folder}` shows the volume), then run the same command "
            "again: it goes on from here",
        )
