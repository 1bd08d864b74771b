"""Does a capture fit the disk? Pure arithmetic over a plan, before any engine starts.

Every byte counts as it will lie on the volume: hidden states after the codec, ids and masks, and an
allowance for headers. With DVC's cache types ``copy`` and ``symlink`` the disk is needed twice while
the shards are committed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eyas import console
from eyas.contracts import CapturePlan, LastRows
from eyas.errors import DiskError

HEADER_BYTES_PER_SAMPLE = 1024
"""Allowance for a sample's entries in its shard's header and in the manifest."""
HEADER_BYTES_PER_SHARD = 4096
CODEC_RATIO = {"raw": 1.0, "blosc2": 0.69, "int8": 0.5156}
"""Stored bytes by bytes of bf16. Of ``blosc2`` it is an expectation (measured on SmolLM2: 0.688; the entropy floor
is 0.65), which a run watches while it writes; the other two are arithmetic."""
HARDLINK_FIX = "dvc config cache.type hardlink,reflink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a capture still needs against what the volume has."""

    total_bytes: int
    """All shards when the capture is complete."""
    done_bytes: int
    """Already stored."""
    copies: int
    """How often the shards lie on the volume at the peak: 2 when DVC copies them."""
    needed_bytes: int
    """Free bytes needed at the peak, the reserve not included."""
    free_bytes: int
    reserve_bytes: int
    num_samples: int
    num_samples_that_fit: int
    """Samples of average size that fit in all, the stored ones included."""

    @property
    def fits(self) -> bool:
        """Whether the capture ends with the reserve still free."""
        return self.needed_bytes + self.reserve_bytes <= self.free_bytes


def stored_bytes(plan: CapturePlan) -> int:
    """Estimate of the bytes of all shards, from above but for the ratio of ``blosc2``."""
    headers = plan.num_samples * HEADER_BYTES_PER_SAMPLE + len(plan.shards) * HEADER_BYTES_PER_SHARD
    return expected_bytes(plan, plan.capture.last_rows, plan.capture.codec) + plan.token_bytes + headers


def expected_bytes(plan: CapturePlan, last_rows: LastRows, codec: str) -> int:
    """Bytes of the plan's hidden states when these rows are stored with this codec."""
    payload = plan.trained_payload_bytes if last_rows == "trained" else plan.payload_bytes
    return math.ceil(payload * CODEC_RATIO[codec])


def peak_copies(cache_types: Sequence[str]) -> int:
    """How often DVC's cache type makes the bytes lie on the volume; no types mean no cache.

    DVC 3.67 links into its cache only when ``hardlink`` stands first. With ``reflink`` first it copies, and
    on a file system without reflinks both copies stay; ``reflink`` alone says that the file system has them.
    """
    return 1 if not cache_types or cache_types[0] == "hardlink" or tuple(cache_types) == ("reflink",) else 2


def budget(
    plan: CapturePlan, free_bytes: int, reserve_bytes: int, done_bytes: int = 0, cache_types: Sequence[str] = ()
) -> Budget:
    """Compare what a plan still needs with what is free.

    Args:
        plan: What is to be captured.
        free_bytes: Free on the volume now.
        reserve_bytes: Must stay free.
        done_bytes: Of this plan, already on the volume.
        cache_types: DVC's ``cache.type`` in order; empty when nothing is committed to a cache.
    """
    total, copies = stored_bytes(plan), peak_copies(cache_types)
    usable = max(free_bytes - reserve_bytes + done_bytes, 0)
    return Budget(
        total_bytes=total,
        done_bytes=done_bytes,
        copies=copies,
        needed_bytes=max(total * copies - done_bytes, 0),
        free_bytes=free_bytes,
        reserve_bytes=reserve_bytes,
        num_samples=plan.num_samples,
        num_samples_that_fit=min(plan.num_samples, usable * plan.num_samples // (total * copies)),
    )


def check_fits(
    plan: CapturePlan, free_bytes: int, reserve_bytes: int, done_bytes: int = 0, cache_types: Sequence[str] = ()
) -> Budget:
    """Refuse a capture that does not fit.

    Raises:
        DiskError: It does not fit; says what is needed, what is free and how many samples would fit,
            and names hardlinks when the cache type alone is the reason.
    """
    found = budget(plan, free_bytes, reserve_bytes, done_bytes, cache_types)
    if found.fits:
        return found
    message = f"{summary(found)}: does not fit, {found.num_samples_that_fit:,} of {found.num_samples:,} samples would"
    once = budget(plan, free_bytes, reserve_bytes, done_bytes)
    if found.copies > 1 and once.fits:
        raise DiskError(
            f"{message}; DVC's cache.type {','.join(cache_types)} needs the shards twice, with hardlink they fit",
            f"link instead of copying: `{HARDLINK_FIX}`",
        )
    fewer = (
        f"set data.max_conversations to about {found.num_samples_that_fit:,}, " if found.num_samples_that_fit else ""
    )
    raise DiskError(message, f"{fewer}free space, or take a larger volume")


def summary(found: Budget) -> str:
    """One line: needed, free, reserve."""
    twice = f" ({found.copies} times {console.human_bytes(found.total_bytes)})" if found.copies > 1 else ""
    done = f", {console.human_bytes(found.done_bytes)} already stored" if found.done_bytes else ""
    return (
        f"hidden states need {console.human_bytes(found.needed_bytes)}{twice}{done}; "
        f"{console.human_bytes(found.free_bytes)} free, {console.human_bytes(found.reserve_bytes)} in reserve"
    )
