"""Trainers as processes: where each finds its interpreter, and how it is given orders.

A peer's packages do not agree with ours (another transformers), so it has an environment of its own. It is made
below ``.eyas/bench/peers`` from pinned versions on the first run; ``EYAS_PEER_SPECULATORS`` or
``EYAS_PEER_SPECFORGE``, the path of a python that has the peer, is taken instead.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.errors import EyasError
from eyas.ops.bench.peers.protocol import MARK

OURS = "eyas"
READY = "ready.json"
TORCH = "torch==2.13.0"


class PeerError(EyasError):
    """A peer's environment cannot be made, or its process failed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A trainer to compare with."""

    name: str
    requirements: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    """Installed alone: what they declare wants a GPU."""
    has_our_loss: bool = True
    """Its loss is the mean KL of the rows that train, as ours; no ratio is taken of another kind."""
    unwanted: tuple[str, ...] = ()
    """Declared by a package and not used: builds for another torch break the import."""

    @property
    def version(self) -> str:
        """What is measured."""
        pinned = [r for r in (*self.without_dependencies, *self.requirements) if r.startswith(f"{self.name}==")]
        return pinned[0].split("==")[1]


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "speculators",
            (
                "speculators==0.9.0", "hs-connectors==0.9.0", "transformers==5.19.0", "datasets==5.1.0",
                "safetensors==0.8.0", "numpy", TORCH,
            ),
            unwanted=("torchvision", "torchaudio"),
        ),
        Peer(
            "specforge",
            (
                "transformers==5.8.1", "numpy", "pyyaml", "safetensors", "pydantic", "psutil", "requests", "tqdm",
                "accelerate", "datasets", TORCH,
            ),
            without_dependencies=("specforge==0.2.0",),
            has_our_loss=False,
        ),
    )
}  # fmt: skip


def eyas_version() -> str:
    """Empty where eyas is on the path and not installed."""
    try:
        return importlib.metadata.version(OURS)
    except importlib.metadata.PackageNotFoundError:
        return ""


def peer_python(name: str, environments: Path) -> Path:
    """The interpreter of a peer's environment, made when it is not there.

    Args:
        name: Of the peer.
        environments: Folder of all environments that eyas made.

    Raises:
        PeerError: It cannot be made.
    """
    given = os.environ.get(f"EYAS_PEER_{name.upper()}")
    if given:
        if not Path(given).is_file():
            raise PeerError(f"EYAS_PEER_{name.upper()} is {given}, expected the path of a python that has {name}")
        return Path(given).absolute()
    peer, folder = PEERS[name], (environments / name).absolute()
    python = folder / "bin/python"
    wanted = [*peer.requirements, *peer.without_dependencies]
    if python.is_file() and (folder / READY).is_file() and fs.read_json(folder / READY) == wanted:
        return python
    console.log(f"bench: making an environment for {name} {peer.version} in {folder} (minutes)")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", str(folder)], name)
    _run([*pip, "install", *peer.requirements], name)
    if peer.without_dependencies:
        _run([*pip, "install", "--no-deps", *peer.without_dependencies], name)
    if peer.unwanted:
        _run([*pip, "uninstall", "-y", *peer.unwanted], name)
    fs.write_text(folder / READY, json.dumps(wanted))
    return python


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise PeerError(
            f"the environment of {name} cannot be made: `{' '.join(command)}` exited {done.returncode}: {''.join(last)}",
            f"make one by hand and give its python: EYAS_PEER_{name.upper()}=/path/to/python",
        )


class Running:
    """A trainer's process, ready for orders."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self._process, self._log = name, process, log
        self._answer()

    def train(self, num_steps: int) -> dict[str, Any]:
        """Take optimizer steps; gives processor and wall seconds, tokens, losses."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{num_steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it died of is told by the answer that does not come
        return self._answer()

    def finish(self) -> int:
        """End the process; gives the most bytes it ever held."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return int(self._answer()["peak_bytes"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        lines = self._log.read_text(errors="replace").strip().splitlines()
        raise PeerError(
            f"the process of {self.name} ended: {lines[-1] if lines else 'it says nothing'}", str(self._log)
        )


@contextmanager
def started(
    name: str, python: Path, job: Mapping[str, Any], folder: Path, *, device: bool = False
) -> Iterator[Running]:
    """A trainer's process on one thread; killed on leaving, if it is still there.

    Args:
        name: ``eyas`` or a peer's.
        python: Its interpreter.
        job: What the driver reads.
        folder: Its job and what it prints to stderr are kept here.
        device: The driver for packs on a device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fs.write_text(folder / f"{name}.json", json.dumps(job))
    driver = ["-m", "eyas.ops.bench.train_device_ours" if device else "eyas.ops.bench.train_ours"]
    if name != OURS:
        driver = [str(Path(__file__).parent / "peers" / f"run_{name}{'_device' if device else ''}.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if name != OURS:
        environment.pop("PYTHONPATH", None)
    log = folder / f"{name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [str(python), *driver, str(folder / f"{name}.json")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
        )  # fmt: skip
        try:
            yield Running(name, process, log)
        finally:
            process.kill()
            process.wait()
