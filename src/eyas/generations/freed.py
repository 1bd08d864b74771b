"""How many bytes a deletion gives back: an inode's blocks, once its last name is gone.

Objects of the cache are hard links of files in the workspace: deleting one of the two names frees nothing, for ``du``
as little as for the next extraction. So names are counted, inode by inode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from eyas.generations.objects import CachedObject
from eyas.generations.trees import TreeFile


def freed_bytes(names: Iterable[CachedObject | TreeFile]) -> int:
    """Bytes that the volume gets back when all these names, each given once, are deleted."""
    counted: Counter[tuple[int, int]] = Counter()
    inodes: dict[tuple[int, int], CachedObject | TreeFile] = {}
    for name in names:
        key = (name.device, name.inode)
        counted[key] += 1
        inodes[key] = name
    return sum(inodes[key].disk_bytes for key, count in counted.items() if count >= inodes[key].num_links)
