"""Does a capture fit the disk? Pure arithmetic over a plan, before any engine starts.

Every byte counts as it will lie on the volume: hidden states after the codec, ids and masks, and an
allowance for headers. With DVC's cache types ``copy`` and ``symlink`` the disk is needed twice while
the shards are committed. ``make budget`` and the gate of ``extract`` ask the same ``Budget``; what would
close a gap is the same ``Budget`` with one thing changed (``eyas.plan.remedies``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from eyas import console
from eyas.contracts import BYTES_PER_MASK, BYTES_PER_TOKEN_ID, CapturePlan, LastRows
from eyas.errors import StoreError

HEADER_BYTES_PER_SAMPLE = 1024
"""Allowance for a sample's entries in its shard's header and in the manifest."""
HEADER_BYTES_PER_SHARD = 4096
SPARE_FILES = 1024
"""Allowance for folders, the cache's fan-out of 256 among them, journals and locks."""
CODEC_RATIO = {"raw": 1.0, "blosc2": 0.69, "int8": 0.5156}
"""Stored bytes by bytes of bf16. Of ``blosc2`` it is an expectation (measured on SmolLM2: 0.688; the entropy floor
is 0.65), which a run watches while it writes; the other two are arithmetic."""
HARDLINK_FIX = "dvc config cache.type hardlink,reflink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What of a plan decides its bytes."""

    num_samples: int
    num_tokens: int
    num_shards: int
    payload_bytes: int
    """Every row of every stream, before the codec."""
    trained_payload_bytes: int
    token_bytes: int
    codec: str
    last_rows: LastRows

    @classmethod
    def of(cls, plan: CapturePlan) -> Need:
        """The figures of a plan."""
        return cls(
            num_samples=plan.num_samples,
            num_tokens=plan.num_tokens,
            num_shards=len(plan.shards),
            payload_bytes=plan.payload_bytes,
            trained_payload_bytes=plan.trained_payload_bytes,
            token_bytes=plan.token_bytes,
            codec=plan.capture.codec,
            last_rows=plan.capture.last_rows,
        )

    @property
    def rows_payload_bytes(self) -> int:
        """The rows that are stored, before the codec."""
        return self.trained_payload_bytes if self.last_rows == "trained" else self.payload_bytes

    @property
    def overhead_bytes(self) -> int:
        """What lies beside the states: ids, masks and an allowance for headers."""
        headers = self.num_samples * HEADER_BYTES_PER_SAMPLE + self.num_shards * HEADER_BYTES_PER_SHARD
        return self.token_bytes + headers


@dataclass(frozen=True, slots=True)
class Ratio:
    """Stored bytes by bytes of bf16, and where the figure is from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Shards of this very capture that lie on the volume already."""

    num_shards: int = 0
    num_bytes: int = 0
    is_cached: bool = False
    """Whether DVC's cache has its copy of each as well."""


@dataclass(frozen=True, slots=True)
class Retirable:
    """A generation that nothing needs but its name: `make retire GEN=hash` and gc would free it."""

    hash: str
    name: str
    num_bytes: int


class Reclaimable(Protocol):
    """What ``eyas.generations`` answers; that room lies above this one."""

    @property
    def free_now_bytes(self) -> int: ...  # noqa: D102

    @property
    def retirable(self) -> Sequence[tuple[str, str, int]]: ...  # noqa: D102

    @property
    def problem(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Reclaim:
    """What could be deleted."""

    free_now_bytes: int = 0
    """By gc, with nothing else done before."""
    retirable: tuple[Retirable, ...] = ()
    problem: str = ""
    """Why gc would refuse, or what could not be read."""

    @classmethod
    def of(cls, found: Reclaimable, own: Collection[str] = ()) -> Reclaim:
        """What a look at the generations found, without those of the capture itself."""
        stale = tuple(Retirable(*generation) for generation in found.retirable if generation[0] not in own)
        return cls(found.free_now_bytes, stale, found.problem)

    @property
    def retirable_bytes(self) -> int:
        """What all retirable generations hold."""
        return sum(generation.num_bytes for generation in self.retirable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a capture still needs against what the volume has."""

    need: Need
    ratio: Ratio
    free_bytes: int
    reserve_bytes: int
    done: Done = Done()
    cache_types: tuple[str, ...] = ()
    """DVC's ``cache.type`` in order; empty when nothing is committed to a cache."""
    free_files: int | None = None
    """Files that can still be made; None where nothing limits them or nobody asked."""
    reclaim: Reclaim = Reclaim()

    @property
    def total_bytes(self) -> int:
        """All shards when the capture is complete."""
        if self.is_complete:
            return self.done.num_bytes
        return math.ceil(self.need.rows_payload_bytes * self.ratio.value) + self.need.overhead_bytes

    @property
    def is_complete(self) -> bool:
        """Whether every shard is there."""
        return self.done.num_shards == self.need.num_shards

    @property
    def copies(self) -> int:
        """How often the shards lie on the volume at the peak: 2 when DVC copies them."""
        return peak_copies(self.cache_types)

    @property
    def payload_ratio(self) -> float:
        """Expected bytes by payload of every row: the codec's ratio times the share of rows that are stored."""
        return self.ratio.value * self.need.rows_payload_bytes / self.need.payload_bytes

    @property
    def peak_bytes(self) -> int:
        """What the whole capture takes at its peak, done or not."""
        return self.total_bytes * self.copies

    @property
    def needed_bytes(self) -> int:
        """Free bytes still needed at the peak, the reserve not included."""
        return max(self.peak_bytes - self._done_bytes, 0)

    @property
    def num_needed_files(self) -> int:
        """Files still to be made at the peak."""
        return 0 if self.is_complete else self._peak_files - self.done.num_shards

    @property
    def headroom_bytes(self) -> int:
        """Free bytes above the reserve at the peak; negative when the reserve is touched."""
        return self.free_bytes - self.reserve_bytes - self.needed_bytes

    @property
    def gap_bytes(self) -> int:
        """Bytes that lack; 0 when none do, or when nothing is to be written any more."""
        return max(-self.headroom_bytes, 0) if self.needed_bytes else 0

    @property
    def num_missing_files(self) -> int:
        """Files too many for the volume; 0 when it has room for them."""
        return 0 if self.free_files is None else max(self.num_needed_files - self.free_files, 0)

    @property
    def fits(self) -> bool:
        """Whether the capture ends with the reserve still free."""
        return not self.gap_bytes and not self.num_missing_files

    @property
    def num_samples_that_fit(self) -> int:
        """Samples of average size that fit in all, the stored ones included."""
        if self.fits:
            return self.need.num_samples
        usable = max(self.free_bytes - self.reserve_bytes + self._done_bytes, 0)
        fitting = min(self.need.num_samples, usable * self.need.num_samples // self.peak_bytes)
        if self.free_files is None:
            return fitting
        return min(fitting, (self.free_files + self.done.num_shards) * self.need.num_samples // self._peak_files)

    @property
    def _done_bytes(self) -> int:
        return self.done.num_bytes * (self.copies if self.done.is_cached else 1)

    @property
    def _peak_files(self) -> int:
        return self.need.num_shards * self.copies + SPARE_FILES


def default_ratio(codec: str) -> Ratio:
    """The documented ratio of a codec.

    Raises:
        StoreError: There is no such codec here.
    """
    if codec not in CODEC_RATIO:
        raise StoreError(
            f"codec {codec!r}, expected one of {', '.join(CODEC_RATIO)}", "another eyas planned it: make plan"
        )
    source = {"raw": "exact", "blosc2": "its documented default, not measured", "int8": "its documented size"}[codec]
    return Ratio(CODEC_RATIO[codec], source)


def measured_ratio(need: Need, stored_bytes: int, num_tokens: int, where: str) -> Ratio | None:
    """Ratio of shards of the same target, codec and streams; None when they tell nothing.

    Args:
        need: Of the plan; tells which share of the rows a token's states are on average.
        stored_bytes: The shards, headers, ids and masks included: headers count as states, so that the estimate
            comes out above rather than below.
        num_tokens: That they hold.
        where: For the reader.
    """
    payload_bytes = need.rows_payload_bytes * num_tokens / need.num_tokens
    states_bytes = stored_bytes - num_tokens * (BYTES_PER_TOKEN_ID + BYTES_PER_MASK)
    if need.codec == "raw" or not payload_bytes or states_bytes <= 0:
        return None
    return Ratio(states_bytes / payload_bytes, f"measured on {where}")


def best_ratio(need: Need, done: Done, num_done_tokens: int, earlier: Ratio | None) -> Ratio:
    """The capture's own shards tell best, then an earlier capture's, then the documentation."""
    own = measured_ratio(need, done.num_bytes, num_done_tokens, f"{done.num_shards:,} shards of this capture")
    return own or earlier or default_ratio(need.codec)


def stored_bytes(plan: CapturePlan) -> int:
    """Estimate of the bytes of all shards, from above but for the ratio of ``blosc2``."""
    return budget(plan, 0, 0).total_bytes


def expected_bytes(plan: CapturePlan, last_rows: LastRows, codec: str) -> int:
    """Bytes of the plan's hidden states when these rows are stored with this codec."""
    payload = plan.trained_payload_bytes if last_rows == "trained" else plan.payload_bytes
    return math.ceil(payload * CODEC_RATIO[codec])


def peak_copies(cache_types: Sequence[str]) -> int:
    """How often DVC's cache type makes the bytes lie on the volume; no types mean no cache.

    DVC 3.67 links into its cache only when ``hardlink`` stands first; whether it can reflink instead of copying is
    the file system's matter (``eyas.plan.cache.copying_types``).
    """
    return 1 if not cache_types or cache_types[0] == "hardlink" else 2


def budget(
    plan: CapturePlan,
    free_bytes: int,
    reserve_bytes: int,
    done: Done = Done(),
    cache_types: Sequence[str] = (),
) -> Budget:
    """Compare what a plan still needs with what is free, at the codec's documented ratio.

    Args:
        plan: What is to be captured.
        free_bytes: Free on the volume now.
        reserve_bytes: Must stay free.
        done: Of this plan, already on the volume.
        cache_types: DVC's ``cache.type`` in order; empty when nothing is committed to a cache.
    """
    return Budget(
        need=Need.of(plan),
        ratio=default_ratio(plan.capture.codec),
        free_bytes=free_bytes,
        reserve_bytes=reserve_bytes,
        done=done,
        cache_types=tuple(cache_types),
    )


def summary(found: Budget) -> str:
    """One line: needed, free, reserve."""
    twice = f" ({found.copies} times {console.human_bytes(found.total_bytes)})" if found.copies > 1 else ""
    done = f", {console.human_bytes(found.done.num_bytes)} already stored" if found.done.num_bytes else ""
    return (
        f"hidden states need {console.human_bytes(found.needed_bytes)}{twice}{done}; "
        f"{console.human_bytes(found.free_bytes)} free, {console.human_bytes(found.reserve_bytes)} in reserve"
    )
