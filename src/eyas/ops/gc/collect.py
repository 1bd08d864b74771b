"""``eyas gc``: carry out one confirmed plan, and nothing else, whatever happens on the way.

The plan is worked out again and must be the one that was confirmed; DVC must want to remove exactly the same. Then the
whole list is written down, ``dvc gc`` runs, the names outside the cache go, the freed space is measured and the ledger
gets one line. Killed anywhere, the same command goes on; what somebody has named again meanwhile is left alone.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.errors import EyasError
from eyas.generations import ledger
from eyas.generations.extents import Key
from eyas.generations.objects import Cache, scan_cache
from eyas.generations.trees import RETIRED_HOME
from eyas.ops.gc import dvc as gc_dvc
from eyas.ops.gc import measure as gc_measure
from eyas.ops.gc.changes import changes
from eyas.ops.gc.intent import INTENT, Intent, forget_plans, read_intent, read_plan, write_intent
from eyas.ops.gc.plan import GcPlan, make_plan, read_with_projects
from eyas.ops.gc.refusals import Refusal, refusals
from eyas.ops.gc.removal import Removal, lstat, remove_names, remove_strays
from eyas.shards.handover import HOME, LOCK_NAME

EVENT = "gc"


def collect(root: Path, plan_id: str) -> dict[str, Any]:
    """Carry out a plan, or go on with one that was interrupted.

    Args:
        root: The repository.
        plan_id: As ``gc-plan`` printed it.

    Returns:
        The ledger's line.

    Raises:
        EyasError: Something changed since the plan, speaks against it, or DVC failed; the message says what went.
    """
    with fs.volume_lock(root / HOME / LOCK_NAME, f"gc {plan_id}") as lock:
        intent = read_intent(root)
        if intent is not None and intent.plan_id != plan_id:
            raise EyasError(
                f"gc of plan {intent.plan_id} was interrupted, expected its id, not {plan_id}",
                f"finish it first: make gc CONFIRM={intent.plan_id}",
            )
        if intent is not None:
            return _finish(root, intent, lock, is_resumed=True)
        planned = read_plan(root, plan_id)
        if planned is None:
            return _done_before(root, plan_id)
        return _finish(root, _begin(root, planned), lock, is_resumed=False)


def _done_before(root: Path, plan_id: str) -> dict[str, Any]:
    done = [event for event in ledger.read(root) if event.get("event") == EVENT and event.get("plan_id") == plan_id]
    if done:
        console.log(f"gc: plan {plan_id} was carried out on {done[-1]['when']}; nothing was left to do")
        return done[-1]
    what = f"no plan has the id {plan_id!r}" if plan_id else "no plan was confirmed, expected the id of one"
    raise EyasError(what, "`make gc-plan` prints it: make gc CONFIRM=…")


# ── the beginning ─────────────────────────────────────────────────────────────────────────────


def _begin(root: Path, planned: dict[str, Any]) -> Intent:
    """Make sure that the plan is still the one, then write down what goes."""
    projects = planned["projects"]
    plan = make_plan(root, None if projects is None else [Path(project) for project in projects], is_locked=True)
    _refuse(plan.refusals)
    if plan.plan_id != planned["plan_id"]:
        changed = changes(planned["snapshot"], plan.snapshot)
        raise EyasError(
            "the plan is out of date, nothing was deleted; since it was made:\n" + "\n".join(f"  {c}" for c in changed),
            "make gc-plan",
        )
    _compare(root, plan)
    places = [plan.cache, *(root / folder for folder in {name.folder for name in plan.going.names})]
    block = max(gc_measure.block_bytes(os.fspath(plan.cache)), 512)
    intent = Intent(
        plan_id=plan.plan_id,
        run=time.time_ns(),
        projects=plan.projects or (),
        objects={name: (stat.device, stat.inode) for name, stat in plan.going.objects.items()},
        strays={path: (stat.device, stat.inode, stat.size_bytes) for path, stat in plan.going.strays.items()},
        names=tuple(
            (n.path, n.generation, n.folder, n.stat.device, n.stat.inode, n.stat.size_bytes, n.stat.mtime_ns)
            for n in plan.going.names
        ),
        freed=tuple((*key, num_bytes) for key, num_bytes in plan.freed.items()),
        tolerance_bytes=block * max(len(plan.freed), 1),
        free_bytes={folder: gc_measure.free_bytes(folder) for folder in _synced(places)},
        generations=tuple(asdict(row) for row in plan.rows if row.hash),
        others=tuple(asdict(row) for row in plan.rows if not row.hash),
        commit=plan.snapshot["head"],
    )
    write_intent(root, intent)
    return intent


def _synced(places: Sequence[Path]) -> list[str]:
    folders = gc_measure.volumes(places)
    for folder in folders:
        gc_measure.sync(folder)
    return folders


def _refuse(listed: Sequence[Refusal]) -> None:
    if listed:
        listed_lines = "\n".join(f"  {refusal.what}" for refusal in listed)
        raise EyasError(f"nothing was deleted:\n{listed_lines}", listed[0].hint)


def _compare(root: Path, plan: GcPlan) -> None:
    """DVC decides for itself what it removes: it must be exactly what was confirmed."""
    ours = _paths(scan_cache(root), plan.going.objects)
    strays = {gc_dvc.real_path(plan.cache / path) for path in plan.going.strays}
    theirs = gc_dvc.would_remove(root, [Path(project) for project in plan.projects or ()])
    more, less = sorted(theirs - ours - strays), sorted(ours - theirs)
    if more or less:
        lines = [f"  DVC would also remove {path}" for path in more[:5]]
        lines += [f"  DVC would keep {path}" for path in less[:5]]
        raise EyasError(
            f"nothing was deleted: `dvc gc` would remove {len(more):,} objects more and {len(less):,} fewer than the "
            "plan\n" + "\n".join(lines),
            f"look at what names them: `dvc gc {' '.join(gc_dvc.KEEP)} --dry`",
        )


def _paths(cache: Cache, names: Sequence[str] | dict[str, Any]) -> set[str]:
    return {gc_dvc.real_path(cache.place(name)) for name in names}


# ── the deletion ──────────────────────────────────────────────────────────────────────────────


def _finish(root: Path, intent: Intent, lock: int, *, is_resumed: bool) -> dict[str, Any]:
    told = [event for event in ledger.read(root) if event.get("run") == intent.run]
    if told:  # killed between the ledger's line and the end
        _close(root)
        return told[-1]
    projects = [Path(project) for project in intent.projects]
    notes = [] if not is_resumed else ["it was interrupted and gone on with"]
    left_over = _left_over(root, intent, projects) if is_resumed else set[str]()
    if left_over:
        notes.append(
            f"{len(left_over):,} objects became unused since and were not confirmed: `dvc gc` did not run again, "
            "`make gc-plan` lists what is left"
        )
    else:
        gc_dvc.remove(root, projects, lock)
    found = read_with_projects(root, projects, commits=False)
    kept = found.kept
    if kept.problems:
        raise EyasError(f"it is not certain any more what is in use: {kept.problems[0]}", "make gc-plan says more")
    removal = remove_names(root, intent, found)
    remove_strays(root, intent)
    for generation in intent.generations:
        if generation["hash"] not in kept.names:
            (root / RETIRED_HOME / generation["hash"]).unlink(missing_ok=True)
    event = _event(root, intent, kept.names, removal, notes)
    ledger.append(root, event)
    _close(root)
    return event


def _left_over(root: Path, intent: Intent, projects: Sequence[Path]) -> set[str]:
    """Objects that DVC would remove now and that the plan did not have."""
    found = read_with_projects(root, projects, commits=False)
    _refuse(refusals(found, projects if intent.projects else [], is_locked=True))
    confirmed = _paths(found.cache, intent.objects)
    confirmed |= {gc_dvc.real_path(found.cache.folder / path) for path in intent.strays}
    return gc_dvc.would_remove(root, projects) - confirmed


# ── the account ───────────────────────────────────────────────────────────────────────────────


def _event(root: Path, intent: Intent, kept: frozenset[str], removal: Removal, notes: list[str]) -> dict[str, Any]:
    alive, num_left = _survivors(root, intent)
    expected = {(device, inode): size for device, inode, size in intent.freed if (device, inode) not in alive}
    expected_bytes = sum(expected.values())
    own_bytes = (root / INTENT).stat().st_blocks * 512
    measured = gc_measure.freed_since(intent.free_bytes, expected_bytes, own_bytes)
    if measured < expected_bytes - intent.tolerance_bytes:
        notes.append(_why_less(expected, expected_bytes - measured))
    if removal.num_kept or removal.num_changed:
        notes.append(
            f"names left alone: {removal.num_kept:,} of what is in use again, {removal.num_changed:,} changed since"
        )
    if removal.denied:
        notes.append(
            f"{len(removal.denied):,} names may not be removed ({removal.denied[0]}); what they hold is not free "
            "before somebody who may removes them"
        )
    if num_left:
        notes.append(f"{num_left:,} objects of the plan are still in the cache")
    return {
        "event": EVENT,
        "plan_id": intent.plan_id,
        "run": intent.run,
        "commit": intent.commit,
        "user": _user(),
        "generations": [one for one in intent.generations if one["hash"] not in kept],
        "kept_again": [one["hash"] for one in intent.generations if one["hash"] in kept],
        "others": list(intent.others),
        "num_objects": len(intent.objects) - num_left,
        "num_names": removal.num_gone,
        "promised_bytes": sum(size for *_, size in intent.freed),
        "expected_bytes": expected_bytes,
        "measured_bytes": measured,
        "notes": notes,
    }


def _survivors(root: Path, intent: Intent) -> tuple[set[Key], int]:
    """Inodes of the plan that still have a name of it, and how many objects are left."""
    cache = scan_cache(root)
    alive = {key for name, key in intent.objects.items() if name in cache.objects}
    num_left = sum(name in cache.objects for name in intent.objects)
    for path, _, _, device, inode, *_ in intent.names:
        found = lstat(root / path)
        if found is not None and (found.st_dev, found.st_ino) == (device, inode):
            alive.add((device, inode))
    return alive, num_left


def _why_less(expected: dict[Key, int], missing_bytes: int) -> str:
    text = f"{console.human_bytes(missing_bytes)} less came free than was promised"
    holders = gc_measure.open_files(expected)
    if holders:
        who = ", ".join(sorted({f"{one.program} (pid {one.pid})" for one in holders}))
        size = console.human_bytes(sum({one.num_bytes for one in holders}))
        return f"{text}: {who} has deleted files open ({size}); they are free once it ends"
    return f"{text}: somebody wrote to the volume meanwhile, or files share blocks with files that eyas does not know"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _close(root: Path) -> None:
    """The intent goes last: a plan without it would look like one that was never begun."""
    forget_plans(root)
    (root / INTENT).unlink(missing_ok=True)
    fs.fsync_dir((root / INTENT).parent)


def outcome_text(event: dict[str, Any]) -> str:
    """What a gc did, for people."""
    rows = [
        (one["title"], one["engine"].partition(" ")[0] or "-", console.human_bytes(one["freed_bytes"]))
        for one in event["generations"]
    ]
    rows += [(one["title"], "", console.human_bytes(one["freed_bytes"])) for one in event["others"]]
    lines = [console.table(rows, ("deleted", "engine", "freed"))] if rows else []
    measured = event["measured_bytes"]
    told = f"{measured:,}" if measured >= 0 else f"{-measured:,} fewer than before (others wrote to the volume)"
    lines.append(
        f"promised {event['promised_bytes']:,} bytes, measured {told}: "
        f"{event['num_objects']:,} objects and {event['num_names']:,} names; noted in {ledger.LEDGER}"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in event["notes"])])
