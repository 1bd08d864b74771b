"""Does the store's way to the trainer starve its step? ``python -m eyas.ops.bench.train_feed``; the answer is JSON.

A store of random states, alike in bytes to residual streams, is written with the store's own writer. The same
steps then run fed as ``train.loop`` feeds them (reader, packs made ahead, copies beside the step), from a disk
whose page cache is dropped before every step and from a warm one, and once more with packs that lie on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from eyas import config, console, heap
from eyas.batches.loader import BatchLoader, num_read_threads, order_of
from eyas.batches.order import BatchOrder, Cursor
from eyas.config.schema import TrainConfig
from eyas.contracts import CaptureIdentity, DrafterShape, TokenSample
from eyas.drafter.init import draft_head
from eyas.drafter.loss import Workspace, ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.objective import Objective
from eyas.drafter.precision import matmul_dtype
from eyas.drafter.rows import Pack
from eyas.drafter.teacher import TargetHead
from eyas.drafter.weights import FlatWeights
from eyas.ops.bench.replay import manifest_of
from eyas.plan.build import build_plan
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder
from eyas.shards.reader import ShardReader
from eyas.shards.writer import ShardAssembly
from eyas.train.data import Packer, check_states
from eyas.train.distributed import World
from eyas.train.loop import teacher_of
from eyas.train.optimizer import Optimizer
from eyas.train.packs import Placer, StepData, StepSource, made_ahead

GIB, READ_BYTES, MAX_RESIDENT = 1 << 30, 8 << 20, 8


def write_store(folder: Path, args: argparse.Namespace, shape: DrafterShape) -> ShardReader:
    """Documents of about ``args.doc`` tokens, the last ``args.share`` of each trained, in real shards."""
    generator = torch.Generator(args.device).manual_seed(0)
    D, A, num_docs = shape.target_hidden_size, shape.num_aux, max(2, round(args.tokens / args.doc))
    capture = CaptureIdentity(
        target="0" * 64, tokens="0" * 64, boundaries=tuple(range(1, A + 1)), final_hidden="post_norm",
        dtype="bfloat16", codec=args.codec, engine="random", engine_version="1", engine_options={}, image="",
        shard_bytes=GIB, batch_tokens=8192, revision=1, last_rows="trained",
    )  # fmt: skip
    tokens = {}
    for i in range(num_docs):
        T = round(args.doc * (0.9 + 0.2 * i / (num_docs - 1)))
        ids_T = torch.randint(shape.vocab_size, (T,), generator=torch.Generator().manual_seed(i))
        num_masked = max(1, round((1 - args.share) * T))
        tokens[f"{i:016x}"] = TokenSample(
            sample_id=f"{i:016x}", conversation_id=str(i), source="random", split="train", variant="greedy",
            input_ids=tuple(ids_T.tolist()), loss_mask=(0,) * num_masked + (1,) * (T - num_masked),
        )  # fmt: skip
    plan = build_plan([(name, len(sample.input_ids)) for name, sample in tokens.items()], capture, D)
    # channels differ in scale by powers of two and deeper streams are larger: what a codec finds in exponents
    scale_ND = torch.randn(A + 1, D, generator=generator, device=args.device).mul(0.7).exp()
    scale_ND *= 2.0 ** torch.arange(-2, A - 1, device=args.device)[:, None]
    scale_ND[-1] = 1.0
    entries = []
    with Encoder(make_codec(args.codec)) as encoder:
        for planned in plan.shards:
            assembly = ShardAssembly(planned, capture, D, tokens, encoder)
            for sample in planned.samples:
                T = sample.num_tokens
                states_TND = torch.randn(T, A + 1, D, generator=generator, device=args.device) * scale_ND
                states_TND = states_TND.bfloat16().cpu()
                ids_T = torch.tensor(tokens[sample.sample_id].input_ids, dtype=torch.int32)
                assembly.add(sample.sample_id, ids_T, states_TND[:, :-1].contiguous(), states_TND[:, -1].contiguous())
            entry = assembly.write(folder).entry
            assert entry is not None
            entries.append(entry)
    return ShardReader(folder, manifest_of(plan, entries))


def drop_cache(files: Iterable[Path]) -> None:
    """Ask the kernel to forget the pages of files."""
    for path in files:
        with open(path, "rb") as handle:
            os.fdatasync(handle.fileno())  # dirty pages are not dropped
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_speed(files: Iterable[Path]) -> float:
    """Plain GB/s of reading files whole, with as many threads as the loader has."""

    def read(path: Path, begin: int) -> int:
        with open(path, "rb", buffering=0) as handle:
            return len(os.pread(handle.fileno(), READ_BYTES, begin))

    places = [(path, begin) for path in files for begin in range(0, path.stat().st_size, READ_BYTES)]
    with ThreadPoolExecutor(num_read_threads()) as pool:
        begin_s = time.perf_counter()
        num_bytes = sum(pool.map(lambda place: read(*place), places))
        return num_bytes / (time.perf_counter() - begin_s) / 1e9


class Bench:
    """The step and its inputs, as ``train.loop.Trainer`` puts them together, without checkpoints and metrics."""

    def __init__(self, args: argparse.Namespace, reader: ShardReader, shape: DrafterShape) -> None:
        self.args, self.reader, self.world = args, reader, World(0, 1, torch.device(args.device))
        self.device = self.world.device
        V, W, D = shape.vocab_size, shape.draft_vocab_size, shape.target_hidden_size
        generator = torch.Generator(args.device).manual_seed(1)
        # the device makes a billion random numbers in no time
        head_VD, embedding_VE = (torch.randn(V, D, generator=generator, device=args.device) for _ in range(2))
        head_VD /= D**0.5
        head_VD[W:] *= 0.01  # the choice of random states is then in the draft vocab, as a real one mostly is
        head_VD, embedding_VE = head_VD.bfloat16().cpu(), embedding_VE.bfloat16().cpu()
        drafter = Drafter(shape)
        drafter.set_target(embedding_VE, torch.zeros(W, dtype=torch.int64), torch.arange(V) < W)
        with torch.no_grad():
            drafter.lm_head.weight.copy_(draft_head(head_VD, drafter.d2t)).requires_grad_(False)
        self.drafter, self.head = drafter.train(), TargetHead(head_VD, self.device)
        self.config = TrainConfig(
            num_steps=10**6, ttt_steps=args.ttt, batch_tokens=args.batch_tokens, optimizer="adamw", lr=1e-5
        )
        on_gpu = self.device.type == "cuda"
        self.weights = FlatWeights(drafter, torch.bfloat16 if on_gpu else torch.float32, self.device)
        self.teacher_WD = teacher_of(drafter, self.weights, head_VD)
        self.optimizer = Optimizer(self.weights, self.config, self.world)
        self.placer, self.workspace, self.objective = Placer(self.device), Workspace(), Objective("kl", 0)
        self.packer, self.number = self.new_packer(), 0

    def new_packer(self) -> Packer:
        """One that has not asked for any document's argmax yet, as in a first epoch."""
        return Packer(self.head, self.drafter.t2d, self.drafter.embed_tokens.weight)  # type: ignore[arg-type]

    def order(self) -> BatchOrder:
        """Of all documents."""
        return order_of(self.reader, self.reader.samples, self.args.batch_tokens, 0)

    @contextlib.contextmanager
    def fed(self, num_steps: int) -> Iterator[Iterator[StepData]]:
        """The input path of ``Trainer.run``."""
        loader = BatchLoader(self.reader, self.order().plan(Cursor()), check_states)
        source = StepSource(
            loader, self.packer, self.placer, self.world, steps=(0, num_steps), ttt_steps=lambda _: self.args.ttt,
            damaged={}, max_damaged=0, stop=lambda: False,
        )  # fmt: skip
        with loader, contextlib.closing(made_ahead(iter(source), in_thread=self.device.type == "cuda")) as steps:
            yield steps

    def train(self, pack: Pack, num_trained_S: tuple[int, ...]) -> None:
        """``Trainer._train`` of one pack."""
        self.weights.zero_grad()
        total, _ = ttt_loss(
            self.drafter, pack, self.teacher_WD, self.config.step_decay, weights=self.weights,
            num_trained_S=num_trained_S, measure=self.number % 10 == 9, workspace=self.workspace,
            objective=self.objective,
        )  # fmt: skip
        total.backward()
        self.optimizer.step(self.number, self.config.lr)
        self.number += 1

    def run_fed(self, num_steps: int, before: Callable[[], None] = lambda: None, train: bool = True) -> dict[str, Any]:
        """Steps from the store; with ``train`` False only its packs, each copied to the device."""
        before()
        clock = Clock(self.device)
        with self.fed(num_steps) as steps:
            for data in steps:
                assert data.first is not None
                pack = data.first.take()
                if train:
                    self.train(pack, data.num_trained_S)
                clock.count(data.num_tokens)
                del data, pack
                before()
        return clock.figures()

    def run_resident(self, num_steps: int) -> dict[str, Any]:
        """The same steps with packs that lie on the device."""
        with self.fed(min(num_steps, len(self.order().epoch(0)), MAX_RESIDENT)) as steps:
            packs = [(d.first.take(), d.num_trained_S, d.num_tokens) for d in steps if d.first is not None]
        clock = Clock(self.device)
        for number in range(num_steps):
            pack, num_trained_S, num_tokens = packs[number % len(packs)]
            self.train(pack, num_trained_S)
            clock.count(num_tokens)
        return clock.figures()


class Clock:
    """Tokens over time, all of it and from the end of the first step on, and the device's memory meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._wait = torch.cuda.synchronize if self._on_gpu else lambda: None
        self._wait()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._num_tokens, self._first_tokens, self._first_s, self._begin_s = 0, 0, 0.0, time.perf_counter()

    def count(self, num_tokens: int) -> None:
        """A step was launched."""
        self._num_tokens += num_tokens
        if not self._first_tokens:
            self._wait()
            self._first_tokens, self._first_s = num_tokens, time.perf_counter() - self._begin_s

    def figures(self) -> dict[str, Any]:
        """Once the device is done."""
        self._wait()
        all_s, rest = time.perf_counter() - self._begin_s, self._num_tokens - self._first_tokens
        return {
            "tokens": self._num_tokens, "seconds": all_s, "first_step_s": self._first_s,
            "tokens_s": rest / (all_s - self._first_s) if rest else self._num_tokens / all_s,
            "tokens_s_with_first": self._num_tokens / all_s,
            "peak_bytes": torch.cuda.max_memory_allocated() if self._on_gpu else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if self._on_gpu else None,
        }  # fmt: skip


def make_shape(args: argparse.Namespace) -> DrafterShape:
    """A drafter of Llama-3.1-8B's proportions."""
    heads = 32 if args.hidden % 32 == 0 and args.hidden >= 2048 else 4
    return DrafterShape(
        target_hidden_size=args.hidden, hidden_size=args.hidden, intermediate_size=args.hidden * 7 // 2,
        num_attention_heads=heads, num_key_value_heads=heads // 4, head_dim=args.hidden // heads, num_aux=args.aux,
        vocab_size=args.vocab, draft_vocab_size=args.vocab // 4 if args.vocab < 32_000 else 32_000,
        rms_norm_eps=1e-5, rope_theta=500_000.0, max_position_embeddings=131_072, fc_norm=False, norm_output=False,
    )  # fmt: skip


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures. Bytes are of all stored rows, the masked ones included."""
    shape = make_shape(args)
    begin_s = time.perf_counter()
    reader = write_store(folder, args, shape)
    took_s = time.perf_counter() - begin_s
    console.log(f"train_feed: {reader.manifest.stored_bytes:,} bytes are written in {took_s:.1f} s")
    files = [folder / entry.path for entry in reader.manifest.shards]
    drop_cache(files)
    disk = {"disk_cold_gb_s": read_speed(files), "disk_warm_gb_s": read_speed(files)}
    console.log(f"train_feed: {json.dumps(disk)}")
    num_tokens, stored_bytes = reader.manifest.num_stored_tokens, reader.manifest.stored_bytes
    states = (reader.read(sample.sample_id) for sample in reader.samples)
    raw_bytes = sum((s.num_aux_rows * args.aux + int(s.has_last_T.sum())) * args.hidden * 2 for s in states)
    bench = Bench(args, reader, shape)
    num_steps = args.steps or 4 * len(bench.order().epoch(0))
    one_epoch = len(bench.order().epoch(0))
    runs: dict[str, dict[str, Any]] = {}

    def run(name: str, work: Callable[[], dict[str, Any]]) -> None:
        torch.cuda.empty_cache()  # so that a run's reserved memory is its own
        runs[name] = figures = work()
        rate = figures["tokens_s"]
        figures["raw_gb_s"], figures["stored_gb_s"] = (rate * b / num_tokens / 1e9 for b in (raw_bytes, stored_bytes))
        console.log(f"train_feed: {name}: {json.dumps(figures)}")

    def cold() -> None:
        drop_cache(files)

    with matmul_dtype("bfloat16"):
        run("compiling", lambda: bench.run_fed(num_steps))
        run("resident", lambda: bench.run_resident(num_steps))
        run("warm", lambda: bench.run_fed(num_steps))
        run("cold", lambda: bench.run_fed(num_steps, cold))
        run("resident_again", lambda: bench.run_resident(num_steps))
        run("input_alone_warm", lambda: bench.run_fed(num_steps, train=False))
        run("input_alone_cold", lambda: bench.run_fed(num_steps, cold, train=False))
        bench.packer = bench.new_packer()
        run("cold_first_epoch", lambda: bench.run_fed(one_epoch, cold))
        bench.optimizer.settle()
    resident = max(runs[name]["tokens_s"] for name in ("resident", "resident_again"))
    limits = {
        "disk": disk["disk_cold_gb_s"] * 1e9 / (stored_bytes / num_tokens),
        "decoding": runs["input_alone_warm"]["tokens_s"],
        "device": resident,
    }
    return {
        "bound": min(limits, key=lambda name: limits[name]), "limits_tokens_s": limits,
        "idle_share": {name: 1 - runs[name]["tokens_s"] / resident for name in ("cold", "warm", "cold_first_epoch")},
        "runs": runs, **disk, "cache_dropped": disk["disk_cold_gb_s"] < 0.7 * disk["disk_warm_gb_s"],
        "raw_bytes": raw_bytes, "stored_bytes": stored_bytes, "stored_share": stored_bytes / raw_bytes,
        "tokens": num_tokens, "steps": num_steps, "packs_per_epoch": one_epoch, "cores": config.cores(),
        "read_threads": num_read_threads(), "shape": {key: getattr(shape, key) for key in shape.__slots__},
        "settings": {key: value for key, value in vars(args).items() if key != "folder"},
        "torch": torch.__version__, "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"hidden": 4096, "aux": 3, "tokens": 60_000, "doc": 1500, "ttt": 7, "steps": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--share", type=float, default=0.75)
    parser.add_argument("--codec", choices=("blosc2", "raw"), default="blosc2")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.cores())  # as the trainer does
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="train-feed-") as scratch:
        sys.stdout.write(json.dumps(measure(Path(scratch), args), indent=1) + "\n")


if __name__ == "__main__":
    heap.keep_freed()  # as every stage does
    main()
