"""What ``train_gpus`` runs in each process of ``torchrun``: JOB.json says which part; the first rank writes its answer.

``steps``: the trainer's step on packs that lie on the device, in every way to divide the work. ``train``: a whole
training from a store, told to stop after some reads when the job says so, resumed when its folder holds a state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from eyas import fs
from eyas.batches.loader import Reader
from eyas.config.schema import TrainConfig
from eyas.contracts import ShardManifest
from eyas.drafter.precision import matmul_dtype
from eyas.drafter.rows import pack_documents
from eyas.ops.bench.train_step import Step, make_documents, make_drafter
from eyas.shards.reader import ShardReader
from eyas.train.checkpoint import RunFolder
from eyas.train.data import FILL_MULTIPLE
from eyas.train.distributed import World, open_world
from eyas.train.loop import MEASURE_EVERY, Trainer
from eyas.train.optimizer import SHARD_KNOB

WAYS = {"replicated": "0", "sharded": "1"}
"""Values of the knob: every process has all moments, or its part of them."""
WARM_UP, NUM_SUMS = 5, 5


# ── steps ─────────────────────────────────────────────────────────────────────────────────────


class Bench:
    """The step of one number of TTT steps.

    Args:
        job: ``sizes``, ``share``, ``ttt_steps``, ``steps``, ``rounds``, ``settings``, ``device``.
        world: The processes.
        num_packs: Packs of one optimizer step of all processes; twice as many are made.
    """

    def __init__(self, job: dict[str, Any], world: World, num_packs: int) -> None:
        self.job, self.world, self.num_packs = job, world, num_packs
        self.alone = World(0, 1, world.device)
        sizes = argparse.Namespace(**job["sizes"])
        self._documents = [make_documents(sizes, job["share"], seed) for seed in range(2 * num_packs)]
        self._drafter = make_drafter(sizes)
        self._first_P: torch.Tensor | None = None

    def begin(self, ttt_steps: int) -> None:
        """Plan packs and put them on the device."""
        packs = [pack_documents(documents, ttt_steps, FILL_MULTIPLE) for documents in self._documents]
        self.num_trained = [pack.num_trained for pack in packs]
        self.step = Step(self._drafter, packs, str(self.world.device), **self.job["settings"])
        if self._first_P is None:
            self._first_P = self.step.weights.master_P.to("cpu", copy=True)

    def restart(self, world: World, way: str) -> None:
        """First weights, no moments."""
        assert self._first_P is not None
        os.environ[SHARD_KNOB] = WAYS[way]
        self.step.weights.master_P.copy_(self._first_P)
        self.step.weights.refresh()
        self.step.restart(world, **self.job["settings"])

    def wait(self) -> None:
        """For the device, then for everybody."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        self.world.gather(None)

    def speed(self, world: World, way: str) -> dict[str, Any]:
        """Milliseconds of one pack a process and step; the slowest process counts."""
        self.restart(world, way)
        own = self.world.rank % self.num_packs
        count = [sum(values) for values in zip(*[self.num_trained[own]] * world.size, strict=True)]
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        rounds_ms = []
        for number in range(self.job["rounds"] + 1):
            num_steps = self.job["steps"] if number else WARM_UP
            self.wait()
            begin_s = time.perf_counter()
            for taken in range(num_steps):
                self.step.take([own], 1e-4, count, measure=taken % MEASURE_EVERY == MEASURE_EVERY - 1)
            if self.world.device.type == "cuda":
                torch.cuda.synchronize()
            rounds_ms.append(max(self.world.gather((time.perf_counter() - begin_s) * 1e3 / num_steps)))
        self.step.optimizer.settle()
        step_ms = sorted(rounds_ms[1:])[self.job["rounds"] // 2]
        num_tokens = self.job["sizes"]["tokens"] * self.world.size
        return {
            "step_ms": step_ms, "step_ms_of_rounds": rounds_ms[1:], "tokens_s": num_tokens / step_ms * 1e3,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.world.device.type == "cuda" else None,
        }  # fmt: skip

    def losses(self, way: str) -> list[float]:
        """Of every step: the same global batches whatever the number of processes."""
        self.restart(self.world, way)
        S, taken = len(self.num_trained[0]), []
        for number in range(self.job["loss_steps"]):
            packs = [(number % 2) * self.num_packs + pack for pack in range(self.num_packs)]
            count = [sum(self.num_trained[pack][k] for pack in packs) for k in range(S)]
            lr = 1e-4 * min(1.0, (number + 1) / 10)
            own = packs[self.world.rank :: self.world.size]
            taken.append((self.step.take(own, lr, count), count))
        values = []
        for measured, count in taken:
            sums_S = torch.stack([one.losses_S * one.num_trained_S for one in measured]).sum(0).double()
            self.world.sum_(sums_S)
            values.append(sum(loss / n for loss, n in zip(sums_S.tolist(), count, strict=True)))
        return values

    def sums(self) -> dict[str, Any]:
        """What a sum of all gradients takes by itself."""
        self.restart(self.world, "replicated")
        grad_P, times_ms = self.step.weights.grad_P, []
        for _ in range(NUM_SUMS):
            self.wait()
            begin_s = time.perf_counter()
            self.world.sum_(grad_P)
            self.wait()
            times_ms.append((time.perf_counter() - begin_s) * 1e3)
        return {"bytes": grad_P.numel() * grad_P.element_size(), "lowest_ms": min(times_ms)}


def steps(job: dict[str, Any], world: World) -> dict[str, Any]:
    """Speed of every way, and the losses that the last number of TTT steps gives."""
    bench = Bench(job, world, job["num_packs"])
    found: dict[str, Any] = {"world": world.size, "cases": [], "losses": {}}
    ways = tuple(WAYS) if world.size > 1 else ("replicated",)
    with matmul_dtype("bfloat16"):
        for ttt_steps in job["ttt_steps"]:
            bench.begin(ttt_steps)
            case: dict[str, Any] = {"ttt_steps": ttt_steps, "trained": bench.num_trained[0]}
            if world.size > 1:  # what processes of one host cost each other without a sum
                case["side_by_side"] = bench.speed(bench.alone, "replicated")
            case |= {way: bench.speed(world, way) for way in ways}
            found["cases"].append(case)
        found["losses"] = {way: bench.losses(way) for way in ways}
        if world.size > 1:
            found["sum"] = bench.sums()
    return found


# ── a training ────────────────────────────────────────────────────────────────────────────────


class StoppedReader:
    """Sends this process SIGTERM at one of its reads, as a cluster does."""

    def __init__(self, reader: Reader, at: int) -> None:
        self._reader, self._left = reader, at
        self.samples = reader.samples
        self.shard_of = reader.shard_of

    def read(self, sample_id: str) -> Any:
        """As the reader's."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self._reader.read(sample_id)


def train(job: dict[str, Any], world: World) -> dict[str, Any]:
    """Go on from the folder's state, to the end or to a signal; the weights, when the end was reached, in a file."""
    from safetensors.torch import save_file

    work, sizes = Path(job["work"]), argparse.Namespace(**job["sizes"])
    store = Path(job["store"])
    reader: Any = ShardReader(store, fs.read_record(ShardManifest, store / "manifest.json"))
    if job["stop_at"] and world.is_first:
        reader = StoppedReader(reader, job["stop_at"])
    os.environ[SHARD_KNOB] = WAYS[job["way"]]
    drafter = make_drafter(sizes)
    W = sizes.draft_vocab
    head_VD = torch.randn(sizes.vocab, sizes.hidden, generator=torch.Generator().manual_seed(3)) * 0.01
    head_VD[:W] = drafter.lm_head.weight.detach()
    config = TrainConfig(**job["settings"])
    run = RunFolder(work / "runs", "0" * 64)
    trainer = Trainer(config, drafter, head_VD, reader, run, work / "metrics", world)
    with contextlib.suppress(KeyboardInterrupt):
        outcome = trainer.run()
        trainer.settle_on_published()
        if world.is_first:
            weights = {name: view.detach().cpu().contiguous() for name, view in trainer.weights.views.items()}
            save_file(weights, work / "weights.safetensors")
        return {"resumed_at": outcome.resumed_at, "ended": True}
    state = world.on_first(run.load)
    return {"stopped_at": state.step if state else 0, "ended": False}


PARTS = {"steps": steps, "train": train}


def main() -> None:
    """Obey one job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["device"] == "cpu":
        torch.set_num_threads(1)
    with open_world(job["device"], job["num_packs"]) as world:
        found = PARTS[job["part"]](job, world)
        if world.is_first:
            fs.write_text(Path(job["answer"]), json.dumps(found))


if __name__ == "__main__":
    main()
