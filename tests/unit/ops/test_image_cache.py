"""Where DVC's cache may lie for a container: what stands for another folder inside is refused."""

from __future__ import annotations

from eyas.ops.image import run as runs
from eyas.ops.image.builder import Builder


def test_a_cache_below_the_home_folder_is_refused(tmp_path, monkeypatch):
    """Inside, HOME is the repository's own: DVC would begin an empty cache there and make everything again."""
    repository, home = tmp_path / "eyas", tmp_path / "home"
    (repository / ".dvc").mkdir(parents=True)
    (home / "cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    (repository / ".dvc/config").write_text("[cache]\n    dir = ~/cache\n")
    (fault,) = runs.preflight(repository, Builder("docker"))
    assert fault.endswith(f"which is another folder in a container: dvc cache dir --local {home / 'cache'}")
