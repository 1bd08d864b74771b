"""A project whose training can be streamed, copies of it, and looks at its ring; fixtures for the tests of streams."""

import contextlib
import os
import shutil
import textwrap
import threading
from pathlib import Path

import pytest
import stream_world as world

from eyas.shards.ring import Ring

SRC = str(Path(__file__).parents[3] / "src")


class Watched:
    """Looks at what a folder takes on the disk, as ``du`` does, as often as it can."""

    def __init__(self, folder):
        self.folder, self.peak_bytes, self._ended = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _look(self):
        while not self._ended.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, allocated_bytes(self.folder))


def allocated_bytes(folder):
    total = 0
    for place, _, names in os.walk(folder):
        for path in (place, *(f"{place}/{name}" for name in names)):
            with contextlib.suppress(FileNotFoundError):
                total += Path(path).stat().st_blocks * 512
    return total


@pytest.fixture(scope="module", autouse=True)
def little_calibration():
    """For this file alone."""
    with pytest.MonkeyPatch.context() as patch:
        for module in world.CALIBRATED:
            patch.setattr(module, "CALIBRATION_ROWS", world.CALIBRATION_ROWS)
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory, little_calibration):
    """A project with its stored part, and the drafter that a training from stored states gives."""
    root = tmp_path_factory.mktemp("project")
    world.make_project(root)
    before = Path.cwd()
    os.chdir(root)
    expected = world.run_store(root)
    world.capture_set(root, "stream")
    os.chdir(before)
    return root, expected


@pytest.fixture
def place(project, tmp_path, monkeypatch):
    """A copy of the project, and what must come out."""
    root = tmp_path / "project"
    shutil.copytree(project[0], root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", f"{SRC}{os.pathsep}{Path(__file__).parent}")
    return root, project[1]


def least(root):
    """The smallest ring that trains."""
    manifest = world.manifest_of(root)
    config = world.inputs_of(root, world.stored_part(root), source="stream").config
    return world.part_of(root / "data/tokens", manifest, config).need.least_bytes


def ring_of(root):
    return Ring(root / ".eyas", world.make_plan(root, "store").identity)


def patched(tmp_path, code):
    """A capturing process with something changed in it."""
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(code) + "\nfrom eyas import console\nconsole.run_main(streamed.main)\n")
    return [str(script)]


ONCE = """
    import os, pathlib, time
    from eyas.engines import streamed
    from eyas.engines.fake import FakeEngine
    capture, mark = FakeEngine.capture, pathlib.Path("happened")

    def changed(self, batch, counts=[0]):
        counts[0] += 1
        if counts[0] == 15 and not mark.exists():
            mark.touch()
            {fault}
        yield from capture(self, batch)

    FakeEngine.capture = changed
"""
