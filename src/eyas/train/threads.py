"""How many threads a training computes with: they decide the order of sums."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def all_threads() -> Iterator[None]:
    """All cores this process may use, unless OMP_NUM_THREADS says otherwise.

    The number enters the run record, because the order of sums depends on it.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
