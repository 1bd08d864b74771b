"""Checks of samples and captured states; every captured sample passes them before it is stored.

Letters: T tokens of the sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import torch

from eyas.contracts import TokenSample
from eyas.engines.base import CapturedSample
from eyas.errors import CaptureError
from eyas.shards.values import row_faults


def check_sample(sample: TokenSample, vocab_size: int, context: int) -> None:
    """Raise ``CaptureError`` for a sample that the target cannot run, with both numbers."""
    num_tokens = len(sample.input_ids)
    if not 1 <= num_tokens <= context:
        raise CaptureError(
            f"sample {sample.sample_id}: {num_tokens} tokens, expected 1 to {context} (the target's context)",
            "lower tokenize.max_tokens",
        )
    low, high = min(sample.input_ids), max(sample.input_ids)
    if low < 0 or high >= vocab_size:
        raise CaptureError(f"sample {sample.sample_id}: token ids {low} to {high}, expected 0 to {vocab_size - 1}")


def check_captured(captured: CapturedSample, sample: TokenSample, num_aux: int, hidden_size: int) -> None:
    """Check one sample's states against the sample that was planned.

    Args:
        captured: What the engine gave.
        sample: What was asked for.
        num_aux: A of the plan.
        hidden_size: D of the target.

    Raises:
        CaptureError: Another sample, another shape or dtype, other ids, a value that is not finite, or a row of
            zeros; says found and expected.
    """
    name, num_tokens = f"sample {sample.sample_id}", len(sample.input_ids)
    if captured.sample_id != sample.sample_id:
        raise CaptureError(f"{name}: states of sample {captured.sample_id} came instead")
    _check_shape(f"{name}: aux", captured.aux_TAD, (num_tokens, num_aux, hidden_size))
    _check_shape(f"{name}: last", captured.last_TD, (num_tokens, hidden_size))
    check_ids(name, captured.input_ids_T, sample)
    streams = {f"aux stream {a}": captured.aux_TAD[:, a] for a in range(num_aux)} | {"last": captured.last_TD}
    for stream, states_TD in streams.items():
        _check_values(f"{name}: {stream}", states_TD)


def _check_shape(what: str, states: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(states.shape) != expected:
        parts = "tokens, streams, hidden" if len(expected) == 3 else "tokens, hidden"
        raise CaptureError(f"{what}: shape {tuple(states.shape)}, expected {expected} ({parts})")
    if states.dtype != torch.bfloat16:
        raise CaptureError(f"{what}: dtype {states.dtype}, expected torch.bfloat16")


def check_ids(name: str, ids_T: torch.Tensor, sample: TokenSample) -> None:
    """Raise ``CaptureError`` unless the ids are the sample's; ``name`` begins the message."""
    if len(ids_T) != len(sample.input_ids):
        raise CaptureError(f"{name}: {len(ids_T)} token ids, expected {len(sample.input_ids)}")
    differing = (ids_T.long() != torch.tensor(sample.input_ids)).nonzero()
    if len(differing):
        at = int(differing[0])
        raise CaptureError(f"{name}: token id {int(ids_T[at])} at index {at}, expected {sample.input_ids[at]}")


def _check_values(what: str, states_TD: torch.Tensor) -> None:
    broken_T, empty_T = row_faults(states_TD)
    if broken_T.any():
        at = int(broken_T.nonzero()[0])
        channel = int((~states_TD[at].isfinite()).nonzero()[0])
        value = float(states_TD[at, channel])
        raise CaptureError(f"{what}: {value} at token {at}, channel {channel}, expected finite values")
    if empty_T.any():
        first, number = int(empty_T.nonzero()[0]), int(empty_T.sum())
        raise CaptureError(f"{what}: token {first} is all zero, {number} such tokens, expected none")
