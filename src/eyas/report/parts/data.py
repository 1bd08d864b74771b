"""Token statistics: how much text, how long, how it was split, how much of it the draft vocab covers."""

from __future__ import annotations

from eyas.contracts import TokenReport
from eyas.report.charts import bars, split_bar
from eyas.report.html import facts, nothing, section, subtitle, tiles
from eyas.report.parts.words import share, size
from eyas.report.sources import Sources


def data(sources: Sources) -> str:
    """The section."""
    tokens = sources.tokens
    if tokens is None:
        return section("data", "Data", nothing())
    return section(
        "data", "Data", _headline(tokens), subtitle("Length of a sample, in tokens"), _lengths(tokens), *_shares(tokens)
    )


def _headline(tokens: TokenReport) -> str:
    return tiles(
        (
            ("samples", f"{tokens.num_samples:,}", ""),
            ("tokens", f"{tokens.num_tokens:,}", ""),
            ("mean length", f"{tokens.mean:,.1f}", "tokens a sample"),
            ("assistant share", share(tokens.assistant_share), f"{tokens.num_assistant_tokens:,} tokens"),
            ("hidden states, estimated", size(tokens.hidden_state_bytes), "before the codec"),
        )
    )


def _lengths(tokens: TokenReport) -> str:
    known = {50: float(tokens.median), **{int(name[1:]): float(value) for name, value in tokens.percentiles.items()}}
    entries = [("minimum", float(tokens.min), f"{tokens.min:,}")]
    entries += [("median" if p == 50 else f"{p} %", value, f"{value:,g}") for p, value in sorted(known.items())]
    return bars("Percentiles of sample lengths", [*entries, ("maximum", float(tokens.max), f"{tokens.max:,}")])


def _shares(tokens: TokenReport) -> list[str]:
    splits = [
        (
            name,
            float(tokens.num_tokens_by_split.get(name, 0)),
            f"{tokens.num_tokens_by_split.get(name, 0):,} in {num:,} samples",
        )
        for name, num in sorted(tokens.num_samples_by_split.items())
    ]
    coverage = ", ".join(f"{name} {value:.1%}" for name, value in sorted(tokens.draft_vocab_coverage.items()))
    dropped = ", ".join(f"{reason}: {number:,}" for reason, number in sorted(tokens.num_dropped.items())) or "none"
    told = (
        ("draft vocab", f"{tokens.draft_vocab_size:,} tokens; of the assistant's tokens it covers {coverage}"),
        ("left out", dropped),
        ("truncated", f"{tokens.num_truncated:,}"),
    )
    return [split_bar("Tokens by split", splits), facts(told)]
