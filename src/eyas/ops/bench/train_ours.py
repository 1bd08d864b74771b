"""Our side of ``eyas bench train``, in a process of its own: the store's reader, the packs, the loss, the optimizer.

Losses are taken at every tenth step, as in training. So that they compare, the rows that train are those that
speculators trains: its mask, and rows whose target is outside the draft vocab too. That is more work than ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from eyas import fs, heap
from eyas.config.schema import TrainConfig
from eyas.contracts import DrafterShape, ShardManifest
from eyas.drafter.init import draft_head
from eyas.drafter.loss import Workspace, ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.precision import matmul_dtype, product_dtype
from eyas.drafter.rows import Pack, plan_pack
from eyas.drafter.weights import FlatWeights
from eyas.ops.bench.peers.protocol import Step, serve
from eyas.shards.reader import ShardReader, StoredStates
from eyas.train.data import FILL_MULTIPLE
from eyas.train.distributed import World
from eyas.train.loop import MEASURE_EVERY
from eyas.train.optimizer import Optimizer


def make_drafter(job: dict[str, Any]) -> tuple[Drafter, torch.Tensor]:
    """The drafter with the job's first weights, and the target's head over the draft vocab."""
    drafter, ends = Drafter(DrafterShape(**job["shape"])), load_file(job["ends"])
    drafter.set_target(ends["embedding"].bfloat16(), ends["d2t"], ends["t2d"])
    with torch.no_grad():
        weights = load_file(job["weights"])
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])
    drafter.lm_head.weight.requires_grad_(False)
    return drafter, draft_head(ends["head"], drafter.d2t)


def make_pack(stored: StoredStates, ttt_steps: int) -> Pack:
    """One sequence with the rows that speculators trains: row t at step k iff loss_mask[t+k+1]."""
    return plan_pack(
        ids_T=stored.input_ids_T.long(),
        aux_TAD=[stored.aux_TAD],
        last_TD=[stored.last_TD],
        lengths=[len(stored.input_ids_T)],
        trains_TS=rows_of_speculators(stored.loss_mask_T, ttt_steps),
        multiple=FILL_MULTIPLE,
    )


def rows_of_speculators(mask_T: torch.Tensor, ttt_steps: int) -> torch.Tensor:
    """Bool [T,S]: the rows of one document that train at each step."""
    T, mask_X = len(mask_T), F.pad(mask_T.bool(), (0, ttt_steps))
    return torch.stack([mask_X[k + 1 : k + 1 + T] for k in range(ttt_steps)], 1)


def make(job: dict[str, Any]) -> Step:
    """See ``protocol.serve``."""
    device = torch.device("cpu")
    dtype = product_dtype(device, job["dtype"])
    drafter, teacher_WD = make_drafter(job)
    weights, workspace = FlatWeights(drafter, dtype), Workspace()
    teacher_WD = teacher_WD.to(dtype)
    names = ("betas", "weight_decay", "max_grad_norm")
    optimizer = Optimizer(
        weights, TrainConfig(optimizer="adamw", **{name: job[name] for name in names}), World(0, 1, device)
    )
    folder = Path(job["data"]["eyas"])
    reader = ShardReader(folder / "shards", fs.read_record(ShardManifest, folder / "manifest.json"))
    sample_ids = job["sample_ids"]

    def step(number: int) -> tuple[int, float | None]:
        stored = reader.read(sample_ids[number % len(sample_ids)])
        measure = number % MEASURE_EVERY == MEASURE_EVERY - 1
        weights.zero_grad()
        with matmul_dtype(job["dtype"]):
            pack = make_pack(stored, job["ttt_steps"])
            total, measured = ttt_loss(
                drafter, pack, teacher_WD, job["step_decay"], weights=weights, workspace=workspace, measure=measure
            )
            total.backward()
        optimizer.step(number, job["lr"])
        return len(stored.input_ids_T), measured.total(job["step_decay"]) if measured else None

    return step


if __name__ == "__main__":
    heap.keep_freed()  # as every stage does
    serve(make)
