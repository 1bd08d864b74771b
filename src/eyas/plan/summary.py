"""The plan as an operator reads it."""

from __future__ import annotations

from eyas import console
from eyas.contracts import CapturePlan
from eyas.plan.budget import CODEC_RATIO, expected_bytes
from eyas.plan.build import padding_share


def plan_table(plan: CapturePlan) -> str:
    """Samples, shards, batches, bytes and how each stream is taken."""
    num_batches = sum(len(shard.batches) for shard in plan.shards)
    largest = max(shard.payload_bytes for shard in plan.shards)
    capture = plan.capture
    return console.table(
        [
            ("samples", f"{plan.num_samples:,} with {plan.num_tokens:,} tokens"),
            ("streams", f"{plan.num_streams} of {plan.hidden_size:,}: {_streams(plan)}"),
            ("payload", f"{plan.payload_bytes:,} bytes = {console.human_bytes(plan.payload_bytes)} before the codec"),
            ("stored", _stored(plan)),
            ("ids and masks", f"{plan.token_bytes:,} bytes"),
            ("shards", f"{len(plan.shards):,}, the largest {console.human_bytes(largest)}"),
            (
                "batches",
                f"{num_batches:,} of at most {capture.batch_tokens:,} tokens, {padding_share(plan):.1%} padding",
            ),
            ("engine", f"{capture.engine} ({capture.engine_version})"),
            ("identity", plan.identity),
        ]
    )


def _stored(plan: CapturePlan) -> str:
    capture = plan.capture
    stored = expected_bytes(plan, capture.last_rows, capture.codec)
    text = f"about {console.human_bytes(stored)} with {capture.codec} (x {CODEC_RATIO[capture.codec]:.2f}), "
    saving = 1 - plan.trained_payload_bytes / plan.payload_bytes
    if capture.last_rows == "trained":
        return f"{text}trained rows alone: {saving:.1%} of the payload left out"
    return f"{text}every row; extract.last_rows=trained would leave out {saving:.1%}"


def _streams(plan: CapturePlan) -> str:
    entering = ", ".join(f"b{boundary}" for boundary in plan.capture.boundaries)
    norm = {"post_norm": "after the final norm", "pre_norm": "before the final norm"}[plan.capture.final_hidden]
    return f"boundaries {entering} without norm, last {norm}"
