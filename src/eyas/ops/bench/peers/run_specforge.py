"""Drives SpecForge 0.2.0 on a CPU: its draft model, unroll, teacher, strategy and optimizer, unchanged.

What a CPU lacks is answered by ``specforge_cpu``. It trains the head too and averages a cross entropy over all
positions, so its loss is of another kind.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import specforge_cpu  # noqa: F401 - before anything of the peer

# isort: split
import torch
from protocol import Step, serve
from safetensors.torch import load_file
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from transformers import LlamaConfig


class Head(torch.nn.Module):
    """The target's head from a tensor; the peer's own preprocessing is kept."""

    preprocess = TargetHead.preprocess

    def __init__(self, head_VD: torch.Tensor) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(head_VD.shape[1], head_VD.shape[0], bias=False)
        self.fc.weight = torch.nn.Parameter(head_VD, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.fc(hidden)


def make_draft(job: dict[str, Any], dtype: torch.dtype) -> Any:
    """The draft model with the job's first weights."""
    shape = job["shape"]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = LlamaConfig(
        **{name: shape[name] for name in names},
        num_hidden_layers=1,
        rms_norm_eps=shape["rms_norm_eps"],
        rope_theta=shape["rope_theta"],
        max_position_embeddings=8192,
        pad_token_id=0,
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    config.draft_vocab_size = shape["draft_vocab_size"]
    draft = LlamaForCausalLMEagle3(config, attention_backend=job["attention"]).to(dtype)
    ends, maps = load_file(job["ends"]), torch.load(Path(job["data"]["specforge"]) / "vocab_mapping/vocab_mapping.pt")
    weights = load_file(job["weights"]) | {"embed_tokens.weight": ends["embedding"]} | maps
    unknown = draft.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    draft.freeze_embedding()
    return draft


def make(job: dict[str, Any]) -> Step:
    """See ``protocol.serve``."""
    dtype = getattr(torch, job["dtype"])
    draft = make_draft(job, dtype)
    model = OnlineEagle3Model(draft_model=draft, length=job["ttt_steps"], attention_backend=job["attention"])
    strategy = Eagle3TrainStrategy(model, target_head=Head(load_file(job["ends"])["head"].to(dtype)))
    optimizer = BF16Optimizer(
        draft, lr=job["lr"], max_grad_norm=job["max_grad_norm"], total_steps=100_000, warmup_ratio=0.0
    )
    paths = sorted(Path(job["data"]["specforge"]).rglob("data_*.ckpt"), key=lambda path: int(path.stem.split("_")[1]))

    def step(number: int) -> tuple[int, float]:
        sample = torch.load(paths[number % len(paths)])
        ids = sample["input_ids"][None]
        tensors = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "loss_mask": sample["loss_mask"][None],
            "hidden_state": sample["aux_hidden_state"].to(dtype),
            "target": sample["hidden_state"].to(dtype),
        }
        batch = TrainBatch(
            sample_ids=["0"], strategy="eagle3", tensors=tensors, metadata={"target_repr": "hidden_state"}
        )
        result = strategy.forward_loss(batch)
        result.loss.backward()
        optimizer.step()
        return ids.numel(), float(result.loss)

    return step


if __name__ == "__main__":
    serve(make)
