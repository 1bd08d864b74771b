"""Random histories of generate, commit, branch, tag, experiment, adopt, retire, keep and gc, on a volume of their own.

After every gc: no object that something kept uses is gone, everything else is, no name outside the cache keeps freed
bytes alive, and the bytes promised are the bytes that ``du`` and the volume say. See ``gc_history``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from gc_history import History

from eyas import fs
from eyas.ops.gc import dvc as gc_dvc
from states_repository import dvc_gc

REPORT = Path(__file__).parents[3] / "reports/bench/gc.json"
NUM_BLOCKS, BLOCK = 10, 50
EVERY_PROCESS = 25
"""Of the long run's histories one in so many runs ``dvc gc`` as eyas does, in a process of its own."""
tried: set[int] = set()


@pytest.fixture(scope="module")
def volume(tmp_path_factory) -> Iterator[Path]:
    """A tmpfs: nobody else writes there, so that its free bytes can be compared to the byte."""
    folder = tmp_path_factory.mktemp("volume")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def dvc_in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same DVC without two seconds of starting it."""

    def would_remove(root: Path, projects: Sequence[Path]) -> set[str]:
        return {os.path.realpath(path) for path in dvc_gc(root, dry=True)}

    def remove(root: Path, projects: Sequence[Path], lock: int) -> None:
        dvc_gc(root, dry=False)

    with monkeypatch.context() as patch:
        patch.setattr(gc_dvc, "would_remove", would_remove)
        patch.setattr(gc_dvc, "remove", remove)
        yield


def live(volume: Path, seed: int, *, num_steps: int, check_out: bool) -> History:
    """One history; on a failure what it did is shown."""
    home = volume / f"{seed}"
    home.mkdir()
    history = History(home, random.Random(seed))
    try:
        history.run(num_steps)
        if check_out:
            history.check_out_everything()
    except BaseException:
        print(f"history {seed}:", *history.steps, sep="\n  ")
        raise
    finally:
        shutil.rmtree(home)
    assert history.num_gcs
    return history


@pytest.mark.parametrize("seed", range(6))
def test_a_history(volume, monkeypatch, seed):
    """Cases 82 and 86."""
    with dvc_in_process(monkeypatch):
        live(volume, seed, num_steps=14, check_out=seed < 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_many_histories(volume, monkeypatch, block):
    for seed in range(1000 + BLOCK * block, 1000 + BLOCK * (block + 1)):
        num_steps = random.Random(-seed).randint(5, 30)
        if seed % EVERY_PROCESS:
            with dvc_in_process(monkeypatch):
                live(volume, seed, num_steps=num_steps, check_out=seed % 5 == 0)
        else:
            live(volume, seed, num_steps=num_steps, check_out=False)
        tried.add(seed)
    figures = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    fs.write_text(REPORT, json.dumps(figures | {"histories_tried": len(tried)}, indent=2, sort_keys=True) + "\n")
