"""Assembling ``reports/acceptance.json`` and its printed table.

The headline figures are those of the held-out conversations: documents whose prompt set also trained the
drafter. Other sets (code prompts, say) stand beside them under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.canonical import digest
from eyas.config import EvaluateConfig
from eyas.contracts import AcceptanceReport, CheckpointMeta, DecodeCheck, ModeCheck, SetAcceptance, StoredSample
from eyas.errors import EvaluateError
from eyas.evaluate.decode import Decoded
from eyas.evaluate.summary import WalkedDocument, summarise, tau


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Which stored samples are judged, and which sets are the headline."""

    samples: tuple[StoredSample, ...]
    trained_sources: frozenset[str]


def held_out(samples: Sequence[StoredSample]) -> HeldOut:
    """The target's own greedy answers that were kept out of training; given text where there is none.

    Raises:
        EvaluateError: Nothing was held out, or nothing of a set that was trained on.
    """
    kept = [s for s in samples if s.split == "held_out"]
    greedy = [s for s in kept if s.variant == "greedy"]
    chosen = sorted(greedy or kept, key=lambda s: (s.source, s.sample_id))
    trained = frozenset(s.source for s in samples if s.split == "train")
    if not any(s.source in trained for s in chosen):
        num_trained = len({s.conversation_id for s in samples if s.split == "train"})
        raise EvaluateError(
            f"{len(chosen)} held-out documents, none of a set that was trained on ({', '.join(sorted(trained)) or 'none'}; "
            f"{num_trained:,} conversations to train on): nothing could be judged, expected one or more",
            "raise data.held_out_share, then `make repro`"
            if num_trained > 1
            else "add conversations (two that begin differently are needed, one to train on and one to judge), or raise "
            "data.max_conversations, then `make repro`",
        )
    return HeldOut(tuple(chosen), trained)


def acceptance_report(
    *,
    walked: Sequence[WalkedDocument],
    untrained: Sequence[WalkedDocument],
    decoded: Sequence[Decoded],
    modes: Mapping[str, Mapping[str, ModeCheck]],
    trained_sources: frozenset[str],
    meta: CheckpointMeta,
    config: EvaluateConfig,
) -> AcceptanceReport:
    """The record of one evaluation.

    Args:
        walked: All held-out documents with the trained drafter.
        untrained: The same documents with the drafter as initialised.
        decoded: Prompts decoded both ways; each was found identical.
        modes: Checks of the other ways of decoding, by prompt set.
        trained_sources: Prompt sets that trained the drafter.
        meta: Of the judged checkpoint.
        config: Chain length, bootstrap and seed.
    """
    by_set: dict[str, list[WalkedDocument]] = {}
    for document in walked:
        by_set.setdefault(document.source, []).append(document)
    settings = (config.num_bootstrap, config.seed, config.temperature)
    sets = {
        source: summarise(documents, *settings)
        for source, documents in sorted(by_set.items())
        if any(d.rounds for d in documents)
    }
    head = summarise([d for d in walked if d.source in trained_sources], *settings)
    return AcceptanceReport(
        tau=head.tau,
        tau_loop_free=head.tau_loop_free,
        tau_by_set={source: figures.tau for source, figures in sets.items()},
        alpha=head.alpha,
        loop_share=head.loop_share,
        lossless=True,
        num_rounds=head.num_rounds,
        chain_length=config.chain_length,
        tau_untrained=tau([d for d in untrained if d.source in trained_sources]) or 1.0,
        sets=sets,
        decode=decode_checks(decoded),
        drafter=digest(meta),
        capture_identity=meta.capture_identity,
        seed=config.seed,
        headline_sets=tuple(source for source in sets if source in trained_sources),
        tau_low=head.tau_low,
        tau_high=head.tau_high,
        tau_by_chain={length: figures.tau for length, figures in head.chains.items()},
        tau_sampled=tau_of_sampled_text(
            [modes[s]["sampled"] for s in sorted(trained_sources) if "sampled" in modes.get(s, {})]
        ),
        temperature=config.temperature,
        modes={source: dict(checks) for source, checks in modes.items()},
    )


def tau_of_sampled_text(checks: Sequence[ModeCheck]) -> float | None:
    """Tokens over expected rounds of all sets; none where nothing was sampled."""
    pairs = [(c.tau * c.num_rounds, c.tau * c.num_rounds / c.tau_expected) for c in checks if c.tau_expected]
    return sum(emitted for emitted, _ in pairs) / sum(rounds for _, rounds in pairs) if pairs else None


def decode_checks(decoded: Sequence[Decoded]) -> dict[str, DecodeCheck]:
    """Rounds and tokens of the real decoding, per prompt set."""
    checks = {}
    for source in sorted({d.prompt.source for d in decoded}):
        results = [d for d in decoded if d.prompt.source == source]
        sizes = [size for d in results for size in d.round_sizes]
        checks[source] = DecodeCheck(
            num_prompts=len(results),
            num_identical=len(results),
            num_tokens=sum(len(d.ids) for d in results),
            num_rounds=len(sizes),
            tau=sum(sizes) / len(sizes) if sizes else 1.0,
            accepted=tuple(np.bincount([a for d in results for a in d.round_accepted], minlength=1).tolist()),
            num_walked_alike=sum(d.walked_alike for d in results),
        )
    return checks


def agreement_of_rounds(
    walked: Sequence[WalkedDocument], decoded: Sequence[Decoded], answers: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """How many documents took the same rounds in the walk over the stored text and in real decoding.

    Real decoding may stop earlier, and its last round is then clipped; near ties of another forward's shape may
    lead it elsewhere, and those documents are not compared.

    Args:
        walked: The offline walk.
        decoded: Real decoding.
        answers: Sample id -> first answer in the stored text.
    """
    walks = {d.sample_id: tuple(r.num_emitted for r in d.rounds) for d in walked}
    same_text = [d for d in decoded if tuple(answers[d.prompt.sample_id][: len(d.ids)]) == d.ids]
    same_rounds = sum(_begins_alike(walks[d.prompt.sample_id], d.round_sizes) for d in same_text)
    return {"num_documents": len(decoded), "num_same_text": len(same_text), "num_same_rounds": same_rounds}


def _begins_alike(walk: Sequence[int], loop: Sequence[int]) -> bool:
    before = max(len(loop) - 1, 0)
    return tuple(walk[:before]) == tuple(loop[:before]) and all(a >= b for a, b in zip(walk, loop, strict=False))


def table_rows(report: AcceptanceReport) -> list[tuple[str, ...]]:
    """Rows of the printed table, one per prompt set."""
    return [_row(source, figures, report.decode.get(source)) for source, figures in report.sets.items()]


def mode_rows(report: AcceptanceReport, facts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the table of modes; speed-ups are of all sets together.

    Args:
        report: The record.
        facts: See ``compare.Compared.facts``.
    """
    speedups = {mode: f"{entry['speedup']:.2f}" for kind in facts.values() for mode, entry in _modes_of(kind).items()}
    return [
        (
            source,
            mode,
            f"{check.batch_size}",
            f"{check.tau:.3f}",
            _span(check),
            f"{check.num_identical}/{check.num_prompts}" if not check.temperature else "-",
            f"{check.num_ties}" if not check.temperature else "-",
            "-" if check.p_value is None else f"{check.p_value:.3f}",
            speedups[mode],
        )
        for source, checks in report.modes.items()
        for mode, check in checks.items()
    ]


def _span(figures: SetAcceptance | ModeCheck) -> str:
    low, high = figures.tau_low, figures.tau_high
    return "-" if low is None or high is None else f"{low:.3f}-{high:.3f}"


def _modes_of(kind: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    return {name: entry for name, entry in kind.items() if isinstance(entry, Mapping)}


MODE_HEADERS = ("set", "mode", "batch", "tau", "95 % interval", "as plain", "ties", "p", "speed-up")

TABLE_HEADERS = (
    "set",
    "tau",
    "95 % interval",
    "loop-free",
    "loops",
    "alpha",
    "rounds",
    "docs",
    "covered",
    "decoded tau",
)


def _row(source: str, figures: SetAcceptance, check: DecodeCheck | None) -> tuple[str, ...]:
    return (
        source,
        f"{figures.tau:.3f}",
        _span(figures),
        "-" if figures.tau_loop_free is None else f"{figures.tau_loop_free:.3f}",
        f"{figures.loop_share:.1%}",
        " ".join(f"{a:.3f}" for a in figures.alpha),
        f"{figures.num_rounds}",
        f"{figures.num_documents}",
        f"{figures.coverage:.1%}",
        "-" if check is None else f"{check.tau:.3f}",
    )
