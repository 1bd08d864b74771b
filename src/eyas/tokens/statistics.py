"""What an operator asks of the tokens before an extraction: counts, lengths, bytes, coverage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from eyas import console
from eyas.contracts import TokenReport, TokenSample, payload_bytes
from eyas.errors import DataError
from eyas.tokens.dataset import Reject
from eyas.tokens.draft_vocab import DraftVocab
from eyas.tokens.pipeline import Outcome

PERCENTILES = (10, 25, 75, 90, 95, 99)
TRAIN = "train"


@dataclass
class Tally:
    """Running counts over the outcomes of a tokenisation; keeps lengths and counts, no tokens."""

    vocab_size: int
    lengths: list[int] = field(default_factory=list)
    num_trained: int = 0
    num_truncated: int = 0
    num_samples_by_split: Counter = field(default_factory=Counter)
    num_tokens_by_split: Counter = field(default_factory=Counter)
    counts_V_by_split: dict[str, np.ndarray] = field(default_factory=dict)
    end_ids: set[int] = field(default_factory=set)
    rejects: list[Reject] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    @property
    def num_dropped(self) -> dict[str, int]:
        """Conversations without a sample, by reason, sorted."""
        return dict(sorted(Counter(reject.reason for reject in self.rejects).items()))

    @property
    def counts_V(self) -> np.ndarray:
        """How often each id is trained in the training split; zeros when that split is empty."""
        return self.counts_V_by_split.get(TRAIN, np.zeros(self.vocab_size, dtype=np.int64))

    def keep(self, outcomes: Iterable[Outcome]) -> Iterator[TokenSample]:
        """Count every outcome and yield the samples, equal ones once (the first stays).

        Conversations come held-out first, so a text that is in both splits is never trained on.
        """
        for outcome in outcomes:
            if outcome.reject is not None:
                self.rejects.append(outcome.reject)
                continue
            sample = outcome.sample
            assert sample is not None
            if sample.sample_id in self._seen:
                self.rejects.append(_duplicate(sample))
                continue
            self._seen.add(sample.sample_id)
            self._count(sample, outcome)
            yield sample

    def _count(self, sample: TokenSample, outcome: Outcome) -> None:
        ids_T, mask_T = np.asarray(sample.input_ids), np.asarray(sample.loss_mask, dtype=bool)
        counts_V = self.counts_V_by_split.setdefault(sample.split, np.zeros(self.vocab_size, dtype=np.int64))
        np.add.at(counts_V, ids_T[mask_T], 1)
        self.lengths.append(len(ids_T))
        self.num_trained += int(mask_T.sum())
        self.num_truncated += outcome.truncated
        self.num_samples_by_split[sample.split] += 1
        self.num_tokens_by_split[sample.split] += len(ids_T)
        self.end_ids.update(outcome.end_ids)


def require_samples(tally: Tally) -> None:
    """Refuse a dataset without samples, saying what happened to most of it.

    Raises:
        DataError: Nothing was kept.
    """
    if tally.lengths:
        return
    if not tally.rejects:
        raise DataError("no conversation to tokenize", "look at data.max_conversations and at the ingest summary")
    if set(tally.num_dropped) == {"no_assistant_turn"}:
        raise DataError(
            f"none of {len(tally.rejects):,} conversations has an assistant turn",
            "set respond.enabled: true in params.yaml, so that the target writes them",
        )
    first = tally.rejects[0]
    counts = ", ".join(f"{reason} {count:,}" for reason, count in tally.num_dropped.items())
    raise DataError(
        f"no sample left of {len(tally.rejects):,} conversations ({counts}); "
        f"first: {first.conversation_id}: {first.reason}: {first.detail}",
        "look at the target's chat template and at tokenize.max_tokens",
    )


def make_report(
    tally: Tally, vocab: DraftVocab, *, hidden_size: int, num_boundaries: int, tokens_sha256: str
) -> TokenReport:
    """The figures of ``reports/tokens.json``."""
    lengths = sorted(tally.lengths)
    num_tokens = sum(lengths)
    splits = sorted(tally.num_samples_by_split)
    return TokenReport(
        num_samples=len(lengths),
        num_tokens=num_tokens,
        mean=num_tokens / len(lengths),
        min=lengths[0],
        max=lengths[-1],
        median=_median(lengths),
        percentiles={f"p{p}": nearest_rank(lengths, p) for p in PERCENTILES},
        assistant_share=tally.num_trained / num_tokens,
        num_assistant_tokens=tally.num_trained,
        hidden_state_bytes=payload_bytes(num_tokens, hidden_size, num_boundaries + 1),
        num_samples_by_split={split: tally.num_samples_by_split[split] for split in splits},
        num_tokens_by_split={split: tally.num_tokens_by_split[split] for split in splits},
        num_dropped=tally.num_dropped,
        num_truncated=tally.num_truncated,
        draft_vocab_size=vocab.draft_vocab_size,
        draft_vocab_coverage={split: vocab.coverage(tally.counts_V_by_split[split]) for split in splits},
        tokens_sha256=tokens_sha256,
    )


def report_table(report: TokenReport, num_streams: int, hidden_size: int) -> str:
    """The report as the table that the stage prints."""
    rows: list[tuple[str, str]] = [
        ("samples", f"{report.num_samples:,}{_by_split(report.num_samples_by_split)}"),
        ("tokens", f"{report.num_tokens:,}{_by_split(report.num_tokens_by_split)}"),
        ("tokens per sample", f"average {report.mean:,.1f}, min {report.min:,}, max {report.max:,}"),
        ("", ", ".join([f"median {report.median:,.0f}", *(f"{k} {v:,}" for k, v in report.percentiles.items())])),
        ("assistant tokens", f"{report.num_assistant_tokens:,} ({report.assistant_share:.1%})"),
        (
            "hidden states",
            f"{report.hidden_state_bytes:,} bytes = {console.human_bytes(report.hidden_state_bytes)} "
            f"before the codec ({num_streams} streams of {hidden_size:,}, bf16)",
        ),
        ("cut at the limit", f"{report.num_truncated:,} samples"),
        ("dropped", ", ".join(f"{reason} {count:,}" for reason, count in report.num_dropped.items()) or "none"),
        (
            "draft vocab",
            f"{report.draft_vocab_size:,} ids cover "
            + ", ".join(f"{share:.2%} of {split}" for split, share in report.draft_vocab_coverage.items()),
        ),
        ("tokens sha256", report.tokens_sha256),
    ]
    return console.table(rows)


def nearest_rank(rising: list[int], percent: int) -> int:
    """Smallest value with at least ``percent`` % of all values at or below it."""
    return rising[max(math.ceil(percent * len(rising) / 100), 1) - 1]


def _median(rising: list[int]) -> float:
    middle = len(rising) // 2
    return float(rising[middle]) if len(rising) % 2 else (rising[middle - 1] + rising[middle]) / 2


def _by_split(counts: dict[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {split}' for split, count in counts.items())})"


def _duplicate(sample: TokenSample) -> Reject:
    return Reject(
        conversation_id=sample.conversation_id,
        source=sample.source,
        variant=sample.variant,
        reason="duplicate",
        detail=f"same tokens and mask as sample {sample.sample_id}",
    )
