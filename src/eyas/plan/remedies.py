"""What would close the gap: each way with its number, and whether it is enough alone.

Each is the same ``Budget`` with one thing changed, so that no remedy is judged by another rule than the capture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from eyas import console
from eyas.errors import DiskError
from eyas.plan.budget import HARDLINK_FIX, Budget, Done, default_ratio, summary
from eyas.plan.volume import Volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One way to make it fit."""

    name: str
    """``gc``, ``retire``, ``hardlink``, ``trained_rows``, ``int8``, ``fewer_samples`` or ``other_volume``."""
    figure: str
    """Its number as people read it."""
    num_bytes: int
    """Freed, saved at the peak or, of another volume, needed there."""
    closes_gap: bool
    how: str
    num_samples: int | None = None
    """Of ``fewer_samples`` alone."""


def remedies(found: Budget, volumes: Sequence[Volume] = ()) -> tuple[Remedy, ...]:
    """Every way, the cheapest for the user first; none when the capture fits.

    Args:
        found: The capture as it is set up now.
        volumes: Other volumes that are mounted here.
    """
    if found.fits:
        return ()
    ways = (_gc(found), _retire(found), _hardlink(found), _trained_rows(found), _int8(found), _fewer(found))
    return (*(way for way in ways if way is not None), _other_volume(found, volumes))


def with_gc(found: Budget) -> Budget:
    """The budget after gc."""
    return dataclasses.replace(found, free_bytes=found.free_bytes + found.reclaim.free_now_bytes)


def with_retired(found: Budget) -> Budget:
    """The budget after every retirable generation was retired and gc ran."""
    return dataclasses.replace(found, free_bytes=with_gc(found).free_bytes + found.reclaim.retirable_bytes)


def _gc(found: Budget) -> Remedy:
    freed = found.reclaim.free_now_bytes
    how = "`make gc-plan`, then `make gc CONFIRM=<its id>`" if freed else "no states lie there without a name"
    if found.reclaim.problem:
        how = f"gc would refuse: {found.reclaim.problem}"
    return _remedy("gc", "frees", freed, with_gc(found), how)


def _retire(found: Budget) -> Remedy | None:
    stale = found.reclaim.retirable
    if not stale:
        return None
    named = ", ".join(f"{g.hash[:8]} ({g.name}, {console.human_bytes(g.num_bytes)})" for g in stale)
    freed = found.reclaim.free_now_bytes + found.reclaim.retirable_bytes
    return _remedy("retire", "frees", freed, with_retired(found), f"`make retire GEN=…`, then gc: {named}")


def _hardlink(found: Budget) -> Remedy | None:
    if found.copies == 1:
        return None
    linked = dataclasses.replace(found, cache_types=("hardlink",))
    how = f"`{HARDLINK_FIX}`: DVC's cache.type {','.join(found.cache_types)} needs the shards twice"
    return _remedy("hardlink", "saves", found.needed_bytes - linked.needed_bytes, linked, how)


def _trained_rows(found: Budget) -> Remedy | None:
    if found.need.last_rows == "trained":
        return None
    need = dataclasses.replace(found.need, last_rows="trained")
    return _new_capture(found, dataclasses.replace(found, need=need), "trained_rows", "extract.last_rows: trained")


def _int8(found: Budget) -> Remedy | None:
    if found.need.codec == "int8":
        return None
    need = dataclasses.replace(found.need, codec="int8")
    changed = dataclasses.replace(found, need=need, ratio=default_ratio("int8"))
    return _new_capture(found, changed, "int8", "extract.codec: int8 (lossy; its effect is measured and printed)")


def _new_capture(found: Budget, changed: Budget, name: str, setting: str) -> Remedy:
    """A remedy with another identity: what is done already does not count for it, and stays where it is."""
    anew = dataclasses.replace(changed, done=Done())
    lost = f"; the {console.human_bytes(found.done.num_bytes)} done are of another capture then"
    how = f"set {setting}{lost if found.done.num_bytes else ''}"
    return _remedy(name, "saves", found.needed_bytes - anew.needed_bytes, anew, how)


def _fewer(found: Budget) -> Remedy:
    fitting = dataclasses.replace(found, done=Done()).num_samples_that_fit
    how = f"set data.max_conversations to about {fitting:,}" if fitting else "not even one fits"
    return Remedy(
        name="fewer_samples",
        figure=f"{fitting:,} of {found.need.num_samples:,}",
        num_bytes=found.gap_bytes,
        closes_gap=fitting > 0,
        how=how,
        num_samples=fitting,
    )


def _other_volume(found: Budget, volumes: Sequence[Volume]) -> Remedy:
    needed = dataclasses.replace(found, done=Done()).peak_bytes + found.reserve_bytes
    roomy = [volume for volume in volumes if volume.free_bytes >= needed]
    named = ", ".join(f"{volume.path} ({console.human_bytes(volume.free_bytes)} free)" for volume in roomy)
    return Remedy(
        name="other_volume",
        figure=f"needs {console.human_bytes(needed)}",
        num_bytes=needed,
        closes_gap=bool(roomy),
        how=f"move the repository to {named}" if roomy else "no mounted one has them",
    )


def _remedy(name: str, verb: str, num_bytes: int, then: Budget, how: str) -> Remedy:
    figure = f"{verb} {console.human_bytes(num_bytes)}"
    return Remedy(name=name, figure=figure, num_bytes=num_bytes, closes_gap=then.fits, how=how)


def remedies_text(ways: Sequence[Remedy]) -> str:
    """The remedies as a table."""
    rows = [(way.name, way.figure, "enough" if way.closes_gap else "not enough", way.how) for way in ways]
    return console.table(rows)


def missing(found: Budget) -> str:
    """What lacks, and how many samples would fit."""
    lacks = []
    if found.gap_bytes:
        lacks.append(f"{console.human_bytes(found.gap_bytes)} lack")
    if found.num_missing_files:
        lacks.append(
            f"{found.num_needed_files:,} files are to be made and the volume has room for {found.free_files:,} "
            "(a larger extract.shard_bytes makes fewer)"
        )
    samples = f"{found.num_samples_that_fit:,} of {found.need.num_samples:,} samples would"
    return f"does not fit, {samples}; {' and '.join(lacks)}"


def check_fits(found: Budget, volumes: Sequence[Volume] = ()) -> Budget:
    """Refuse a capture that does not fit.

    Raises:
        DiskError: It does not fit; says what is needed, what is free, how much lacks and how many samples would
            fit, and lists every remedy with its number.
    """
    if found.fits:
        return found
    ways = remedies(found, volumes)
    message = f"{summary(found)}: {missing(found)}\n{remedies_text(ways)}"
    enough = [way for way in ways if way.closes_gap]
    linked = next((way for way in enough if way.name == "hardlink"), None)
    if linked is not None:
        raise DiskError(message, f"`make budget` shows the whole account; link instead of copying: `{HARDLINK_FIX}`")
    first = f"{enough[0].name}: {enough[0].how}" if enough else "free space, or take a larger volume"
    raise DiskError(message, f"`make budget` shows the whole account; {first}")
