"""The codec's ratio on states that were stored before: of the same target, codec and streams, by their manifest.

DVC deletes the manifest before it runs ``extract`` again; ``dvc.lock`` names it in the cache all the same, so that
the gate of a run and ``make budget`` before it count with one figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.errors import StoreError
from eyas.plan.budget import Need, Ratio, measured_ratio
from eyas.plan.cache import cache_object, hashes, locked_stage

SAME = ("target", "codec", "boundaries", "final_hidden", "dtype", "revision")
"""Of two captures whose states compress alike; ``revision`` counts up when a codec's bytes change."""
INVENTED = "fake"
"""The engine whose states are no model's: they compress forty times better."""
MIN_SHARE = 0.01
"""Of the planned tokens; a sample or two tell nothing of a million."""


def earlier_ratio(root: Path, need: Need, capture: Mapping[str, Any], manifest_path: Path) -> Ratio | None:
    """Ratio of the published states, or of those that ``dvc.lock`` names; None when there are none like these.

    Args:
        root: The repository.
        need: Of the plan.
        capture: The plan's capture identity as plain values.
        manifest_path: Relative to the repository.

    Raises:
        StoreError: A file is there and is no manifest.
    """
    path = next(
        (path for path in (root / manifest_path, _cached(root, manifest_path)) if path and path.is_file()), None
    )
    if path is None:
        return None
    manifest = fs.read_json(path)
    try:
        is_telling = manifest["num_stored_tokens"] >= MIN_SHARE * need.num_tokens
        if not is_telling or not _is_like(manifest["capture"], capture):
            return None
        where = f"{len(manifest['shards']):,} shards of {manifest['identity'][:16]}"
        return measured_ratio(need, manifest["stored_bytes"], manifest["num_stored_tokens"], where)
    except (KeyError, TypeError, AttributeError) as error:
        raise no_manifest(path, error) from None


def no_manifest(path: Path, error: Exception) -> StoreError:
    """What a file that is no manifest is answered with."""
    return StoreError(f"{path} is no manifest of hidden states: {error!r}", f"look at it: head -c 500 {path}")


def _cached(root: Path, path: Path) -> Path | None:
    md5 = hashes(locked_stage(root, "extract"), "outs").get(path.as_posix())
    return cache_object(root, md5) if md5 else None


def _is_like(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """The share of rows that are left out is the tokens' own: it is known of no other tokens."""
    engines = {stored.get("engine"), wanted.get("engine")}
    if INVENTED in engines and len(engines) > 1:
        return False
    rows = [capture.get("last_rows", "all") for capture in (stored, wanted)]
    if rows[0] != rows[1] or (rows[0] == "trained" and stored.get("tokens") != wanted.get("tokens")):
        return False
    return all(stored.get(key) == wanted.get(key) for key in SAME)
