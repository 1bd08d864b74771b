"""``make generations``: every version of the hidden states, what names it, and what deleting it would give back.

Nothing is hashed and no shard is read: git's objects, DVC's lists and ``stat``. Two lines a generation, because what
decides (bytes, names, users) does not fit on one.
"""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.console import human_bytes, table
from eyas.generations import ledger
from eyas.generations.freed import freed_bytes
from eyas.generations.generation import Generation
from eyas.generations.listing import Situation, list_generations, read_situation
from eyas.generations.reclaim import removed_files, removed_objects
from eyas.generations.trees import is_imported
from eyas.generations.working import WorkingFolders, working_lines, working_values

WIDTH = 120
INDENT = "  "
HEADERS = ("generation", "kind", "engine", "when", "samples", "tokens", "logical", "stored", "on disk", "gc frees")
SIZES = HEADERS[4:]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What was found; every size in bytes."""

    generations: list[Generation]
    """What can be freed first."""
    collected: list[dict[str, Any]]
    """What the ledger says was deleted, newest first; only when everything was asked for."""
    disk_bytes: int
    """Of all generations, each inode once."""
    freed_now_bytes: int
    """What gc would free now, outputs that are no hidden states included."""
    problems: tuple[str, ...]
    """Why gc would refuse."""
    working: WorkingFolders
    """Rings and cached shards: no generation, and on the disk all the same."""


def list_all(root: Path, *, everything: bool = False) -> Listing:
    """Find the generations of a repository.

    Args:
        root: The repository.
        everything: Those of which commits alone have the name left, and those that were deleted, too.

    Raises:
        StoreError: ``root`` is in no git repository.
    """
    found = read_situation(root, commits=True)
    collected = _collected(root) if everything else []
    gone = {event["hash"] for event in collected}
    # Old commits name for ever what gc deleted, and what was never here.
    generations = [
        g for g in list_generations(found) if g.is_kept or g.disk_bytes or (everything and g.hash not in gone)
    ]
    present = {generation.hash for generation in generations}
    return Listing(
        generations=generations,
        collected=[event for event in collected if event["hash"] not in present],
        disk_bytes=_disk_bytes(found, generations),
        freed_now_bytes=freed_bytes([*removed_objects(found), *removed_files(found)], found.shared),
        problems=found.kept.problems,
        working=found.working,
    )


def _disk_bytes(found: Situation, generations: Iterable[Generation]) -> int:
    names = {name for generation in generations for name in generation.objects}
    objects = [found.cache.objects[name] for name in names if name in found.cache.objects]
    files = [file for tree in found.trees for file in tree.files.values()]
    return sum({(one.device, one.inode): one.disk_bytes for one in (*objects, *files)}.values())


def _collected(root: Path) -> list[dict[str, Any]]:
    """Generations that gc deleted, each with its plan's id and when, newest first."""
    gone = []
    for event in reversed(ledger.read(root)):
        listed = event.get("generations") if event.get("event") == "gc" else None
        for generation in listed if isinstance(listed, list) else []:
            if isinstance(generation, dict) and isinstance(generation.get("hash"), str):
                gone.append(generation | {"when": event.get("when", ""), "plan_id": event.get("plan_id", "")})
    return gone


def state(generation: Generation) -> str:
    """In one or two words, what a generation is to this repository."""
    if generation.is_retired:
        return "retired"
    if generation.kind in ("spool", "unrecorded"):
        return "stale" if generation.is_stale else "current"
    if generation.is_stale:
        return "stale"
    if "workspace" in generation.named_by:
        return "adopted" if generation.kind == "adopted" else "current"
    for kind in ("tag", "branch", "experiment"):
        if any(name.startswith(f"{kind} ") for name in generation.named_by):
            return f"kept by {kind}"
    return "only in commits"


def as_json(listing: Listing) -> list[dict[str, Any]]:
    """One flat mapping a generation, sizes in bytes; then deleted ones with the state ``collected``, then working folders."""
    present = [_flat(generation) for generation in listing.generations]
    return [*present, *map(_flat_collected, listing.collected), *working_values(listing.working)]


def _flat(generation: Generation) -> dict[str, Any]:
    skipped = ("facts", "objects")  # 80,000 hashes say nothing to whoever asks for a list
    fields = [field.name for field in dataclasses.fields(generation) if field.name not in skipped]
    facts = dataclasses.asdict(generation.facts)
    own = {name: getattr(generation, name) for name in fields}
    return facts | own | {"name": generation.name, "state": state(generation), "is_whole": generation.is_whole}


def _flat_collected(gone: dict[str, Any]) -> dict[str, Any]:
    return gone | {"state": "collected"}


def as_text(listing: Listing) -> str:
    """The table, a line of totals, and what stands in gc's way."""
    if not listing.generations and not listing.collected:
        none = "no generations: nothing names hidden states here, and none lie in data/hidden_states or .eyas/spool"
        return "\n".join([none, *working_lines(listing.working)])
    columns = zip(HEADERS, *map(_row, listing.generations), strict=True)
    cells = [_to_the_right(column) if column[0] in SIZES else column for column in columns]
    head, *lines = table(list(zip(*cells, strict=True))).splitlines()
    parts = [head]
    for line, generation in zip(lines, listing.generations, strict=True):
        parts += [line, *_wrapped(_remarks(generation))]
    parts += [line for gone in listing.collected for line in _gone_lines(gone)]
    parts += ["", *_elsewhere(listing), _totals(listing)]
    parts += working_lines(listing.working)
    parts += [f"problem: {problem}" for problem in listing.problems]
    return "\n".join(parts)


def _to_the_right(column: tuple[str, ...]) -> tuple[str, ...]:
    width = max(map(len, column))
    return tuple(cell.rjust(width) for cell in column)


def _row(generation: Generation) -> tuple[str, ...]:
    facts = generation.facts
    return (
        generation.name,
        generation.kind,
        facts.engine or "?",
        _date(generation.when_s),
        f"{facts.num_samples:,}" if facts.num_samples else "?",
        f"{facts.num_tokens:,}" if facts.num_tokens else "?",
        human_bytes(facts.payload_bytes) if facts.payload_bytes else "?",
        human_bytes(generation.stored_bytes),
        human_bytes(generation.disk_bytes),
        human_bytes(generation.freed_now_bytes),
    )


def _date(when_s: int) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(when_s)) if when_s else "?"


def _remarks(generation: Generation) -> list[str]:
    """What decides over it, most telling first."""
    objects = f"{generation.num_objects:,} {'files' if generation.kind in ('spool', 'unrecorded') else 'objects'}"
    whole = "whole" if generation.is_whole else f"{generation.num_missing:,} missing"
    later = generation.freed_bytes != generation.freed_now_bytes
    texts = [
        state(generation),
        f"{objects} {whole}" if generation.is_whole else f"{objects}, {whole}",
        " ".join(part for part in (generation.facts.engine, generation.facts.engine_version) if part),
        f"in {generation.path}" if is_imported(generation.path) else "",
        f"target {generation.facts.target}" if generation.facts.target else "",
        f"named by {', '.join(generation.named_by)}" if generation.named_by else "named by nothing",
        f"used by {', '.join(generation.used_by)}" if generation.used_by else "",
        f"{human_bytes(generation.freed_bytes)} when nothing names it any more" if later else "",
        generation.facts.note,
    ]
    return [text for text in texts if text]


def _wrapped(texts: Sequence[str]) -> list[str]:
    inner = INDENT * 2
    return textwrap.wrap(
        "; ".join(texts), WIDTH, initial_indent=INDENT, subsequent_indent=inner, break_long_words=False
    )


def _gone_lines(gone: dict[str, Any]) -> list[str]:
    """A deleted one: its sizes are the ledger's."""
    name = str(gone.get("name") or gone["hash"][:10])
    size_bytes = next((gone[key] for key in ("freed_bytes", "stored_bytes") if isinstance(gone.get(key), int)), None)
    size = f", {human_bytes(size_bytes)}" if size_bytes is not None else ""
    return [f"{name}  collected {str(gone['when'])[:10]}{size}, plan {gone['plan_id'] or '?'}"]


def _totals(listing: Listing) -> str:
    num = len(listing.generations)
    return (
        f"{num:,} {'generation' if num == 1 else 'generations'}, {human_bytes(listing.disk_bytes)} on disk with files "
        f"that several share counted once; gc would free {human_bytes(listing.freed_now_bytes)} now"
    )


def _elsewhere(listing: Listing) -> list[str]:
    """Where the rest of what gc would free is listed."""
    listed_bytes = sum(generation.freed_now_bytes for generation in listing.generations)
    listed_bytes += sum(ring.disk_bytes for ring in listing.working.idle)
    if listing.freed_now_bytes <= listed_bytes:
        return []
    rest = human_bytes(listing.freed_now_bytes - listed_bytes)
    return [f"not listed: {rest} of other outputs that gc would free as well: `make gc-plan`"]
