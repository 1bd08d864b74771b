"""The calibration of a capture with a lossy codec: captured once, before the first shard, and kept.

    spool's file, else a finished shard's block, else: slice of the plan → engine → scales → spool's file

Whichever it is, every finished shard must hold the very same scales.

Letters: N streams, T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from eyas import console
from eyas.contracts import CapturePlan, TokenSample
from eyas.engines.base import CapturedSample, Engine
from eyas.engines.checks import check_captured
from eyas.errors import CaptureError, StoreError
from eyas.rows import stored_rows
from eyas.shards.calibration import (
    FILE_NAME,
    Calibration,
    calibration_samples,
    make_calibration,
    read_calibration,
    write_calibration,
)
from eyas.shards.codecs import make_codec
from eyas.shards.effect import Rows, measure_effect
from eyas.shards.format import CALIBRATED_CODECS
from eyas.shards.opening import open_shard, read_header
from eyas.shards.reader import read_scales
from eyas.shards.spool import Spool
from eyas.shards.writer import FinishedShard

JUDGED_ROWS = 2048
"""Rows that the effect is measured on; each costs two products with the whole head."""
AUX_ROWS = 256
"""Rows of each sample whose aux states are compared."""

Head = Callable[[], torch.Tensor]
"""Reads the target's head, [V, D]."""


def stored_calibration(plan: CapturePlan, spool: Spool, done: Mapping[str, FinishedShard]) -> Calibration | None:
    """What an earlier run calibrated, compared with every finished shard; None when there is nothing.

    Raises:
        StoreError: The file is damaged or of another capture, or a finished shard holds other scales.
    """
    if plan.capture.codec not in CALIBRATED_CODECS:
        return None
    path, found = spool.folder / FILE_NAME, None
    if path.exists():
        found = read_calibration(path, plan.identity, (plan.num_streams, plan.hidden_size))
    for shard in done.values():
        scales_ND = None if shard.entry is None else _scales(spool, shard.path)
        if scales_ND is None:
            continue
        found = found or Calibration(scales_ND)
        if not torch.equal(found.scales_ND, scales_ND):
            raise StoreError(
                f"{spool.states / shard.path} was encoded with other channel scales than {path}",
                "scales of two runs are never mixed: move that shard away, it is captured again",
            )
    if found is not None and not path.exists():
        write_calibration(path, found, plan.identity)
    return found


def _scales(spool: Spool, path: str) -> torch.Tensor | None:
    header, _ = read_header(spool.states / path, path)
    with open_shard(spool.states / path, path) as fd:
        return read_scales(fd.number, header)


def calibrate(
    plan: CapturePlan, tokens: Mapping[str, TokenSample], engine: Engine, spool: Spool, head: Head | None
) -> Calibration | None:
    """Calibrate with an open engine, measure the effect on the slice, keep both in the spool.

    Args:
        plan: Gives the slice.
        tokens: The token dataset by sample id.
        engine: Open.
        spool: Where the file goes.
        head: For the effect on the target's distribution; without it none is measured.

    Returns:
        None when the codec needs no calibration.

    Raises:
        CaptureError: No sample of the slice could be captured.
        DiskError: The volume is full.
    """
    if plan.capture.codec not in CALIBRATED_CODECS:
        return None
    chosen = [tokens[sample.sample_id] for sample in calibration_samples(plan)]
    num_tokens = sum(len(sample.input_ids) for sample in chosen)
    console.log(f"extract: calibrates {plan.capture.codec} on {len(chosen):,} samples ({num_tokens:,} tokens)")
    kept: list[Rows] = []
    states = _states(plan, chosen, engine, kept)
    calibration = Calibration(make_calibration(states))
    if head is not None and any(len(rows.last_RD) for rows in kept):
        codec = make_codec(plan.capture.codec, calibration.scales_ND)
        calibration = Calibration(calibration.scales_ND, measure_effect(codec, kept, head()))
    write_calibration(spool.folder / FILE_NAME, calibration, plan.identity)
    return calibration


def _states(
    plan: CapturePlan, chosen: list[TokenSample], engine: Engine, kept: list[Rows]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """States of the slice, one sample in memory at a time; some rows of each are kept for the effect."""
    judged_per_sample = max(1, JUDGED_ROWS // len(chosen))
    for sample in chosen:
        captured = _capture_alone(plan, sample, engine)
        if captured is None:
            continue
        judged_L = stored_rows(sample.loss_mask, "trained").last_L
        judged_L = judged_L[:: max(1, len(judged_L) // judged_per_sample)][:judged_per_sample]
        kept.append(Rows(captured.aux_TAD[:AUX_ROWS].clone(), captured.last_TD[torch.from_numpy(judged_L)]))
        yield captured.aux_TAD, captured.last_TD


def _capture_alone(plan: CapturePlan, sample: TokenSample, engine: Engine) -> CapturedSample | None:
    """One sample, tried twice as the shards' samples are."""
    for attempt in ("once more", "without it"):
        try:
            for captured in engine.capture([sample]):
                check_captured(captured, sample, len(plan.capture.boundaries), plan.hidden_size)
                return captured
            reason = f"sample {sample.sample_id}: the engine ended without its states"
        except CaptureError as error:
            reason = error.message
        console.log(f"extract: calibrates {attempt}: {reason}")
    return None
