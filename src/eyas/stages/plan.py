"""Stage ``plan``: lengths of the tokens → which sample goes where, how large, under which identity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas import config, console, fs
from eyas.contracts import TargetIdentity
from eyas.plan.budget import budget, summary
from eyas.plan.build import build_plan, check_context
from eyas.plan.cache import copying_types
from eyas.plan.identity import STORED, capture_identity
from eyas.plan.summary import plan_table
from eyas.stages import common
from eyas.tokens.dataset import read_index, read_lengths
from eyas.tokens.part import planned_part

PATHS = ("TARGET_JSON", "TOKENS", "PLAN_JSON")


def main(argv: Sequence[str]) -> None:
    """Plan as ``params.yaml`` says."""
    target_path, tokens, plan_path = common.paths("plan", PATHS, argv)
    params = config.load()
    identity = fs.read_record(TargetIdentity, target_path)
    with common.stage_run("plan", [target_path, tokens], [plan_path]) as run:
        index, stored = read_index(tokens), STORED[params.train.source]
        check_context(read_lengths(tokens), identity.max_position_embeddings)
        capture = capture_identity(params.extract, identity, params.target, index.tokens_sha256, stored)
        part = planned_part(tokens, stored)
        plan = build_plan(part.lengths, capture, identity.hidden_size, part.trained_rows)
        fs.write_record(plan_path, plan)
        run.facts = {"identity": plan.identity, "payload_bytes": plan.payload_bytes}
    console.emit(plan_table(plan))
    found = budget(plan, fs.free_bytes(Path.cwd()), params.extract.reserve_bytes, cache_types=copying_types(Path.cwd()))
    verdict = "fits" if found.fits else f"does NOT fit, {found.num_samples_that_fit:,} samples would"
    console.log(f"{summary(found)}: {verdict}")


if __name__ == "__main__":
    console.run_main(main)
