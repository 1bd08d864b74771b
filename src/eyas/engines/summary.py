"""What an extraction did, as an operator reads it."""

from __future__ import annotations

from pathlib import Path

from eyas import console
from eyas.contracts import payload_bytes
from eyas.engines.loop import ExtractResult


def extract_table(result: ExtractResult, out: Path) -> str:
    """Samples, bytes, ratio, speed, failures, and the effect of a lossy codec."""
    manifest = result.manifest
    num_streams = len(manifest.boundaries) + 1
    payload = payload_bytes(manifest.num_stored_tokens, manifest.hidden_size, num_streams)
    rows = [
        ("samples", f"{manifest.num_stored_samples:,}"),
        ("tokens", f"{manifest.num_stored_tokens:,}"),
        ("shards", f"{len(manifest.shards):,} in {out}, {result.num_resumed_shards:,} of them from an earlier run"),
        ("size", f"{console.human_bytes(manifest.stored_bytes)}, {manifest.stored_bytes / payload:.3f} of bf16"),
        ("speed", f"{result.num_tokens / max(result.work_s, 1e-9):,.0f} tok/s"),
        ("failed", "\n".join([f"{len(manifest.failed):,}", *(f"  {sample.reason}" for sample in manifest.failed)])),
    ]
    if result.effect is not None:
        rows.append((manifest.capture.codec, str(result.effect)))
    return console.table(rows)
