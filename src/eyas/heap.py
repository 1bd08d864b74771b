"""The heap of a process that moves tensors: what one of them gave back is taken for the next.

By default the C library takes every large block from the kernel and returns it when it is freed, so that each tensor of a
loop costs a fault a page: a seventh of the processor time of a capture through transformers on a CPU (docs/log.md).
"""

from __future__ import annotations

import ctypes

MIB = 1 << 20
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
"""Numbers of glibc's ``mallopt``."""
SETTINGS = ((ARENA_MAX, 1), (MMAP_THRESHOLD, 65 * MIB), (TOP_PAD, 64 * MIB), (TRIM_THRESHOLD, 512 * MIB))
"""One heap for all threads, for blocks up to 64 MiB, a chunk of logits; it grows by as much, and 512 MiB free at its end go
back. Holes between larger blocks of changing sizes doubled what a process held."""
OLD_MMAP_THRESHOLD = 32 * MIB
"""What older ones take at most."""


def keep_freed() -> None:
    """Let this process reuse its freed memory; without glibc nothing changes.

    Before threads begin. Children have heaps of their own: a server that is started is not touched.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, value in SETTINGS:
        if not mallopt(name, value) and name == MMAP_THRESHOLD:
            mallopt(name, OLD_MMAP_THRESHOLD)
