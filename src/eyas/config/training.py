"""Sections ``drafter`` and ``train`` of the schema, see ``schema``."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from eyas.config.checks import DEVICES, LOSSES, require, require_seed
from eyas.config.images import require_pin

OUTPUT = "models/drafter"


@dataclass
class DrafterConfig:
    """Shape of the drafter; zeros mean the target's own value."""

    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    fc_norm: bool = False
    """One RMSNorm per aux stream before ``fc`` (EAGLE-3.1)."""
    norm_output: bool = False
    """Feed the normed output to the next step (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """The layer's residual is the normed hidden state; SGLang loads the raw one (False) only."""

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            require(value >= 0, f"drafter.{spec.name}", value, "0 or more")


@dataclass
class TrainConfig:
    """How the drafter is trained."""

    source: str = "store"
    """Where the states come from: ``store``, or ``stream``: captured while training goes on, into a ring of shards of
    bounded size, once an epoch; only what an evaluation reads is stored then (docs/streaming.md)."""
    shuffle_shards: int = 32
    """Shards whose documents are shuffled together: an epoch goes through the set so many shards at a time. The ring
    of a stream must hold them."""
    num_steps: int = 3000
    """Optimizer steps in all; a schedule over time would not be reproducible."""
    ttt_steps: int = 3
    """S: drafted tokens that training unrolls."""
    curriculum: list[float] = field(default_factory=lambda: [0.35, 0.65])
    """Shares of the run at which one more TTT step is unrolled: 1 step before the first, 2 before
    the second, ttt_steps after the last. Empty unrolls all from the start."""
    step_decay: float = 0.8
    """Loss weight of step k is step_decay ** k."""
    loss: str = "kl"
    """``kl`` to the target's distribution over the draft vocab; ``ce``, cross-entropy to the target's choice; ``lk``,
    KL while the draft is far off and the share that sampling rejects once it is near."""
    top_k: int = 0
    """Of the target's distribution ``kl`` and ``lk`` see the largest logits, this many; 0 shows all."""
    anchors: int = 0
    """Most rows of a sample that train, thrown anew in each epoch; 0 trains every row of an answer."""
    batch_tokens: int = 512
    """Tokens of one pack; documents stay whole and never see each other."""
    packs_per_step: int = 1
    """Packs of one optimizer step, dealt to all ranks; the loss is the mean over the rows of all of them."""
    optimizer: str = "muon"
    """``muon`` for the hidden matrices and AdamW for the rest, or ``adamw`` for all."""
    lr: float = 2e-3
    """Of either optimizer, and measured for Muon: AdamW wants half of it."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's; the momentum of Muon is 0.95 always."""
    weight_decay: float = 0.0
    """Of all matrices, by either optimizer; a step takes ``lr`` times this share of them."""
    warmup_steps: int = 20
    min_lr_share: float = 0.02
    """The cosine ends at this share of lr."""
    max_grad_norm: float = 0.5
    train_head: bool = False
    """Train ``lm_head``; False keeps the rows it starts with (the target's, or a warm start's), which is faster;
    docs/performance.md has what either gives."""
    warm_start: str = ""
    """Folder of an EAGLE-3 checkpoint to start from, relative to the repository: SGLang's form, speculators', or a
    copy of an earlier models/drafter. Empty starts from the target."""
    warm_start_sha256: str = ""
    """Its content hash, which training checks and prints: DVC sees a changed start by it."""
    dtype: str = "bfloat16"
    """Dtype of matrix products; weights, softmax and loss are float32."""
    device: str = "cpu"
    checkpoint_every: int = 500
    """Steps between resumable checkpoints."""
    log_every: int = 50
    validation_share: float = 0.0
    """Share of the training conversations that validate and are not trained on; all samples of a conversation are
    on one side. The held-out ones of the evaluation are never touched."""
    validate_every: int = 500
    """Steps between validations; the last step has one too."""
    keep: str = "last"
    """Which weights are published: those of the last step, or ``best``: of the validation with the highest tau."""
    max_damaged_samples: int = 0
    """Samples that may be left out because their states cannot be read; one more ends the run with an error."""
    seed: int = 0
    image: str = ""
    """Pinned container image, ``NAME@sha256:…``: another one is refused. Empty: whatever this runs in."""
    revision: int = 4
    """Raise it when the trained bytes change on purpose."""

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        require(self.source in ("store", "stream"), "train.source", self.source, "store or stream")
        counts = (
            "shuffle_shards",
            "num_steps",
            "ttt_steps",
            "batch_tokens",
            "packs_per_step",
            "checkpoint_every",
            "log_every",
        )
        for key in (*counts, "validate_every"):
            require(getattr(self, key) >= 1, f"train.{key}", getattr(self, key), "1 or more")
        require(self.lr > 0, "train.lr", self.lr, "more than 0")
        require(0 < self.step_decay <= 1, "train.step_decay", self.step_decay, "more than 0, at most 1")
        require(self.loss in LOSSES, "train.loss", self.loss, "kl, ce or lk")
        for key in ("top_k", "anchors"):
            require(getattr(self, key) >= 0, f"train.{key}", getattr(self, key), "0 or more")
        require(
            self.loss != "ce" or not self.top_k, "train.top_k", self.top_k, "0: loss ce sees the target's choice alone"
        )
        shares = list(self.curriculum)
        rising = sorted(shares) == shares and all(0 < s < 1 for s in shares)
        require(rising, "train.curriculum", shares, "rising shares between 0 and 1")
        require(
            len(shares) < self.ttt_steps, "train.curriculum", shares, f"fewer than ttt_steps={self.ttt_steps} entries"
        )
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "train.betas",
            list(self.betas),
            "two shares below 1",
        )
        for key in ("weight_decay", "warmup_steps", "max_damaged_samples"):
            require(getattr(self, key) >= 0, f"train.{key}", getattr(self, key), "0 or more")
        require(self.optimizer in ("adamw", "muon"), "train.optimizer", self.optimizer, "adamw or muon")
        share = self.validation_share
        require(0 <= share < 1, "train.validation_share", share, "a share below 1")
        require(self.keep in ("last", "best"), "train.keep", self.keep, "last or best")
        told = self.keep == "last" or share > 0
        require(told, "train.keep", self.keep, "last, or train.validation_share above 0 to tell which is best")
        require(self.max_grad_norm > 0, "train.max_grad_norm", self.max_grad_norm, "more than 0")
        require(0 <= self.min_lr_share <= 1, "train.min_lr_share", self.min_lr_share, "a share")
        require(self.dtype in ("bfloat16", "float32"), "train.dtype", self.dtype, "bfloat16 or float32")
        require_pin("train.image", self.image)
        require(self.device in DEVICES, "train.device", self.device, "cpu or cuda")
        inside = not self.warm_start.startswith(("/", "~")) and ".." not in self.warm_start.split("/")
        require(inside, "train.warm_start", self.warm_start, "a folder of the repository, relative to it")
        kept = not PurePosixPath(self.warm_start).is_relative_to(OUTPUT)
        require(kept, "train.warm_start", self.warm_start, f"a copy of it: DVC empties {OUTPUT} before it trains")
        digits = "[0-9a-f]{64}" if self.warm_start else ""
        named = not self.warm_start_sha256 or re.fullmatch(digits, self.warm_start_sha256) is not None
        expected = "64 hex digits; empty without train.warm_start"
        require(named, "train.warm_start_sha256", self.warm_start_sha256, expected)
        require_seed("train.seed", self.seed)
