"""Train drafters with speculators' own dataset, collation, model, loss and optimizers, as a job says.

    python speculators_quality.py JOB.json

Settings of a run: norm_before_residual, ttt_steps, step_decay, max_grad_norm, and either nothing more (the peer's
own defaults: Muon 1e-3 beside AdamW 1e-3, linear decay after a warm-up of 1 %) or ``ours``: adamw_lr, betas,
weight_decay, warmup_steps, min_lr_share for AdamW on the schedule of eyas, with muon_lr the peer's Muon beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
from quality_job import Build, cosine, run_job
from speculators.models.eagle3 import Eagle3DraftModel  # pyright: ignore[reportMissingImports]
from speculators.models.eagle3.data import shift_batch  # pyright: ignore[reportMissingImports]
from speculators.train.data import ArrowDataset, CollateFn  # pyright: ignore[reportMissingImports]
from speculators.train.optimizers import build_optimizers  # pyright: ignore[reportMissingImports]
from transformers import AutoConfig, LlamaConfig, get_linear_schedule_with_warmup

FLEX_BLOCK = 128
"""Packs are padded to a multiple of this: blocks of the flex attention."""
COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


class Trainer:
    """The step of the peer's ``Trainer.train_epoch``, without its logging and distribution."""

    def __init__(self, job: dict[str, Any], settings: dict[str, Any], num_steps: int) -> None:
        target = AutoConfig.from_pretrained(job["target"])
        states = Path(job["states"])
        d2t_W, t2d_V = (torch.from_numpy(np.load(states / name)) for name in ("d2t.npy", "t2d.npy"))
        self._device, self._max_grad_norm = job["device"], settings["max_grad_norm"]
        is_cuda = self._device == "cuda"
        options = {
            "target_layer_ids": job["layer_ids"],
            "verifier_name_or_path": job["target"],
            "draft_attn_impl": "simple_flex_attention" if is_cuda else "sdpa",
            "draft_vocab_size": len(d2t_W),
            "norm_before_residual": settings["norm_before_residual"],
            "ttt_steps": settings["ttt_steps"],
            "ttt_step_loss_decay": settings["step_decay"],
            "loss_fn": "kl_div",
            "loss_implementation": "fused" if is_cuda else "eager",
        }
        config = LlamaConfig(
            num_hidden_layers=1, tie_word_embeddings=False, **{name: getattr(target, name) for name in COPIED}
        )
        model = Eagle3DraftModel.from_training_args(config, t2d=t2d_V, d2t=d2t_W, **options)
        self._options, _ = Eagle3DraftModel.get_trainer_kwargs(**options)
        self._model = model.float().to(self._device).train()
        self._optimizers, self._schedulers = _optimizers(self._model, settings.get("ours"), num_steps)

    def step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Forward under autocast, backward, clip, optimizers, schedules."""
        batch = {
            name: value.to(self._device, non_blocking=True)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor)
        }
        with torch.autocast(self._device, dtype=torch.bfloat16):
            _, loss, _ = self._model(**batch, **self._options)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        """Without the frozen copies of the target."""
        kept = ("fc.", "fc_norm.", "layers.0.", "norm.", "lm_head.")
        named = self._model.state_dict().items()
        return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in named if name.startswith(kept)}


def _optimizers(model: Any, ours: dict[str, Any] | None, num_steps: int) -> tuple[list[Any], list[Any]]:
    own = SimpleNamespace(
        optimizer="muon",
        lr=1e-3,
        weight_decay=0.01,
        muon_lr=1e-3,
        muon_momentum=0.95,
        muon_weight_decay=0.1,
        muon_ns_steps=5,
        muon_adjust_lr_fn="match_rms_adamw",
    )
    if ours is None:
        optimizers = build_optimizers(model, own)
        return optimizers, [get_linear_schedule_with_warmup(o, num_steps // 100, num_steps) for o in optimizers]
    own.lr, own.weight_decay = ours["adamw_lr"], ours["weight_decay"]
    if "muon_lr" in ours:
        own.muon_lr, own.muon_weight_decay = ours["muon_lr"], ours["weight_decay"]
    else:
        own.optimizer = "adamw"
    optimizers = build_optimizers(model, own)
    for group in optimizers[-1].param_groups:  # AdamW comes last, or alone
        group["betas"] = tuple(ours["betas"])
    shares = cosine(num_steps, ours["warmup_steps"], ours["min_lr_share"])
    return optimizers, [torch.optim.lr_scheduler.LambdaLR(optimizer, shares) for optimizer in optimizers]


def make(job: dict[str, Any]) -> tuple[Build, Any, Callable[..., Any]]:
    """How to build a drafter, the peer's dataset and its collate function."""
    if job["device"] == "cuda":
        # torch 2.11's Dynamo refuses the list of tile sizes that both fused kernels share
        import speculators.losses.fused as fused  # pyright: ignore[reportMissingImports]

        fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
    hidden_size = AutoConfig.from_pretrained(job["target"]).hidden_size
    max_tokens = -(-job["max_tokens"] // FLEX_BLOCK) * FLEX_BLOCK
    dataset = ArrowDataset(max_tokens, job["states"], on_missing="raise")
    collate = CollateFn(max_tokens, hidden_size, len(job["layer_ids"]), preprocess=shift_batch)
    return lambda settings, num_steps: Trainer(job, settings, num_steps), dataset, collate


if __name__ == "__main__":
    run_job("speculators", make)
