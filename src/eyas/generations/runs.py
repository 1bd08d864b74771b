"""What DVC's run cache names: it remembers finished runs, and keeps reports that ``dvc.yaml`` does not cache.

No gc of DVC's counts those as used. They matter when ``dvc.lock`` is lost: with them DVC takes a stage for done,
without them it runs it again.
"""

from __future__ import annotations

from eyas.errors import StoreError
from eyas.generations.objects import DIR_SUFFIX, Cache
from eyas.generations.snapshot import load_yaml

RUNS = "runs"


def run_cache_names(cache: Cache) -> frozenset[str]:
    """Hashes of every output of every run that is remembered, folders with their files."""
    names: set[str] = set()
    folder = cache.folder / RUNS
    for path in sorted(folder.glob("*/*/*")) if folder.is_dir() else ():
        try:
            outs = load_yaml(str(path), path.read_bytes()).get("outs")
        except (StoreError, OSError):
            continue  # DVC passes over a damaged one as well
        for out in outs if isinstance(outs, list) else ():
            name = str(out.get("md5") or "") if isinstance(out, dict) else ""
            if name and name not in names:
                names.add(name)
                names.update(_files(cache, name))
    return frozenset(names)


def _files(cache: Cache, name: str) -> list[str]:
    if not name.endswith(DIR_SUFFIX):
        return []
    try:
        return list(cache.read_tree(name).values())
    except StoreError:
        return []
