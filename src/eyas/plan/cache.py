"""How DVC is set to keep its cache, read from ``.dvc/config`` alone: no DVC import, a millisecond.

A terabyte is committed by linking it. That needs ``hardlink`` first in ``cache.type`` and the cache on the
workspace's own mount; both are asked before an engine starts.
"""

from __future__ import annotations

import configparser
from pathlib import Path

from eyas import fs
from eyas.errors import DiskError


def _settings(root: Path) -> dict[str, str]:
    settings: dict[str, str] = {}
    for name in ("config", "config.local"):
        parser = configparser.ConfigParser()
        parser.read(root / ".dvc" / name)
        if parser.has_section("cache"):
            settings.update(parser["cache"])
    return {key: value.strip("\"'") for key, value in settings.items()}


def cache_types(root: Path) -> tuple[str, ...]:
    """DVC's ``cache.type`` in order; empty without a DVC repository, DVC's own default without a setting."""
    if not (root / ".dvc").is_dir():
        return ()
    named = _settings(root).get("type", "reflink,copy")
    return tuple(kind.strip() for kind in named.split(","))


def cache_dir(root: Path) -> Path:
    """DVC's cache folder."""
    folder = Path(_settings(root).get("dir", "cache"))
    return folder if folder.is_absolute() else root / ".dvc" / folder


def check_links(root: Path) -> None:
    """Refuse a cache that hardlinks cannot reach although ``cache.type`` counts on them.

    Raises:
        DiskError: A file of the workspace could not be linked into the cache's folder.
    """
    if cache_types(root)[:1] == ("hardlink",) and not fs.can_hardlink(root, cache_dir(root)):
        raise DiskError(
            f"DVC's cache {cache_dir(root)} cannot hold hardlinks to files of {root.resolve()}: two mounts, or a file "
            "system without links; a commit would copy every shard",
            f"keep both on one mount: dvc cache dir --local {root.resolve() / '.dvc' / 'cache'}",
        )
