"""Adopting what is odd: signs that break tables or files, and more equal files than an inode takes names."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from adopt_cases import adopt_other, contents, eyas, is_clean, make_folder, make_repository, run

from eyas.errors import StoreError
from eyas.ops.adopt.folder import AdoptRequest, adopt
from eyas.ops.adopt.place import Placer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "old")


def test_a_note_of_several_lines_and_odd_signs_is_written_down_and_listed(root: Path, old: Path) -> None:
    note = "two\nlines: [x] 'q\" # \t é \u2028 \x07"
    done = run(
        root, sys.executable, "-m", "eyas.cli", "adopt", "--dir", str(old), "--engine", 'vllm\n"1"\x0b: x',
        "--format", "other", "--note", note,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    meta = yaml.safe_load((root / "adopted/old.dvc").read_text())["meta"]["eyas"]["adopted"]
    assert (meta["engine"], meta["note"]) == ('vllm\n"1"\x0b: x', note)
    assert is_clean(root, "adopted/old.dvc")
    listed = eyas(root, "generations")
    assert listed.returncode == 0
    assert 'vllm "1" : x' in listed.stdout


@pytest.mark.parametrize("which", ["folder", "engine", "note"])
def test_what_cannot_be_written_down_is_refused_before_anything(root: Path, old: Path, which: str) -> None:
    bad = b"b\xff".decode(errors="surrogateescape")
    folder = old.rename(old.with_name(bad)) if which == "folder" else old
    texts = {"engine": "vllm", "note": ""} | ({which: bad} if which != "folder" else {})
    done = eyas(root, "adopt", "--dir", str(folder), "--engine", texts["engine"], "--note", texts["note"])
    assert done.returncode == 2
    assert f"error: the {which} " in done.stderr
    assert not (root / "adopted").exists()


def test_more_equal_files_than_an_inode_takes_names(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 gives an inode 65,000 names; a cache object of 3 names stands for it here."""
    old = make_folder(tmp_path / "equal", {str(i): b"same" for i in range(6)})
    link = os.link

    def link_up_to_3(source: str | os.PathLike, target: str | os.PathLike) -> None:
        if Path(source).stat().st_nlink >= 3:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), source)
        link(source, target)

    monkeypatch.setattr(os, "link", link_up_to_3)
    done = adopt_other(root, old)
    monkeypatch.undo()
    assert contents(root / "adopted/equal") == contents(old)
    assert is_clean(root, "adopted/equal.dvc")
    assert adopt_other(root, old).hash == done.hash
    assert {p.stat().st_ino for p in (root / "adopted/equal").iterdir()} <= {p.stat().st_ino for p in old.iterdir()}


def test_another_engine_said_later_is_not_claimed(root: Path, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the .dvc file says is printed."""
    adopt_other(root, old, note="first")
    text = (root / "adopted/old.dvc").read_text()
    again = adopt(root, AdoptRequest(folder=old, engine="sglang", layout="other"))
    assert (again.is_known, again.engine) == (True, "vllm")
    assert "engine 'sglang' is not taken: old was adopted with 'vllm'" in capsys.readouterr().err
    assert (root / "adopted/old.dvc").read_text() == text


def test_what_another_folder_of_the_name_has_hashed_is_not_thrown_away(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders with one name, the first adoption interrupted after hours of hashing."""
    first, second = make_folder(tmp_path / "one/states"), make_folder(tmp_path / "two/states", {"z": b"z"})
    monkeypatch.setattr(Placer, "place_all", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        adopt_other(root, first)
    monkeypatch.undo()
    journal = root / ".eyas/adopted/states/journal.jsonl"
    text = journal.read_text()
    with pytest.raises(StoreError, match="one/states was begun under the name states and waits"):
        adopt_other(root, second)
    assert journal.read_text() == text
    assert adopt_other(root, second, name="other").num_files == 1
    shutil.rmtree(first)
    assert adopt_other(root, second).num_files == 1


def _interrupted(_: Placer) -> None:
    raise KeyboardInterrupt
