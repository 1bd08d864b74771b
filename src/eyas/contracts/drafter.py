"""Records of the drafter: checkpoint, acceptance, export."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eyas.contracts.data import SCHEMA_VERSION, FileDigest

RopeScaling = tuple[tuple[str, Any], ...]
"""``rope_type`` and its numbers as (key, value) pairs sorted by key, in transformers' spelling."""


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
    rope_scaling: RopeScaling | None = None
    """None is the plain type."""
    norm_before_residual: bool = False
    """The layer's residual is the normed hidden state, as some trainers have it; SGLang knows the raw one only."""


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
    warm_start: str = ""
    """Content hash of the checkpoint that the first weights are from; empty when they are the target's."""
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
class WorstRound:
    """Text that one round emitted."""

    accepted: str
    """Of the drafter's tokens; empty when the first was wrong."""
    bonus: str
    """Of the target's own token; empty where the answer ended before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstDocument:
    """A held-out document of low tau: the end of its prompt and its first answer, cut at its rounds."""

    sample_id: str
    source: str
    tau: float
    num_rounds: int
    loop_share: float
    prompt: str
    first: str
    """The token of the prefill, which is no round's."""
    rounds: tuple[WorstRound, ...]


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
    worst: tuple[WorstDocument, ...] = ()
    """The documents of lowest tau, lowest first."""
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
    """How far rounding to ``dtype`` moves the logits of the float32 weights on a fixed sample."""
    files: tuple[FileDigest, ...] = field(default=())
    dtype: str = "bfloat16"
    """Of the weights; d2t is int64, t2d bool."""
    schema_version: int = SCHEMA_VERSION
