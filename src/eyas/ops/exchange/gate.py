"""Does an import fit the disk? Asked before a file is read, by the account of ``make budget``.

A set of ours lies there beside the files that it came from: a second full set. How large is estimated from what an
adoption noted, or from a few files; the gate of the import itself counts again, from every file, before it writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas import console, fs
from eyas.config import Params
from eyas.contracts import BYTES_PER_MASK, BYTES_PER_STATE, BYTES_PER_TOKEN_ID
from eyas.errors import DataError, DiskError
from eyas.plan.budget import Budget, Done, Need, Reclaim, default_ratio, summary
from eyas.plan.cache import copying_types
from eyas.plan.remedies import missing, remedies, remedies_text
from eyas.plan.volume import others, volume
from eyas.shards.handover import HOME, SPOOL

if TYPE_CHECKING:
    from eyas.shards.layouts.base import LayoutSource

OPENED_FILES = 8
NO_CHOICE = "fewer_samples"
"""A remedy of captures: an import takes what is there."""


def estimated_need(params: Params, num_samples: int, num_tokens: int, num_payload_bytes: int) -> Need:
    """What a set needs, from figures that may be estimates.

    Args:
        params: Codec, rows and size of shards.
        num_samples: Of the set.
        num_tokens: Of the set.
        num_payload_bytes: bf16 states of all rows; how many of them no training reads is not known yet.
    """
    return Need(
        num_samples=max(num_samples, 1),
        num_tokens=num_tokens,
        num_shards=max(math.ceil(num_payload_bytes / params.extract.shard_bytes), 1),
        payload_bytes=max(num_payload_bytes, 1),
        trained_payload_bytes=max(num_payload_bytes, 1),
        token_bytes=num_tokens * (BYTES_PER_TOKEN_ID + BYTES_PER_MASK),
        codec=params.extract.codec,
        last_rows="trained" if params.extract.last_rows == "trained" else "all",
    )


def adopted_need(params: Params, adopted: Mapping[str, Any]) -> Need:
    """What a set of an adopted generation needs, by its ``.dvc`` file: its states, or else its files' own size."""
    noted = adopted.get("meta", {}).get("eyas", {}).get("adopted", {})
    size_bytes = int(adopted["outs"][0].get("size") or 0)
    num_samples = int(noted.get("num_samples") or noted.get("num_files") or 1)
    payload = int(noted.get("payload_bytes") or size_bytes)
    return estimated_need(params, num_samples, int(noted.get("num_tokens") or 0), payload)


def folder_need(params: Params, source: LayoutSource, folder: Path) -> Need:
    """What a set of a folder's files needs, by the share of their bytes that is opened."""
    sizes = {path: fs.size_or_none(folder / path) or 0 for path in source.paths}
    step = max(1, len(sizes) // OPENED_FILES)
    opened_bytes = num_tokens = payload = 0
    for path in list(sizes)[::step]:
        with contextlib.suppress(DataError):  # the scan counts the bad ones
            sample = source.read(path)
            opened_bytes += sizes[path]
            num_tokens += len(sample.input_ids_T)
            payload += (sample.aux_TAD.numel() + sample.last_TD.numel()) * BYTES_PER_STATE
    scale = sum(sizes.values()) / opened_bytes if opened_bytes else 0
    return estimated_need(params, len(sizes), math.ceil(num_tokens * scale), math.ceil(payload * scale))


def check_room(root: Path, out: Path, params: Params, need: Need, own: Sequence[str] = ()) -> Budget:
    """Refuse an import that does not fit; what it has written already counts as done.

    Args:
        root: The repository.
        out: Folder of the set.
        params: The reserve.
        need: Of the set.
        own: Generations that must not be proposed to be retired: the one that is imported.

    Raises:
        DiskError: It does not fit; lists every remedy with its number.
    """
    where = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    is_committed = out.resolve().is_relative_to(root.resolve())  # only below the repository a commit follows
    found = Budget(
        need=need,
        ratio=default_ratio(need.codec),
        free_bytes=fs.free_bytes(where),
        reserve_bytes=params.extract.reserve_bytes,
        done=Done(num_bytes=_written_bytes(out)),
        cache_types=copying_types(root) if is_committed else (),
        free_files=volume(where).free_files,
    )
    if found.fits:
        return found
    found = dataclasses.replace(found, reclaim=reclaim(root, own))
    ways = [way for way in remedies(found, others(where)) if way.name != NO_CHOICE]
    lacks = missing(found).rpartition("; ")[2]
    enough = [way for way in ways if way.closes_gap]
    hint = f"{enough[0].name}: {enough[0].how}" if enough else "free space, or take a larger volume"
    raise DiskError(
        f"{out} would be a second full set, estimated before a file was read: {summary(found)}: {lacks}\n"
        f"{remedies_text(ways)}",
        hint,
    )


def reclaim(root: Path, own: Sequence[str] = ()) -> Reclaim:
    """What gc could free, as ``make budget`` counts it."""
    from eyas.generations.reclaim import reclaimable

    return Reclaim.of(reclaimable(root), own)


def _written_bytes(out: Path) -> int:
    """Shards of this set that lie in its spool or are published; whose they are, the import itself finds out."""
    places = (out / HOME / SPOOL, out / "hidden_states")
    files = [Path(folder) / name for place in places for folder, _, names in os.walk(place) for name in names]
    return sum({(stat.st_ino, stat.st_dev): stat.st_size for stat in (path.stat() for path in files)}.values())


def log_room(found: Budget, out: Path, source: Path) -> None:
    """Say what is about to be written, and how large it becomes."""
    console.log(f"import: {out} becomes a second full set beside {source}: {summary(found)}")
