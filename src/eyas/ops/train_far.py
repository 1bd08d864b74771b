"""``eyas train-far``: the train stage as ``dvc.yaml`` has it, its states on a remote and not here, noted in ``dvc.lock``.

``dvc repro`` runs no stage whose dependency is missing, whatever ``--allow-missing`` says (that skips stages which are
unchanged), and would first capture the states again. Here DVC runs the one stage and notes it; what it cannot hash, the
missing states, has the hash under which their own stage is locked. Nothing upstream runs, nothing of it is deleted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas import config, console
from eyas.config.images import check_image
from eyas.errors import EyasError, StoreError
from eyas.plan.cache import hashes, locked_stage, object_finder
from eyas.shards.handover import HOME

STAGE, DRAFTER = "train", "models/drafter"


def train_far(root: Path) -> None:
    """Run the train stage and note it, unless DVC has it as up to date.

    Args:
        root: The repository; ``EYAS_SHARD_CACHE_BYTES`` lets the stage read from the remote.

    Raises:
        ConfigError: A parameter is wrong, or this is not the pinned image; DVC has emptied nothing yet.
        StoreError: What is missing was never made, or something before the training is out of date.
        EyasError: The stage failed.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    from eyas.train import finished

    check_image("train.image", config.load(root / config.PARAMS_PATH).train.image)
    try:
        with Repo(str(root)) as repo, repo.lock:
            (stage,) = repo.stage.collect(STAGE)
            before = _all_before(repo.index.graph, stage)
            made = {out.fs_path: out for one in before for out in one.outs}
            _check_before(before)
            for dep in stage.deps:
                _check_dep(dep, made)
            is_stale = _is_stale(stage, before)
            if not is_stale:
                _check_out(stage)
            if not is_stale and not stage.changed_outs():
                console.log(f"Stage '{STAGE}' didn't change, skipping")
                return
            for dep in stage.deps:
                if not dep.exists:
                    _take_as_locked(dep, made[dep.fs_path])
            stage.run(force=True)
            stage.dump(update_pipeline=False)
    except DvcException as error:
        raise EyasError(f"{STAGE}: {error}", "its own lines above say why; the same command goes on") from None
    finished.settle(root / HOME / "train", hashes(locked_stage(root, STAGE), "outs").get(DRAFTER), object_finder(root))


def _all_before(graph: Any, stage: Any) -> list[Any]:
    found, todo = [], [stage]
    while todo:
        new = [one for one in graph.successors(todo.pop()) if one not in found]
        found += new
        todo += new
    return found


def _take_as_locked(dep: Any, out: Any) -> None:
    """Let DVC note a dependency that it cannot hash."""
    dep.hash_info, dep.meta = out.hash_info, out.meta
    dep.get_hash, dep.save = lambda: out.hash_info, lambda: None


def _is_stale(stage: Any, before: list[Any]) -> bool:
    return stage.changed_stage() or stage.changed_deps(allow_missing=True, upstream=before)


def _check_out(stage: Any) -> None:
    """Bring back what is missing here and whole in DVC's cache: nothing changed, so no night of training is due."""
    for out in stage.outs:
        if out.use_cache and out.hash_info and not out.exists and not out.changed_cache():
            out.checkout()


def _check_before(stages: list[Any]) -> None:
    """Refuse when parameters, tokens or anything else that the states came from is another than when they were made."""
    for stage in stages:
        upstream = [one for one in stages if one is not stage]
        if _is_stale(stage, upstream):
            raise StoreError(
                f"stage {stage.name} is out of date: the states on the remote are not those of these parameters",
                f"`dvc status {stage.name}` says what changed; `git checkout params.yaml dvc.lock` has what was pushed",
            )


def _check_dep(dep: Any, made: dict[str, Any]) -> None:
    """What is there must be what its own stage is locked with; what is not must be locked at all."""
    out = made.get(dep.fs_path)
    if out is None:
        return
    if not out.hash_info:
        raise StoreError(
            f"dvc.lock does not name {dep}: it was never made", "`make extract` where the states come from"
        )
    if dep.exists and dep.get_hash() != out.hash_info:
        raise StoreError(f"{dep} is not the one that dvc.lock names", f"`dvc pull {dep}`, or `dvc checkout {dep}`")
    if not dep.exists and not out.hash_info.isdir:
        raise StoreError(f"{dep} is missing", f"`dvc pull {dep}`: hidden states alone may be missing")
