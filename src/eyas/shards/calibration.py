"""Channel scales of the codec ``int8``: made once per capture from a slice of the plan, then part of its data.

    plan → slice over all lengths → states of the slice → mean magnitude per stream and channel → file, digest

The mean magnitude and not the largest or the root mean square: a few tokens with values a thousand times the usual
(attention sinks) would take the channel's range away from all other tokens.

Letters: N streams (aux streams, then last), D target hidden size, A aux streams, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from eyas import fs
from eyas.canonical import canonical_json
from eyas.errors import CaptureError, StoreError
from eyas.shards.int8 import MAX_CHANNEL, MIN_CHANNEL

if TYPE_CHECKING:
    from eyas.contracts import CapturePlan, PlannedSample

MIN_TOKENS = 4096
MIN_SAMPLES = 8
FILE_NAME = "calibration.safetensors"
TENSOR = "calibration"
AGAIN = "it is made again when no shard is finished: remove the file, or the whole spool"


def calibration_samples(plan: CapturePlan) -> tuple[PlannedSample, ...]:
    """The slice of a plan: evenly spaced over the planned lengths, 4,096 tokens or more where there are as many.

    At least eight samples, so that long conversations do not stand alone; twice as many until the tokens suffice.
    """
    by_length = sorted((s for shard in plan.shards for s in shard.samples), key=lambda s: (s.num_tokens, s.sample_id))
    count = MIN_SAMPLES
    while count < len(by_length):
        chosen = tuple(by_length[(2 * i + 1) * len(by_length) // (2 * count)] for i in range(count))
        if sum(sample.num_tokens for sample in chosen) >= MIN_TOKENS:
            return chosen
        count *= 2
    return tuple(by_length)


def make_calibration(states: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Channel scales [N, D] float32: mean magnitude per stream and channel over all tokens.

    Sums run over tokens one after another in float64, so that every processor gives the same scales. A channel that
    is zero throughout has scale 1.

    Args:
        states: aux_TAD and last_TD, bf16, of each sample of the slice.

    Raises:
        CaptureError: There are no states.
    """
    total_ND: np.ndarray | None = None
    num_tokens = 0
    for aux_TAD, last_TD in states:
        magnitudes_TND = torch.cat([aux_TAD, last_TD.unsqueeze(1)], dim=1).abs().double().numpy()
        if total_ND is None:
            total_ND = np.zeros(magnitudes_TND.shape[1:])
        for magnitude_ND in magnitudes_TND:
            total_ND += magnitude_ND
        num_tokens += len(magnitudes_TND)
    if total_ND is None or not num_tokens:
        raise CaptureError("no states to calibrate the codec int8 from, expected at least one sample's")
    mean_ND = torch.from_numpy(total_ND / num_tokens)
    scale_ND = torch.where(mean_ND > 0, mean_ND, 1.0).clamp(MIN_CHANNEL, MAX_CHANNEL).float()
    return scale_ND


def calibration_digest(calibration_ND: torch.Tensor) -> str:
    """SHA-256 over shape and bytes: what the manifest holds."""
    head = canonical_json({"dtype": "F32", "shape": list(calibration_ND.shape)}).encode()
    return hashlib.sha256(head + calibration_ND.contiguous().numpy().tobytes()).hexdigest()


def write_calibration(path: Path, calibration_ND: torch.Tensor, identity: str) -> None:
    """Write the file that a resumed run reads: a safetensors file, atomically.

    Raises:
        DiskError: The volume is full.
    """
    from safetensors.torch import save

    metadata = {"identity": identity, "sha256": calibration_digest(calibration_ND)}
    fs.write_bytes(path, save({TENSOR: calibration_ND.contiguous()}, metadata))


def read_calibration(path: Path, identity: str, shape: tuple[int, int]) -> torch.Tensor:
    """Channel scales [N, D] of a file.

    Args:
        path: As written.
        identity: Capture they must belong to.
        shape: (N, D) of the capture.

    Raises:
        StoreError: The file is damaged, of another capture or of another shape.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            calibration_ND = file.get_tensor(TENSOR)
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path}: is no calibration: {error}", AGAIN) from None
    if metadata.get("identity") != identity:
        raise StoreError(
            f"{path}: is of another capture: identity {metadata.get('identity')}, expected {identity}",
            "move it away; scales of two captures are never mixed",
        )
    if (calibration_ND.dtype, tuple(calibration_ND.shape)) != (torch.float32, shape):
        raise StoreError(
            f"{path}: {calibration_ND.dtype} of shape {tuple(calibration_ND.shape)}, expected float32 {shape}", AGAIN
        )
    if (found := calibration_digest(calibration_ND)) != metadata.get("sha256"):
        raise StoreError(f"{path}: digest {found}, expected {metadata.get('sha256')}", AGAIN)
    return calibration_ND
