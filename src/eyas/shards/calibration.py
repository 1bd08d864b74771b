"""Channel scales of the codec ``int8``: made once per capture from a slice of the plan, then part of its data.

    plan → slice over all lengths → states of the slice → mean magnitude per stream and channel → file, digest

Every shard holds the scales as its first block, the manifest their digest, and the spool this file, so that a resumed
run goes on with the very same.

The mean magnitude and not the largest or the root mean square: a few tokens with values a thousand times the usual
(attention sinks) would take the channel's range away from all other tokens.

Letters: N streams (aux streams, then last), D target hidden size, A aux streams, T tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from eyas import fs
from eyas.canonical import canonical_json, from_plain
from eyas.errors import CaptureError, StoreError
from eyas.shards.effect import Effect
from eyas.shards.int8 import MAX_CHANNEL, MIN_CHANNEL

if TYPE_CHECKING:
    from eyas.contracts import CapturePlan, PlannedSample

MIN_TOKENS = 4096
MIN_SAMPLES = 8
FILE_NAME = "calibration.safetensors"
TENSOR = "calibration"
FACTS = "facts"
ROWS_AT_A_TIME = 256
AGAIN = "remove the file: finished shards hold the scales too, and without one they are made again"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Channel scales [N, D] float32, and what they did to the slice when a head was there to judge it."""

    scales_ND: torch.Tensor
    effect: Effect | None = None

    @property
    def digest(self) -> str:
        """SHA-256 over shape and bytes of the scales: what the manifest holds."""
        head = canonical_json({"dtype": "F32", "shape": list(self.scales_ND.shape)}).encode()
        return hashlib.sha256(head + self.scales_ND.contiguous().numpy().tobytes()).hexdigest()


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
        for aux_RAD, last_RD in zip(aux_TAD.split(ROWS_AT_A_TIME), last_TD.split(ROWS_AT_A_TIME), strict=True):
            magnitudes_RND = torch.cat([aux_RAD, last_RD.unsqueeze(1)], dim=1).abs().double().numpy()
            total_ND = np.zeros(magnitudes_RND.shape[1:]) if total_ND is None else total_ND
            for magnitude_ND in magnitudes_RND:
                total_ND += magnitude_ND
            num_tokens += len(magnitudes_RND)
    if total_ND is None:
        raise CaptureError("no states to calibrate the codec int8 from, expected at least one sample's")
    mean_ND = torch.from_numpy(total_ND / num_tokens)
    return torch.where(mean_ND > 0, mean_ND, 1.0).clamp(MIN_CHANNEL, MAX_CHANNEL).float()


def write_calibration(path: Path, calibration: Calibration, identity: str) -> None:
    """Write the file that a resumed run reads: a safetensors file, atomically.

    Raises:
        DiskError: The volume is full.
    """
    from safetensors.torch import save

    facts = {"identity": identity, "sha256": calibration.digest, "effect": calibration.effect}
    # One key alone: safetensors writes several in an order that changes from run to run.
    fs.write_bytes(path, save({TENSOR: calibration.scales_ND.contiguous()}, {FACTS: canonical_json(facts)}))


def read_calibration(path: Path, identity: str, shape: tuple[int, int]) -> Calibration:
    """The calibration of a file.

    Args:
        path: As written.
        identity: Capture it must belong to.
        shape: (N, D) of the capture.

    Raises:
        StoreError: The file is damaged, of another capture or of another shape.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[FACTS])
            scales_ND = file.get_tensor(TENSOR)
        found_identity, sha256, plain = facts["identity"], facts["sha256"], facts["effect"]
        found = Calibration(scales_ND, None if plain is None else from_plain(Effect, plain))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: is no calibration: {error}", AGAIN) from None
    if found_identity != identity:
        raise StoreError(
            f"{path}: is of another capture: identity {found_identity}, expected {identity}",
            "move it away; scales of two captures are never mixed",
        )
    if (scales_ND.dtype, tuple(scales_ND.shape)) != (torch.float32, shape):
        raise StoreError(
            f"{path}: {scales_ND.dtype} of shape {tuple(scales_ND.shape)}, expected float32 {shape}", AGAIN
        )
    if found.digest != sha256:
        raise StoreError(f"{path}: digest {found.digest}, expected {sha256}", AGAIN)
    return found
