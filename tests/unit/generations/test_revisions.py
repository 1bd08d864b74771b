"""Which revisions there are and which of them gc keeps, in real git repositories and with DVC's real experiments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import StoreError
from eyas.generations.kept import kept_objects
from eyas.generations.objects import scan_cache
from eyas.generations.revisions import Revision, read_revisions
from states_repository import STATES, StatesRepository


@pytest.fixture
def repository(tmp_path) -> StatesRepository:
    return StatesRepository(tmp_path / "r")


def states(revision: Revision) -> str:
    """Hash of the states that a revision names."""
    return next((out.name for s in revision.stages for out in s.outs if out.path == STATES), "")


def named(root: Path, kind: str, **options) -> dict[str, str]:
    """Name → hash of the states, of one kind of revision."""
    return {r.name: states(r) for r in read_revisions(root, **{"commits": False, **options}) if r.kind == kind}


def make(repository: StatesRepository, content: bytes, message: str = "c") -> tuple[str, str]:
    """New states, committed: their hash and the commit."""
    name = repository.publish({"000/s": content})
    return name, repository.commit(message)


def test_every_kind_of_name_is_read_at_its_own_state(repository):
    one, _ = make(repository, b"1")
    repository.git("tag", "light")
    two, _ = make(repository, b"2")
    repository.git("tag", "-a", "noted", "-m", "m")
    repository.git("tag", "-a", "noted-twice", "-m", "m", "noted")
    repository.git("branch", "deep/side")
    three, _ = make(repository, b"3")
    four = repository.publish({"000/s": b"4"})
    assert named(repository.root, "workspace") == {"workspace": four}
    assert named(repository.root, "branch") == {"main": three, "deep/side": two}
    assert named(repository.root, "tag") == {"light": one, "noted": two, "noted-twice": two}
    assert all(r.is_kept for r in read_revisions(repository.root, commits=False))


def test_commits_are_read_on_demand_and_keep_nothing(repository):
    hashes = [make(repository, bytes([i]))[0] for i in range(5)]
    commits = [r for r in read_revisions(repository.root, commits=True) if r.kind == "commit"]
    assert sorted(map(states, commits)) == sorted(hashes)
    assert not any(r.is_kept for r in commits)
    kept = kept_objects(read_revisions(repository.root, commits=True), scan_cache(repository.root)).names
    assert hashes[-1] in kept
    assert not kept & set(hashes[:-1])


def test_commit_times_are_gits(repository):
    make(repository, b"1")
    (branch,) = [r for r in read_revisions(repository.root, commits=False) if r.kind == "branch"]
    assert branch.when_s == int(repository.git("log", "-1", "--format=%ct"))
    assert branch.commit == repository.git("rev-parse", "HEAD")


def test_both_sides_of_a_merge_are_read(repository):
    make(repository, b"1")
    repository.git("checkout", "-q", "-b", "side")
    side, _ = make(repository, b"side")
    repository.git("checkout", "-q", "main")
    ours, _ = make(repository, b"ours")
    repository.git("merge", "-q", "-s", "ours", "-m", "m", "side")
    repository.git("branch", "-q", "-D", "side")
    assert {side, ours} <= set(map(states, read_revisions(repository.root, commits=True)))
    assert named(repository.root, "branch") == {"main": ours}


def test_packed_references_count_and_deleted_ones_do_not(repository):
    one, _ = make(repository, b"1")
    repository.git("tag", "gone")
    repository.git("tag", "stays")
    repository.git("branch", "side")
    repository.git("pack-refs", "--all", "--prune")
    repository.git("tag", "-d", "gone")
    two, _ = make(repository, b"2")
    assert named(repository.root, "tag") == {"stays": one}
    assert named(repository.root, "branch") == {"side": one, "main": two}


def test_a_detached_head_is_no_branch_but_the_workspace_counts(repository):
    one, first = make(repository, b"1")
    make(repository, b"2")
    repository.git("checkout", "-q", first)
    lost, _ = make(repository, b"on no branch")
    assert named(repository.root, "workspace") == {"workspace": lost}
    assert lost not in named(repository.root, "branch").values()
    assert {lost, one} <= set(named(repository.root, "commit", commits=True).values())


def test_an_unborn_head_has_a_workspace(repository):
    name = repository.publish({"000/s": b"1"})
    (workspace,) = read_revisions(repository.root, commits=True)
    assert (workspace.kind, workspace.commit, states(workspace)) == ("workspace", "", name)


def test_stashes_notes_and_remote_branches_keep_nothing(repository):
    make(repository, b"1")
    stashed = repository.publish({"000/s": b"stashed"})
    repository.git("stash", "-q")
    commit = repository.git("rev-parse", "HEAD")
    repository.git("update-ref", "refs/remotes/origin/side", commit)
    repository.git("notes", "add", "-m", "n")
    repository.git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/nothing")
    assert set(named(repository.root, "branch")) == {"main"}
    assert {r.kind for r in read_revisions(repository.root, commits=False)} == {"workspace", "branch"}
    assert stashed in named(repository.root, "commit", commits=True).values()


@pytest.mark.parametrize("what", ["blob", "tree"])
def test_a_tag_on_no_commit_is_a_reason_not_to_delete_because_dvc_fails_on_it(repository, what):
    make(repository, b"1")
    inner = repository.git("rev-parse", "HEAD:dvc.lock" if what == "blob" else "HEAD^{tree}")
    repository.git("tag", "odd", inner)
    (problem,) = kept_objects(read_revisions(repository.root, commits=True), scan_cache(repository.root)).problems
    assert "tag odd" in problem
    assert "git tag -d" in problem
    with pytest.raises(Exception, match="odd"):
        repository.gc_would_remove()


def test_a_branch_and_a_tag_of_one_name_are_a_reason_not_to_delete(repository):
    """DVC resolves names as git does, the tag first: it collects what the branch alone names."""
    one, first = make(repository, b"1")
    repository.git("checkout", "-q", "-b", "twice")
    lost, _ = make(repository, b"the branch's own")
    repository.git("checkout", "-q", "main")
    make(repository, b"3")
    repository.git("update-ref", "refs/tags/twice", first)
    assert repository.object_path(lost) in repository.gc_would_remove()
    kept = kept_objects(read_revisions(repository.root, commits=False), scan_cache(repository.root))
    assert {one, lost} <= kept.names
    (problem,) = kept.problems
    assert problem.startswith("branch twice: ")


@pytest.mark.parametrize("name", ["HEAD", "abcdef1", "refs/heads/main", "origin/main", "stash", "workspace", "@"])
def test_odd_names_of_branches_are_read_or_refused_as_dvc_would(repository, name):
    _, first = make(repository, b"1")
    own, commit = make(repository, b"the branch's own")
    repository.git("update-ref", f"refs/heads/{name}", commit)
    repository.git("reset", "-q", "--hard", first)
    repository.git("update-ref", "refs/heads/main", first)
    repository.git("update-ref", "refs/stash", first)
    found = scan_cache(repository.root)
    kept = kept_objects(read_revisions(repository.root, commits=False), found)
    assert own in kept.names
    if not kept.problems:
        assert {found.path(n) for n in found.objects if n not in kept.names} == repository.gc_would_remove()


@pytest.mark.parametrize("length", [7, 40])
def test_a_branch_named_like_a_commit(repository, length):
    _, first = make(repository, b"1")
    own, _ = make(repository, b"the branch's own")
    repository.git("update-ref", f"refs/heads/{first[:length]}", "HEAD")
    repository.git("update-ref", "refs/heads/main", first)
    repository.git("reset", "-q", "--hard", first)
    found = scan_cache(repository.root)
    kept = kept_objects(read_revisions(repository.root, commits=False), found)
    assert own in kept.names
    is_lost = repository.object_path(own) in repository.gc_would_remove()
    assert bool(kept.problems) == is_lost


def test_a_linked_worktree_reads_its_own_files_and_everybodys_names(repository, tmp_path):
    one, _ = make(repository, b"1")
    repository.git("worktree", "add", "-q", "-b", "side", os.fspath(tmp_path / "w"))
    two = repository.publish({"000/s": b"2"})
    assert named(tmp_path / "w", "workspace") == {"workspace": one}
    assert named(tmp_path / "w", "branch") == {"main": one, "side": one}
    assert named(repository.root, "workspace") == {"workspace": two}


def test_a_project_below_the_root_of_git(tmp_path):
    repository = StatesRepository(tmp_path / "r/deep/er", tmp_path / "r")
    (tmp_path / "r/before").write_text("older than the project")
    repository.git("add", "before", cwd=tmp_path / "r")
    repository.git("commit", "-q", "-m", "before", cwd=tmp_path / "r")
    repository.git("tag", "before")
    one, _ = make(repository, b"1")
    (tmp_path / "r/dvc.yaml").write_text("another project's")
    repository.git("add", "-A", cwd=tmp_path / "r")
    repository.git("commit", "-q", "-m", "above", cwd=tmp_path / "r")
    assert named(repository.root, "branch") == {"main": one}
    assert named(repository.root, "workspace") == {"workspace": one}
    assert named(repository.root, "tag") == {"before": ""}


def test_a_root_behind_a_symlink(repository, tmp_path):
    one, _ = make(repository, b"1")
    (tmp_path / "link").symlink_to(repository.root)
    assert named(tmp_path / "link", "branch") == {"main": one}
    assert named(tmp_path / "link", "workspace") == {"workspace": one}


def test_a_shallow_clone_reads_what_it_has(repository, tmp_path):
    for i in range(4):
        hashed, commit = make(repository, bytes([i]))
    repository.git("update-ref", f"refs/exps/{commit[:2]}/{commit[2:]}/deep", commit)
    repository.git("clone", "-q", "--depth", "2", f"file://{repository.root}", os.fspath(tmp_path / "c"))
    assert named(tmp_path / "c", "branch") == {"main": hashed}
    assert len(named(tmp_path / "c", "commit", commits=True)) == 2


def test_an_experiment_whose_beginning_a_shallow_clone_lacks(repository, tmp_path):
    for i in range(4):
        _, commit = make(repository, bytes([i]))
    repository.git("clone", "-q", "--depth", "1", f"file://{repository.root}", os.fspath(tmp_path / "c"))
    repository.git("update-ref", f"refs/exps/{'0' * 2}/{'0' * 38}/cut", commit, cwd=tmp_path / "c")
    assert set(named(tmp_path / "c", "experiment")) == {"cut"}


def test_no_repository_and_a_bare_one_are_refused(tmp_path):
    with pytest.raises(StoreError, match="git repository"):
        read_revisions(tmp_path, commits=False)
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "bare"], check=True)
    with pytest.raises(StoreError, match="bare"):
        read_revisions(tmp_path / "bare", commits=False)


def test_names_that_are_no_text_and_submodules_are_passed_over(repository, tmp_path):
    one, commit = make(repository, b"1")
    (repository.root / os.fsdecode(b"\xff\xfe.bin")).write_bytes(b"x")
    (repository.root / os.fsdecode(b"folder-\xff")).mkdir()
    (repository.root / os.fsdecode(b"folder-\xff/dvc.yaml")).write_text("stages: {}\n")
    repository.commit()
    repository.git("update-index", "--add", "--cacheinfo", f"160000,{commit},module")
    repository.git("commit", "-q", "-m", "module")
    assert named(repository.root, "branch") == {"main": one}
    assert named(repository.root, "workspace") == {"workspace": one}


def test_a_revision_that_cannot_be_read_is_named_with_its_file(repository):
    make(repository, b"1")
    (repository.root / "dvc.lock").write_text("a: [1\n")
    repository.commit()
    repository.git("tag", "torn")
    (repository.root / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n")
    repository.commit()
    (problem,) = kept_objects(read_revisions(repository.root, commits=False), scan_cache(repository.root)).problems
    assert problem.startswith("tag torn: dvc.lock is no YAML")
    with pytest.raises(Exception, match="torn"):
        repository.gc_would_remove()


@pytest.fixture(scope="module")
def experiments(tmp_path_factory) -> StatesRepository:
    """A pipeline that DVC ran itself: two experiments kept, one removed, one saved from the workspace."""
    repository = StatesRepository(tmp_path_factory.mktemp("e") / "r")
    code = "import os; os.makedirs('data/hidden_states', exist_ok=True); "
    code += "open('data/hidden_states/s', 'w').write(open('params.yaml').read())"
    stage = {"cmd": f'{sys.executable} -c "{code}"', "params": ["lr"], "outs": ["data/hidden_states"]}
    repository.write_yaml("dvc.yaml", {"stages": {"extract": stage}})
    repository.write_yaml("params.yaml", {"lr": 1})
    dvc(repository, "repro", "-q")
    repository.commit()
    for name, lr in (("kept", 2), ("gone", 3)):
        dvc(repository, "exp", "run", "-q", "--temp", "-n", name, "-S", f"lr={lr}")
    dvc(repository, "exp", "run", "-q", "--queue", "-n", "queued", "-S", "lr=9")
    dvc(repository, "exp", "remove", "-q", "gone")
    repository.write_yaml("params.yaml", {"lr": 4})
    dvc(repository, "repro", "-q")
    dvc(repository, "exp", "save", "-q", "-n", "saved")
    repository.git("checkout", "-q", ".")
    return repository


def dvc(repository: StatesRepository, *words: str) -> None:
    path = os.pathsep.join((os.fspath(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    environment = os.environ | who | {"PATH": path, "DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(["dvc", *words], cwd=repository.root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"dvc {words}: {done.stdout}{done.stderr}"


@pytest.mark.slow
def test_experiments_that_dvc_ran(experiments):
    found = named(experiments.root, "experiment")
    assert set(found) == {"kept", "saved"}
    assert len({*found.values(), *named(experiments.root, "branch").values()}) == 3


@pytest.mark.slow
def test_experiments_that_dvc_ran_keep_what_dvc_keeps(experiments):
    found = scan_cache(experiments.root)
    kept = kept_objects(read_revisions(experiments.root, commits=False), found)
    removed = {found.path(name) for name in found.objects if name not in kept.names}
    assert removed == experiments.gc_would_remove()
    assert len(removed) == 2, "the removed experiment's file and list"
