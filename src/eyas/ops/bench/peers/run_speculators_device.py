"""Drives speculators 0.9.0 on packs that lie on a device: its collate function, model, loss and optimizer, unchanged.

On CUDA its own fast path: flex attention, torch.compile, fused losses. The loop does what its trainer does in a step.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

from documents import begin, end, pack_number, read_documents, takes_loss
from protocol import Step, serve
from run_speculators import make_model
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers


def make_batch(path: str, num_aux: int, device: str) -> tuple[int, dict[str, torch.Tensor]]:
    """A pack's tokens, and what the model is called with."""
    documents = read_documents(path)
    num_tokens, hidden_size = sum(len(d["ids_T"]) for d in documents), documents[0]["last_TD"].shape[1]
    items = [
        {
            "input_ids": d["ids_T"],
            "hidden_states": d["aux_TAD"].flatten(1),
            "verifier_last_hidden_states": d["last_TD"],
            "loss_mask": d["mask_T"].long(),
            "lengths": torch.tensor([len(d["ids_T"])]),
            "position_ids": torch.arange(len(d["ids_T"])),
        }
        for d in documents
    ]
    batch = CollateFn(num_tokens, hidden_size, num_aux, torch.bfloat16, preprocess=shift_batch)(items)
    return num_tokens, {name: t.to(device) for name, t in batch.items() if isinstance(t, torch.Tensor)}


def make(job: dict[str, Any]) -> Step:
    """See ``protocol.serve``."""
    device = job["device"]
    if device == "cuda":
        # torch 2.11's Dynamo refuses the list of tile sizes that both fused kernels share
        import speculators.losses.fused as fused

        fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
    model, call_options = make_model(job)
    model = model.float().to(device).train()
    packs = [make_batch(path, len(job["boundaries"]), device) for path in job["packs"]]
    (optimizer,) = build_optimizers(
        model, SimpleNamespace(optimizer="adamw", lr=job["lr"], weight_decay=job["weight_decay"])
    )
    for group in optimizer.param_groups:
        group["betas"] = tuple(job["betas"])

    def step(number: int) -> tuple[int, float | None]:
        num_tokens, batch = packs[pack_number(job, number)]
        with torch.autocast(device, dtype=torch.bfloat16):
            _, loss, _ = model(**batch, **call_options)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["max_grad_norm"])
        optimizer.step()
        return num_tokens, float(loss) if takes_loss(job, number) else None

    return step


if __name__ == "__main__":
    serve(make, begin, end)
