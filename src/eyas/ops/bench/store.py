"""``eyas bench store``: what the store costs beside its parts, on states that a real target gave.

The published states of this repository are held in memory and written again and again, until enough
bytes went through. Each figure is a ratio within one run: the parts alone (codec, md5, disk) and the
whole, one after another, with the same number of encoding threads. Speeds count bf16 bytes, so that a
codec's output and its input compare.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from eyas import fs
from eyas.contracts import CapturePlan, ShardEntry, ShardManifest
from eyas.ops.bench.replay import Source, manifest_of
from eyas.rows import stored_rows
from eyas.shards.blosc import tensor_bytes
from eyas.shards.codecs import Codec, decode_block, make_codec
from eyas.shards.encode import Encoder
from eyas.shards.opening import open_entry, open_shard
from eyas.shards.reader import ShardReader, read_encoded
from eyas.shards.writer import ShardAssembly

GB = 1_000_000_000
SHARD_BYTES = 128 << 20
PASSES = 3
ROUND = "round-{}"
LONG_TOKENS = 2103
"""Mean of long conversations; what a read costs besides decoding is much the same for every length."""


def measure(scratch: Path, source: Source, num_bytes: int) -> dict[str, float]:
    """Bytes and speeds of the lossless default.

    Args:
        scratch: Shards are written below it and removed.
        source: Real states.
        num_bytes: bf16 bytes to put through the writer at least.

    Returns:
        ``lossless_ratio`` (files by payload), ``write_efficiency`` (whole against the slowest part),
        ``read_efficiency`` (a random sample against decoding alone; the same for samples of 2,103 tokens), GB/s of bf16 of each part.
    """
    source = source.planned_as(codec="blosc2", shard_bytes=SHARD_BYTES)
    payload = source.plan.payload_bytes
    rounds = max(1, -(-num_bytes // (PASSES * payload)))
    seconds: dict[str, list[float]] = {name: [] for name in ("codec", "md5", "disk", "write", "read", "decode")}
    entries: list[ShardEntry] = []
    for number in range(PASSES):
        folder = scratch / f"pass-{number}"
        seconds["codec"].append(_timed(lambda: _encode(source, rounds)) / rounds)
        start_s = time.perf_counter()
        entries = write(source, folder, rounds)
        seconds["write"].append((time.perf_counter() - start_s) / rounds)
        for name, spent_s in _parts(folder / ROUND.format(0), entries).items():
            seconds[name].append(spent_s)
        for name, spent_s in _reading(folder / ROUND.format(0), source.plan, entries, number).items():
            seconds[name].append(spent_s)
        shutil.rmtree(folder)
    long = source.joined(LONG_TOKENS)
    long_s = _reading(scratch / "long" / ROUND.format(0), long.plan, write(long, scratch / "long", 1), 0)
    shutil.rmtree(scratch / "long")
    typical_s = {name: statistics.median(values) for name, values in seconds.items()}
    slowest_s = max(typical_s[name] for name in ("codec", "md5", "disk"))
    return {
        "lossless_ratio": sum(entry.size_bytes for entry in entries) / payload,
        "write_efficiency": slowest_s / typical_s["write"],
        "read_efficiency": typical_s["decode"] / typical_s["read"],
        "read_efficiency_2103_tokens": long_s["decode"] / long_s["read"],
        "tokens_per_sample": source.plan.num_tokens / source.plan.num_samples,
        "gigabytes_written": PASSES * rounds * payload / GB,
        **{f"{name}_gigabytes_per_s": payload / GB / value for name, value in typical_s.items()},
    }


def write(source: Source, folder: Path, rounds: int) -> list[ShardEntry]:
    """Write all shards as an extraction does, encoders and one writing thread side by side.

    The whole set ``rounds`` times without a pause, so that filling and draining the pipeline does not count;
    gives the shards of one round.
    """
    plan, entries = source.plan, []
    with Encoder(make_codec(plan.capture.codec)) as encoder, ThreadPoolExecutor(1) as writer:
        pending = None
        for number in range(rounds):
            for planned in plan.shards:
                assembly = ShardAssembly(planned, plan.capture, plan.hidden_size, source.tokens, encoder)
                for sample in planned.samples:
                    captured = source.states[sample.sample_id]
                    assembly.add(sample.sample_id, captured.input_ids_T, captured.aux_TAD, captured.last_TD)
                if pending is not None:
                    entries.append(pending.result().entry)
                pending = writer.submit(assembly.write, folder / ROUND.format(number))
        assert pending is not None
        entries.append(pending.result().entry)
    return entries[-len(plan.shards) :]


def _encode(source: Source, rounds: int) -> None:
    with Encoder(make_codec(source.plan.capture.codec)) as encoder:
        for _ in range(rounds):
            started = [
                encoder.encode(captured.aux_TAD, captured.last_TD, stored_rows([1] * len(captured.last_TD), "all"))
                for captured in source.states.values()
            ]
            for encoded in started:
                encoded.block("aux")
                encoded.block("last")


def _parts(folder: Path, entries: Sequence[ShardEntry]) -> dict[str, float]:
    """md5 alone and the disk alone, over the bytes of the shards."""
    files = [(folder / entry.path).read_bytes() for entry in entries]

    def to_disk() -> None:
        for number, data in enumerate(files):
            with fs.atomic_writer(folder / f"alone-{number}") as handle:
                handle.write(data)

    hashing_s = _timed(lambda: [hashlib.md5(data, usedforsecurity=False).hexdigest() for data in files])
    return {"md5": hashing_s, "disk": _timed(to_disk)}


def _reading(folder: Path, plan: CapturePlan, entries: Sequence[ShardEntry], seed: int) -> dict[str, float]:
    """Processor time of random samples through the reader, and of decoding their blocks from memory.

    One thread and the page cache: what the reader adds to decoding, not what the disk does.
    """
    manifest = manifest_of(plan, entries)
    reader = ShardReader(folder, manifest)
    ids = [sample.sample_id for sample in reader.samples]
    random.Random(seed).shuffle(ids)  # noqa: S311 - an order, no secret
    reading_s = _timed_cpu(lambda: [reader.read(sample_id).sample for sample_id in ids])
    codec, num_aux = make_codec(plan.capture.codec), len(plan.capture.boundaries)
    decoding_s = 0.0
    for data, shape, stream in _blocks(folder, entries, manifest, num_aux):
        decoding_s += _timed_cpu(lambda: _decode(codec, data, shape, stream))  # noqa: B023 - called at once
    return {"read": reading_s, "decode": decoding_s}


def _decode(codec: Codec, data: torch.Tensor, shape: tuple[int, int, int], stream: int) -> None:
    decode_block(codec, tensor_bytes(data), torch.empty(shape, dtype=torch.bfloat16), stream)


def _blocks(
    folder: Path, entries: Sequence[ShardEntry], manifest: ShardManifest, num_aux: int
) -> Iterator[tuple[torch.Tensor, tuple[int, int, int], int]]:
    for entry in entries:
        header = open_entry(folder, entry, manifest)
        with open_shard(folder / entry.path, entry.path) as fd:
            for index, (aux_rows, last_rows) in enumerate(header.rows):
                D = manifest.hidden_size
                yield read_encoded(fd.number, header, index, "aux"), (num_aux, aux_rows, D), 0
                yield read_encoded(fd.number, header, index, "last"), (1, last_rows, D), num_aux


def _timed_cpu(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def _timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
