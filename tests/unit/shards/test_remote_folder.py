"""States on a folder as DVC's remote, without a server: what is said on the way."""

from __future__ import annotations

import re
import shutil

import pytest
from dvc_repository import MANIFEST, STATES, DvcRepository

from eyas import console
from eyas.ops.remote import pull, push, verify_remote

LENGTHS = tuple(5 + (7 * i) % 26 for i in range(30))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """States captured once, and committed by DVC."""
    repository = DvcRepository(tmp_path_factory.mktemp("made") / "repository", LENGTHS)
    repository.made()
    return repository


@pytest.fixture
def root(made, tmp_path, monkeypatch):
    """A copy of it with a remote, in which DVC is called as a user calls it."""
    folder = tmp_path / "repository"
    shutil.copytree(made.root, folder, symlinks=True)
    with (folder / ".dvc/config.local").open("a") as file:
        file.write(f"    remote = there\n['remote \"there\"']\n    url = {tmp_path}/shared\n")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    return folder


def test_push_pull_and_verify_say_how_far_they_are(root, capsys, monkeypatch):
    """Hours pass with a real set: objects done, of how many, and bytes that were looked at."""
    monkeypatch.setattr(console, "PLAIN_PROGRESS_EVERY_S", 0.0)
    for name, value in (("TQDM_MININTERVAL", "0"), ("TQDM_MINITERS", "1")):
        monkeypatch.setenv(name, value)  # or DVC's bars leave out what takes milliseconds
    done = push(root)
    said = capsys.readouterr().err
    num_shards = done.num_objects - 2
    assert f"push: {num_shards}/{num_shards} objects" in said
    assert re.search(rf"(?m)^remote: {done.num_objects}/{done.num_objects} objects, .* left  [\d.,]+ k?B$", said), said
    verify_remote(root)
    said = capsys.readouterr().err
    counts = [int(count) for count in re.findall(rf"(?m)^remote: (\d+)/{done.num_objects} objects", said)]
    assert counts == list(range(1, done.num_objects + 1))
    for path in (STATES, ".dvc/cache", ".dvc/tmp"):
        shutil.rmtree(root / path, ignore_errors=True)
    (root / MANIFEST).unlink()
    pull(root)
    said = capsys.readouterr().err
    assert re.search(rf"(?m)^pull: {num_shards}/\d+ objects", said), said
    assert re.search(rf"(?m)^pulled: {num_shards}/{num_shards} objects", said), said


def test_what_lasts_no_quarter_of_a_minute_says_nothing(root, capsys):
    push(root)
    assert "objects" not in capsys.readouterr().err


def test_what_dvc_says_of_a_failure_is_told_and_its_bars_are_not(root, tmp_path, monkeypatch, capsys):
    """A file is in the place of the remote's folder."""
    monkeypatch.setattr("eyas.ops.remote.ATTEMPTS", 1)
    (tmp_path / "shared").write_text("")
    with pytest.raises(Exception, match=r"dvc push failed 1 times: .*(File exists|Not a directory)") as raised:
        push(root)
    assert not re.search(r"\d+%|\[00:|\x1b|\r", str(raised.value) + capsys.readouterr().err)
