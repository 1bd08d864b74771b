"""Train drafters with SpecForge's own sample normaliser, collation, model, strategy and optimizer, as a job says.

    python specforge_quality.py JOB.json

Settings of a run: ttt_steps, lr, warmup_ratio. The rest is the peer's own: loss weights 0.8 ** k, AdamW on
float32 masters, cosine, clip 0.5, a trained head. It cannot pack: the documents of a pack become rows of one batch,
padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import specforge_cpu  # noqa: F401 - before anything of the peer

# isort: split
import torch
from quality_job import Build, run_job
from specforge.algorithms.eagle3.data import build_offline_normalizer  # pyright: ignore[reportMissingImports]
from specforge.algorithms.eagle3.model import OnlineEagle3Model  # pyright: ignore[reportMissingImports]
from specforge.data.utils import DataCollatorWithPadding  # pyright: ignore[reportMissingImports]
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # pyright: ignore[reportMissingImports]
from specforge.modeling.target.target_head import TargetHead  # pyright: ignore[reportMissingImports]
from specforge.optimizer import BF16Optimizer  # pyright: ignore[reportMissingImports]
from specforge.runtime.contracts import TrainBatch  # pyright: ignore[reportMissingImports]
from specforge.runtime.data_plane.feature_store import load_feature_file  # pyright: ignore[reportMissingImports]
from specforge.training.model_loading import _TARGET_ARCHITECTURE_FIELDS  # pyright: ignore[reportMissingImports]
from specforge.training.strategies.base import Eagle3TrainStrategy  # pyright: ignore[reportMissingImports]
from transformers import AutoConfig, LlamaConfig

ATTENTION = "sdpa"
"""Flex attention, the peer's default, compiles anew for every padded length; for documents this short it is slower."""
NAMES = ("input_ids", "attention_mask", "loss_mask", "hidden_state", "target")


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The peer's offline files by number, through its own normaliser."""

    def __init__(self, folder: Path, max_len: int) -> None:
        numbered = {int(path.stem.rsplit("_", 1)[1]): str(path) for path in folder.glob("rows_*/data_*.ckpt")}
        self._paths = [numbered[number] for number in sorted(numbered)]
        self._normalise = build_offline_normalizer(max_len)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._normalise(load_feature_file(self._paths[index]))


class Trainer:
    """One step of the peer: its strategy's loss, backward, its optimizer."""

    def __init__(self, job: dict[str, Any], head: Any, settings: dict[str, Any], num_steps: int) -> None:
        self._device = job["device"]
        draft = _new_draft(job).to(self._device, torch.bfloat16)
        model = OnlineEagle3Model(draft_model=draft, length=settings["ttt_steps"], attention_backend=ATTENTION)
        self._draft = draft
        self._strategy = Eagle3TrainStrategy(model.to(self._device).train(), target_head=head)
        self._optimizer = BF16Optimizer(
            draft, lr=settings["lr"], total_steps=num_steps, warmup_ratio=settings["warmup_ratio"]
        )

    def step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Forward, backward, optimizer and its schedule."""
        tensors = {name: batch[name].to(self._device, non_blocking=True) for name in NAMES}
        train_batch = TrainBatch(
            sample_ids=[str(row) for row in range(len(tensors["input_ids"]))],
            strategy="eagle3",
            tensors=tensors,
            metadata={"target_repr": "hidden_state"},
        )
        loss = self._strategy.forward_loss(train_batch).loss
        loss.backward()
        self._optimizer.step()
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        """The bf16 weights that the peer's checkpoint holds, without what is the target's."""
        left_out = ("embed_tokens", "d2t", "t2d")
        named = self._draft.state_dict().items()
        return {name: tensor for name, tensor in named if not name.startswith(left_out) and "rotary" not in name}


def _new_draft(job: dict[str, Any]) -> Any:
    """The draft as the peer derives it from a target's config; its first weights are the peer's own."""
    target = AutoConfig.from_pretrained(job["target"])
    fields = {name: getattr(target, name, None) for name in (*_TARGET_ARCHITECTURE_FIELDS, "rope_parameters")}
    mapping = Path(job["states"]) / "vocab_mapping" / "vocab_mapping.pt"
    config = LlamaConfig(
        **{name: value for name, value in fields.items() if value is not None},
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    config.draft_vocab_size = len(torch.load(mapping, weights_only=True)["d2t"])
    draft = LlamaForCausalLMEagle3(config, attention_backend=ATTENTION)
    draft.load_vocab_mapping(str(mapping))
    draft.load_embedding(job["target"], embedding_key=job["embedding_key"])
    draft.freeze_embedding()
    return draft


def make(job: dict[str, Any]) -> tuple[Build, Any, Callable[..., Any]]:
    """How to build a drafter, the peer's samples and its collate function."""
    head = TargetHead(job["target"])
    head.load_weights(job["target"], lm_head_key=job["head_key"])
    head.freeze_weights()
    head = head.eval().to(device=job["device"], dtype=torch.bfloat16)
    samples = Samples(Path(job["states"]), job["max_tokens"])
    return lambda settings, num_steps: Trainer(job, head, settings, num_steps), samples, DataCollatorWithPadding()


if __name__ == "__main__":
    run_job("specforge", make)
