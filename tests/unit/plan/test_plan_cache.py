import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import DiskError, StoreError
from eyas.plan.cache import (
    SITE_CACHE,
    cache_dir,
    cache_types,
    check_links,
    hashes,
    locked_stage,
    site_cache_dir,
)

ROOT = Path(__file__).parents[3]


def repository(root: Path, config: str, local: str = "") -> Path:
    (root / ".dvc").mkdir()
    (root / ".dvc" / "config").write_text(config)
    (root / ".dvc" / "config.local").write_text(local)
    return root


def test_no_repository_has_no_types(tmp_path):
    assert cache_types(tmp_path) == ()
    check_links(tmp_path)


def test_dvc_defaults_stand_without_a_setting(tmp_path):
    """DVC documents ``reflink,copy`` as its default."""
    root = repository(tmp_path, "[core]\n    analytics = false\n")
    assert (cache_types(root), cache_dir(root)) == (("reflink", "copy"), root / ".dvc" / "cache")


def test_local_settings_win(tmp_path):
    root = repository(
        tmp_path, '[cache]\n    type = "reflink,copy"\n    dir = here\n', "[cache]\n    type = hardlink\n"
    )
    assert (cache_types(root), cache_dir(root)) == (("hardlink",), root / ".dvc" / "here")


def test_settings_of_the_user_and_of_the_system_count_as_dvc_counts_them(tmp_path, monkeypatch):
    for level, kind in (("SYSTEM", "copy"), ("GLOBAL", "symlink")):
        (tmp_path / level).mkdir()
        monkeypatch.setenv(f"DVC_{level}_CONFIG_DIR", str(tmp_path / level))
        (tmp_path / level / "config").write_text(f"[cache]\n    type = {kind}\n    dir = {tmp_path}/{level}/cache\n")
    (tmp_path / "project").mkdir()
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=tmp_path / "project", check=True)
    told = subprocess.run(
        [sys.executable, "-m", "dvc", "cache", "dir"],
        cwd=tmp_path / "project",
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(cache_dir(tmp_path / "project")) == told.stdout.strip() == f"{tmp_path}/GLOBAL/cache"
    assert cache_types(tmp_path / "project") == ("symlink",)


def test_the_repository_itself_commits_by_links():
    assert cache_types(ROOT)[0] == "hardlink"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no second mount")
def test_a_cache_on_another_mount_is_refused(tmp_path):
    """Case 22."""
    root = repository(tmp_path, "[cache]\n    type = hardlink\n    dir = /dev/shm\n")
    with pytest.raises(DiskError, match="two mounts") as caught:
        check_links(root)
    assert "dvc cache dir --local" in caught.value.hint


def test_two_bind_mounts_of_one_file_system_are_named_with_the_fix(tmp_path):
    """Case 22: as with ``docker run -v repo:/repo -v cache:/cache``; link(2) refuses, ``st_dev`` is the same."""
    for name in ("host/repo", "host/cache", "repo", "cache"):
        (tmp_path / name).mkdir(parents=True)
    repository(tmp_path / "host/repo", f"[cache]\n    type = hardlink\n    dir = {tmp_path}/cache\n")
    script = f"""
mount --bind {tmp_path}/host/repo {tmp_path}/repo && mount --bind {tmp_path}/host/cache {tmp_path}/cache || exit 77
exec {sys.executable} -c '
from pathlib import Path
from eyas import console
from eyas.plan.cache import check_links
console.run_main(lambda _: check_links(Path("{tmp_path}/repo")))'
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "--mount", "bash", "-c", script]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 2
    assert f"two mounts, {tmp_path}/repo (" in done.stderr
    assert f") and {tmp_path}/cache (" in done.stderr
    assert f"dvc cache dir --local {tmp_path}/repo/.dvc/cache" in done.stderr
    assert "mount the folder that holds both once" in done.stderr


def test_the_state_lies_where_environment_or_settings_say(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    root = repository(tmp_path, "[core]\n    analytics = false\n")
    assert site_cache_dir(root) is None
    (root / ".dvc/config.local").write_text("[core]\n    site_cache_dir = /there\n")
    assert site_cache_dir(root) == Path("/there")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", "/elsewhere")
    assert site_cache_dir(root) == Path("/elsewhere")


@pytest.mark.slow
def test_dvc_itself_takes_its_state_from_where_we_say(tmp_path, monkeypatch):
    """The premise of ``site_cache_dir``, asked of the installed DVC."""
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    run = ["dvc", "--cd", str(tmp_path)]
    subprocess.run([*run, "init", "--no-scm", "-q"], check=True)
    subprocess.run([*run, "config", "--local", "core.site_cache_dir", str(tmp_path / SITE_CACHE)], check=True)
    assert site_cache_dir(tmp_path) == tmp_path / SITE_CACHE
    (tmp_path / "file").write_text("content")
    subprocess.run([*run, "add", "-q", "file"], check=True)
    assert list((tmp_path / SITE_CACHE / "repo").iterdir())
    said = subprocess.run([*run, "doctor"], check=True, capture_output=True, text=True).stdout
    assert f"Repo.site_cache_dir: {tmp_path / SITE_CACHE}" in said


@pytest.mark.parametrize(("text", "problem"), [("a: [1", "is no YAML"), ("- a", "expected a mapping")])
def test_a_damaged_lock_is_an_error_with_its_name(tmp_path, text, problem):
    (tmp_path / "dvc.lock").write_text(text)
    with pytest.raises(StoreError, match=problem):
        locked_stage(tmp_path, "extract")


def test_a_stage_that_never_ran_has_no_entry(tmp_path):
    assert locked_stage(tmp_path, "extract") == {}
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages:\n  plan:\n    cmd: p\n")
    assert (locked_stage(tmp_path, "extract"), hashes(locked_stage(tmp_path, "plan"), "outs")) == ({}, {})


@pytest.mark.slow
def test_dvc_links_folders_with_our_setting_and_copies_them_with_reflink_first(tmp_path):
    """The premise of ``peak_copies``, asked of the installed DVC on a file system without reflinks."""
    links = {}
    for types in ("hardlink,reflink", "reflink,hardlink"):
        root = tmp_path / types
        root.mkdir()
        run = ["dvc", "--cd", str(root)]
        subprocess.run([*run, "init", "--no-scm", "-q"], check=True)
        subprocess.run([*run, "config", "cache.type", types], check=True)
        (root / "dvc.yaml").write_text("stages:\n  s:\n    cmd: mkdir out && echo shard > out/a\n    outs: [out]\n")
        subprocess.run([*run, "repro", "-q"], check=True)
        links[types] = (root / "out" / "a").stat().st_nlink
    assert links == {"hardlink,reflink": 2, "reflink,hardlink": 1}


@pytest.mark.parametrize("level", ["--global", "--project", "--local"])
@pytest.mark.parametrize("named", ["~/cache", "../there", "/data/cache", "/data/cache  # of all", "'''../there'''", ""])
def test_the_cache_folder_is_the_one_that_dvc_takes(tmp_path, monkeypatch, level, named):
    """``~`` is the home; a relative folder is relative to the file that sets it, wherever that lies."""
    from dvc.repo import Repo

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "of the user"))
    root = tmp_path / "project"
    root.mkdir()
    Repo.init(str(root), no_scm=True).close()
    places = {"--global": tmp_path / "of the user", "--project": root / ".dvc", "--local": root / ".dvc"}
    places[level].mkdir(exist_ok=True)
    with (places[level] / ("config.local" if level == "--local" else "config")).open("a") as handle:
        handle.write(f"[cache]\n    dir = {named}\n")
    with Repo(str(root)) as repo:
        assert os.path.realpath(cache_dir(root)) == os.path.realpath(repo.cache.local_cache_dir)
