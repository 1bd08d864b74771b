"""What tensor parallelism changes in a capture: ``python -m eyas.ops.bench.ranks``; ``reports/bench/ranks.json``.

    one rank:  the samples; the same in another order, so in other batches: the engine's own spread
    all ranks: the samples
    each:      prefill and capture in turns, tokens per second
    then:      transformers in float32, and how far each is from it

A sum over ranks is another order of additions: in bf16 its states differ from one rank's as two right engines do. So
they are judged as engines are: no further from float32 than 1.1 times one rank's own mean error, in every stream.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas import config, console, fs, heap
from eyas.contracts import TokenSample
from eyas.engines.base import CapturedSample
from eyas.engines.sglang.engine import SglangEngine
from eyas.engines.sglang.preflight import ARGUMENTS_VARIABLE
from eyas.ops.bench.capture import capture, open_for, options_of, prefill
from eyas.ops.bench.random_target import BOUNDARIES, MLA_SHAPES, SHAPES, identity, make_samples, make_target
from eyas.ops.parity import FACTOR, RowErrors, exact_streams, streams
from eyas.plan.identity import engine_version

REPORT = Path("reports/bench/ranks.json")
MODES = ("prefill", "capture", "prefill", "capture", "prefill")
WARM = 40
BATCH = 8
EXACT = 1e-6
"""A mean error that is float32's own."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
NO_FUSION = "--enforce-disable-flashinfer-allreduce-fusion"
"""NVLink multicast stays off: on a shared host it can put the GPUs of others out of service. SGLang would use it unasked
with DeepSeek-type models on Hopper and Blackwell."""

States = Mapping[str, torch.Tensor]
"""Streams [T, N, D] of each sample, float32."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Capture with one rank and with all, time both, compare.

    Args:
        args: As ``main`` reads them.
    """
    os.environ.update(NO_MULTICAST)
    os.environ[ARGUMENTS_VARIABLE] = f"{os.environ.get(ARGUMENTS_VARIABLE, '')} {NO_FUSION}".strip()
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    target, folder, boundaries = identity(args.shape), work / f"target-{args.shape}", BOUNDARIES[args.shape]
    if not (folder / "config.json").exists():
        make_target(folder, args.shape, args.device)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    timed = list(make_samples(args.tokens, target.vocab_size, target.max_position_embeddings).values())
    compared = timed[: args.samples]
    found: dict[str, Any] = {}
    runs: dict[str, States] = {}
    for num_ranks in sorted({1, args.tp}):
        engine = SglangEngine(
            target, folder, boundaries, dtype=args.dtype, device=args.device, tp_size=num_ranks,
            **options_of(args.option),
        )  # fmt: skip
        open_for(engine, timed)
        try:
            found[f"tp{num_ranks}"] = _rates(engine, timed)
            runs[f"tp{num_ranks}"] = states(engine, compared)
            if num_ranks == 1:
                runs["again"] = states(engine, compared[::-1])
        finally:
            engine.close()
        console.log(f"ranks: tp{num_ranks}: {json.dumps(found[f'tp{num_ranks}'])}")
    runs["exact"] = dict(exact_streams(folder, boundaries, compared, args.device, False))
    names = [*(f"aux {boundary}" for boundary in boundaries), "last"]
    return found | verdict(runs, names, f"tp{args.tp}") | {
        "shape": args.shape, "dtype": args.dtype, "options": options_of(args.option), "compared": len(compared),
        "tokens": sum(len(sample.input_ids) for sample in timed), "engine": engine_version("sglang"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu", "cores": config.cores(),
    }  # fmt: skip


def _rates(engine: SglangEngine, samples: Sequence[TokenSample]) -> dict[str, Any]:
    """Tokens per second of prefill and of capture in turns, after a warm-up; what rank 0 says of itself."""
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    prefill(engine, samples[:WARM], "warm")
    capture(engine, samples[:WARM])
    runs: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number, mode in enumerate(MODES):
        seconds = prefill(engine, samples, f"turn-{number}") if mode == "prefill" else capture(engine, samples)
        runs[mode].append(num_tokens / seconds)
    middle = {
        mode: statistics.median(rates) for mode, rates in runs.items()
    }  # a turn may stand still for other reasons
    session = engine.keeper.session
    assert session.hello is not None
    assert session.server is not None
    said = [line for line in session.server.log.read_text(errors="replace").splitlines() if "eyas" in line]
    return {
        "ranks": session.hello.server_args.get("tp_size"),
        "faults_in_the_log": said[:5],  # a rank beside 0 that opened a socket, or could not capture, says so there
        **{f"{mode}_tokens_s": rate for mode, rate in middle.items()},
        **{f"{mode}_runs": rates for mode, rates in runs.items()},
        "ratio": middle["capture"] / middle["prefill"],
    }


def states(engine: SglangEngine, samples: Sequence[TokenSample]) -> States:
    """Every row of every sample, once: the engine refuses one that is missing or comes twice."""
    found: dict[str, torch.Tensor] = {}
    engine.announce(samples)
    for begin in range(0, len(samples), BATCH):
        for got in engine.capture_raw(samples[begin : begin + BATCH]):
            found[got.sample_id] = _checked(got, samples)
    assert len(found) == len(samples), f"{len(samples) - len(found)} samples have no states"
    return found


def _checked(got: CapturedSample, samples: Sequence[TokenSample]) -> torch.Tensor:
    sent = next(sample.input_ids for sample in samples if sample.sample_id == got.sample_id)
    assert tuple(got.input_ids_T.tolist()) == sent
    assert len(got.last_TD) == len(got.aux_TAD) == len(sent)
    return streams(got)


def verdict(runs: Mapping[str, States], names: Sequence[str], ranks: str) -> dict[str, Any]:
    """Mean relative row errors of every stream, and whether all are right.

    Args:
        runs: ``tp1``, ``again`` (one rank, other batches), ``ranks``, ``exact``; the same samples in each.
        names: Of the streams.
        ranks: The run of all ranks.
    """
    pairs = {
        "spread": ("again", "tp1"),
        "difference": (ranks, "tp1"),
        "error_one_rank": ("tp1", "exact"),
        "error_all_ranks": (ranks, "exact"),
    }
    per_stream: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pair, (first, second) in pairs.items():
        for index, name in enumerate(names):
            errors, num_equal = RowErrors(), 0
            for sample_id, rows_TND in runs[second].items():
                found_TD, exact_TD = runs[first][sample_id][:, index], rows_TND[:, index]
                errors.add(sample_id, found_TD, exact_TD)
                num_equal += int((found_TD == exact_TD).all(dim=-1).sum())
            figures = errors.figures()
            per_stream[name][pair] = figures["mean_relative_error"]
            per_stream[name][f"worst_{pair}"] = figures["worst_relative_error"]
            per_stream[name][f"equal_rows_{pair}"] = num_equal / errors.num_rows
            per_stream[name]["rows"] = errors.num_rows
    for stream in per_stream.values():
        one, every = stream["error_one_rank"], stream["error_all_ranks"]
        stream["by_one_rank"] = every / one if one else 1.0
        stream["right"] = every <= max(FACTOR * one, EXACT)
    return {"streams": per_stream, "tolerance": FACTOR, "right": all(each["right"] for each in per_stream.values())}


def main() -> None:
    """Measure and print."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=(*SHAPES, *MLA_SHAPES), help="default: 8b on cuda, tiny on cpu")
    parser.add_argument("--tp", type=int, default=2, help="ranks, each a GPU (a core on cpu)")
    parser.add_argument("--samples", type=int, default=32, help="samples whose states are compared")
    parser.add_argument("--tokens", type=int, default=300_000, help="tokens of all samples, which are timed")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="engine option")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, required=True, help="folder for the target's files; 17 GB for 8b")
    args = parser.parse_args()
    args.shape = args.shape or ("8b" if args.device == "cuda" else "tiny")
    found = measure(args) | {"seconds": round(time.monotonic() - started_s, 1)}
    known = fs.read_json(REPORT) if REPORT.exists() else {}
    key = f"{args.device} {args.shape} tp{args.tp} {args.dtype}"
    fs.write_text(REPORT, json.dumps(known | {key: found}, indent=2, sort_keys=True) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    heap.keep_freed()  # as every stage does
    main()
