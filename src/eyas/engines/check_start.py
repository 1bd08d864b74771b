"""Before a long run with a server: states of a few planned samples, beside transformers or by the target's own head.

Where the target fits into this machine's memory, ``probe`` compares every stream with transformers. A larger one is
judged by what its files alone tell: the last state must be the final norm's output (dividing by the norm's scale
leaves rows of length one), the head must read the next token out of it more often than out of its neighbours, and more
often than out of the same rows with the norm's scale taken off once: those of a state normed twice are the right ones.

Letters: T tokens of all samples, D target hidden size, V target vocab.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from eyas import console
from eyas.config import Params
from eyas.contracts import CapturePlan, TargetIdentity, TokenSample
from eyas.engines.base import CapturedSample, Engine
from eyas.engines.checks import check_captured
from eyas.engines.probe import probe
from eyas.engines.registry import SERVER_ENGINES
from eyas.errors import CaptureError
from eyas.target.load import load_model, read_ends
from eyas.target.locate import ensure

NUM_SAMPLES = 3
LEAST_TOKENS = 24
"""Shorter samples say little per channel."""
MEMORY_SHARE = 0.5
"""Of what is available, for a second copy of the target beside the server."""
NORM_TOLERANCE = 0.05
LEAST_TOP1 = 0.2
"""Of tokens that any target predicts in conversations; guessing gives a fraction of a percent."""
CLEARLY_MORE = (1.1, 0.02)
"""Factor and share by which the head reads more out of another state than noise gives."""


def probe_samples(plan: CapturePlan, tokens: Mapping[str, TokenSample]) -> list[TokenSample]:
    """A few of the shortest samples that are long enough to judge by, else the longest there are."""
    planned = sorted(
        (sample for shard in plan.shards for sample in shard.samples), key=lambda s: (s.num_tokens, s.sample_id)
    )
    judged = [sample for sample in planned if sample.num_tokens >= LEAST_TOKENS][:NUM_SAMPLES] or planned[-NUM_SAMPLES:]
    return [tokens[sample.sample_id] for sample in judged]


def check_planned(
    engine: Engine, params: Params, target: TargetIdentity, plan: CapturePlan, tokens: Mapping[str, TokenSample]
) -> None:
    """Refuse a server that gives other states than the plan wants; transformers is the reference itself.

    Raises:
        CaptureError: As ``check_start``.
    """
    if plan.capture.engine not in SERVER_ENGINES:
        return
    check_start(
        engine,
        probe_samples(plan, tokens),
        target,
        ensure(target, params.target),
        plan.capture.boundaries,
        dtype=plan.capture.engine_options["dtype"],
        trust_remote_code=params.target.trust_remote_code,
    )


def check_start(
    engine: Engine,
    samples: Sequence[TokenSample],
    target: TargetIdentity,
    folder: Path,
    boundaries: Sequence[int],
    *,
    dtype: str,
    trust_remote_code: bool = False,
) -> None:
    """Refuse an engine that gives other states than the plan wants.

    Args:
        engine: Open.
        samples: See ``probe_samples``.
        target: Identity of the target.
        folder: Its files.
        boundaries: In stored order.
        dtype: Of the weights while running.
        trust_remote_code: Let transformers run the repository's own model code.

    Raises:
        CaptureError: A stream is another state; names which, as far as can be told.
    """
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    if weight_bytes(target) < MEMORY_SHARE * available_bytes():
        model = load_model(folder, dtype, "cpu", trust_remote_code)
        fits = probe(engine, model, samples, boundaries)
        worst = max(fit.distance for fit in fits)
        console.log(f"probe: {num_tokens:,} tokens as transformers gives them, distance at most {worst:.4f}")
        return
    captured = {got.sample_id: got for got in engine.capture(samples)}
    for sample in samples:
        check_captured(captured[sample.sample_id], sample, len(boundaries), target.hidden_size)
    top1 = check_by_head(target, folder, [captured[sample.sample_id] for sample in samples])
    console.log(f"probe: the head reads {top1:.0%} of {num_tokens:,} next tokens; the target is too large for more")


def check_by_head(target: TargetIdentity, folder: Path, captured: Sequence[CapturedSample]) -> float:
    """Judge last states by the target's final norm and head alone; gives the share of next tokens read.

    Raises:
        CaptureError: They are not normed, normed twice, in another order, or another model's.
    """
    ends = read_ends(folder)
    scale_D = ends.final_norm_D.float() + target.final_norm.weight_offset
    last_TD = torch.cat([got.last_TD for got in captured]).float()
    kept_D = scale_D.abs() > 1e-3 * scale_D.abs().max()
    if target.final_norm.kind == "rms_norm":
        length = float((last_TD[:, kept_D] / scale_D[kept_D]).pow(2).mean(dim=1).sqrt().median())
        if abs(length - 1) > NORM_TOLERANCE:
            raise CaptureError(
                f"probe: last divided by the final norm's scale has length {length:.3f}, expected 1 within "
                f"{NORM_TOLERANCE}: it is not the last state after the final norm",
                "the engine gives it before the norm, or of another model; nothing was captured",
            )
    top1 = {shift: _top1(captured, ends.head_VD, shift) for shift in (-1, 0, 1, 2)}
    best = max(top1, key=lambda shift: top1[shift])
    if best != 1 or top1[1] < LEAST_TOP1:
        found = f"token t{best:+d} at row t" if best != 1 and top1[best] >= LEAST_TOP1 else "nothing else either"
        raise CaptureError(
            f"probe: the head reads {top1[1]:.1%} of the next tokens (t+1) out of last, expected {LEAST_TOP1:.0%} or "
            f"more: it reads {found}",
            "rows are in another order, or the server runs another model; nothing was captured",
        )
    inverse_D = torch.where(kept_D, 1 / scale_D, 0.0)
    once = [replace(got, last_TD=got.last_TD.float() * inverse_D) for got in captured]
    factor, share = CLEARLY_MORE
    if (read := _top1(once, ends.head_VD, 1)) > factor * top1[1] + share:
        raise CaptureError(
            f"probe: the head reads {top1[1]:.1%} of the next tokens out of last, and {read:.1%} with the final norm's "
            "scale taken off: last is normed twice",
            "the engine applies the final norm to what has passed it already; nothing was captured",
        )
    return top1[1]


def _top1(captured: Sequence[CapturedSample], head_VD: torch.Tensor, shift: int) -> float:
    """Share of tokens t + shift that the head's first choice at row t names."""
    hits = total = 0
    for got in captured:
        T = len(got.input_ids_T)
        rows = range(max(0, -shift), T - max(0, shift))
        choice = (got.last_TD[rows.start : rows.stop].to(head_VD.dtype) @ head_VD.T).argmax(dim=1)
        wanted = got.input_ids_T[rows.start + shift : rows.stop + shift].long()
        hits, total = hits + int((choice == wanted).sum()), total + len(wanted)
    return hits / max(1, total)


def weight_bytes(target: TargetIdentity) -> int:
    """Of the target's weight files."""
    return sum(file.size_bytes for file in target.files if file.path.endswith((".safetensors", ".gguf")))


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that may be taken without swapping: of the machine, or what is left to this container if that is less."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        found.append(1024 * _line(proc / "meminfo", "MemAvailable:"))
    with contextlib.suppress(OSError, StopIteration, ValueError):
        limit = int((cgroup / "memory.max").read_text())  # the word "max" is no limit
        used = int((cgroup / "memory.current").read_text()) - _line(cgroup / "memory.stat", "inactive_file")
        found.append(max(0, limit - used))
    return min(found, default=0)


def _line(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return int(next(line for line in lines if line.split()[0] == name).split()[1])
