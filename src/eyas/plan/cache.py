"""What DVC's own files say, read without importing DVC: the cache and its objects, ``dvc.lock``.

A terabyte is committed by linking it. That needs ``hardlink`` first in ``cache.type`` and the cache on the
workspace's own mount; both are asked before an engine starts. DVC's state, which spares hashing it again, belongs
on that volume too: elsewhere a container or another machine does not find it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.config import dvc
from eyas.errors import DiskError, StoreError
from eyas.plan.volume import holding, mounts

SITE_CACHE = Path(".dvc/tmp/site")
"""Where ``make`` lets DVC keep its state: with the repository, out of git, gone only with ``.dvc/tmp``."""


def cache_types(root: Path) -> tuple[str, ...]:
    """DVC's ``cache.type`` in order; empty without a DVC repository, DVC's own default without a setting."""
    if not (root / ".dvc").is_dir():
        return ()
    named = dvc.settings(root, "cache").get("type", "reflink,copy")
    return tuple(kind.strip() for kind in named.split(","))


def copying_types(root: Path) -> tuple[str, ...]:
    """``cache.type`` where a commit copies, so that the disk is needed twice meanwhile; empty where it does not.

    DVC 3.67 links only when ``hardlink`` stands first. Whatever else stands there, it reflinks where the file system
    can and copies where it cannot, even when ``reflink`` is the only type.
    """
    types = cache_types(root)
    if types[:1] in ((), ("hardlink",)) or fs.can_reflink(root, cache_dir(root)):
        return ()
    return types


def cache_dir(root: Path) -> Path:
    """DVC's cache folder; a relative one is relative to the file that sets it, ``~`` the user's home."""
    folder = root / ".dvc/cache"
    for path in dvc.files(root):
        if (named := dict(dvc.sections(path)).get("cache", {}).get("dir")) is not None:  # empty: that file's own folder
            folder = path.parent / os.path.expanduser(named)  # noqa: PTH111 - an unknown user is a folder's name
    return folder


def object_finder(root: Path) -> Callable[[str], str]:
    """Where DVC's cache keeps the file or folder of a hash; made once and asked 80,000 times."""
    folder = f"{cache_dir(root)}/files/md5/"
    return lambda md5: f"{folder}{md5[:2]}/{md5[2:]}"


def cache_object(root: Path, md5: str) -> Path:
    """Where DVC's cache keeps one file or folder."""
    return Path(object_finder(root)(md5))


def site_cache_dir(root: Path) -> Path | None:
    """Where DVC keeps its state, as set for this repository; None when it is DVC's own place."""
    named = os.environ.get("DVC_SITE_CACHE_DIR") or dvc.settings(root, "core").get("site_cache_dir")
    return Path(named) if named else None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as DVC reads it; empty when it is missing.

    Raises:
        StoreError: It is no YAML mapping.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        value = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (YAMLError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is no YAML: {error}", f"`git diff {path}` shows what was changed") from None
    if not isinstance(value, dict):
        raise StoreError(f"{path} holds {type(value).__name__}, expected a mapping", f"git checkout {path}")
    return value


def at_key(values: Any, key: str, absent: Any = None) -> Any:
    """The value at a dotted key, as DVC reads it; ``absent`` when there is none."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return absent
        values = values[part]
    return values


def locked_stage(root: Path, name: str) -> dict[str, Any]:
    """A stage's entry in ``dvc.lock``; empty when it never finished."""
    stages = read_yaml(root / "dvc.lock").get("stages")
    entry = stages.get(name) if isinstance(stages, dict) else None
    return entry if isinstance(entry, dict) else {}


def hashes(entry: dict[str, Any], kind: str) -> dict[str, str]:
    """Path → md5 of a locked stage's ``deps`` or ``outs``."""
    listed = entry.get(kind)
    items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return {str(item.get("path", "")): str(item.get("md5", "")) for item in items}


def check_links(root: Path) -> None:
    """Refuse a cache that hardlinks cannot reach although ``cache.type`` counts on them.

    Raises:
        DiskError: A file of the workspace could not be linked into the cache's folder.
    """
    cache = cache_dir(root)
    if cache_types(root)[:1] != ("hardlink",) or fs.can_hardlink(root, cache):
        return
    own, other = _mount(root), _mount(cache)
    if own == other:
        why = f"{own}: a file system without hardlinks"
        fix = "keep the repository on a file system with hardlinks (ext4, xfs, NFS, CephFS)"
    else:
        why = f"two mounts, {own} and {other}; links do not cross mounts, not even two bind mounts of one file system"
        fix = (
            f"keep both on one mount: dvc cache dir --local {root.resolve() / '.dvc' / 'cache'}; "
            "in a container, mount the folder that holds both once instead of each by itself"
        )
    raise DiskError(
        f"DVC's cache {cache} cannot hold hardlinks to files of {root.resolve()}: {why}; a commit would copy every shard",
        fix,
    )


def _mount(path: Path) -> str:
    """The mount that holds a path: ``/data (ext4)``; bind mounts have no other mark than this list."""
    resolved, found = path.resolve(), mounts()
    if not found:
        return f"device {resolved.stat().st_dev if resolved.exists() else '?'}"
    mount = holding(resolved, found)
    return f"{mount.point} ({mount.kind})" if mount else "/ (?)"
