"""Situations made to have gc delete what somebody still needs: copies, worktrees, overlaps, undone retirements."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gc_cases import mounted

from eyas.errors import StoreError
from eyas.generations import ledger
from eyas.generations.listing import list_generations, read_situation
from eyas.ops.adopt.folder import AdoptRequest, adopt, adopted_rows
from eyas.ops.gc import collect as gc
from eyas.ops.gc import measure as gc_measure
from eyas.ops.gc.collect import collect
from eyas.ops.gc.intent import PLANS, read_plan, write_plan
from eyas.ops.gc.plan import GcPlan, make_plan, parse_projects
from eyas.ops.retire import keep, retire, retired_text
from states_repository import MANIFEST, STATES, StatesRepository

FIRST, SECOND = ({f"{i}.safetensors": bytes([i + seed]) * 5000 for i in range(3)} for seed in (1, 100))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(gc_measure, "SETTLE_S", 0.1)  # what is freed is not the question here
    made = StatesRepository(tmp_path / "repo")
    made.first = made.publish(FIRST, engine="vllm")
    made.commit("first")
    return made


def adopted(repository, folder: Path, name: str, files=("a", "b")) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / file).exists():
            (folder / file).write_bytes(file.encode() * 3000)
    adopt(repository.root, AdoptRequest(folder=folder, engine="vllm", layout="other", name=name))
    repository.commit(f"adopt {name}")


def given_up(repository, name: str) -> GcPlan:
    retire(repository.root, name)
    repository.commit(f"retire {name}")
    plan = make_plan(repository.root, None)
    assert not plan.refusals
    write_plan(repository.root, plan.plan_id, plan.projects, plan.snapshot)
    return plan


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def names(plan: GcPlan) -> set[str]:
    return {name.path for name in plan.going.names}


def test_a_copy_of_the_repository_does_not_own_the_folder_that_was_adopted(repository, tmp_path):
    """Its notes name the folder by an absolute path, with inodes and times that are still right."""
    adopted(repository, tmp_path / "old", "mine")
    subprocess.run(["cp", "-a", repository.root, tmp_path / "copy"], check=True)
    twin = object.__new__(StatesRepository)
    twin.root = twin.git_root = tmp_path / "copy"
    assert not {path for path in names(given_up(twin, "mine")) if path.startswith(f"{tmp_path}/old")}
    repository.root.rename(tmp_path / "moved")
    repository.root = repository.git_root = tmp_path / "moved"
    assert {f"{tmp_path}/old/a", f"{tmp_path}/old/b"} <= names(given_up(repository, "mine"))


def test_a_folder_within_an_adopted_folder_that_stays(repository, tmp_path):
    adopted(repository, tmp_path / "all", "whole", ["sub/a", "sub/b", "c"])
    adopted(repository, tmp_path / "all/sub", "part")
    plan = given_up(repository, "part")
    assert {"adopted/part/a", "adopted/part/b"} <= names(plan)
    collect(repository.root, plan.plan_id)
    assert listed(tmp_path / "all/sub") == ["a", "b"]
    assert not (repository.root / "adopted/part").exists()
    assert {f"{tmp_path}/all/sub/a", f"{tmp_path}/all/c"} <= names(given_up(repository, "whole"))


def test_a_gc_that_goes_on_leaves_what_was_checked_out_meanwhile(repository):
    """The two generations share a file: the same inode lies in the same place for the one and then for the other."""
    shared = {"0.safetensors": FIRST["0.safetensors"], "9.safetensors": b"9" * 5000}
    repository.git("branch", "keeps")
    repository.publish(shared, engine="sglang")
    repository.commit("second")
    plan = given_up(repository, repository.root.joinpath("dvc.lock").read_text().split("md5: ")[1][:10])
    assert f"{STATES}/0.safetensors" in names(plan)
    gc._begin(repository.root, read_plan(repository.root, plan.plan_id) or {})
    repository.git("checkout", "-q", "keeps")
    repository.publish(FIRST, engine="vllm")
    repository.git("checkout", "-q", ".")
    collect(repository.root, plan.plan_id)
    assert {path: (repository.root / STATES / path).read_bytes() for path in FIRST} == FIRST


def test_a_name_that_may_not_be_removed_does_not_stop_a_gc_for_ever(repository, tmp_path):
    adopted(repository, tmp_path / "old", "mine")
    plan = given_up(repository, "mine")
    if subprocess.run(["chattr", "+i", tmp_path / "old"], capture_output=True, check=False).returncode:
        pytest.skip("no immutable folders here")
    try:
        event = collect(repository.root, plan.plan_id)
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "old"], check=True)
    assert listed(tmp_path / "old") == ["a", "b"]
    assert any("2 names may not be removed" in note and "Operation not permitted" in note for note in event["notes"])
    assert make_plan(repository.root, None).is_empty


def test_a_worktree_on_the_same_cache(repository, tmp_path):
    """What is checked out there at a bare commit, no branch names; DVC keeps it when it is told of the worktree."""
    repository.publish(SECOND, engine="sglang")
    repository.commit("second")
    other = tmp_path / "other tree"
    repository.git("worktree", "add", "-q", "--detach", os.fspath(other), "HEAD~1")
    assert not make_plan(repository.root, None).refusals  # a cache of its own
    (other / ".dvc/config.local").write_text(f"[cache]\n    dir = {repository.root}/.dvc/cache\n")
    (refusal,) = make_plan(repository.root, ()).refusals
    assert "worktree of this git repository" in refusal.what
    assert refusal.hint == f"name it: PROJECTS=\"'{other}'\""
    plan = make_plan(repository.root, parse_projects(f"'{other}'"))
    assert not plan.refusals
    assert repository.first not in plan.going.objects


def test_a_cache_that_is_a_mount_of_its_own(repository, tmp_path):
    """A bind mount of a common cache lies, by its path, inside the repository."""
    repository.publish(SECOND, engine="sglang")
    repository.commit("second")
    shutil.copytree(repository.root / ".dvc/cache", tmp_path / "common")
    mount = ["mount", "--bind", tmp_path / "common", repository.root / ".dvc/cache"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (refusal,) = make_plan(repository.root, None).refusals
        assert "is a mount of its own" in refusal.what
        assert not make_plan(repository.root, ()).refusals
    finally:
        subprocess.run(["umount", repository.root / ".dvc/cache"], check=True)


def test_a_retirement_that_was_taken_back_excuses_no_later_loss(repository):
    identity = json.loads((repository.root / MANIFEST).read_text())["identity"]
    (repository.root / "data/plan.json").write_text(json.dumps({"identity": identity}))
    retire(repository.root, repository.first[:10])
    repository.git("checkout", "-q", "dvc.lock")
    repository.write_yaml("dvc.lock", {"schema": "2.0", "stages": {}})
    repository.commit("lost")
    (refusal,) = make_plan(repository.root, None).refusals
    assert "holds the finished states that data/plan.json wants" in refusal.what
    retire(repository.root, repository.first[:10])
    assert not make_plan(repository.root, None).refusals


def test_a_retired_spool_that_is_recorded_after_all(repository):
    manifest = json.loads((repository.root / MANIFEST).read_text())
    home = repository.root / ".eyas/spool" / manifest["identity"]
    shutil.copytree(repository.root / STATES, home / "states")
    shutil.copy(repository.root / MANIFEST, home / "manifest.json")
    (home / "retired").touch()
    plan = make_plan(repository.root, None)
    assert plan.is_empty
    assert [generation.hash for generation in plan.kept] == [repository.first]


def test_a_commit_that_only_the_reflog_has(repository):
    """``git commit --amend``: the generation is still known by what it is, and can be pinned."""
    repository.publish(SECOND, engine="sglang")
    repository.git("add", "-A")
    repository.git("commit", "-q", "--amend", "-m", "another")
    plan = make_plan(repository.root, None)
    (row,) = [row for row in plan.rows if row.hash]
    assert (row.hash, row.kind) == (repository.first, "pipeline")
    assert any("no branch or tag leads there any more" in warning for warning in plan.warnings)
    repository.git("config", "tag.gpgSign", "true")
    keep(repository.root, repository.first[:10], "amended")
    assert make_plan(repository.root, None).is_empty


def test_a_second_stash_is_in_the_reflog_alone(repository):
    for seed in (7, 8):
        repository.publish({"0.safetensors": bytes([seed]) * 4000}, engine=f"e{seed}")
        repository.git("stash", "-q")
    found = list_generations(read_situation(repository.root, commits=True))
    named = {generation.facts.engine for generation in found}
    assert {"e7", "e8"} <= named
    plan = make_plan(repository.root, None)
    assert sum("no local branch or tag does" in w or "leads there any more" in w for w in plan.warnings) == 2


def test_a_clone_without_the_contents_of_other_branches(repository, tmp_path):
    repository.git("branch", "other")
    repository.publish(SECOND, engine="sglang")
    repository.commit("second")
    repository.git("config", "uploadpack.allowFilter", "true")
    clone = tmp_path / "clone"
    repository.git("clone", "-q", "--filter=blob:none", f"file://{repository.root}", os.fspath(clone))
    repository.git("branch", "other", "origin/other", cwd=clone)
    (problem,) = [one for one in read_situation(clone).kept.problems if one.startswith("branch other")]
    assert "git lacks objects of it" in problem


@pytest.mark.parametrize("place", ["tmpabc123", "standalone/tmpabc123"])
def test_an_experiment_that_runs_in_a_folder_of_its_own(repository, place):
    """DVC copies the repository there; the outputs of its finished stages are in the cache and named only there."""
    repository.put(b"just made")
    (repository.root / ".dvc/tmp/exps" / place).mkdir(parents=True)
    (refusal,) = make_plan(repository.root, None).refusals
    assert "an experiment of DVC's runs in" in refusal.what


def test_projects_with_spaces(repository, tmp_path):
    other = tmp_path / "with a space"
    (other / ".dvc").mkdir(parents=True)
    assert parse_projects(f"'{other}' {repository.root}") == (other, repository.root)
    with pytest.raises(StoreError, match="quotation"):
        parse_projects(f"'{other}")


def test_a_plan_under_another_name_is_none(repository):
    repository.put(b"rubbish")
    plan = make_plan(repository.root, None)
    write_plan(repository.root, plan.plan_id, plan.projects, plan.snapshot)
    folder = repository.root / PLANS
    (folder / f"{plan.plan_id}.json").rename(folder / "0123456789abcdef.json")
    assert read_plan(repository.root, "0123456789abcdef") is None


def test_objects_of_a_name_twice(repository, tmp_path):
    """The same bytes adopted twice under two names are one generation: it goes when both names are gone."""
    adopted(repository, tmp_path / "old", "one")
    shutil.copytree(tmp_path / "old", tmp_path / "twin")
    adopted(repository, tmp_path / "twin", "two")
    (repository.root / "adopted/one.dvc").unlink()
    repository.commit("one of them")
    assert make_plan(repository.root, None).is_empty
    assert listed(tmp_path / "old") == ["a", "b"]


def test_a_disk_that_is_full_to_the_last_byte(tmp_path):
    """The plan says how little room is lacking; with so much, gc frees the rest."""
    with mounted(tmp_path / "volume", "tmpfs", 16) as point:
        full = StatesRepository(point / "repo")
        full.put(b"rubbish" * 100_000)
        full.publish(FIRST)
        full.commit("first")
        stat = os.statvfs(point)
        (point / "ballast").write_bytes(bytes(2 << 20))
        (point / "fill").write_bytes(bytes((stat.f_bfree * stat.f_frsize - (2 << 20)) // 4096 * 4096))
        (refusal,) = make_plan(full.root, None).refusals
        assert refusal.what.startswith("0 bytes are free on this volume, and gc writes up to 1,0")
        (point / "ballast").unlink()
        plan = make_plan(full.root, None)
        write_plan(full.root, plan.plan_id, plan.projects, plan.snapshot)
        assert collect(full.root, plan.plan_id)["expected_bytes"] == 700_416


def test_an_adopted_folder_that_was_moved_and_linked(repository, tmp_path):
    """The link leads to the very files, but who moved them wanted them kept."""
    adopted(repository, tmp_path / "old", "mine")
    (tmp_path / "old").rename(tmp_path / "precious")
    (tmp_path / "old").symlink_to("precious")
    collect(repository.root, given_up(repository, "mine").plan_id)
    assert listed(tmp_path / "precious") == ["a", "b"]


def test_an_adoption_that_git_passes_over(repository, tmp_path):
    """DVC reads no file that git ignores: what it names would go, and the folder it came from."""
    adopted(repository, tmp_path / "old", "mine")
    (repository.root / ".gitignore").write_text("/data\n/.eyas\n*.dvc\n")
    with pytest.raises(StoreError, match="rules pass over adopted/other"):
        adopted(repository, tmp_path / "other", "other")
    repository.git("rm", "-q", "--cached", "adopted/mine.dvc")
    repository.commit("no .dvc files")
    (refusal,) = make_plan(repository.root, None).refusals
    assert refusal.what.startswith("adopted/mine.dvc is passed over by git's rules")


def test_the_way_back_from_a_retirement_that_git_does_not_know(repository):
    assert "undo: git checkout dvc.lock" in retired_text(retire(repository.root, repository.first[:10]))
    repository.git("checkout", "-q", "dvc.lock")
    second = repository.publish(SECOND, engine="sglang")
    text = retired_text(retire(repository.root, second[:10]))
    assert "the last commit does not have it" in text
    assert "git checkout dvc.lock" not in text


def test_a_ledger_of_rubbish_stops_nothing(repository):
    repository.put(b"rubbish")
    (repository.root / ".eyas").mkdir()
    (repository.root / ".eyas/ledger.jsonl").write_bytes(b"\xff\n[1]\n" + b"[" * 100_000 + b'\n{"event": "gc"')
    plan = make_plan(repository.root, None)
    write_plan(repository.root, plan.plan_id, plan.projects, plan.snapshot)
    event = collect(repository.root, plan.plan_id)
    assert [told for told in ledger.read(repository.root) if told.get("plan_id") == plan.plan_id][-1]["run"] == event[
        "run"
    ]


def test_a_folder_of_another_repository_is_adopted_with_a_warning(repository, tmp_path, monkeypatch):
    """gc would delete that one's names for its own states, and free little: its cache has the same files."""
    other = StatesRepository(tmp_path / "other")
    other.publish(SECOND)
    monkeypatch.chdir(repository.root)
    request = AdoptRequest(folder=other.root / STATES, engine="vllm", layout="other", name="theirs")
    told = [str(value) for name, value in adopted_rows(adopt(repository.root, request)) if name == "warning"]
    assert any(f"it lies in {other.root}, a repository of DVC's" in text for text in told)


def test_without_a_remote_one_warning_is_enough(repository):
    for seed in (50, 60):
        repository.publish({"0.safetensors": bytes([seed]) * 4000}, engine=f"e{seed}")
        repository.commit(f"{seed}")
    about_copies = [w for w in make_plan(repository.root, None).warnings if "remote" in w]
    assert about_copies == ["DVC has no remote: for what goes, this is the only copy"]
