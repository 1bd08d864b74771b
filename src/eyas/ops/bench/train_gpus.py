"""The trainer on one GPU and on several of one host: ``python -m eyas.ops.bench.train_gpus``; the answer is JSON.

Three parts, each with a time limit: the step for a drafter of Llama-3.1-8B's shape on one device and on all, with
everything on every process (as DDP) and with moments in parts (``EYAS_TRAIN_SHARD=1``), the batch of a process
unchanged; the losses of one and of all at equal global batches; a small training from a store that starts
on all devices, goes on with one and ends on all again, beside one that never stopped. Processes are ``torchrun``'s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas import config, console, fs
from eyas.errors import EyasError
from eyas.ops.bench.train_feed import make_shape, write_store
from eyas.ops.bench.train_gpus_rank import WAYS
from eyas.ops.bench.train_step import SIZES

SETTINGS = {
    "optimizer": "adamw",
    "betas": [0.9, 0.95],
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "curriculum": [],
}
SMALL = {
    "hidden": 256, "inner": 896, "heads": 4, "kv_heads": 1, "vocab": 2048, "draft_vocab": 1024, "tokens": 20_000,
    "doc": 150, "batch": 1024, "steps": 60,
}  # fmt: skip
"""Of the training that stops and goes on; steps are its optimizer steps."""
STOPS = (0.2, 0.35)
"""A training is told to stop at this share of its reads, its next process after as many again."""
WANTED_SPEED, WANTED_LOSS = 1.85, 1e-3
LIMIT_S = {"one": 140, "all": 160, "small": 90}
"""Of one start of processes, while the whole has time left."""
GRACE_S = 5
TINY = {
    "hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "vocab": 300, "draft_vocab": 200, "tokens": 200, "doc": 60,
}  # fmt: skip
"""For a CPU: what it takes to see that the bench works."""
TINY_SMALL = TINY | {"tokens": 3000, "batch": 240, "steps": 24}


class RanksError(EyasError):
    """A part's processes failed or took too long."""


class Launcher:
    """Starts the processes of a part.

    Args:
        scratch: Jobs, answers and logs.
        device: ``cuda`` or ``cpu``.
        deadline_s: Of all parts, by the monotonic clock.
    """

    def __init__(self, scratch: Path, device: str, deadline_s: float) -> None:
        self.scratch, self.device = scratch, device
        self._number, self._deadline_s = 0, deadline_s

    def __call__(self, size: int, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer of the first of ``size`` processes.

        Raises:
            RanksError: It failed or took longer than ``limit_s``; all its processes are ended.
        """
        self._number += 1
        limit_s = max(1.0, min(limit_s, self._deadline_s - time.monotonic()))
        path, answer, log = (self.scratch / f"{kind}-{self._number}" for kind in ("job", "answer", "log"))
        fs.write_text(path, json.dumps({**job, "device": self.device, "answer": str(answer)}))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
            "-m", "eyas.ops.bench.train_gpus_rank", str(path),
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "4" if self.device == "cuda" else "1", "NCCL_NVLS_ENABLE": "0"} | os.environ
        with log.open("w") as output:
            started = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code = started.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = f"still running after {limit_s:.0f} s"
            finally:
                _end(started)
        if code != 0 or not answer.is_file():
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            told = next(
                (line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it says nothing"
            )
            raise RanksError(f"{size} processes of part {job['part']!r}: {code}: {told[-400:]}", str(log))
        return fs.read_json(answer)


def _end(started: subprocess.Popen[bytes]) -> None:
    """End ``torchrun`` and what it started: they are a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if started.poll() is not None:
            return
        os.killpg(started.pid, number)
        try:
            started.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def compare_losses(one: list[float], other: list[float]) -> dict[str, Any]:
    """Largest relative difference, and whether every step is within what is wanted."""
    worst = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
    return {
        "steps": len(one),
        "worst": worst,
        "holds": worst <= WANTED_LOSS,
        "first": one[0],
        "last": (one[-1], other[-1]),
    }


def steps(launch: Launcher, args: argparse.Namespace) -> dict[str, Any]:
    """Speed and losses of one device and of all."""
    job = {
        "part": "steps", "sizes": args.sizes, "share": args.share, "ttt_steps": args.ttt, "steps": args.steps,
        "rounds": args.rounds, "loss_steps": args.loss_steps, "num_packs": args.gpus, "settings": SETTINGS,
    }  # fmt: skip
    one = launch(1, job, LIMIT_S["one"])
    every = launch(args.gpus, job, LIMIT_S["all"])
    cases = []
    for alone, case in zip(one["cases"], every["cases"], strict=True):
        base = alone["replicated"]["tokens_s"]
        ratios = {way: case[way]["tokens_s"] / base for way in WAYS}
        holds = {way: ratio >= WANTED_SPEED * args.gpus / 2 for way, ratio in ratios.items()}
        cases.append(case | {"one": alone["replicated"], "ratios": ratios, "holds": holds})
    losses = {way: compare_losses(one["losses"]["replicated"], every["losses"][way]) for way in WAYS}
    took_s = every["sum"]["lowest_ms"] / 1e3
    # what a ring sends and receives on each link
    moved = every["sum"]["bytes"] * 2 * (args.gpus - 1) / args.gpus
    return {"cases": cases, "losses": losses, "sum": every["sum"] | {"bus_gb_s": moved / took_s / 1e9}}


def goes_on(launch: Launcher, args: argparse.Namespace) -> dict[str, Any]:
    """A training that changes its number of processes twice, beside one that never stops."""
    sizes = args.small
    store = launch.scratch / "store"
    store_args = argparse.Namespace(
        hidden=sizes["hidden"], aux=3, tokens=sizes["tokens"], doc=sizes["doc"], share=0.75, codec="blosc2",
        vocab=sizes["vocab"], device="cpu",
    )  # fmt: skip
    reader = write_store(store, store_args, make_shape(store_args))
    fs.write_record(store / "manifest.json", reader.manifest)
    settings = SETTINGS | {
        "num_steps": sizes["steps"], "ttt_steps": 3, "batch_tokens": sizes["batch"], "packs_per_step": args.gpus,
        "lr": 1e-4, "warmup_steps": 5, "log_every": 1, "checkpoint_every": sizes["steps"], "dtype": "float32",
        "device": launch.device,
    }  # fmt: skip
    reads_of_pack = sizes["steps"] * sizes["batch"] / sizes["doc"]
    stop_at = [int(STOPS[0] * reads_of_pack), int(STOPS[1] * reads_of_pack * args.gpus)]

    def run(name: str, size: int, way: str, stop_at: int) -> dict[str, Any]:
        work = launch.scratch / name
        work.mkdir(exist_ok=True)
        job = {
            "part": "train", "sizes": sizes, "settings": settings, "store": str(store), "work": str(work), "way": way,
            "stop_at": stop_at, "num_packs": args.gpus,
        }  # fmt: skip
        return launch(size, job, LIMIT_S["small"])

    run("unbroken", 1, "replicated", 0)
    found = {}
    for way in WAYS:
        stops = [run(way, size, way, at).get("stopped_at", 0) for size, at in zip((args.gpus, 1), stop_at, strict=True)]
        run(way, args.gpus, way, 0)
        losses = compare_losses(*(read_losses(launch.scratch / name / "metrics") for name in ("unbroken", way)))
        away = weights_apart(
            launch.scratch / "unbroken/weights.safetensors", launch.scratch / way / "weights.safetensors"
        )
        found[way] = {
            "processes": [args.gpus, 1, args.gpus], "stopped_at": stops, "losses": losses, "weights_apart": away,
            "holds": 0 < stops[0] < stops[1] < sizes["steps"] and losses["holds"],
        }  # fmt: skip
    return found


def read_losses(metrics: Path) -> list[float]:
    """Of every step, all TTT steps one behind another."""
    paths = sorted(path for path in metrics.rglob("step_*.tsv") if path.parent.name == "loss")
    return [float(line.split("\t")[1]) for path in paths for line in path.read_text().splitlines()[1:]]


def weights_apart(one: Path, other: Path) -> dict[str, float]:
    """The tensor of the largest relative distance: AdamW makes large steps of gradients that are rounding alone."""
    a, b = load_file(one), load_file(other)
    apart = {name: float((a[name].double() - b[name].double()).norm() / a[name].double().norm()) for name in a}
    worst = max(apart, key=lambda name: apart[name])
    return {worst: apart[worst]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every part; one that fails is named and the others go on."""
    found: dict[str, Any] = {
        "machine": config.machine() | {"torch": torch.__version__}, "gpus": args.gpus, "sizes": args.sizes,
        "share": args.share, "settings": SETTINGS, "failed": {}, "seconds": {},
    }  # fmt: skip
    if args.device == "cuda":
        from torch.cuda import nccl

        found["machine"]["nccl"] = ".".join(map(str, nccl.version()))
        found["machine"]["nvls"] = os.environ.get("NCCL_NVLS_ENABLE", "0")
    deadline_s = time.monotonic() + args.limit_s
    parts: dict[str, Callable[[Launcher, argparse.Namespace], dict[str, Any]]] = {"goes_on": goes_on, "steps": steps}
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="train-gpus-") as scratch:
        for name in args.parts:
            begin_s = time.monotonic()
            try:
                (Path(scratch) / name).mkdir()
                found[name] = parts[name](Launcher(Path(scratch) / name, args.device, deadline_s), args)
            except RanksError as error:
                found["failed"][name] = error.message
                console.log(f"train_gpus: {error.message}")
            found["seconds"][name] = round(time.monotonic() - begin_s, 1)
            console.log(f"train_gpus: {name}: {found['seconds'][name]} s")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--ttt", type=int, nargs="+", default=[7, 3], help="losses are compared at the last")
    parser.add_argument("--share", type=float, default=0.75, help="of the rows that train")
    parser.add_argument("--steps", type=int, default=15, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loss-steps", type=int, default=50)
    parser.add_argument("--parts", nargs="+", choices=("steps", "goes_on"), default=["steps", "goes_on"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo and tiny sizes")
    parser.add_argument("--limit-s", type=float, default=285, help="seconds for all parts")
    parser.add_argument("--folder", type=Path, default=None, help="for scratch")
    args = parser.parse_args()
    args.sizes, args.small = (SIZES, SMALL) if args.device == "cuda" else (TINY, TINY_SMALL)
    found = measure(args)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bool(found["failed"]))


if __name__ == "__main__":
    main()
