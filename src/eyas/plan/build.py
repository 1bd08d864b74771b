"""The capture plan: samples into shards and batches, bytes per shard.

Samples are taken from the longest to the shortest (sample id among equals), whatever order they came
in. A shard is filled up to ``shard_bytes`` with whole samples; inside it, a batch takes rows while
rows x its longest sample stay within ``batch_tokens``. Neighbours have nearly equal lengths, so a
forward carries little padding, and a target that has too little memory fails in the first minute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from eyas.contracts import (
    BYTES_PER_MASK,
    BYTES_PER_TOKEN_ID,
    CaptureIdentity,
    CapturePlan,
    PlannedSample,
    PlannedShard,
    payload_bytes,
)
from eyas.errors import PlanError

SHARDS_PER_FOLDER = 64


def build_plan(
    samples: Iterable[tuple[str, int]],
    capture: CaptureIdentity,
    hidden_size: int,
    trained_rows: tuple[int, int] | None = None,
) -> CapturePlan:
    """Plan a capture.

    Args:
        samples: (sample id, number of tokens), in any order.
        capture: Decides shard size, batch size and the number of streams.
        hidden_size: Of the target.
        trained_rows: Rows that a training can read, of each aux stream and of the last states; every row
            when None.

    Raises:
        PlanError: No sample, an id that comes twice, or a sample without tokens.
    """
    ordered = _ordered(samples)
    num_streams = len(capture.boundaries) + 1
    token_payload_bytes = payload_bytes(1, hidden_size, num_streams)
    shards = tuple(
        PlannedShard(
            path=shard_path(i),
            payload_bytes=sum(sample.num_tokens for sample in members) * token_payload_bytes,
            batches=tuple(_batches(members, capture.batch_tokens)),
        )
        for i, members in enumerate(_fill(ordered, capture.shard_bytes // token_payload_bytes))
    )
    num_tokens = sum(sample.num_tokens for sample in ordered)
    aux_rows, last_rows = trained_rows or (num_tokens, num_tokens)
    return CapturePlan(
        identity=capture.digest,
        capture=capture,
        hidden_size=hidden_size,
        num_streams=num_streams,
        num_samples=len(ordered),
        num_tokens=num_tokens,
        payload_bytes=num_tokens * token_payload_bytes,
        trained_payload_bytes=payload_bytes(aux_rows, hidden_size, num_streams - 1)
        + payload_bytes(last_rows, hidden_size, 1),
        token_bytes=num_tokens * (BYTES_PER_TOKEN_ID + BYTES_PER_MASK),
        shards=shards,
    )


def streamed_plan(capture: CaptureIdentity, lengths: Iterable[tuple[str, int]], hidden_size: int) -> CapturePlan:
    """The plan of a stored set of all samples, of which a stream captures shard after shard.

    Args:
        capture: Of the part that is stored.
        lengths: (sample id, number of tokens) of every sample.
        hidden_size: Of the target.
    """
    return build_plan(lengths, dataclasses.replace(capture, stored="all"), hidden_size)


def shard_path(index: int) -> str:
    """Path of a shard relative to the states folder: at most 64 shards a folder."""
    return f"{index // SHARDS_PER_FOLDER:03d}/shard-{index:05d}.safetensors"


def padding_share(plan: CapturePlan) -> float:
    """Share of the forwards' positions that are padding (batch rows x longest row, minus tokens)."""
    positions = sum(
        len(batch) * max(sample.num_tokens for sample in batch) for shard in plan.shards for batch in shard.batches
    )
    return 1 - plan.num_tokens / positions


def check_context(samples: Iterable[tuple[str, int]], max_position_embeddings: int) -> None:
    """Refuse samples that the target cannot take: a server needs room for one token more.

    Raises:
        PlanError: The longest sample plus one token exceeds the target's context.
    """
    sample_id, num_tokens = max(samples, key=lambda sample: sample[1], default=("", 0))
    if num_tokens + 1 > max_position_embeddings:
        raise PlanError(
            f"sample {sample_id} has {num_tokens:,} tokens and needs {num_tokens + 1:,} positions, "
            f"expected at most {max_position_embeddings:,}: the target's context",
            f"set tokenize.max_tokens to {max_position_embeddings - 1} or less in params.yaml",
        )


def _ordered(samples: Iterable[tuple[str, int]]) -> list[PlannedSample]:
    planned = [PlannedSample(sample_id=sample_id, num_tokens=num_tokens) for sample_id, num_tokens in samples]
    planned.sort(key=lambda sample: (-sample.num_tokens, sample.sample_id))
    if not planned:
        raise PlanError("no sample to plan", "look at data/tokens/rejects.jsonl")
    if planned[-1].num_tokens < 1:
        raise PlanError(f"sample {planned[-1].sample_id} has {planned[-1].num_tokens} tokens, expected 1 or more")
    seen: set[str] = set()
    for sample in planned:
        if sample.sample_id in seen:
            raise PlanError(f"sample {sample.sample_id} comes twice", "make the tokens again: `dvc repro tokenize`")
        seen.add(sample.sample_id)
    return planned


def _fill(ordered: Sequence[PlannedSample], shard_tokens: int) -> Iterator[list[PlannedSample]]:
    """Cut the order into shards; a sample larger than a shard gets one of its own."""
    members: list[PlannedSample] = []
    num_tokens = 0
    for sample in ordered:
        if members and num_tokens + sample.num_tokens > shard_tokens:
            yield members
            members, num_tokens = [], 0
        members.append(sample)
        num_tokens += sample.num_tokens
    yield members


def _batches(members: Sequence[PlannedSample], batch_tokens: int) -> Iterator[tuple[PlannedSample, ...]]:
    """Cut a shard into batches; members fall in length, so the first row of a batch is its longest."""
    start = 0
    while start < len(members):
        num_rows = max(1, batch_tokens // members[start].num_tokens)
        yield tuple(members[start : start + num_rows])
        start += num_rows
