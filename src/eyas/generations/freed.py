"""How many bytes a deletion gives back: an inode's blocks, once its last name is gone.

Objects of the cache are hard links of files in the workspace: deleting one of the two names frees nothing, for ``du``
as little as for the next extraction. So names are counted, inode by inode; where files share blocks (reflinks), the
blocks are counted as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from eyas.generations.extents import Key, SharedBlocks
from eyas.generations.objects import CachedObject
from eyas.generations.trees import TreeFile

NOT_SHARED = SharedBlocks()


def freed_by_inode(names: Iterable[CachedObject | TreeFile], shared: SharedBlocks = NOT_SHARED) -> dict[Key, int]:
    """Bytes that the volume gets back, per inode that loses its last name, in the order of the names.

    Args:
        names: Names that are deleted, each given once.
        shared: Blocks that files have in common; those are put down to the first of their inodes.
    """
    counted: Counter[Key] = Counter()
    inodes: dict[Key, CachedObject | TreeFile] = {}
    for name in names:
        key = (name.device, name.inode)
        counted[key] += 1
        inodes[key] = name
    gone = {key: name for key, name in inodes.items() if counted[key] >= name.num_links}
    if not shared.blocks:
        return {key: name.disk_bytes for key, name in gone.items()}
    freed = shared.freed(gone)
    return {key: max(name.disk_bytes - shared.shared_bytes(key), 0) + freed[key] for key, name in gone.items()}


def freed_bytes(names: Iterable[CachedObject | TreeFile], shared: SharedBlocks = NOT_SHARED) -> int:
    """Bytes that the volume gets back when all these names, each given once, are deleted."""
    return sum(freed_by_inode(names, shared).values())
