"""Drives speculators 0.9.0 on a CPU: its data set, collate function, model, loss and metrics, unchanged.

Its Trainer class wants an accelerator, flex attention has no backward pass on a CPU and its fused losses want
Triton, so the loop is here, attention is "eager" or "sdpa" and the loss is its eager one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from protocol import Step, serve
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from transformers import AutoConfig, LlamaConfig


def make_model(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The draft model with the job's first weights, and what its forward pass is called with."""
    shape, folder = job["shape"], Path(job["data"]["speculators"])
    target = AutoConfig.from_pretrained(job["target"])
    draft = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=1,
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=shape["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=False,
    )
    options = {
        "target_layer_ids": list(job["boundaries"]),
        "verifier_name_or_path": job["target"],
        "draft_attn_impl": job["attention"],
        "draft_vocab_size": shape["draft_vocab_size"],
        "norm_before_residual": shape["norm_before_residual"],
        "norm_before_fc": False,
        "ttt_steps": job["ttt_steps"],
        "ttt_step_loss_decay": job["step_decay"],
        "loss_fn": "kl_div",
        "loss_implementation": job.get("loss_implementation", "eager"),
    }
    d2t, t2d = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("d2t", "t2d"))
    model = Eagle3DraftModel.from_training_args(draft, t2d=t2d, d2t=d2t, **options)
    weights = {name.replace("midlayer.", "layers.0."): t for name, t in load_file(job["weights"]).items()}
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    call_options, _ = Eagle3DraftModel.get_trainer_kwargs(**options)
    return model.train(), call_options


def make(job: dict[str, Any]) -> Step:
    """See ``protocol.serve``."""
    model, call_options = make_model(job)
    num_tokens, reduced = job["sequence_tokens"], job["dtype"] == "bfloat16"
    dtype = torch.bfloat16 if reduced else torch.float32
    data = ArrowDataset(
        max_len=num_tokens, datapath=job["data"]["speculators"], on_missing="raise", hidden_states_dtype=dtype
    )
    collate = CollateFn(num_tokens, job["shape"]["hidden_size"], 3, dtype, preprocess=shift_batch)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job["lr"], betas=job["betas"], weight_decay=job["weight_decay"])

    def step(number: int) -> tuple[int, float]:
        batch = collate([data[number % len(data)]])
        batch.pop("error_records")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=reduced):
            _, loss, _ = model(**batch, **call_options)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["max_grad_norm"])
        optimizer.step()
        return num_tokens, float(loss)

    return step


if __name__ == "__main__":
    serve(make)
