"""The intent: what a gc has begun to delete, written before the first byte goes, so that a killed one is gone on with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.canonical import canonical_json
from eyas.errors import StoreError
from eyas.shards.handover import HOME

PLANS = HOME / "gc"
INTENT = PLANS / "intent.json"


@dataclass(frozen=True, kw_only=True)
class Intent:
    """A gc under way."""

    plan_id: str
    run: int
    """Nanoseconds since 1970 at its begin: the ledger names the run by it."""
    projects: tuple[str, ...]
    objects: dict[str, tuple[int, int]]
    """Name → device and inode."""
    strays: dict[str, tuple[int, int, int]]
    """Path relative to the cache → device, inode and size."""
    names: tuple[tuple[str, str, str, int, int, int, int], ...]
    """Path, generation, folder, device, inode, size, mtime in nanoseconds."""
    freed: tuple[tuple[int, int, int], ...]
    """Device, inode, bytes."""
    tolerance_bytes: int
    """One block of the file system an object."""
    free_bytes: dict[str, int]
    """Free bytes before, by folder: one of every volume concerned."""
    generations: tuple[dict[str, Any], ...]
    """As they were promised."""
    others: tuple[dict[str, Any], ...]
    commit: str


def read_intent(root: Path) -> Intent | None:
    """The intent of a gc that did not come to its end; None without one.

    Raises:
        StoreError: It is damaged.
    """
    path = root / INTENT
    if not path.exists():
        return None
    value = fs.read_json(path)
    try:
        return Intent(
            plan_id=value["plan_id"],
            run=value["run"],
            projects=tuple(value["projects"]),
            objects={name: (device, inode) for name, (device, inode) in value["objects"].items()},
            strays={name: (device, inode, size) for name, (device, inode, size) in value["strays"].items()},
            names=tuple((p, g, f, d, i, s, m) for p, g, f, d, i, s, m in value["names"]),
            freed=tuple((device, inode, num_bytes) for device, inode, num_bytes in value["freed"]),
            tolerance_bytes=value["tolerance_bytes"],
            free_bytes=value["free_bytes"],
            generations=tuple(value["generations"]),
            others=tuple(value["others"]),
            commit=value["commit"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path} is no list of a gc under way: {error!r}", f"look at it; remove it to plan anew: rm {path}"
        ) from None


def write_intent(root: Path, intent: Intent) -> None:
    """Write it durably."""
    fs.write_text(root / INTENT, json.dumps(intent.__dict__, sort_keys=True, separators=(",", ":")) + "\n")


def plan_path(root: Path, plan_id: str) -> Path:
    """Where a plan is kept."""
    return root / PLANS / f"{plan_id}.json"


def write_plan(root: Path, plan_id: str, projects: tuple[str, ...] | None, snapshot: dict[str, Any]) -> None:
    """Keep what an id stands for; plans of other situations are of no use any more."""
    path = plan_path(root, plan_id)
    fs.write_text(path, canonical_json({"plan_id": plan_id, "projects": projects, "snapshot": snapshot}) + "\n")
    forget_plans(root, but=plan_id)


def read_plan(root: Path, plan_id: str) -> dict[str, Any] | None:
    """A kept plan; None when there is none of that id."""
    if not plan_id.isalnum():
        return None
    try:
        value = json.loads(plan_path(root, plan_id).read_bytes())
    except (OSError, ValueError):
        return None
    is_plan = isinstance(value, dict) and value.get("plan_id") == plan_id and {"snapshot", "projects"} <= value.keys()
    return value if is_plan else None


def forget_plans(root: Path, *, but: str = "") -> None:
    """Remove kept plans."""
    for path in (root / PLANS).glob("*.json"):
        if path.name not in (INTENT.name, f"{but}.json"):
            path.unlink(missing_ok=True)
