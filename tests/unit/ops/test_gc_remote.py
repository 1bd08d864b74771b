"""What a plan says of remotes, against a real DVC and a remote in a folder; no command here deletes on one."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from pathlib import Path

import pytest
from dvc.config import Config
from gc_cases import Project

from eyas.ops.gc import holdings as room
from eyas.ops.gc.plan import make_plan
from eyas.ops.gc.remote import Remote as Remotes
from eyas.ops.gc.remote import remote_folder, remotes

STRAY = "aa" * 16


class Remote:
    """The files of a remote, looked at without eyas."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "files/md5"

    @property
    def objects(self) -> dict[str, int]:
        return {p.parent.name + p.name: p.stat().st_size for p in self.base.glob("*/*") if p.is_file()}


@pytest.fixture
def pushed(tmp_path):
    """Two pushed generations, the older one named by its commit alone, and an object that no commit names."""
    project = Project(tmp_path / "repo")
    project.ok("dvc", "remote", "add", "-q", "-d", "store", os.fspath(tmp_path / "store"))
    old, old_objects = project.generation(1, shared=1), project.md5s()
    project.ok("dvc", "push", "-q")
    new, new_objects = project.generation(2, shared=1), project.md5s()
    project.ok("dvc", "push", "-q")
    remote = Remote(tmp_path / "store")
    stray = remote.base / STRAY[:2] / STRAY[2:]
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"x" * 1234)
    return project, remote, (old, old_objects), (new, new_objects)


def dvc_would_remove(project: Project, command: str, remote: Remote) -> set[str]:
    """Objects of the remote that DVC says it would remove."""
    said = project.ok(*shlex.split(command), "--dry", "--force")
    paths = [Path(line.removeprefix("Removing ")) for line in said.splitlines() if line.startswith("Removing ")]
    return {path.parent.name + path.name for path in paths if path.is_relative_to(remote.base)}


def test_a_remote_is_told_apart_by_what_names_its_objects_as_dvc_would(pushed):
    project, remote, (old, old_objects), (_, new_objects) = pushed
    there = remote.objects
    plan = project.plan()
    [held] = plan["remotes"]
    assert held["is_known"]
    by_dvc = {kind: dvc_would_remove(project, command, remote) for kind, command in held["commands"].items()}
    assert by_dvc["unnamed"] == {STRAY}
    only_old = by_dvc["old"] - {STRAY}
    assert only_old >= (old_objects - new_objects) >= {old}
    assert (held["unnamed"]["num_objects"], held["unnamed"]["num_bytes"]) == (1, 1234)
    assert sum(share["num_objects"] for share in held["old"]) == len(only_old)
    assert held["old_bytes"] == sum(there[name] for name in only_old)
    assert held["needed"]["num_bytes"] == sum(size for name, size in there.items() if name not in by_dvc["old"])
    [states] = [share for share in held["old"] if share["title"] == f"data/hidden_states {old[:10]}"]
    assert states["num_bytes"] == sum(there[name] for name in old_objects - new_objects)
    assert states["last_named_by"].startswith("commit ")


def test_after_gc_here_the_remote_still_tells_what_the_old_commit_names(pushed):
    """The list of the old folder lies on the remote alone by then; nothing of it was deleted there."""
    project, remote, (old, _), _ = pushed
    before, plan = remote.objects, project.plan()
    [row] = plan["generations"]
    assert (row["hash"], row["num_pushed"]) == (old, row["num_objects"])
    project.gc(plan["plan_id"])
    assert old not in project.objects
    assert remote.objects == before
    assert project.plan()["remotes"] == plan["remotes"]
    (remote.base / old[:2] / old[2:]).unlink()
    [held] = project.plan()["remotes"]
    assert held["num_lost_lists"] == 1
    assert held["unnamed"]["num_bytes"] > 1234, "nobody knows any more whose files those are"
    project.ok("git", "tag", "keep/it", "HEAD~1")
    assert not project.plan(code=1)["remotes"][0]["is_known"], "a kept list is nowhere: what is in use is not certain"


def test_what_a_tag_or_an_adopted_set_names_is_in_use(pushed):
    project, remote, (old, old_objects), _ = pushed
    project.ok("git", "tag", "keep/old", "HEAD~1")
    [held] = project.plan()["remotes"]
    assert (held["old"], held["needed"]["num_objects"]) == ([], len(remote.objects) - 1)
    assert old in old_objects
    project.ok("git", "tag", "-d", "keep/old")
    folder = project.root.parent / "their_states"
    folder.mkdir()
    theirs = os.urandom(3000)
    (folder / "data_0.pt").write_bytes(theirs)
    done = project.eyas("adopt", "--dir", str(folder), "--engine", "vllm", "--format", "other", "--name", "theirs")
    assert done.returncode == 0, done.stderr
    project.commit("adopted")
    project.ok("dvc", "push", "-q", "adopted/theirs.dvc")
    [after] = project.plan()["remotes"]
    kept = remote.objects.keys() - dvc_would_remove(project, after["commands"]["old"], remote)
    assert after["needed"]["num_bytes"] == sum(remote.objects[name] for name in kept)
    assert hashlib.md5(theirs).hexdigest() in kept
    assert after["unnamed"]["num_bytes"] == 1234
    assert dvc_would_remove(project, after["commands"]["unnamed"], remote) == {STRAY}


def test_people_read_bytes_and_commands_and_gc_leaves_the_remote_alone(pushed):
    project, remote, *_ = pushed
    before = remote.objects
    text = project.eyas("gc-plan").stdout
    assert re.search(r"named by no commit here +1 +1\.2 kB", text)
    assert "gc deletes on no remote" in text
    assert "--all-commits --all-experiments --cloud --remote store" in text
    assert re.search(r"last named by +pushed", text)
    assert remote.objects == before


def test_an_object_that_a_power_loss_emptied_on_the_remote_is_not_pushed(pushed):
    project, remote, (old, old_objects), (_, new_objects) = pushed
    name = next(iter(sorted(old_objects - new_objects - {old})))
    (remote.base / name[:2] / name[2:]).chmod(0o644)
    (remote.base / name[:2] / name[2:]).write_bytes(b"")
    [row] = project.plan()["generations"]
    assert row["num_pushed"] == row["num_objects"] - 1


def test_other_outputs_that_go_are_said_to_be_pushed_or_not(pushed):
    """Also what is no generation: an object here that no commit names."""
    project, *_ = pushed
    for name in ("bb" * 16, STRAY):
        path = project.root / ".dvc/cache/files/md5" / name[:2] / name[2:]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 1234)
    [row] = [one for one in project.plan()["others"] if one["title"] == "named by no commit"]
    assert (row["num_objects"], row["num_pushed"]) == (2, 1)


def test_a_remote_that_is_gone_is_not_known(pushed):
    project, remote, *_ = pushed
    remote.base.parent.parent.rename(project.root.parent / "moved")
    [held] = project.plan()["remotes"]
    assert not held["is_known"]
    assert "is not known" in project.eyas("gc-plan").stdout


def test_a_remote_that_is_no_folder_is_listed_by_dvc_alike(pushed, monkeypatch):
    """The same remote asked through DVC, as a bucket is."""
    project, *_ = pushed
    plan = project.plan()
    project.gc(plan["plan_id"])  # the old list must come from the remote as well
    expected = make_plan(project.root, None).holdings
    monkeypatch.setattr(room, "remote_folder", lambda *_: None)
    assert make_plan(project.root, None).holdings == expected
    assert expected[0].num_lost_lists == 0
    assert expected[0].old


def test_commands_name_the_projects_whose_objects_count_as_in_use(pushed, tmp_path):
    """Without them DVC takes for unneeded what another repository on the same remote names."""
    project, remote, *_ = pushed
    other = Project(tmp_path / "an other")
    other.ok("dvc", "remote", "add", "-q", "-d", "store", os.fspath(tmp_path / "store"))
    other.generation(3, shared=2)
    other.ok("dvc", "push", "-q")
    [held] = make_plan(project.root, (other.root,)).holdings
    for command in held.commands:
        would_remove = dvc_would_remove(project, command, remote)
        assert STRAY in would_remove
        assert not would_remove & other.md5s()


def test_a_remote_in_the_home_folder_is_where_dvc_takes_it_to_be(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    assert remote_folder(Remotes("store", "~/store", tmp_path / "repo/.dvc")) == tmp_path / "store"


SETTINGS = {
    "system": "['remote \"of_the_machine\"']\n    url = ../pool  # for all\n['remote \"moved\"']\n    url = /nowhere\n",
    "user": '[core]\n    remote = Mine\n[\'remote "Mine"\']\n    url = "~/an #1 store"\n',
    "repo/.dvc": "['remote \"moved\"']\n    url = ../../store\n['remote \"bucket\"']\n    url = s3://bucket/x\n",
}


def test_remotes_are_those_that_dvc_itself_sees(tmp_path, monkeypatch):
    """Of the system, of the user and of the repository; each path relative to the file that names it."""
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    monkeypatch.setenv("DVC_SYSTEM_CONFIG_DIR", os.fspath(tmp_path / "system"))
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", os.fspath(tmp_path / "user"))
    for folder, text in SETTINGS.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config").write_text(text)
    by_dvc = {name: one["url"] for name, one in Config(os.fspath(tmp_path / "repo/.dvc"))["remote"].items()}
    ours = {one.name: os.fspath(remote_folder(one) or one.url) for one in remotes(tmp_path / "repo")}
    assert ours == by_dvc
    assert ours["mine"] == f"{tmp_path}/an #1 store"
    assert ours["moved"] == f"{tmp_path}/store"


def test_a_remote_of_the_user_s_own_settings_counts_in_a_plan(tmp_path, monkeypatch):
    """``dvc remote add --global``: the repository's own settings do not name it, and DVC pushes there."""
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", os.fspath(tmp_path / "user"))
    project = Project(tmp_path / "repo")
    project.ok("dvc", "remote", "add", "-q", "--global", "-d", "store", os.fspath(tmp_path / "store"))
    project.generation(1)
    project.ok("dvc", "push", "-q")
    project.generation(2)
    plan = project.plan()
    [row] = plan["generations"]
    assert row["num_pushed"] == row["num_objects"] > 0
    [held] = plan["remotes"]
    assert (held["remote"], held["is_known"]) == ("store", True)
    assert not [said for said in plan["warnings"] if "no remote" in said]
