"""What the quality drivers of both peers share: the job file, the clock, the order of the data, the results.

A driver is run by the peer's own interpreter as ``python <driver>.py JOB.json``; it imports nothing of eyas. The job:

    states, target      folders: the exported states, the target with ``model.safetensors.index.json``
    device              cpu or cuda
    num_workers         reading processes
    batches             seed -> list of steps, each a list of sample numbers of the export: the packs of eyas
    max_tokens          tokens of the longest pack
    warm_steps          steps before each run that nobody counts: compilation happens there, and the speed is taken
    runs                name, seed, num_steps, settings, out

Every run leaves ``out/drafter.safetensors`` (names of the SGLang export) and ``out/facts.json``.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

MEASURED_SHARE = 0.5
"""Of the warm steps, the last ones: by then everything is compiled."""


class PeerTrainer(Protocol):
    """One drafter in training."""

    def step(self, batch: Any) -> torch.Tensor:
        """One optimizer step; gives the loss, still on the device."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """The drafter's weights under the names of the SGLang export."""
        ...


Build = Callable[[dict[str, Any], int], PeerTrainer]
"""(settings, steps of the schedule) -> a new drafter."""


class Steps:
    """The packs of one seed for a DataLoader, from the first on and without end."""

    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.cycle(self._batches)


def run_job(package: str, make: Callable[[dict[str, Any]], tuple[Build, Any, Callable[..., Any]]]) -> None:
    """Train every drafter of a job.

    Args:
        package: The peer's distribution name.
        make: From the job: how to build a drafter, the peer's dataset and its collate function.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    build, dataset, collate = make(job)
    for run in job["runs"]:
        facts: dict[str, Any] = {
            "num_steps": run["num_steps"],
            "settings": run["settings"],
            "package": f"{package} {importlib.metadata.version(package)}",
            "torch": torch.__version__,
        }
        if job["warm_steps"]:
            warm = _new(build, run, job["warm_steps"])
            facts["seconds_per_step"] = _warm(job, warm, _loader(job, run["seed"], dataset, collate))
            del warm
        trainer = _new(build, run, run["num_steps"])
        batches = _loader(job, run["seed"], dataset, collate)
        facts["losses"], facts["seconds"] = _train(job, trainer, batches, run["num_steps"])
        _write(Path(run["out"]), trainer, facts)
        print(f"{run['name']}: {run['num_steps']} steps, {facts['seconds']:.1f} s", facts["losses"], flush=True)  # noqa: T201


def _new(build: Build, run: dict[str, Any], num_steps: int) -> PeerTrainer:
    torch.manual_seed(run["seed"])
    return build(run["settings"], num_steps)


def _loader(job: dict[str, Any], seed: int, dataset: Any, collate: Callable[..., Any]) -> Iterable[Any]:
    workers = job["num_workers"]
    return DataLoader(
        dataset,
        batch_sampler=Steps(job["batches"][str(seed)]),  # pyright: ignore[reportArgumentType] - any iterable of lists
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=job["device"] == "cuda",
    )


def _wait(job: dict[str, Any]) -> None:
    if job["device"] == "cuda":
        torch.cuda.synchronize()


def _warm(job: dict[str, Any], trainer: PeerTrainer, batches: Iterable[Any]) -> float:
    """Seconds per step once everything is compiled."""
    num_steps = job["warm_steps"]
    first = int(num_steps * (1 - MEASURED_SHARE))
    start_s = time.perf_counter()
    for number, batch in enumerate(itertools.islice(batches, num_steps)):
        if number == first:
            _wait(job)
            start_s = time.perf_counter()
        trainer.step(batch)
    _wait(job)
    return (time.perf_counter() - start_s) / (num_steps - first)


def _train(
    job: dict[str, Any], trainer: PeerTrainer, batches: Iterable[Any], num_steps: int
) -> tuple[list[float], float]:
    """Mean losses of twenty stretches of the run, and its seconds."""
    losses: list[torch.Tensor] = []
    start_s = time.perf_counter()
    for batch in itertools.islice(batches, num_steps):
        losses.append(trainer.step(batch).detach())
    _wait(job)
    seconds = time.perf_counter() - start_s
    parts = torch.stack(losses).float().cpu().tensor_split(min(20, num_steps))
    return [round(float(part.mean()), 5) for part in parts], seconds


def _write(out: Path, trainer: PeerTrainer, facts: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in trainer.weights().items()}
    save_file(tensors, out / "drafter.safetensors")
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def cosine(num_steps: int, warmup_steps: int, min_share: float) -> Callable[[int], float]:
    """The learning rate of eyas as a share of its top: linear warm-up, then a cosine to ``min_share``."""
    from math import cos, pi

    def share(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps))
        return min_share + (1 - min_share) * 0.5 * (1 + cos(pi * progress))

    return share
