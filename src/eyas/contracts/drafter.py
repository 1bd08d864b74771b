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
class ChainAcceptance:
    """The greedy walk with chains of one length; drafts do not depend on it, rounds do."""

    tau: float
    tau_low: float | None
    tau_high: float | None
    """95 % bootstrap interval over conversations; none of a single one."""
    alpha: tuple[float, ...]
    accepted: tuple[int, ...]
    """Rounds that accepted 0, 1, … draft tokens."""
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAcceptance:
    """Expected acceptance when drafter and target sample: a draft x is accepted with min(1, p(x)/q(x)).

    Expectations along the same text, whose contexts are greedy ones: no random number is drawn. Sampled text is
    harder to foretell: what a server sees at this temperature is ``AcceptanceReport.tau_sampled``.
    """

    temperature: float
    tau: float
    tau_low: float | None
    tau_high: float | None
    alpha: tuple[float, ...]
    accepted: tuple[float, ...]
    """Expected rounds by accepted draft tokens."""
    tau_by_chain: dict[str, float]
    """By chain length, 1 to 7."""
    tau_greedy_drafts: float
    """The target samples, drafts are the drafter's likeliest tokens: accepted with p(x)."""
    covered_mass: float
    """The target's probability inside the draft vocab, a mean over tokens: no draft can be accepted oftener."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAcceptance:
    """Acceptance of one prompt set by the exact walk over the target's own greedy text."""

    tau: float
    """Tokens emitted per target forward, bonus included: 1 is useless, S + 1 perfect."""
    tau_low: float | None
    tau_high: float | None
    """95 % bootstrap interval over conversations; none of a single one."""
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
    draft_vocab_coverage: float = 0.0
    """Share of target argmaxes inside it: 1 less the one above."""
    accepted: tuple[int, ...] = ()
    """Rounds that accepted 0, 1, … draft tokens."""
    tau_by_place: dict[str, float] = field(default_factory=dict)
    """Of rounds by the place of their first token in its answer: 0 to 31, then doubling; keys are first places."""
    chains: dict[str, ChainAcceptance] = field(default_factory=dict)
    """By chain length, 1 to 7, whatever number of steps was trained."""
    sampled: SampledAcceptance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCheck:
    """Real chain speculative decoding of one prompt set beside plain greedy decoding on the same numeric path."""

    num_prompts: int
    num_identical: int
    num_tokens: int
    num_rounds: int
    tau: float
    accepted: tuple[int, ...] = ()
    """Rounds that accepted 0, 1, … draft tokens."""
    num_walked_alike: int = 0
    """Prompts whose walk over the decoded text takes the same rounds, one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCheck:
    """Some prompts of a set decoded in one mode, held against the target run one token a forward."""

    temperature: float
    batch_size: int
    num_prompts: int
    num_identical: int
    """Prompts whose text is that of plain decoding, token for token; at a temperature none need be."""
    num_tokens: int
    num_rounds: int
    tau: float
    tau_low: float | None
    tau_high: float | None
    """95 % bootstrap interval over prompts; none of a single one."""
    accepted: tuple[int, ...]
    num_ties: int
    """Tokens that are not a forward of one token's first, but within the rounding of the dtype; 0 at a temperature."""
    largest_gap: float
    """The largest lead, in logits, of another token at such a place."""
    tau_expected: float | None = None
    """At a temperature: expectation of tau given the text, by the acceptance rule."""
    p_value: float | None = None
    """At a temperature: chi-square test that the tokens are the target's samples."""


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
    """Of the states that the drafter was trained on; empty for an imported one, which was trained elsewhere: what
    is held out here may have trained it."""
    seed: int
    headline_sets: tuple[str, ...] = ()
    """Of ``sets``, those that ``tau`` is of."""
    tau_low: float | None = None
    tau_high: float | None = None
    """95 % bootstrap interval of ``tau`` over conversations; none of a single one."""
    tau_by_chain: dict[str, float] = field(default_factory=dict)
    """Headline tau by chain length."""
    tau_sampled: float | None = None
    """Of text that was really sampled at ``temperature``, of the headline's sets: expectation by the acceptance rule."""
    temperature: float = 0.0
    modes: dict[str, dict[str, ModeCheck]] = field(default_factory=dict)
    """By prompt set, then ``chain``, ``tree`` and ``sampled``, with ``_single`` for one prompt at a time."""
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
