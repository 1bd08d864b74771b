"""Seconds, bytes and the bound of each stage.

A stage overlaps its parts: it takes as long as the slowest of products, encoding, disk and network, which is its
bound. What a part takes is work divided by a measured rate; where the target itself was not measured, products are
counted (two operations a parameter and token) and a share of the measured rate of products is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.contracts import BYTES_PER_MASK, BYTES_PER_TOKEN_ID, payload_bytes
from eyas.errors import ConfigError
from eyas.ops.simulate.description import HINT, Description
from eyas.plan.budget import CODEC_RATIO

GIGA, TERA = 1e9, 1e12
BACKWARD, FROZEN = 3, 2
"""A product and its two gradients; with its input's gradient alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage as predicted."""

    name: str
    num_tokens: int
    seconds: float
    num_bytes: int
    """Written by it, or by ``train`` read, in all."""
    bound: str
    parts_s: dict[str, float]
    """Seconds that each part would take alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """All stages, and the disk that they need."""

    stages: tuple[Stage, ...]
    stored_bytes: int
    disk_bytes: int
    gpu_hours: float

    @property
    def seconds(self) -> float:
        """Of all stages, one after another."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether the states fit the disks."""
        return self.stored_bytes <= self.disk_bytes


def predict(given: Description) -> Prediction:
    """Predict a run.

    Raises:
        ConfigError: A rate is missing without which a stage cannot be predicted.
    """
    num_tokens = round(given.work.conversations * given.work.mean_tokens)
    payload = payload_bytes(num_tokens, given.target.hidden_size, given.target.num_boundaries + 1)
    token_bytes = num_tokens * (BYTES_PER_TOKEN_ID + BYTES_PER_MASK)
    stored = round(payload * CODEC_RATIO[given.work.codec]) + token_bytes
    stages = []
    if given.work.respond:
        written = round(num_tokens * given.work.assistant_share)
        stages.append(_stage(given, "respond", written, written * 4, {"decoding": written / _decode_rate(given)}))
    stages.append(_stage(given, "tokenize", num_tokens, token_bytes, {"processors": _tokenize_s(given, num_tokens)}))
    parts = {"products": _products_s(given, "extract", num_tokens, 2 * given.target.active_parameters)}
    parts |= _disk_parts(given, stored, given.disk.write_gb_per_s)
    if given.cpu.encode_gb_per_s and given.work.codec != "raw":
        parts["encoding"] = payload / (given.cpu.encode_gb_per_s * GIGA * given.cpu.cores * given.nodes)
    stages.append(_stage(given, "extract", num_tokens, stored, parts))
    seen, read = round(num_tokens * given.drafter.epochs), round(stored * given.drafter.epochs)
    parts = {"products": _products_s(given, "train", seen, drafter_flops(given))}
    stages.append(_stage(given, "train", seen, read, parts | _disk_parts(given, read, given.disk.read_gb_per_s)))
    disks = 1 if given.disk.shared else given.nodes
    busy_s = sum(stage.seconds for stage in stages if stage.name != "tokenize")
    return Prediction(
        stages=tuple(stages),
        stored_bytes=stored,
        disk_bytes=round(given.disk.size_gb * GIGA * disks),
        gpu_hours=busy_s * given.num_gpus / 3600,
    )


def _stage(given: Description, name: str, num_tokens: int, num_bytes: int, parts_s: dict[str, float]) -> Stage:
    bound = max(parts_s, key=lambda part: parts_s[part])
    seconds = given.start_s.get(name, 0.0) + parts_s[bound]
    return Stage(name=name, num_tokens=num_tokens, seconds=seconds, num_bytes=num_bytes, bound=bound, parts_s=parts_s)


def _decode_rate(given: Description) -> float:
    rate = given.rates.get("respond") or given.gpu.decode_tokens_per_s
    if not rate:
        raise _lacking("respond", "gpu.decode_tokens_per_s, rates.respond, or work.respond: false")
    return rate * given.num_gpus


def _tokenize_s(given: Description, num_tokens: int) -> float:
    rate = given.cpu.tokenize_tokens_per_s * given.cpu.cores or given.rates.get("tokenize", 0.0)
    if not rate:
        raise _lacking("tokenize", "cpu.tokenize_tokens_per_s, or rates.tokenize of a node")
    return num_tokens / rate  # one node tokenizes


def _products_s(given: Description, stage: str, num_tokens: int, flops_per_token: float) -> float:
    if stage in given.rates:
        return num_tokens / (given.rates[stage] * given.num_gpus)
    if not given.gpu.matmul_tflops or not flops_per_token:
        needed = "gpu.matmul_tflops and target.active_parameters" if stage == "extract" else "gpu.matmul_tflops"
        raise _lacking(stage, f"{needed}, or rates.{stage}")
    share = given.gpu.prefill_share if stage == "extract" else given.gpu.train_share
    return num_tokens * flops_per_token / (given.gpu.matmul_tflops * TERA * share * given.num_gpus)


def _disk_parts(given: Description, num_bytes: int, gb_per_s: float) -> dict[str, float]:
    if not given.disk.shared:
        return {"disk": num_bytes / (gb_per_s * GIGA * given.nodes)}
    network_s = num_bytes / (given.network_gb_per_s * GIGA * given.nodes)
    return {"disk": num_bytes / (gb_per_s * GIGA), "network": network_s}


def drafter_flops(given: Description) -> float:
    """Operations of training on one token, all TTT steps.

    What the result needs, as ``ops.bench.flops`` counts it on packs: rows that train cost layer and head, the others
    fc, keys and values; the head is frozen. Attention itself is left out: a few per cent at ordinary lengths.
    """
    drafter, hidden, share = given.drafter, given.target.hidden_size, given.work.assistant_share
    query, keys = drafter.num_attention_heads * drafter.head_dim, 2 * drafter.num_key_value_heads * drafter.head_dim
    # once a token: fc, the embedding's halves of queries, keys and values, and step 0's keys and values
    once = BACKWARD * hidden * (given.target.num_boundaries * hidden + 2 * keys + query)
    layer = BACKWARD * hidden * (2 * query + 3 * drafter.intermediate_size)
    later_keys = BACKWARD * hidden * keys * (drafter.ttt_steps - 1)
    head = FROZEN * hidden * drafter.draft_vocab_size
    teacher = hidden * drafter.draft_vocab_size
    return 2 * (once + share * (drafter.ttt_steps * (layer + head) + later_keys + teacher))


def _lacking(stage: str, what: str) -> ConfigError:
    return ConfigError(f"{stage} cannot be predicted without a measured rate, expected {what}", HINT)
