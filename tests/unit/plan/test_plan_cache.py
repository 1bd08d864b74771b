import os
import subprocess
from pathlib import Path

import pytest

from eyas.errors import DiskError
from eyas.plan.cache import cache_dir, cache_types, check_links

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


def test_the_repository_itself_commits_by_links():
    assert cache_types(ROOT)[0] == "hardlink"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no second mount")
def test_a_cache_on_another_mount_is_refused(tmp_path):
    """Case 22."""
    root = repository(tmp_path, "[cache]\n    type = hardlink\n    dir = /dev/shm\n")
    with pytest.raises(DiskError, match="two mounts") as caught:
        check_links(root)
    assert "dvc cache dir --local" in caught.value.hint


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
