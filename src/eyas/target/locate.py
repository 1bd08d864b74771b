"""Where a fetched target lies, verified: the one door through which later stages reach its files."""

from __future__ import annotations

from pathlib import Path

from eyas import console
from eyas.config import TargetConfig
from eyas.contracts import TargetIdentity
from eyas.errors import TargetError
from eyas.target import store
from eyas.target.fetch import fetch
from eyas.target.store import target_dir

__all__ = ["ensure", "target_dir"]


def ensure(identity: TargetIdentity, config: TargetConfig) -> Path:
    """Folder of exactly this target, fetched again when it is missing or damaged.

    Sizes and mtimes are compared with those at the last hashing; files are hashed only on doubt.

    Raises:
        TargetError: The parameters name another target, or fetching gives one.
    """
    expected = store.source_label(config)
    if identity.source != expected or (config.source != "directory" and identity.revision != config.revision):
        raise TargetError(
            f"models/target.json is {identity.source} at {identity.revision}, "
            f"params.yaml says {expected} at {config.revision}",
            "run `dvc repro fetch`",
        )
    wrong = store.damage(config, identity)
    if wrong is None:
        return target_dir(identity)
    console.log(f"target: {wrong}; fetching it again")
    store.require_same(identity, fetch(config))
    return target_dir(identity)
