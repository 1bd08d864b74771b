"""What capturing costs a real SGLang server: ``python -m eyas.ops.bench.capture``; ``reports/bench/capture.json``.

    a random target → server with the plugin → the same samples, in turns:
      prefill   requests of nobody's slot: the server computes, nothing is taken
      capture   states into shared memory, checked, copied out, dropped
      store     the extraction loop: encoded, hashed, fsynced shards on the disk

On a GPU the target has the shape of Llama-3.1-8B, on a CPU a tiny one. The matrix rate, the copy to host memory, encoding
and the disk are measured beside: each gives a rate that no stage that needs it can pass, the lowest is what bounds it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from eyas import config, console, fs, heap
from eyas.contracts import CaptureIdentity, EngineFacts, TargetIdentity, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.base import CapturedSample
from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.sglang.engine import SglangEngine
from eyas.engines.sglang.session import Answered
from eyas.ops.bench.random_target import BOUNDARIES, SHAPES, identity, make_samples, make_target
from eyas.plan.build import build_plan
from eyas.plan.identity import engine_version
from eyas.rows import stored_rows
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder

COPY_BYTES, DISK_BYTES, DISK_THREADS, MATRIX = 1 << 30, 1 << 30, 4, 8192
ENCODE_ROWS, ENCODE_SAMPLES = 1500, 20
REPORT = Path("reports/bench/capture.json")


class Opened:
    """An open engine, for a loop that would open and close it."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine = engine
        self.given_s = 0.0
        """When the loop took the last sample."""

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """As the engine does."""
        self._engine.announce(samples)

    def open(self) -> None:
        """Nothing: it is."""

    def close(self) -> None:
        """Nothing: others want it."""

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """As the engine does."""
        for captured in self._engine.capture(batch):
            self.given_s = time.perf_counter()
            yield captured

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """As the engine does."""
        return self._engine.generate(requests)

    def describe(self) -> EngineFacts:
        """As the engine does."""
        return self._engine.describe()


def open_for(engine: SglangEngine, samples: Sequence[TokenSample]) -> None:
    """Open an engine with room for the longest sample and announce none: what is announced is sent ahead."""
    engine.announce(())
    engine.keeper.longest, engine.keeper.total_bytes = max(len(sample.input_ids) for sample in samples), 1 << 62
    engine.open()


def prefill(engine: SglangEngine, samples: Sequence[TokenSample], label: str) -> float:
    """Seconds of the same requests under names that the plugin does not know."""
    session, left = engine.keeper.session, len(samples)
    begin_s = time.perf_counter()
    for number, sample in enumerate(samples):
        rid = f"{label}-{number}"
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(sample.input_ids), "rid": rid, "extra_key": rid, "sampling_params": sampling}
        session.client.send((1 << 40) + number, body)
    while left:
        for event in engine.keeper.next_events():
            if isinstance(event, Answered):
                assert event.reply.kind == "done", event.reply
                left -= 1
        fault = engine.keeper.fault(is_busy=True)
        if fault:
            raise console_error(engine, fault)
    return time.perf_counter() - begin_s


def console_error(engine: SglangEngine, fault: str) -> Exception:
    """The server's end with its last lines."""
    server = engine.keeper.session.server
    assert server is not None
    return server.fault(fault)


def capture(engine: SglangEngine, samples: Sequence[TokenSample]) -> float:
    """Seconds until the states of all samples were given, in batches as the loop asks for them."""
    begin_s, num_rows = time.perf_counter(), 0
    engine.announce(samples)
    for begin in range(0, len(samples), 8):
        for captured in engine.capture(samples[begin : begin + 8]):
            num_rows += len(captured.last_TD)
    assert num_rows == sum(len(sample.input_ids) for sample in samples)
    return time.perf_counter() - begin_s


def store(
    engine: SglangEngine, samples: dict[str, TokenSample], target: TargetIdentity, args: argparse.Namespace, work: Path
) -> dict[str, float]:
    """Seconds and bytes of the whole way to shards."""
    identity_of = CaptureIdentity(
        target=target.digest, tokens="0" * 64, boundaries=BOUNDARIES[args.shape], final_hidden="post_norm",
        dtype="bfloat16", codec=args.codec, engine="sglang", engine_version=engine_version("sglang"),
        engine_options={}, image="", shard_bytes=args.shard_bytes, batch_tokens=16_384, revision=3, last_rows="all",
    )  # fmt: skip
    lengths = [(name, len(sample.input_ids)) for name, sample in samples.items()]
    plan = build_plan(lengths, identity_of, target.hidden_size)
    opened, begin_s = Opened(engine), time.perf_counter()
    result = extract(
        plan, samples, opened, ExtractLimits(reserve_bytes=1 << 30, max_failed_samples=0),
        out=work / "states", manifest_path=work / "states.json", home=work / ".eyas",
    )  # fmt: skip
    end_s = time.perf_counter()
    return {
        "seconds": end_s - begin_s,
        "tail_s": end_s - opened.given_s,
        "bytes": float(result.manifest.stored_bytes),
        "payload": plan.payload_bytes,
    }


def machine_rates(work: Path, device: str) -> dict[str, float]:
    """Copy to pinned memory and matrix products of the device, the disk by a few threads, and encoding by all of them."""
    found: dict[str, float] = {}
    if device == "cuda":
        states = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        found["copy_gb_s"] = COPY_BYTES / _seconds(lambda: host.copy_(states, non_blocking=True)) / 1e9
        a_XX, b_XX = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
        found["matrix_flop_s"] = 2 * MATRIX**3 / _seconds(lambda: a_XX @ b_XX)
        torch.cuda.empty_cache()

    def write(number: int) -> None:
        with fs.atomic_writer(work / f"disk-{number}") as handle:
            fs.write_all(handle, [memoryview(os.urandom(1 << 20))] * (DISK_BYTES >> 20))

    with ThreadPoolExecutor(DISK_THREADS) as pool:
        begin_s = time.perf_counter()
        list(pool.map(write, range(DISK_THREADS)))
        found["disk_gb_s"] = DISK_THREADS * DISK_BYTES / (time.perf_counter() - begin_s) / 1e9
    for number in range(DISK_THREADS):
        (work / f"disk-{number}").unlink()
    found["encode_gb_s"] = _encode_rate()
    return found


def _encode_rate() -> float:
    """GB of bf16 states per second through the lossless codec, nothing else running."""
    states_TAD = torch.randn(ENCODE_ROWS, 4, 4096).bfloat16()
    rows = stored_rows((1,) * ENCODE_ROWS, "all")
    make_codec("blosc2", None).encode(states_TAD[:16, 3], 3)  # what a process does once
    begin_s = time.perf_counter()
    with Encoder(make_codec("blosc2", None)) as encoder:
        encoded = [encoder.encode(states_TAD[:, :3], states_TAD[:, 3], rows) for _ in range(ENCODE_SAMPLES)]
        for sample in encoded:
            for kind in sample.blocks:
                sample.block(kind)
    return ENCODE_SAMPLES * states_TAD.nbytes / (time.perf_counter() - begin_s) / 1e9


NEEDS = {"prefill": ("matrix",), "capture": ("matrix", "copy"), "store": ("matrix", "copy", "encode", "disk")}
"""What each stage cannot do without."""


def ceilings(
    machine: dict[str, float], flop: float, payload_bytes: float, stored_bytes: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Tokens per second that each part of the machine allows, and the part that bounds each stage.

    Args:
        machine: As ``machine_rates`` gives it.
        flop: Of one token's prefill.
        payload_bytes: A token's states in bf16.
        stored_bytes: The same on the disk.
    """
    found = {"encode": machine["encode_gb_s"] * 1e9 / payload_bytes, "disk": machine["disk_gb_s"] * 1e9 / stored_bytes}
    if "matrix_flop_s" in machine:
        found |= {"matrix": machine["matrix_flop_s"] / flop, "copy": machine["copy_gb_s"] * 1e9 / payload_bytes}
    if "matrix" not in found:
        return found, dict.fromkeys(NEEDS, "this CPU's products, not measured")
    bound = {stage: min(needs, key=found.__getitem__) for stage, needs in NEEDS.items()}
    return found, bound


def _seconds(work: Any, num_times: int = 5) -> float:
    work()
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(num_times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin_s) / num_times


def flops_per_token(shape: dict[str, int], mean_square: float, mean: float) -> float:
    """Of a prefill: the layers' products and causal attention; of the head one row a sample, which is nothing."""
    D, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    K, kv = shape["head_dim"], shape["num_key_value_heads"]
    linear = 2 * (D * (heads + 2 * kv) * K + heads * K * D + 3 * D * inner)
    attention = 2 * heads * K * mean_square / mean  # two products over half of the square
    return shape["num_hidden_layers"] * (linear + attention)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every stage in turns, each stage's rate as tokens per second."""
    work: Path = args.work
    target_folder = work / f"target-{args.shape}"
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine_rates(work, args.device)}
    _say(found["machine"])
    if not (target_folder / "config.json").exists():
        make_target(target_folder, args.shape, args.device)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    target = identity(args.shape)
    samples = make_samples(args.tokens, target.vocab_size, target.max_position_embeddings)
    listed, lengths = list(samples.values()), [len(sample.input_ids) for sample in samples.values()]
    options = options_of(args.option)
    engine = SglangEngine(
        target, target_folder, BOUNDARIES[args.shape], dtype="bfloat16", device=args.device, **options
    )
    begin_s = time.perf_counter()
    open_for(engine, listed)
    found["start_s"] = time.perf_counter() - begin_s
    _say({"start_s": found["start_s"]})
    try:
        warm = listed[: args.warm]
        found["warm_s"] = [prefill(engine, warm, "warm"), capture(engine, warm)]
        _say({"warm_s": found["warm_s"]})
        runs, found["stored_share"] = _in_turns(engine, samples, target, args)
    finally:
        engine.close()
    return found | _figures(runs, lengths, found, args) | {
        "shape": args.shape, "tokens": sum(lengths), "samples": len(lengths), "options": options, "codec": args.codec,
        "engine": engine_version("sglang"), "cores": config.cores(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    }  # fmt: skip


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Engine options out of ``NAME=VALUE``."""
    named = dict(pair.split("=", 1) for pair in pairs)
    return {name: int(value) if value.lstrip("-").isdecimal() else value for name, value in named.items()}


def _in_turns(
    engine: SglangEngine, samples: dict[str, TokenSample], target: TargetIdentity, args: argparse.Namespace
) -> tuple[list[tuple[str, float]], float]:
    """Seconds of every mode that was asked for, in that order, and the stored share of the bf16 bytes (1 without a store)."""
    listed, share, runs = list(samples.values()), 1.0, list[tuple[str, float]]()
    num_tokens = sum(len(sample.input_ids) for sample in listed)
    for number, mode in enumerate(args.modes.split(",")):
        before, thread_s, more = resource.getrusage(resource.RUSAGE_SELF), time.thread_time(), dict[str, float]()
        if mode == "prefill":
            runs.append((mode, prefill(engine, listed, f"prefill-{number}")))
        elif mode == "capture":
            runs.append((mode, capture(engine, listed)))
        else:
            folder = args.work / f"store-{number}"
            stored = store(engine, samples, target, args, folder)
            shutil.rmtree(folder)
            share = stored["bytes"] / stored["payload"]
            runs.append((mode, stored["seconds"]))
            more = {"tail_s": stored["tail_s"]}
        after = resource.getrusage(resource.RUSAGE_SELF)
        cost = {"user_s": after.ru_utime - before.ru_utime, "system_s": after.ru_stime - before.ru_stime}
        cost |= {"of_the_loop_s": time.thread_time() - thread_s, "page_faults": after.ru_minflt - before.ru_minflt}
        _say({mode: num_tokens / runs[-1][1]} | cost | more)
    return runs, share


def _figures(
    runs: Sequence[tuple[str, float]], lengths: Sequence[int], found: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Rates of the modes, their ratios to prefill, and what bounds each."""
    shape, machine, num_tokens = SHAPES[args.shape], found["machine"], sum(lengths)
    figures: dict[str, Any] = {}
    for mode in {mode: 0 for mode, _ in runs}:
        rates = [num_tokens / seconds for ran, seconds in runs if ran == mode]
        figures |= {f"{mode}_tokens_s": sum(rates) / len(rates), f"{mode}_runs": rates}
    base = figures.get("prefill_tokens_s", math.nan)
    figures["ratios"] = {
        mode: figures[f"{mode}_tokens_s"] / base for mode in ("capture", "store") if f"{mode}_runs" in figures
    }
    per_token = flops_per_token(shape, sum(n * n for n in lengths) / len(lengths), num_tokens / len(lengths))
    if "matrix_flop_s" in machine:
        figures["prefill_share_of_matrix_rate"] = base * per_token / machine["matrix_flop_s"]
    payload = 2.0 * (len(BOUNDARIES[args.shape]) + 1) * shape["hidden_size"]
    limits, bound = ceilings(machine, per_token, payload, payload * found["stored_share"])
    return figures | {"flop_per_token": per_token, "ceilings_tokens_s": limits, "bound": bound}


def _say(values: dict[str, Any]) -> None:
    console.log(f"capture: {json.dumps(values)}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: 8b on cuda, tiny on cpu")
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--warm", type=int, default=40, help="samples that warm the server up")
    parser.add_argument("--modes", default="prefill,capture,store,prefill,capture,store,prefill")
    parser.add_argument("--codec", choices=("blosc2", "raw"), default="blosc2")
    parser.add_argument("--shard-bytes", type=int, default=256 << 20)
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="engine option, as tp_size=2"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, required=True, help="folder on the disk to measure; 35 GB for 8b")
    args = parser.parse_args()
    args.shape = args.shape or ("8b" if args.device == "cuda" else "tiny")
    found = measure(args)
    known = fs.read_json(REPORT) if REPORT.exists() else {}
    fs.write_text(REPORT, json.dumps(known | {args.device: found}, indent=2, sort_keys=True) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    heap.keep_freed()  # as every stage does
    main()
