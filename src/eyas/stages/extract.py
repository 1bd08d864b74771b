"""Stage ``extract``: tokens, by the plan, through an engine → shards, then their manifest, then word to DVC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas import config, console, fs
from eyas.canonical import to_plain
from eyas.config import Params
from eyas.config.images import check_image
from eyas.contracts import CapturePlan, TargetIdentity, TokenSample
from eyas.engines.check_start import check_planned, probe_samples
from eyas.engines.loop import Executor, ExtractLimits, extract
from eyas.engines.registry import SERVER_ENGINES, EngineSpec
from eyas.engines.summary import extract_table
from eyas.errors import PlanError
from eyas.plan.budget import Budget, Need, Reclaim, default_ratio
from eyas.plan.build import build_plan
from eyas.plan.cache import check_links, copying_types, hashes, locked_stage, object_finder
from eyas.plan.earlier import earlier_ratio
from eyas.plan.identity import capture_identity
from eyas.plan.volume import volume
from eyas.shards.handover import HOME, LOCK_NAME, hand_over, settle
from eyas.stages import common
from eyas.target.load import read_ends
from eyas.target.locate import ensure
from eyas.tokens.dataset import read_index
from eyas.tokens.part import planned_part
from eyas.tokens.table import TokenTable

REPLAN = "make the plan again: `dvc repro plan`"
PATHS = ("TARGET_JSON", "TOKENS", "PLAN_JSON", "HIDDEN_STATES", "MANIFEST_JSON")


def main(argv: Sequence[str]) -> None:
    """Extract as ``params.yaml`` says; resumes what an earlier run left."""
    target_path, tokens_path, plan_path, out, manifest_path = common.paths("extract", PATHS, argv)
    params = config.load()
    check_image("extract.image", params.extract.image)
    target = fs.read_record(TargetIdentity, target_path)
    plan = fs.read_record(CapturePlan, plan_path)
    _check_plan(params, target, plan, tokens_path)
    with common.stage_run("extract", [target_path, tokens_path, plan_path], [manifest_path]) as run:
        HOME.mkdir(exist_ok=True)
        tokens = TokenTable(tokens_path, HOME)
        limits = _limits(params, plan, Path.cwd(), manifest_path)
        check_links(Path.cwd())
        before = _budget_facts(plan, limits)
        _settle(Path.cwd(), out, manifest_path)
        engine = _engine(params, target, plan)
        head = None if params.extract.engine == "fake" else lambda: read_ends(ensure(target, params.target)).head_VD
        result = extract(
            plan,
            tokens,
            engine.make(),
            limits,
            out=out,
            manifest_path=manifest_path,
            head=head,
            probe=lambda opened: check_planned(opened, params, target, plan, tokens),
            executor=_executor(params, engine, plan, tokens),
        )
        hand_over(Path.cwd(), result.manifest, out, manifest_path)
        run.num_tokens, run.work_s = result.num_tokens, result.work_s
        run.facts = {"identity": plan.identity, "num_resumed_shards": result.num_resumed_shards, "budget": before}
        if result.effect is not None:
            run.facts["effect"] = to_plain(result.effect)
    console.emit(extract_table(result, out))


def _limits(params: Params, plan: CapturePlan, root: Path, manifest_path: Path) -> ExtractLimits:
    """The figures by which ``make budget`` judged; what gc could free is asked only when it does not fit."""

    def reclaim() -> Reclaim:
        from eyas.generations.reclaim import reclaimable

        return Reclaim.of(reclaimable(root), own=(plan.identity,))

    return ExtractLimits(
        reserve_bytes=params.extract.reserve_bytes,
        max_failed_samples=params.extract.max_failed_samples,
        cache_types=copying_types(root),
        earlier_ratio=earlier_ratio(root, Need.of(plan), to_plain(plan.capture), manifest_path),
        reclaim=reclaim,
    )


def _budget_facts(plan: CapturePlan, limits: ExtractLimits) -> dict[str, int]:
    """What was expected and what was free before the first state, for the report's account of the disk."""
    here = volume(HOME if HOME.is_dir() else Path())
    need = Need.of(plan)
    found = Budget(
        need=need,
        ratio=limits.earlier_ratio or default_ratio(need.codec),
        free_bytes=here.free_bytes,
        reserve_bytes=limits.reserve_bytes,
        cache_types=tuple(limits.cache_types),
    )
    return {
        "expected_bytes": found.total_bytes,
        "peak_bytes": found.peak_bytes,
        "free_bytes": here.free_bytes,
        "volume_bytes": here.total_bytes,
        "reserve_bytes": limits.reserve_bytes,
    }


def _settle(root: Path, out: Path, manifest_path: Path) -> None:
    """Give up the spools of earlier captures that DVC holds by now."""
    with fs.volume_lock(HOME / LOCK_NAME, "extract"):
        locked = hashes(locked_stage(root, "extract"), "outs")
        outs = (out.as_posix(), manifest_path.as_posix())
        for identity in settle(HOME, locked, outs, object_finder(root)):
            console.log(f"extract: the spool of {identity[:16]} is removed: DVC holds every byte of it")


def _check_plan(params: Params, target: TargetIdentity, plan: CapturePlan, tokens: Path) -> None:
    """The plan must be the one that these parameters, this target and these tokens give, to the last figure."""
    index = read_index(tokens)
    stored = plan.capture.stored  # the plan was made for ``train.source``, which is no parameter of this stage
    capture = capture_identity(params.extract, target, params.target, index.tokens_sha256, stored)
    if plan.identity != capture.digest:
        raise PlanError(
            f"the plan's capture identity is {plan.identity}, parameters, target and tokens give {capture.digest}",
            REPLAN,
        )
    part = planned_part(tokens, stored)
    if plan != build_plan(part.lengths, capture, target.hidden_size, part.trained_rows):
        raise PlanError("the plan's samples, shards or counts are not those of its own identity", REPLAN)


def _engine(params: Params, target: TargetIdentity, plan: CapturePlan) -> EngineSpec:
    return EngineSpec(
        name=params.extract.engine,
        target=target,
        folder=None if params.extract.engine == "fake" else ensure(target, params.target).resolve(),
        boundaries=plan.capture.boundaries,
        dtype=params.target.dtype,
        device=params.target.device,
        options=dict(params.extract.engine_options),
        trust_remote_code=params.target.trust_remote_code,
    )


def _executor(
    params: Params, engine: EngineSpec, plan: CapturePlan, tokens: Mapping[str, TokenSample]
) -> Executor | None:
    """Workers of a Ray cluster when ``extract.executor`` says so; None for this process."""
    if params.extract.executor == "local":
        return None
    from eyas.engines.ray.driver import RayExecutor

    return RayExecutor(engine, probe_samples(plan, tokens) if engine.name in SERVER_ENGINES else ())


if __name__ == "__main__":
    console.run_main(main)
