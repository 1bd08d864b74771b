"""When nothing may be deleted. Each case is a repository in which a gc would otherwise have something to do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from eyas import fs
from eyas.errors import EyasError
from eyas.generations.trees import mark_retired
from eyas.ops.gc.collect import collect
from eyas.ops.gc.intent import write_plan
from eyas.ops.gc.plan import make_plan, parse_projects
from states_repository import MANIFEST, STATES, StatesRepository

OLD, NEW = ({f"{i}.safetensors": bytes([i + seed]) * 5000 for i in range(3)} for seed in (1, 100))


@pytest.fixture
def repository(tmp_path):
    """The old generation is named by history alone."""
    made = StatesRepository(tmp_path / "repo")
    made.old = made.publish(OLD, engine="vllm")
    made.commit("old")
    made.new = made.publish(NEW, engine="sglang")
    made.commit("new")
    return made


def edit(repository, path: str, text: str) -> None:
    with (repository.root / path).open("a") as handle:
        handle.write(text)


def drop_stage(repository) -> None:
    repository.write_yaml("dvc.yaml", {"stages": {}})


def conflict(repository, command: str) -> None:
    repository.git("checkout", "-qb", "other", "HEAD~1")
    (repository.root / "notes").write_text("theirs")
    repository.commit()
    repository.git("checkout", "-q", "main")
    (repository.root / "notes").write_text("ours")
    repository.commit()
    subprocess.run(["git", *command.split(), "other"], cwd=repository.root, capture_output=True, check=False)
    (repository.root / "notes").write_text("solved")
    repository.git("add", "-A")


def lose_list(repository) -> None:
    repository.object_path(repository.new).unlink()


def damage_list(repository) -> None:
    path = repository.object_path(repository.new)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"0.safetensors", b"9.safetensors"))


def break_branch(repository) -> None:
    repository.git("checkout", "-qb", "broken")
    (repository.root / "dvc.lock").write_text("stages: [oops\n")
    repository.commit()
    repository.git("checkout", "-q", "main")


def plan_unrecorded(repository) -> None:
    """The states that are wanted lie there, but a kill came before dvc.lock named them."""
    identity = json.loads((repository.root / MANIFEST).read_text())["identity"]
    (repository.root / "data/plan.json").write_text(json.dumps({"identity": identity}))
    repository.git("checkout", "-q", "HEAD~1", "--", "dvc.lock", "params.yaml")
    repository.commit("as if it had not been recorded")


def set_cache(repository, text: str) -> None:
    config = repository.root / ".dvc/config"
    config.write_text(config.read_text() + text)
    repository.commit()


CASES = {
    "stage deleted": (drop_stage, "not committed: dvc.yaml"),
    "lock edited": (lambda r: edit(r, "dvc.lock", "# x\n"), "not committed: dvc.lock"),
    "params edited": (lambda r: edit(r, "params.yaml", "x: 1\n"), "not committed: params.yaml"),
    "dvc file not added": (lambda r: edit(r, "raw.dvc", "outs: []\n"), "not committed: raw.dvc"),
    "no lock": (lambda r: (r.root / "dvc.lock").unlink(), "dvc.lock is missing"),
    "list lost": (lose_list, "missing from DVC's cache"),
    "list damaged": (damage_list, "is damaged"),
    "branch does not parse": (break_branch, "branch broken"),
    "merge": (lambda r: conflict(r, "merge"), "a git merge is under way"),
    "cherry-pick": (lambda r: conflict(r, "cherry-pick"), "a git cherry-pick is under way"),
    "rebase": (lambda r: conflict(r, "rebase"), "a git rebase is under way"),
    "unrecorded": (plan_unrecorded, "record them first: make extract"),
    "shared": (lambda r: set_cache(r, "    shared = group\n"), "PROJECTS="),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(repository, name):
    """Case 83 among them: a stage deleted from dvc.yaml and not committed."""
    assert make_plan(repository.root, None).plan_id
    prepare, expected = CASES[name]
    prepare(repository)
    plan = make_plan(repository.root, None)
    said = [f"{what} {hint}" for what, hint in plan.refusals]
    assert any(expected in text for text in said), said
    assert plan.plan_id == ""


def test_refused_while_a_capture_runs(repository):
    """Case 81: whoever holds the lock, plan and gc both refuse and say who."""
    plan = make_plan(repository.root, None)
    write_plan(repository.root, plan.plan_id, plan.projects, plan.snapshot)
    before = repository.objects()
    with fs.volume_lock(repository.root / ".eyas/extract.lock", "extract of abc"):
        (refusal,) = make_plan(repository.root, None).refusals
        assert "locked by extract of abc" in refusal.what
        with pytest.raises(EyasError, match="locked by extract of abc"):
            collect(repository.root, plan.plan_id)
    assert repository.objects() == before
    assert make_plan(repository.root, None).plan_id == plan.plan_id


def test_two_gcs_at_once(repository):
    plan = make_plan(repository.root, None)
    write_plan(repository.root, plan.plan_id, plan.projects, plan.snapshot)
    with (
        fs.volume_lock(repository.root / ".eyas/extract.lock", f"gc {plan.plan_id}"),
        pytest.raises(EyasError, match=f"locked by gc {plan.plan_id}"),
    ):
        collect(repository.root, plan.plan_id)


def test_recorded_states_of_the_wanted_identity_are_no_reason(repository):
    identity = json.loads((repository.root / MANIFEST).read_text())["identity"]
    (repository.root / "data/plan.json").write_text(json.dumps({"identity": identity}))
    plan = make_plan(repository.root, None)
    assert not plan.refusals
    assert repository.new not in plan.going.objects


def test_retired_states_of_the_wanted_identity_may_go(repository):
    plan_unrecorded(repository)
    mark_retired(repository.root, repository.new)
    plan = make_plan(repository.root, None)
    assert not plan.refusals
    assert repository.new in plan.going.objects
    assert f"{STATES}/0.safetensors" in {name.path for name in plan.going.names}


def test_outside_a_repository(tmp_path):
    with pytest.raises(EyasError, match="no DVC repository"):
        make_plan(tmp_path, None)
    (tmp_path / ".dvc").mkdir()
    with pytest.raises(EyasError, match="no git repository"):
        make_plan(tmp_path, None)


# ── a cache that several projects share ───────────────────────────────────────────────────────


def share(repository, other: StatesRepository, folder: Path) -> None:
    repository.root.joinpath(".dvc/cache").rename(folder)
    for one in (repository, other):
        set_cache(one, f"    dir = {folder}\n")


def test_a_cache_elsewhere_needs_its_other_projects(tmp_path, repository):
    other = StatesRepository(tmp_path / "other")
    other.write_yaml("dvc.lock", (json.loads("{}")))
    other.git("remote", "add", "origin", str(repository.root))
    other.git("fetch", "-q", "origin")
    other.git("reset", "-q", "--hard", "origin/main~1")
    share(repository, other, tmp_path / "cache")
    (refusal,) = make_plan(repository.root, None).refusals
    assert "lies outside this repository" in refusal.what
    alone = make_plan(repository.root, parse_projects("none"))
    assert repository.old in alone.going.objects
    both = make_plan(repository.root, parse_projects(str(other.root)))
    assert both.is_empty, "the other project has the old generation in its workspace"
    with pytest.raises(EyasError, match="is no DVC repository"):
        parse_projects(f"{other.root} {tmp_path}")


def test_another_project_with_a_lost_list_refuses(tmp_path, repository):
    other = StatesRepository(tmp_path / "other")
    other.git("fetch", "-q", str(repository.root), "main")
    other.git("reset", "-q", "--hard", "FETCH_HEAD~1")
    share(repository, other, tmp_path / "cache")
    name = repository.old
    (tmp_path / "cache/files/md5" / name[:2] / name[2:]).unlink()
    plan = make_plan(repository.root, parse_projects(str(other.root)))
    assert any(str(other.root) in refusal.what for refusal in plan.refusals)
