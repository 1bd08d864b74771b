"""The model card of one server's folder: for which target, trained on what and how, how good, and under which licence.

It holds only what is deterministic, so that equal exports are equal bytes. Its head is what the hub reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyas.canonical import digest
from eyas.config import ExportConfig
from eyas.contracts import AcceptanceReport, CheckpointMeta, SetAcceptance, ShardManifest, TargetIdentity

LOAD_COMMANDS = {
    "sglang": "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\\n"
    "    --speculative-draft-model-path DRAFTER --speculative-num-steps 3 --speculative-eagle-topk 1 \\\n"
    "    --speculative-num-draft-tokens 4",
    "vllm": "vllm serve {target} --speculative-config \\\n"
    '    \'{{"method": "eagle3", "model": "DRAFTER", "num_speculative_tokens": 3}}\'',
}
READ_WITH = {"sglang": "SGLang 0.5.14 and 0.5.23", "vllm": "vLLM 0.32 and speculators 0.9"}
"""Releases whose loaders were read; the first of a pair by its source alone."""
HUB_LICENCES = ("apache-2.0", "mit", "gemma", "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4", "other")
"""Identifiers that the hub knows, of models that are likely targets; others are ``other`` with a name."""
DEFINITIONS = """\
`tau`: tokens emitted per forward of the target, the bonus token included; 1 is useless, chain length + 1 perfect.
It is the exact walk over the target's own greedy text, with a 95 % bootstrap interval. `alpha_k`: share
of k-th draft tokens accepted, among rounds whose earlier ones were. Coverage: assistant tokens that equal the
target's argmax. Outside: argmaxes outside the draft vocab, each a miss. Loops: repeated 8-grams, which raise tau.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a card says of training and quality."""

    manifest: ShardManifest | None
    """Of the hidden states that the drafter was trained on; none for an imported one."""
    acceptance: AcceptanceReport


def model_card(
    server: str,
    meta: CheckpointMeta,
    target: TargetIdentity,
    layer_ids: Sequence[int],
    config: ExportConfig,
    evidence: Evidence | None,
) -> str:
    """Text of a server's ``README.md``.

    Args:
        server: ``sglang`` or ``vllm``.
        meta: Of the exported checkpoint.
        target: The model the drafter speaks for.
        layer_ids: The boundaries in the server's spelling.
        config: Dtype, and how others call the target and its licence.
        evidence: None for a drafter that was not trained and judged here.
    """
    name = target_name(target, config)
    parts = [
        _head(server, name, config.target_licence),
        f"# EAGLE-3 drafter for {name or target.source}, for {'SGLang' if server == 'sglang' else 'vLLM'}\n",
        "One decoder layer that drafts tokens for the target in speculative decoding; the target checks every one, so\n"
        "its greedy output does not change.\n",
        f"```sh\n{LOAD_COMMANDS[server].format(target=name or 'TARGET')}\n```\n",
        f"`DRAFTER` is this folder or its name on the hub. Form read in {READ_WITH[server]}.\n",
        _table("What it is", _identity(server, meta, target, layer_ids, config.dtype)),
        _table("Training", _training(meta, evidence)),
        _numbers(evidence),
        _licence(name or target.source, config.target_licence),
    ]
    return "\n".join(parts)


def target_name(target: TargetIdentity, config: ExportConfig) -> str:
    """The target's name for others: the configured one, or its name on the hub; empty when it has neither."""
    return config.target_name or (target.source.removeprefix("hub:") if target.source.startswith("hub:") else "")


def _head(server: str, name: str, licence: str) -> str:
    lines = ["---"]
    known = licence in HUB_LICENCES
    lines += [f"license: {licence}" if known else f"license: other\nlicense_name: {licence}"] if licence else []
    lines += [f"base_model: {name}"] if name else []
    tags = ("eagle3", "speculative-decoding", "draft-model", server)
    return "\n".join([*lines, "pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags), "---\n"])


def _table(title: str, rows: Iterator[tuple[str, object]]) -> str:
    return f"## {title}\n\n| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def _identity(
    server: str, meta: CheckpointMeta, target: TargetIdentity, layer_ids: Sequence[int], dtype: str
) -> Iterator[tuple[str, object]]:
    shape = meta.shape
    yield "target", f"{target.source}, revision {target.revision}, {target.architecture}"
    yield "target identity", meta.target
    yield "checkpoint", digest(meta)
    yield "boundaries", f"{list(meta.boundaries)}: the residual stream entering these decoder layers"
    yield "layer ids", f"{list(layer_ids)}: the same in this server's spelling for this target"
    yield (
        "sizes",
        f"hidden {shape.hidden_size}, inner {shape.intermediate_size}, heads "
        + (f"{shape.num_attention_heads}/{shape.num_key_value_heads} x {shape.head_dim}"),
    )
    yield "draft vocab", f"{shape.draft_vocab_size} of {shape.vocab_size}"
    switches = ("fc_norm", "norm_output", "norm_before_residual")
    yield "switches", ", ".join(f"{switch} {str(getattr(shape, switch)).lower()}" for switch in switches)
    yield "weights", dtype


def _training(meta: CheckpointMeta, evidence: Evidence | None) -> Iterator[tuple[str, object]]:
    if evidence and evidence.manifest:
        states, capture = evidence.manifest, evidence.manifest.capture
        yield (
            "trained on",
            f"{states.num_stored_samples:,} samples, {states.num_stored_tokens:,} tokens (held-out included)",
        )
        yield "hidden states by", f"{capture.engine} ({capture.engine_version}), {capture.dtype}, codec {capture.codec}"
        yield "last hidden state", capture.final_hidden
    yield "capture identity", meta.capture_identity or "not known: it was trained elsewhere"
    yield "tokens", meta.tokens or "not known"
    if meta.num_steps:
        yield "steps", f"{meta.num_steps:,} optimizer steps, {meta.num_trained_rows:,} trained rows"
        yield "unroll", f"{meta.ttt_steps} TTT steps"
        yield "seed", meta.seed
    if meta.warm_start:
        yield "first weights" if meta.num_steps else "imported from", f"content {meta.warm_start}"


def _numbers(evidence: Evidence | None) -> str:
    if evidence is None:
        return "## Numbers\n\nNot measured.\n"
    report = evidence.acceptance
    columns = "set | documents | rounds | tau | 95 % | alpha_1, alpha_2, … | coverage | outside | loops"
    rows = [
        f"| {name} | {s.num_documents:,} | {s.num_rounds:,} | {s.tau:.3f} | {_span(s)} | "
        f"{', '.join(f'{alpha:.3f}' for alpha in s.alpha)} | {s.coverage:.1%} | {s.oov_share:.1%} | {s.loop_share:.1%} |"
        for name, s in sorted(report.sets.items())
    ]
    table = "\n".join([f"| {columns} |", "|" + "---|" * len(columns.split("|")), *rows])
    elsewhere = (
        "" if evidence.manifest else "It was trained elsewhere: texts held out here may be among what trained it.\n\n"
    )
    return (
        f"## Numbers\n\nChain of {report.chain_length} draft tokens, held-out prompts; tau of the untrained drafter is "
        f"{report.tau_untrained:.3f}.\n\n{elsewhere}{table}\n\n{''.join(_further(report))}{DEFINITIONS}"
    )


def _span(figures: SetAcceptance) -> str:
    low, high = figures.tau_low, figures.tau_high
    return "one conversation" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _further(report: AcceptanceReport) -> Iterator[str]:
    sets = ", ".join(report.headline_sets) or "the held-out conversations"
    if report.tau_by_chain:
        taus = {int(length): tau for length, tau in report.tau_by_chain.items()}
        yield f"tau of {sets} by chain length:\n\n"
        yield f"| {' | '.join(map(str, sorted(taus)))} |\n{'|---' * len(taus)}|\n"
        yield f"| {' | '.join(f'{taus[length]:.3f}' for length in sorted(taus))} |\n\n"
    if report.tau_sampled is not None:
        yield (
            f"tau of text of {sets} that was sampled at temperature {report.temperature:g}, by the acceptance rule: "
            f"{report.tau_sampled:.3f}.\n\n"
        )


def _licence(target: str, licence: str) -> str:
    known = f"Licence of {target}: {licence}." if licence else f"The licence of {target} was not named at export."
    return (
        f"## Licence\n\n{known} The weights are derived from the target and from text that it wrote: its licence\n"
        "applies to them.\n"
    )
