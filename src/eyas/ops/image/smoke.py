"""The small pipeline in an image and outside of it, with as many threads: every artifact must have the same hash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from eyas.ops.image.builder import Builder
from eyas.ops.image.run import run

OUTSIDE, INSIDE = Path(".eyas/smoke-outside"), Path(".eyas/smoke")


def smoke_faults(root: Path, builder: Builder, name: str, say: Callable[[str], None]) -> list[str]:
    """What an image makes otherwise than this environment does; empty when every artifact is the same.

    Outside comes first: what it downloads lies in the repository then, where the container finds it.
    """
    from eyas.ops.reproduce import compare  # the pipeline's own packages; all else here needs none

    # Sums of bfloat16 products depend on how they are split.
    threads = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS') or 1}"
    say(f"the small pipeline outside of the image and in it, {threads}")
    command = ["env", threads, sys.executable, "-m", "eyas.cli", "smoke", "--folder", str(OUTSIDE)]
    if subprocess.run(command, cwd=root, check=False).returncode:
        return ["the small pipeline failed outside of the image: `make smoke` runs it alone"]
    if run(root, builder, name, ["env", threads, "make", "smoke"]):
        return ["the small pipeline failed in the image: `make smoke IN_CONTAINER=1` runs it alone"]
    compared = compare(root / OUTSIDE, root / INSIDE)
    return [f"{each.artifact}: another hash in the image than outside" for each in compared if not each.equal]
