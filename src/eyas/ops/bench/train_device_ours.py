"""Our side of ``eyas bench train --device cuda``, in a process of its own: the trainer's step on packs on the device.

The rows that train are those that speculators trains, as in ``train_ours``.
"""

from __future__ import annotations

from typing import Any

import torch

from eyas.drafter.precision import matmul_dtype
from eyas.drafter.rows import Pack, plan_pack
from eyas.ops.bench.peers.documents import begin, end, pack_number, read_documents, takes_loss
from eyas.ops.bench.peers.protocol import Step, serve
from eyas.ops.bench.train_ours import make_drafter, rows_of_speculators
from eyas.ops.bench.train_step import Step as TrainStep
from eyas.train.data import FILL_MULTIPLE
from eyas.train.loop import MEASURE_EVERY


def make_pack(path: str, ttt_steps: int) -> Pack:
    """A pack of the job, in host memory."""
    documents = read_documents(path)
    return plan_pack(
        ids_T=torch.cat([d["ids_T"] for d in documents]),
        aux_TAD=[d["aux_TAD"] for d in documents],
        last_TD=[d["last_TD"] for d in documents],
        lengths=[len(d["ids_T"]) for d in documents],
        trains_TS=torch.cat([rows_of_speculators(d["mask_T"], ttt_steps) for d in documents]),
        multiple=FILL_MULTIPLE,
    )


def make(job: dict[str, Any]) -> Step:
    """See ``protocol.serve``."""
    drafter, _ = make_drafter(job)  # its frozen head is the teacher
    packs = [make_pack(path, job["ttt_steps"]) for path in job["packs"]]
    settings = {name: job[name] for name in ("betas", "weight_decay", "max_grad_norm")}
    train = TrainStep(drafter, packs, job["device"], optimizer="adamw", **settings)
    num_tokens = [sum(span.end - span.start for span in pack.documents) for pack in packs]

    def step(number: int) -> tuple[int, float | None]:
        which, takes = pack_number(job, number), takes_loss(job, number)
        with matmul_dtype("bfloat16"):
            measured = train(which, job["lr"], measure=takes or number % MEASURE_EVERY == MEASURE_EVERY - 1)
        return num_tokens[which], measured.total(1.0) if measured and takes else None

    return step


if __name__ == "__main__":
    serve(make, begin, end)
