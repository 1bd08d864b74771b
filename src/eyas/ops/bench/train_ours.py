"""Our side of ``eyas bench train``, in a process of its own: the store's reader, the packs, the loss, AdamW.

Losses are taken at every tenth step, as in training. So that they compare, rows whose target is outside the draft vocab train here too, as they do in speculators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas import fs
from eyas.contracts import DrafterShape, ShardManifest
from eyas.drafter.init import draft_head
from eyas.drafter.loss import Workspace, ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.precision import matmul_dtype
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.weights import FlatWeights
from eyas.ops.bench.peers.protocol import Step, serve
from eyas.shards.reader import ShardReader
from eyas.train.data import FILL_MULTIPLE
from eyas.train.loop import MEASURE_EVERY


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


def make(job: dict[str, Any]) -> Step:
    """See ``protocol.serve``."""
    dtype = getattr(torch, job["dtype"])
    drafter, teacher_WD = make_drafter(job)
    weights, workspace = FlatWeights(drafter, dtype), Workspace()
    teacher_WD = teacher_WD.to(dtype)
    masters = torch.nn.Parameter(weights.master_P)
    masters.grad = weights.grad_P
    optimizer = torch.optim.AdamW(
        [masters], lr=job["lr"], betas=job["betas"], weight_decay=job["weight_decay"], fused=True
    )
    folder = Path(job["data"]["eyas"])
    reader = ShardReader(folder / "shards", fs.read_record(ShardManifest, folder / "manifest.json"))
    sample_ids = job["sample_ids"]

    def step(number: int) -> tuple[int, float | None]:
        stored = reader.read(sample_ids[number % len(sample_ids)])
        document = Document(stored.input_ids_T, stored.loss_mask_T, stored.aux_TAD, stored.last_TD)
        pack = pack_documents([document], job["ttt_steps"], FILL_MULTIPLE)
        weights.zero_grad()
        with matmul_dtype(job["dtype"]):
            total, measured = ttt_loss(
                drafter,
                pack,
                teacher_WD,
                job["step_decay"],
                weights=weights,
                workspace=workspace,
                measure=number % MEASURE_EVERY == MEASURE_EVERY - 1,
            )
            total.backward()
        torch.nn.utils.clip_grads_with_norm_(
            [masters], job["max_grad_norm"], torch.nn.utils.get_total_norm(list(weights.grad_views.values()))
        )
        optimizer.step()
        weights.refresh()
        return len(stored.input_ids_T), measured.total(job["step_decay"]) if measured else None

    return step


if __name__ == "__main__":
    serve(make)
