"""One planned batch through an engine into a shard in the making: checked, what fails tried once more alone, then listed.

A stored capture and a streamed one go through here, so that the same batch gives the same bytes in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eyas import console
from eyas.contracts import TokenSample
from eyas.engines.base import Engine
from eyas.engines.checked import Checks
from eyas.errors import CaptureError
from eyas.shards.writer import ShardAssembly


def capture_batch(
    engine: Engine,
    samples: Sequence[TokenSample],
    assembly: ShardAssembly,
    checks: Checks,
    unstored: frozenset[str] = frozenset(),
) -> None:
    """Capture a batch; every sample of it that the shard awaits has arrived there or failed there afterwards.

    Args:
        engine: Open.
        samples: The planned batch.
        assembly: The shard in the making.
        checks: Looks at every value.
        unstored: Samples that run because the batch has them, and go nowhere.
    """
    reasons = _collect(engine, samples, assembly, checks, unstored)
    for sample in (s for s in samples if s.sample_id in reasons):
        console.log(f"extract: once more, alone: {reasons[sample.sample_id]}")
        again = _collect(engine, [sample], assembly, checks, frozenset())
        if again:
            assembly.fail(sample.sample_id, again[sample.sample_id])


def _collect(
    engine: Engine,
    samples: Sequence[TokenSample],
    assembly: ShardAssembly,
    checks: Checks,
    unstored: frozenset[str],
) -> dict[str, str]:
    """Capture samples into the assembly; the reason for each that did not get there."""
    wanted: Mapping[str, TokenSample] = {sample.sample_id: sample for sample in samples}
    reasons: dict[str, str] = {}
    general = "the engine ended without its states"

    try:
        for captured, problem in checks.of(engine.capture(samples), wanted):
            if captured.sample_id not in wanted:
                general = f"the engine answered with sample {captured.sample_id}, which was not asked for"
                break
            if captured.sample_id in unstored:
                continue
            if problem:
                reasons[captured.sample_id] = problem
            else:
                assembly.add(captured.sample_id, captured.input_ids_T, captured.aux_TAD, captured.last_TD)
    except CaptureError as error:
        general = error.message
    missing = set(assembly.missing)
    said = {
        s: general if general.startswith(f"sample {s}:") else f"sample {s}: {general}" for s in missing & set(wanted)
    }
    return {s: reasons.get(s, said[s]) for s in wanted if s in missing}
