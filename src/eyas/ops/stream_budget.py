"""What a streamed training costs beside one from stored states: the ring's bytes, the capture of every epoch, break-even.

Storing captures once; a stream captures each epoch, all that its ring does not keep. So the break-even is at one epoch:
from the second on storing is the cheaper in work of the devices. A stream buys disk with it; this says how much of each.
Rates are those of this repository's own runs (``reports/throughput.json``); without them the floor of the capture is
told: two operations per weight and token.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.batches.streamed_set import RING_BYTES, RingNeed, streamed_set
from eyas.config import Params
from eyas.contracts import CaptureIdentity, TargetIdentity
from eyas.generations.working import ring_bytes
from eyas.plan.budget import Budget, Need

THROUGHPUT = Path("reports/throughput.json")
FLOOR_FLOPS = 0.4 * 989e12
"""Operations per second at 40 % of an H200's dense bfloat16 peak, by its data sheet."""
WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAccount:
    """The figures of a streamed training."""

    need: RingNeed
    ring_bytes: int
    """``EYAS_RING_BYTES``, or the usual size."""
    there_bytes: int
    """Of the ring those that a training which was stopped has left: it goes on with them."""
    store_bytes: int
    """What the whole set would take if it was stored."""
    num_tokens: int
    """Captured in an epoch."""
    num_epochs: float
    """Of the training."""
    capture_tokens_per_s: float | None
    """Of this repository's own capture; None when it was not measured."""
    train_tokens_per_s: float | None
    floor_h200_hours: float
    """Of one epoch's capture, all weights taken as active."""
    token_bytes: int
    """Of ids and masks, which lie in a file of the capturing process while it runs."""
    headroom_bytes: int
    """Free above the reserve with the stored part, the ring and that file; negative when they do not fit."""

    @property
    def capture_s(self) -> float | None:
        """One epoch's capture, nothing kept."""
        return self.num_tokens / self.capture_tokens_per_s if self.capture_tokens_per_s else None

    @property
    def train_s(self) -> float | None:
        """One epoch's training."""
        return self.num_tokens / self.train_tokens_per_s if self.train_tokens_per_s else None

    @property
    def captures_by_epoch(self) -> bool:
        """Whether the ring is too small to keep the set."""
        return self.ring_bytes < self.need.pinned_bytes + self.need.set_bytes

    @property
    def num_captures(self) -> float:
        """Of the whole set, by a stream: one an epoch, or one in all when the ring keeps the set."""
        return max(self.num_epochs, 1.0) if self.captures_by_epoch else 1.0

    @property
    def total_s(self) -> tuple[float, float] | None:
        """Of capture and training on the same devices, stored and streamed."""
        if self.capture_s is None or self.train_s is None:
            return None
        train_s = self.train_s * self.num_epochs
        return self.capture_s + train_s, self.capture_s * self.num_captures + train_s


def stream_account(
    root: Path, params: Params, capture: CaptureIdentity, target: TargetIdentity, found: Budget
) -> StreamAccount:
    """Gather the figures; the capture is that of the stored part.

    Raises:
        TrainError: The plan is of other tokens, or of a whole set.
        StoreError: Something that must be read is damaged.
    """
    ratio = found.ratio.value * found.need.rows_payload_bytes / found.need.payload_bytes
    streamed = streamed_set(root / "data/tokens", capture, target.hidden_size, params.train, ratio)
    need, whole = streamed.need, Need.of(streamed.plan)
    size, there = config.knob(RING_BYTES, need.usual_bytes), ring_bytes(root, streamed.plan.identity)
    num_weights = sum(
        file.size_bytes for file in target.files if file.path.endswith((".safetensors", ".gguf"))
    ) / WEIGHT_BYTES.get(target.dtype, 2)
    rates = fs.read_json(root / THROUGHPUT) if (root / THROUGHPUT).is_file() else {}
    return StreamAccount(
        need=need,
        ring_bytes=size,
        store_bytes=math.ceil(whole.payload_bytes * ratio) + whole.overhead_bytes,
        num_tokens=streamed.plan.num_tokens,
        num_epochs=params.train.num_steps * params.train.packs_per_step / streamed.packs_per_epoch,
        capture_tokens_per_s=_rate(rates, "extract"),
        train_tokens_per_s=_rate(rates, "train"),
        floor_h200_hours=2 * num_weights * streamed.plan.num_tokens / FLOOR_FLOPS / 3600,
        there_bytes=there,
        token_bytes=streamed.plan.token_bytes,
        headroom_bytes=found.headroom_bytes - max(size - there, 0) - streamed.plan.token_bytes,
    )


def _rate(rates: Any, stage: str) -> float | None:
    measured = rates.get(stage) if isinstance(rates, dict) else None
    return measured.get("tokens_per_second") or None if isinstance(measured, dict) else None


def stream_values(account: StreamAccount) -> dict[str, Any]:
    """As plain values."""
    return {
        "store_bytes": account.store_bytes,
        "pinned_bytes": account.need.pinned_bytes,
        "window_bytes": account.need.window_bytes,
        "least_ring_bytes": account.need.least_bytes,
        "ring_bytes": account.ring_bytes,
        "ring_there_bytes": account.there_bytes,
        "set_bytes": account.need.set_bytes,
        "token_bytes": account.token_bytes,
        "num_tokens": account.num_tokens,
        "capture_tokens_per_s": account.capture_tokens_per_s,
        "train_tokens_per_s": account.train_tokens_per_s,
        "capture_s_per_epoch": account.capture_s,
        "train_s_per_epoch": account.train_s,
        "floor_h200_hours_per_epoch": account.floor_h200_hours,
        "captures_by_epoch": account.captures_by_epoch,
        "num_epochs": account.num_epochs,
        "num_captures": account.num_captures,
        "break_even_epochs": 1,
        "total_s": None if account.total_s is None else {"store": account.total_s[0], "stream": account.total_s[1]},
        "headroom_bytes": account.headroom_bytes,
    }


def stream_text(account: StreamAccount) -> str:
    """The table below the one of the stored part."""
    shown, need = console.human_bytes, account.need
    said = f"{RING_BYTES}" if RING_BYTES in os.environ else f"usual; {RING_BYTES} sets another"
    rows = [
        ("if stored", f"{shown(account.store_bytes)} for every sample; a stream needs the part above and its ring"),
        (
            "ring",
            f"{shown(account.ring_bytes)} ({said}); {shown(need.least_bytes)} at least: {shown(need.window_bytes)} are "
            f"shuffled together, {shown(need.pinned_bytes)} stay for calibration and validation; {shown(account.token_bytes)} of ids beside it",
        ),
        ("kept", _kept(account)),
        ("capture", _line(account.num_tokens, account.capture_tokens_per_s, account.capture_s, "make extract")),
        ("training", _line(account.num_tokens, account.train_tokens_per_s, account.train_s, "make train")),
        (
            "capture's floor",
            f"{account.floor_h200_hours:,.3g} hours of an H200 per epoch (2 operations per weight and token, all "
            "weights active, 40 % of its peak)",
        ),
        ("per epoch", _epoch(account)),
        ("break-even", _break_even(account)),
        ("ring's verdict", _verdict(account)),
    ]
    return console.table(rows)


def _kept(account: StreamAccount) -> str:
    if not account.captures_by_epoch:
        return "the whole set: it is captured once"
    return f"{account.ring_bytes / (account.need.pinned_bytes + account.need.set_bytes):.1%} of the set at a time"


def _line(num_tokens: int, rate: float | None, seconds: float | None, command: str) -> str:
    if rate is None or seconds is None:
        return f"{num_tokens:,} tokens per epoch; its rate is not measured here yet (`{command}` does)"
    return f"{num_tokens:,} tokens per epoch at {rate:,.0f} tok/s: {console.human_seconds(seconds)} (measured)"


def _epoch(account: StreamAccount) -> str:
    if account.capture_s is None or account.train_s is None:
        return "not known before both rates are measured"
    shown, one, other = console.human_seconds, account.capture_s, account.train_s
    return (
        f"{shown(other)} from stored states; streamed {shown(one + other)} on the same devices, {shown(max(one, other))} "
        "on devices of their own"
    )


def _break_even(account: StreamAccount) -> str:
    if account.num_captures == 1:
        return f"{account.num_epochs:.2f} epochs, one capture either way: a stream costs no time more"
    more = account.num_captures - 1
    text = f"one epoch; this training has {account.num_epochs:.2f}: {more:.2f} captures more than with stored states"
    if account.total_s is None:
        return text
    stored_s, streamed_s = account.total_s
    shown = console.human_seconds
    return (
        f"{text}, {shown(streamed_s)} in place of {shown(stored_s)} on the same devices (x {streamed_s / stored_s:.2f})"
    )


def _verdict(account: StreamAccount) -> str:
    if account.headroom_bytes >= 0:
        return f"fits beside the stored part: {console.human_bytes(account.headroom_bytes)} stay free above the reserve"
    room_bytes = account.headroom_bytes + max(account.ring_bytes - account.there_bytes, 0)
    least = room_bytes - max(account.need.least_bytes - account.there_bytes, 0)
    lacks = f"does not fit: {console.human_bytes(-account.headroom_bytes)} lack"
    return f"{lacks}; the least ring {'would' if least >= 0 else 'would not either'}"
