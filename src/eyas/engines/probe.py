"""The probe: an engine's states of a few samples beside transformers' own, before a long run.

Every stream is compared with every boundary near the wanted one, pre-norm and post-norm, so that a wrong
layer, a wrong norm or a wrong order is not only refused but named. Rows are compared per token by the
distance relative to the reference row's own length; the median over tokens is what counts, and every
channel must follow too.

Letters: T tokens of all samples, D target hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.contracts import TokenSample
from eyas.engines.base import Engine
from eyas.engines.checks import check_captured
from eyas.engines.taps import Taps, text_model
from eyas.errors import CaptureError

TOLERANCE = 0.05
"""Largest relative distance of the same state out of two engines in bf16; a layer's step is far larger."""
CHANNEL_TOLERANCE = 0.25
"""Per channel, relative to that channel's own spread: finds a permuted or scaled channel."""
OUTLIER_SPREAD = 0.05
"""Least spread, relative to a channel's own value: bf16 cannot say how a channel of 700 varies by one."""
CLEARLY = 2.0
"""Another state is what came when its channels fit so many times better."""


@dataclass(frozen=True, slots=True)
class StreamFit:
    """One stream of the engine beside the reference."""

    stream: str
    distance: float
    """Median over tokens of |engine - reference| / |reference|."""
    worst_channel: int
    worst_channel_distance: float


def probe(
    engine: Engine, reference_model: Any, samples: Sequence[TokenSample], boundaries: Sequence[int]
) -> list[StreamFit]:
    """Compare an engine's states of a few samples with transformers.

    Args:
        engine: Open engine, made for ``boundaries``.
        reference_model: The same target in transformers.
        samples: A few planned samples of unlike lengths.
        boundaries: In stored order.

    Raises:
        CaptureError: A sample is broken, or a stream is another state; names the state it is, if any.
    """
    base, by_id = text_model(reference_model), {sample.sample_id: sample for sample in samples}
    captured = {got.sample_id: got for got in engine.capture(samples)}
    missing = sorted(set(by_id) - set(captured))
    if missing:
        raise CaptureError(f"probe: no states of sample {missing[0]}, {len(missing)} of {len(by_id)} missing")
    for name, sample in by_id.items():
        check_captured(captured[name], sample, len(boundaries), base.config.hidden_size)
    names = sorted(by_id)
    reference = _reference(base, [by_id[name] for name in names])
    fits = []
    for place, boundary in enumerate(boundaries):
        states_TD = torch.cat([captured[name].aux_TAD[:, place] for name in names]).float()
        fits.append(_fit(f"aux stream {place}", f"boundary {boundary}", states_TD, reference))
    last_TD = torch.cat([captured[name].last_TD for name in names]).float()
    fits.append(_fit("last", LAST, last_TD, reference))
    return fits


LAST = "the last state after the final norm"


@torch.no_grad()
def _reference(base: Any, samples: Sequence[TokenSample]) -> dict[str, torch.Tensor]:
    """Every state a stream could be by mistake, by name."""
    num_layers, device = len(base.layers), next(base.parameters()).device
    taps, gathered = Taps(base, tuple(range(num_layers + 1))), []
    for sample in samples:
        with taps.listening():
            base(input_ids=torch.tensor([sample.input_ids], device=device), use_cache=False)
        gathered.append(taps.take()[0])
    states_TAD = torch.cat(gathered)
    last_TD = base.norm(states_TAD[:, num_layers])
    named = {f"boundary {b}": states_TAD[:, b] for b in range(num_layers + 1)}
    normed = {f"boundary {b} after the final norm": base.norm(states_TAD[:, b]) for b in range(num_layers)}
    named |= normed | {LAST: last_TD, "the last state normed twice": base.norm(last_TD)}
    return {name: states.float().cpu() for name, states in named.items()}


def _fit(stream: str, wanted: str, states_TD: torch.Tensor, reference: dict[str, torch.Tensor]) -> StreamFit:
    distance, error_D = _distance(states_TD, reference[wanted]), _channel_errors(states_TD, reference[wanted])
    worst, num_wrong = int(error_D.argmax()), int((error_D > CHANNEL_TOLERANCE).sum())
    # Outlier channels make up nearly all of a row's length and pass from layer to layer unchanged: only the many
    # small channels tell neighbours apart.
    scores = {name: float(_channel_errors(states_TD, states).median()) for name, states in reference.items()}
    nearest = min(scores, key=lambda name: scores[name])
    is_another = CLEARLY * scores[nearest] < scores[wanted]
    if distance <= TOLERANCE and not num_wrong and not is_another:
        return StreamFit(stream, distance, worst, float(error_D[worst]))
    if is_another and scores[nearest] <= CHANNEL_TOLERANCE:
        found = f"it is {nearest}"
    elif 0 < num_wrong <= len(error_D) // 4:
        found = f"channel {worst} is off by {float(error_D[worst]):.2f} of its spread, {num_wrong} such channels"
    else:
        found = _order(states_TD, reference[wanted])
    raise CaptureError(
        f"probe: {stream} should be {wanted} but differs by {distance:.3f} of its length (at most {TOLERANCE}): {found}",
        "the engine's layer ids, its norm or its order of rows is wrong; nothing was captured",
    )


def _channel_errors(states_TD: torch.Tensor, reference_TD: torch.Tensor) -> torch.Tensor:
    """Of each channel, in its own spread; medians, since a first token may lie a thousand times off the others."""
    middle_D = reference_TD.median(dim=0).values
    spread_D = 1.4826 * (reference_TD - middle_D).abs().median(dim=0).values
    spread_D = spread_D.maximum(OUTLIER_SPREAD * middle_D.abs())
    return (states_TD - reference_TD).abs().median(dim=0).values / (spread_D + 1e-6)


def _distance(states_TD: torch.Tensor, reference_TD: torch.Tensor) -> float:
    return float(((states_TD - reference_TD).norm(dim=1) / (reference_TD.norm(dim=1) + 1e-6)).median())


def _order(states_TD: torch.Tensor, reference_TD: torch.Tensor) -> str:
    """Name a wrong order: each row looked up among all reference rows of the wanted state."""
    nearest_T = torch.cdist(states_TD, reference_TD).argmin(dim=1)
    if _distance(states_TD, reference_TD[nearest_T]) <= TOLERANCE:
        shift = int((nearest_T - torch.arange(len(nearest_T))).median())
        return f"its rows are in another order (typical shift {shift} rows)"
    return "it is no state of this target at any boundary, normed or not"
