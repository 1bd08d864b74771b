"""A plan and its outcome, for people and for machines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from eyas.console import human_bytes, table
from eyas.generations.generation import Generation
from eyas.generations.revisions import PIN_PREFIX
from eyas.generations.working import working_lines, working_values
from eyas.ops.gc.groups import GroupRow
from eyas.ops.gc.holdings import Holding, holding_values
from eyas.ops.gc.plan import GcPlan

MAX_LISTED = 20


def plan_values(plan: GcPlan) -> dict[str, Any]:
    """The plan for machines."""
    folders = _name_folders(plan)
    return {
        "plan_id": plan.plan_id,
        "freed_bytes": plan.freed_bytes,
        "generations": [asdict(row) for row in plan.rows if row.hash],
        "others": [asdict(row) for row in plan.rows if not row.hash],
        "objects": {
            "num": len(plan.going.objects),
            "bytes": sum(stat.size_bytes for stat in plan.going.objects.values()),
        },
        "strays": {"num": len(plan.going.strays), "bytes": sum(s.size_bytes for s in plan.going.strays.values())},
        "names": [{"folder": folder, "num": num, "bytes": size} for folder, (num, size) in folders.items()],
        "held": asdict(plan.held),
        "working": working_values(plan.working),
        "remotes": [holding_values(one) for one in plan.holdings],
        "kept": [{"hash": g.hash, "name": g.name, "path": g.path, "why": _why(g)} for g in plan.kept],
        "refusals": [refusal._asdict() for refusal in plan.refusals],
        "warnings": list(plan.warnings),
        "command": command(plan),
    }


def command(plan: GcPlan) -> str:
    """What to type next; empty when there is nothing to run."""
    return f"make gc CONFIRM={plan.plan_id}" if plan.plan_id else ""


def plan_text(plan: GcPlan) -> str:
    """The plan for people."""
    return "\n\n".join(part for part in _parts(plan) if part)


def _parts(plan: GcPlan) -> Iterator[str]:
    if plan.is_empty:
        yield "nothing to delete: everything in DVC's cache is in use"
    else:
        yield _going_table(plan.rows)
        yield _names(plan)
    yield _kept_table(plan.kept)
    yield "\n".join(working_lines(plan.working))
    yield "\n\n".join(map(_holding, plan.holdings))
    if plan.held.num_files:
        yield (
            f"held by other names, outside eyas' lists or left in the workspace: {plan.held.num_files:,} of the files, "
            f"{human_bytes(plan.held.num_bytes)}; gc frees nothing of these\nhint: find / -xdev -samefile {plan.held.example}"
        )
    yield "\n".join(f"warning: {warning}" for warning in plan.warnings)
    yield "\n".join(f"refused: {what}\n  hint: {hint}" for what, hint in plan.refusals)
    if not plan.is_empty:
        yield f"freed in all: {human_bytes(plan.freed_bytes)} ({plan.freed_bytes:,} bytes)"
    if plan.plan_id:
        yield f"plan {plan.plan_id}; to delete exactly this:\n  {command(plan)}"


def _going_table(rows: tuple[GroupRow, ...]) -> str:
    states, others = [row for row in rows if row.hash], [row for row in rows if not row.hash]
    parts = []
    if states:
        cells = [
            (
                row.title, row.engine.partition(" ")[0] or "-", f"{row.num_samples:,}", _day(row.when_s), human_bytes(row.stored_bytes),
                human_bytes(row.freed_bytes), row.last_named_by or "no commit", _pushed(row),
            )
            for row in states
        ]  # fmt: skip
        heads = ("generations that go", "engine", "samples", "when", "stored", "freed", "last named by", "pushed")
        parts.append(table(cells, heads))
    if others:
        cells = [
            (
                r.title, f"{r.num_objects or r.num_names:,}", human_bytes(r.stored_bytes), human_bytes(r.freed_bytes),
                _pushed(r) if r.num_objects else "-",
            )
            for r in others
        ]  # fmt: skip
        parts.append(table(cells, ("other objects that go", "number", "stored", "freed", "pushed")))
    return "\n\n".join(parts)


def _holding(one: Holding) -> str:
    """What a remote holds, and by which command of DVC's it would lose what nobody here needs."""
    if not one.is_known:
        return f"remote {one.remote}: what it holds, or what is in use, is not known"
    unneeded = [*one.old, *([one.unnamed] if one.unnamed.num_objects else [])]
    shares = [one.needed, *unneeded[:MAX_LISTED]]
    cells = [(s.title, f"{s.num_objects:,}", human_bytes(s.num_bytes), s.last_named_by) for s in shares]
    lines = [table(cells, (f"remote {one.remote} holds", "objects", "stored", "last named by"))]
    if len(unneeded) > MAX_LISTED:
        lines.append(f"and {len(unneeded) - MAX_LISTED} more")
    if one.num_lost_lists:
        lines.append(
            f"of {one.num_lost_lists:,} folders of older commits the list is nowhere: their files count as named by no commit"
        )
    old, unnamed = one.commands
    if unneeded:
        lines.append(
            "gc deletes on no remote: others may have pushed there what this clone has not fetched. If all is here:"
        )
    if one.unnamed.num_objects:
        lines.append(
            f"  {unnamed}    # {human_bytes(one.unnamed.num_bytes)} that no commit names, there and in the cache here"
        )
    if one.old:
        size = human_bytes(one.old_bytes + one.unnamed.num_bytes)
        lines.append(f"  {old}    # {size} that only older commits or none name: no `dvc pull` brings it back")
    return "\n".join(lines)


def _day(when_s: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(when_s)) if when_s else "-"


def _pushed(row: GroupRow) -> str:
    return "unknown" if row.num_pushed is None else f"{row.num_pushed:,} of {row.num_objects:,}"


def _name_folders(plan: GcPlan) -> dict[str, tuple[int, int]]:
    """Folder → number and bytes of names that go from it."""
    folders: dict[str, tuple[int, int]] = {}
    for name in plan.going.names:
        # A manifest lies beside its folder, not in it.
        inside = name.path.startswith(f"{name.folder}/")
        folder = name.folder if inside else PurePosixPath(name.path).as_posix()
        num, size = folders.get(folder, (0, 0))
        folders[folder] = num + 1, size + name.stat.size_bytes
    return dict(sorted(folders.items()))


def _names(plan: GcPlan) -> str:
    folders = _name_folders(plan)
    if not folders:
        return ""
    cells = [
        (folder, f"{num:,}", human_bytes(size), "a folder outside this repository" if folder.startswith("/") else "")
        for folder, (num, size) in folders.items()
    ]
    return table(cells, ("names that go", "files", "size", ""))


def _kept_table(kept: tuple[Generation, ...]) -> str:
    if not kept:
        return ""
    cells = [(g.name, g.facts.engine or "-", human_bytes(g.stored_bytes), _why(g)) for g in kept[:MAX_LISTED]]
    more = f"\nand {len(kept) - MAX_LISTED} more" if len(kept) > MAX_LISTED else ""
    return table(cells, ("generations that stay", "engine", "stored", "why")) + more


def _why(generation: Generation) -> str:
    """What keeps a generation."""
    pins = [name for name in generation.named_by if name.startswith(f"tag {PIN_PREFIX}")]
    others = [name for name in generation.named_by if name not in pins and not name.startswith("commit ")]
    if pins or others:
        return "; ".join([f"pinned: {', '.join(pins)}"] * bool(pins) + [f"named by {', '.join(others)}"] * bool(others))
    if generation.kind == "spool":
        return "a capture that is not finished; `make retire` gives it up"
    return "no dvc.lock names it; not in DVC's cache, so no gc touches it"
