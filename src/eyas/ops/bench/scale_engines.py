"""Shards per second of one engine and of several side by side through Ray: ``bench.scale --engine sglang``.

The same random target and samples as ``bench.capture``; each count of workers is a run of its own. Counted is the time in
which every worker has work: from the moment when the last of them finished its first shard to the moment when nothing
is left to hand out, about one shard a worker before the end. Starts and ends are not in it, whoever started when.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

from eyas import config, console
from eyas.canonical import digest
from eyas.contracts import CaptureIdentity
from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.ray.driver import WORKERS_VARIABLE, Finish, RayExecutor
from eyas.engines.registry import EngineSpec
from eyas.fs import tree_digests
from eyas.ops.bench.random_target import BOUNDARIES, SHAPES, identity, make_samples, make_target
from eyas.plan.build import build_plan
from eyas.plan.identity import engine_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part."""
    parser.add_argument("--engine", choices=("sglang", "vllm", "hf"), help="measure engines side by side instead")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="a run for each, in this order")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: 8b on cuda, tiny on cpu")
    parser.add_argument("--tokens", type=int, default=1_200_000, help="of each run")
    parser.add_argument("--shard-bytes", type=int, default=256 << 20)
    parser.add_argument("--codec", choices=("blosc2", "raw"), default="blosc2")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="engine option")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A run for each count of workers; gives rates, and their ratio to one worker's."""
    shape = args.shape or ("8b" if args.device == "cuda" else "tiny")
    folder = args.work / f"target-{shape}"
    args.work.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        make_target(folder, shape, args.device)
    _free_device(args.device)
    samples = make_samples(args.tokens, SHAPES[shape]["vocab_size"], SHAPES[shape]["max_position_embeddings"])
    named = dict(pair.split("=", 1) for pair in args.option)
    options = {name: int(value) if value.lstrip("-").isdecimal() else value for name, value in named.items()}
    spec = EngineSpec(
        name=args.engine, target=identity(shape), folder=folder.resolve(), boundaries=BOUNDARIES[shape],
        dtype="bfloat16", device=args.device, options=options,
    )  # fmt: skip
    runs = [_run(args, spec, samples, num_workers) for num_workers in args.workers]
    for run in runs:
        console.log(f"scale: {run}")
    alone = [run["shards_s"] for run in runs if run["workers"] == 1]
    base = sum(alone) / len(alone) if alone else 0.0
    return {
        "engine": f"{args.engine} {engine_version(args.engine)}", "shape": shape, "device": args.device, "codec": args.codec,
        "options": options, "tokens": args.tokens, "samples": len(samples), "runs": runs,
        "speedup": {
            str(n): sum(r["shards_s"] for r in runs if r["workers"] == n) / args.workers.count(n) / base
            for n in sorted(set(args.workers)) if base
        },
        "machine": config.machine(),
    }  # fmt: skip


def _free_device(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def _run(args: argparse.Namespace, spec: EngineSpec, samples: dict[str, Any], num_workers: int) -> dict[str, Any]:
    """One extraction with so many workers, into a folder that is removed afterwards."""
    capture = CaptureIdentity(
        target=spec.target.digest, tokens="0" * 64, boundaries=spec.boundaries, final_hidden="post_norm",
        dtype="bfloat16", codec=args.codec, engine=spec.name, engine_version=engine_version(spec.name),
        engine_options={}, image="", shard_bytes=args.shard_bytes, batch_tokens=16_384, revision=3, last_rows="all",
    )  # fmt: skip
    lengths = [(name, len(sample.input_ids)) for name, sample in samples.items()]
    plan = build_plan(lengths, capture, spec.target.hidden_size)
    work: Path = args.work / f"run-{num_workers}"
    shutil.rmtree(work, ignore_errors=True)
    os.environ[WORKERS_VARIABLE] = str(num_workers)
    executor, begin_s = RayExecutor(spec), time.monotonic()
    result = extract(
        plan, samples, spec.make(), ExtractLimits(reserve_bytes=1 << 30, max_failed_samples=0),
        out=work / "states", manifest_path=work / "states.json", home=work / ".eyas", executor=executor,
    )  # fmt: skip
    wall_s, ready_s = time.monotonic() - begin_s, sorted(at_s - begin_s for at_s, _ in executor.workers.values())
    tree = digest(tree_digests(work / "states")) if result.manifest.engine.deterministic else ""
    shutil.rmtree(work)
    shards_s, num_counted, counted_s = steady_rate(executor.finishes, num_workers)
    tokens_per_shard = plan.num_tokens / len(plan.shards)
    return {
        "workers": num_workers, "shards": len(plan.shards), "shards_s": shards_s, "tokens_s": shards_s * tokens_per_shard,
        "counted_shards": num_counted, "counted_s": counted_s, "wall_s": wall_s, "ready_s": ready_s, "tree": tree,
        "lost_workers": executor.num_lost_workers,
    }  # fmt: skip


def steady_rate(finishes: list[Finish], num_workers: int) -> tuple[float, int, float]:
    """Shards per second while every worker has work, with the counted shards and seconds.

    Args:
        finishes: In the order of time.
        num_workers: All of them must have finished a shard.
    """
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    for finish in finishes:
        firsts.setdefault(finish.worker, finish.at_s)
        lasts[finish.worker] = finish.at_s
    assert len(firsts) == num_workers, f"{len(firsts)} of {num_workers} workers finished a shard: too few tokens"
    begin_s, end_s = max(firsts.values()), min(lasts.values())
    counted = [finish for finish in finishes if begin_s < finish.at_s <= end_s]
    assert counted, "no time in which every worker had work: too few tokens"
    return len(counted) / (end_s - begin_s), len(counted), end_s - begin_s
