"""The codec ``int8`` on stored lossless states: size, error per stream, effect on the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eyas.errors import StoreError

if TYPE_CHECKING:
    import torch

    from eyas.contracts import CapturePlan, StoredSample
    from eyas.shards.effect import Rows
    from eyas.shards.reader import ShardReader

MAX_ROWS = 4096
"""Judged rows. A row costs two products with the whole head: 4,096 of them 1 TFLOP for V x D = 49,152 x 576."""


def measure(reader: ShardReader, plan: CapturePlan, head_VD: torch.Tensor, max_rows: int = MAX_ROWS) -> dict[str, Any]:
    """Calibrate as an extraction would, then judge on samples that the calibration did not see, if there are any.

    Args:
        reader: Lossless states, every row of them.
        plan: The plan they were captured by; gives the calibration slice.
        head_VD: The target's head.
        max_rows: Judged rows at most, from samples spread over the set.

    Returns:
        ``int8_ratio`` (encoded states, and the calibration once per shard, over bf16), ``int8_kl`` in nats,
        ``int8_top1``, ``relative_error`` by stream, ``num_judged_rows``, ``num_aux_rows``, ``num_calibration_tokens``,
        ``calibration``: digest of the scales.

    Raises:
        StoreError: The states are lossy already or not all there, or no row teaches.
    """
    from eyas.shards.calibration import Calibration, calibration_samples, make_calibration
    from eyas.shards.effect import measure_effect
    from eyas.shards.int8 import Int8Codec

    capture = reader.manifest.capture
    if (capture.codec == "int8", capture.last_rows) != (False, "all"):
        raise StoreError(
            f"the states are stored as {capture.codec}, rows {capture.last_rows}, expected every row, lossless",
            "compare on a set with extract.codec blosc2 and extract.last_rows all",
        )
    chosen = calibration_samples(plan)
    stored = [reader.read(sample.sample_id) for sample in chosen]
    scales_ND = make_calibration((states.aux_TAD, states.last_TD) for states in stored)
    seen = {sample.sample_id for sample in chosen}
    others = [s for s in reader.samples if s.sample_id not in seen] or list(reader.samples)
    effect = measure_effect(Int8Codec(scales_ND), _rows(reader, spread(others), max_rows), head_VD)
    names = [*(f"aux {boundary}" for boundary in capture.boundaries), "last"]
    return {
        "int8_ratio": effect.ratio + scales_ND.nbytes * len(plan.shards) / plan.payload_bytes,
        "int8_kl": effect.kl,
        "int8_top1": effect.top1,
        "relative_error": dict(zip(names, effect.relative_error, strict=True)),
        "num_judged_rows": effect.num_judged_rows,
        "num_aux_rows": effect.num_aux_rows,
        "num_calibration_tokens": sum(sample.num_tokens for sample in chosen),
        "calibration": Calibration(scales_ND).digest,
    }


def spread(samples: Sequence[StoredSample]) -> Iterator[StoredSample]:
    """All samples once, each prefix spread over the whole: every 64th, then every 64th from 1 on, and so on."""
    for first in range(64):
        yield from samples[first::64]


def _rows(reader: ShardReader, samples: Iterator[StoredSample], max_rows: int) -> Iterator[Rows]:
    from eyas.rows import stored_rows
    from eyas.shards.effect import Rows

    left = max_rows
    for sample in samples:
        states = reader.read(sample.sample_id)
        last_RD = states.last_TD[stored_rows(states.loss_mask_T.numpy(), "trained").last_L[:left]]
        yield Rows(aux_TAD=states.aux_TAD, last_RD=last_RD)
        left -= len(last_RD)
        if left <= 0:
            return
