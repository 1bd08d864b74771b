"""Time and memory of one training step with its pack on the device: ``python -m eyas.ops.bench.train_step``.

Random states of one pack, the trainer's own step and optimizer; the answer is a JSON line for each share of trained
rows and TTT steps. No reading, no packing, no checkpoints (``train_feed`` has the way from the store).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from eyas.config.schema import TrainConfig
from eyas.contracts import DrafterShape
from eyas.drafter.loss import Measured, Workspace, ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.precision import matmul_dtype, product_dtype
from eyas.drafter.rows import Document, Pack, pack_documents
from eyas.drafter.weights import FlatWeights
from eyas.train.distributed import World
from eyas.train.loop import MEASURE_EVERY
from eyas.train.optimizer import Optimizer

FILL_MULTIPLE, WARM_UP, ROUNDS = 128, 3, 3
PROFILED, SHOWN_KERNELS = 2, 40
SIZES = {
    "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 128_256, "draft_vocab": 32_000,
    "tokens": 8192, "doc": 1500,
}  # fmt: skip
"""A target of Llama-3.1-8B's shape; tokens of a pack and of a document."""
STREAM_SIZES, OUTLIERS, OUTLIER_SIZE, LAST_SIZE = (0.15, 0.6, 1.5), 8, 20.0, 2.0
"""Like a residual stream: deeper streams are larger, a few channels stand out."""


def make_documents(args: argparse.Namespace, share: float, seed: int = 1) -> list[Document]:
    """Documents of about ``args.doc`` tokens that fill ``args.tokens``, the last ``share`` of each trained."""
    generator, D = torch.Generator().manual_seed(seed), args.hidden
    channels_D = torch.ones(D)
    channels_D[torch.randperm(D, generator=generator)[:OUTLIERS]] = OUTLIER_SIZE
    documents, left = [], args.tokens
    while left > 0:
        T = min(left, args.doc + len(documents) * 37 % max(1, args.doc // 8))
        aux_TAD = torch.randn(T, 3, D, generator=generator) * channels_D * torch.tensor(STREAM_SIZES)[:, None]
        last_TD = torch.randn(T, D, generator=generator) * channels_D * LAST_SIZE
        mask_T = (torch.arange(T) >= int((1 - share) * T)).to(torch.uint8)
        ids_T = torch.randint(args.vocab, (T,), generator=generator)
        documents.append(Document(ids_T, mask_T, aux_TAD.bfloat16(), last_TD.bfloat16()))
        left -= T
    return documents


def make_drafter(args: argparse.Namespace) -> Drafter:
    """Random weights; the draft vocab is the first ids."""
    W, D = args.draft_vocab, args.hidden
    shape = DrafterShape(
        target_hidden_size=D, hidden_size=D, intermediate_size=args.inner, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, head_dim=D // args.heads, num_aux=3, vocab_size=args.vocab,
        draft_vocab_size=W, rms_norm_eps=1e-5, rope_theta=500_000.0, max_position_embeddings=131_072, fc_norm=False,
        norm_output=False,
    )  # fmt: skip
    torch.manual_seed(0)
    drafter = Drafter(shape)
    embedding_VE = torch.randn(args.vocab, D, dtype=torch.bfloat16) * 0.02
    drafter.set_target(embedding_VE, torch.zeros(W, dtype=torch.int64), torch.arange(args.vocab) < W)
    drafter.lm_head.weight.requires_grad_(False)
    return drafter


class Step:
    """The trainer's step on packs that lie on the device.

    Args:
        drafter: In host memory; its head is the teacher too.
        packs: In host memory.
        device: Where to train.
        world: Whose gradients are summed; this process alone by default.
        settings: Of ``TrainConfig``.
    """

    def __init__(
        self, drafter: Drafter, packs: Sequence[Pack], device: str, world: World | None = None, **settings: Any
    ) -> None:
        place = torch.device(device)
        self.drafter = drafter
        self.weights = FlatWeights(drafter, product_dtype(place, "bfloat16"), place)
        self.packs = [pack.with_embedding(drafter.embed_tokens.weight).to(device) for pack in packs]  # type: ignore[arg-type]
        self.restart(world or World(0, 1, place), **settings)

    def restart(self, world: World, **settings: Any) -> None:
        """Begin again at step 0 with new moments; weights stay as they are."""
        self.optimizer = Optimizer(self.weights, TrainConfig(**settings), world)
        self.workspace, self.number = Workspace(), 0

    def __call__(self, pack: int = 0, lr: float = 1e-4, *, measure: bool = True) -> Measured | None:
        """Take it on one pack; values stay on the device, for reading them waits for it."""
        measured = self.take([pack], lr, self.packs[pack].num_trained, measure=measure)
        return measured[0] if measured else None

    def take(
        self, packs: Sequence[int], lr: float, num_trained_S: Sequence[int], *, measure: bool = True
    ) -> list[Measured]:
        """Take it on several packs of this process; ``num_trained_S`` are the rows of all processes."""
        self.weights.zero_grad()
        # head and teacher are one tensor, as they are when a frozen head holds the target's rows
        teacher_WD = self.weights.products().head.value
        found = []
        for pack in packs:
            loss, measured = ttt_loss(
                self.drafter,
                self.packs[pack],
                teacher_WD,
                1.0,
                weights=self.weights,
                num_trained_S=num_trained_S,
                workspace=self.workspace,
                measure=measure,
            )
            loss.backward()
            found += [measured] if measured else []
        self.optimizer.step(self.number, lr)
        self.number += 1
        return found


def measure(args: argparse.Namespace, ttt_steps: int, share: float) -> dict[str, Any]:
    """Median of three rounds of ``args.steps`` steps that follow each other, after three steps that are not counted.

    Losses are taken at every tenth step, as in training, and read when the round is over.
    """
    on_gpu = args.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    pack = pack_documents(make_documents(args, share), ttt_steps, FILL_MULTIPLE)
    with matmul_dtype("bfloat16"):
        settings = {
            "ttt_steps": ttt_steps, "curriculum": [], "optimizer": args.optimizer, "weight_decay": 0.01,
            "max_grad_norm": 1.0,
        }  # fmt: skip
        step = Step(make_drafter(args), [pack], args.device, **settings)
        taken, times_ms = [step() for _ in range(WARM_UP)], []
        for _ in range(ROUNDS):
            wait()
            begin_s = time.perf_counter()
            taken += [step(measure=number % MEASURE_EVERY == MEASURE_EVERY - 1) for number in range(args.steps)]
            wait()
            times_ms.append((time.perf_counter() - begin_s) * 1e3 / args.steps)
        losses = [measured.total(1.0) for measured in taken if measured]
        kernels = _kernels(step) if args.kernels else None
    median_ms = statistics.median(times_ms)
    return {
        "optimizer": args.optimizer, "ttt_steps": ttt_steps, "share": share, "tokens": args.tokens, "trained": pack.num_trained,
        "step_ms": round(median_ms, 2), "lowest_ms": round(min(times_ms), 2), "highest_ms": round(max(times_ms), 2),
        "tokens_s": round(args.tokens / median_ms * 1e3), "losses": [round(loss, 4) for loss in losses],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None, **({"kernels": kernels} if kernels else {}),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__,
    }  # fmt: skip


def _kernels(step: Step) -> dict[str, Any]:
    """Milliseconds a step of each kernel (of each operation on a CPU), the longest first."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = step.weights.master_P.is_cuda
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            step(measure=False)
        if on_gpu:
            torch.cuda.synchronize()
    spent_ms = {
        event.key[:90]: (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / PROFILED / 1e3
        for event in profiled.key_averages()
    }
    longest = sorted(spent_ms, key=lambda name: -spent_ms[name])[:SHOWN_KERNELS]
    return {"all_ms": round(sum(spent_ms.values()), 2), **{name: round(spent_ms[name], 3) for name in longest}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {**SIZES, "steps": 20}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--ttt", type=int, nargs="+", default=[7, 3])
    parser.add_argument("--share", type=float, nargs="+", default=[0.75, 0.3])
    parser.add_argument("--kernels", action="store_true", help="add what each kernel takes")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    for ttt_steps in args.ttt:
        for share in args.share:
            sys.stdout.write(json.dumps(measure(args, ttt_steps, share)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
