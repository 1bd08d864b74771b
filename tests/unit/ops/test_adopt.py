"""Adopting a folder into a real git and DVC repository: what DVC says afterwards, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from adopt_cases import (
    FILES,
    REPOSITORY,
    adopt_other,
    contents,
    eyas,
    has_md5_names,
    is_clean,
    make_folder,
    make_repository,
    ok,
    run,
)

from eyas import fs
from eyas.errors import ConfigError, DataError, EyasError, StoreError
from eyas.generations import ledger
from eyas.generations.listing import find, list_generations, read_situation
from eyas.ops.adopt.folder import AdoptRequest, adopt
from eyas.plan.cache import cache_object


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "old")


def test_where_git_would_see_the_files_they_are_ignored_as_dvc_does_it(root: Path, old: Path, tmp_path: Path) -> None:
    """Not where the repository's own rules pass over them already."""
    (root / ".gitignore").write_text("/.eyas\n")
    adopt_other(root, old)
    twin = make_repository(tmp_path / "twin")
    (twin / ".gitignore").write_text("/.eyas\n")
    make_folder(twin / "adopted/old")
    ok(twin, "dvc", "add", "-q", "adopted/old")
    assert (root / "adopted/.gitignore").read_text() == (twin / "adopted/.gitignore").read_text() == "/old\n"


def test_dvc_finds_clean_what_was_adopted_and_names_it_as_it_would_have(root: Path, old: Path, tmp_path: Path) -> None:
    done = adopt_other(root, old)
    assert is_clean(root, "adopted/old.dvc")
    twin = make_repository(tmp_path / "twin")
    make_folder(twin / "adopted/old")
    ok(twin, "dvc", "add", "-q", "adopted/old")
    mine, theirs = (yaml.safe_load((r / "adopted/old.dvc").read_text()) for r in (root, twin))
    assert mine["outs"] == theirs["outs"]
    assert mine["outs"][0]["md5"] == done.hash
    assert contents(root / ".dvc/cache/files") == contents(twin / ".dvc/cache/files")
    assert ok(root, "git", "status", "--porcelain", "-uall").split() == [
        "??",
        "adopted/old.dvc",
    ]


def test_nothing_is_copied_and_no_byte_of_the_folder_changes(root: Path, old: Path) -> None:
    before = {p: p.stat() for p in old.rglob("*") if p.is_file()}
    adopt_other(root, old)
    assert contents(old) == FILES == contents(root / "adopted/old")
    for path, stat in before.items():
        now, copy = path.stat(), (root / "adopted/old" / path.relative_to(old)).stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_size) == (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        assert (copy.st_ino, now.st_nlink, now.st_mode & 0o777) == (now.st_ino, 3, 0o444)


@pytest.mark.slow
def test_dvc_restores_it_and_a_lost_state_costs_a_hash_only(root: Path, old: Path) -> None:
    adopt_other(root, old)
    shutil.rmtree(root / "adopted/old")
    ok(root, "dvc", "checkout", "-q", "adopted/old.dvc")
    assert contents(root / "adopted/old") == FILES
    shutil.rmtree(root / ".dvc/tmp")
    assert is_clean(root, "adopted/old.dvc")


@pytest.mark.slow
def test_dvc_reads_none_of_it_afterwards(root: Path, tmp_path: Path) -> None:
    """The kernel counts what DVC's process reads from files: less than one of the adopted ones."""
    big = make_folder(tmp_path / "big", {f"{i}": os.urandom(8 << 20) for i in range(4)})
    adopt_other(root, big)
    code = (
        "import runpy,sys\nsys.argv=['dvc','status','-q','adopted/big.dvc']\n"
        "def now(): return int(open('/proc/self/io').read().split()[1])\n"
        "import dvc.repo, dvc.commands.status, dvc.cli\nstart=now()\n"
        "code=dvc.cli.main(sys.argv[1:])\nprint(code, now()-start)"
    )

    def status() -> tuple[int, int]:
        code_, read = ok(root, sys.executable, "-c", code).split()
        return int(code_), int(read)

    assert status()[0] == 0
    _, with_state = status()
    shutil.rmtree(root / ".dvc/tmp")
    _, without = status()
    assert without - with_state > 30 << 20
    assert with_state < 8 << 20


def test_what_is_known_of_it_is_listed_and_written_down(root: Path, old: Path) -> None:
    done = adopt_other(root, old, note="of 'spring': old\nstates", name="spring")
    generation = find(root, "spring")
    assert (generation.kind, generation.hash, generation.is_whole) == ("adopted", done.hash, True)
    assert (generation.facts.engine, generation.facts.note) == ("vllm", "of 'spring': old\nstates")
    assert generation.stored_bytes == sum(map(len, FILES.values()))
    [event] = ledger.read(root)
    assert (event["event"], event["hash"], event["folder"]) == ("adopt", done.hash, str(old))


@pytest.mark.slow
def test_the_command_prints_json_and_says_what_is_next(root: Path, old: Path) -> None:
    done = eyas(root, "adopt", "--dir", str(old), "--engine", "vllm", "--format", "other", "--json")
    assert json.loads(done.stdout)["num_files"] == len(FILES), done.stderr
    assert "git add adopted" in eyas(root, "adopt", "--dir", str(old), "--engine", "vllm", "--format", "other").stdout


def test_the_same_again_changes_nothing(root: Path, old: Path) -> None:
    first = adopt_other(root, old)
    text = (root / "adopted/old.dvc").read_bytes()
    again = adopt_other(root, old)
    assert (first.is_known, again.is_known, again.hash) == (False, True, first.hash)
    assert (root / "adopted/old.dvc").read_bytes() == text
    assert len(ledger.read(root)) == 1


def test_only_what_changed_since_is_hashed_again(root: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("eyas.ops.adopt.folder.Placer", _stop)
        with pytest.raises(_StopError):
            adopt_other(root, old)
    journal = root / ".eyas/adopted/old/journal.jsonl"
    before = journal.read_text().splitlines()
    (old / "a").write_bytes(b"FIRST")
    (old / "new").write_bytes(b"new")
    adopt_other(root, old)
    added = journal.read_text().splitlines()[len(before) :]
    assert sorted(json.loads(line)["path"] for line in added) == ["a", "new"]
    assert is_clean(root, "adopted/old.dvc")
    assert has_md5_names(root)


class _StopError(Exception):
    pass


def _stop(*_: object) -> None:
    raise _StopError


@pytest.mark.slow
def test_a_torn_journal_is_gone_on_with(root: Path, old: Path) -> None:
    journal = root / ".eyas/adopted/old/journal.jsonl"
    adopt_other(root, old)
    whole = journal.read_bytes()
    (root / "adopted/old.dvc").unlink()
    journal.write_bytes(whole[: len(whole) * 2 // 3])
    adopt_other(root, old)
    assert len(journal.read_bytes().splitlines()) == len(FILES)
    assert is_clean(root, "adopted/old.dvc")


# ── contents that the cache has ───────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_equal_files_share_one_object(root: Path, tmp_path: Path) -> None:
    twins = make_folder(tmp_path / "twins", {"a": b"same", "b": b"same", "c": b"other"})
    done = adopt_other(root, twins)
    assert (root / "adopted/twins/a").samefile(root / "adopted/twins/b")
    assert not (twins / "b").samefile(twins / "a")
    assert (done.shared_bytes, contents(twins)) == (4, {"a": b"same", "b": b"same", "c": b"other"})
    assert is_clean(root, "adopted/twins.dvc")


@pytest.mark.slow
def test_a_content_and_a_link_that_the_cache_has_already(root: Path, tmp_path: Path) -> None:
    make_folder(root / "mine", {"x": b"known content", "y": b"linked"})
    ok(root, "dvc", "add", "-q", "mine")
    other = make_folder(tmp_path / "other", {"p": b"known content"})
    os.link(root / "mine/y", other / "q")
    done = adopt_other(root, other)
    assert (done.shared_bytes, done.num_named_elsewhere) == (len(b"known content"), 2)
    assert (root / "adopted/other/p").samefile(root / "mine/x")
    assert (root / "adopted/other/q").samefile(root / "mine/y")
    assert is_clean(root, "adopted/other.dvc")
    assert is_clean(root, "mine.dvc")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"known CONTENT", b"short", b""])
def test_a_damaged_object_is_replaced_by_the_whole_file(root: Path, tmp_path: Path, damage: bytes) -> None:
    """Case 85: neither a flipped nor a truncated object becomes the adopted content."""
    folder = make_folder(tmp_path / "folder", {"p": b"known content"})
    target = cache_object(root, fs.hash_file(folder / "p", "md5"))
    fs.write_bytes(target, damage)
    target.chmod(0o444)
    adopt_other(root, folder)
    assert contents(root / "adopted/folder") == {"p": b"known content"}
    assert has_md5_names(root)


# ── refused ───────────────────────────────────────────────────────────────────────────────────


def refused(root: Path, folder: Path, match: str, error: type[EyasError] = StoreError, **changes: str) -> None:
    """Refused in words, with a hint; nothing is adopted and no file of the folder changes."""
    before = contents(folder) if folder.is_dir() else {}
    with pytest.raises(error, match=match) as raised:
        adopt_other(root, folder, **changes)
    assert raised.value.hint
    assert not list(root.glob("adopted/*.dvc"))
    assert before == (contents(folder) if folder.is_dir() else {})


def test_what_is_no_plain_file_is_refused(root: Path, old: Path, tmp_path: Path) -> None:
    (old / "link").symlink_to(old / "a")
    refused(root, old, r"1 symbolic links.*'link'")
    (old / "link").unlink()
    os.mkfifo(old / "sub/pipe")
    refused(root, old, r"sockets, pipes.*'sub/pipe'")
    (old / "sub/pipe").unlink()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.fspath(old / "s"))
        refused(root, old, "sockets")


@pytest.mark.parametrize("name", [b"bad\xff", b"back\\slash", b"new\nline", b"tab\tand", b"del\x7f"])
def test_names_that_dvcs_lists_cannot_hold_are_refused(root: Path, old: Path, name: bytes) -> None:
    path = old / os.fsdecode(name)
    path.touch()
    refused(root, old, "names that are no UTF-8")
    path.unlink()
    path.mkdir()
    refused(root, old, "names that are no UTF-8")


@pytest.mark.parametrize("path", ["x.part", ".git/config", "sub/__pycache__/x", "sub/.eyas/y"])
def test_files_that_dvc_would_not_see_are_refused(root: Path, old: Path, path: str) -> None:
    make_folder(old, {path: b"x"})
    refused(root, old, "names that DVC ignores")


def test_empty_folders_stay_and_are_counted(root: Path, old: Path) -> None:
    (old / "empty/inner").mkdir(parents=True)
    assert adopt_other(root, old).num_empty_folders == 1
    assert (old / "empty/inner").is_dir()
    assert is_clean(root, "adopted/old.dvc")


@pytest.mark.slow
def test_files_that_look_like_dvcs_own_are_files_like_others(root: Path, old: Path) -> None:
    make_folder(old, {"x.dvc": b"{{", "dvc.yaml": b"{{", "sub/dvc.lock": b"[", "sub/.gitignore": b"*\n"})
    adopt_other(root, old)
    assert is_clean(root, "adopted/old.dvc")
    assert ok(root, "dvc", "status", "--json").strip() == "{}"
    assert [g.name for g in list_generations(read_situation(root))] == ["old"]


def test_a_folder_without_files_or_that_is_none_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty/inner").mkdir(parents=True)
    refused(root, tmp_path / "empty", "holds no file")
    refused(root, tmp_path / "nowhere", "is no folder")
    (tmp_path / "file").write_bytes(b"")
    refused(root, tmp_path / "file", "is no folder")


def test_the_repository_and_its_own_folders_are_refused(root: Path, tmp_path: Path) -> None:
    for folder in (root, tmp_path):
        with pytest.raises(StoreError, match="holds this repository"):
            adopt_other(root, folder)
    for name in (".dvc/cache", ".dvc", ".dvc/cache/files"):
        (root / name).mkdir(parents=True, exist_ok=True)
        refused(root, root / name, "DVC's cache")
    for name in (".git", ".eyas/spool/x", "adopted/x", ".dvc/tmp"):
        make_folder(root / name, {"f": b"x"})
        refused(root, root / name, "keep for themselves")


@pytest.mark.slow
def test_what_git_or_dvc_tracks_is_refused(root: Path) -> None:
    make_folder(root / "tracked", {"f": b"x"})
    ok(root, "git", "add", "tracked")
    refused(root, root / "tracked", "git tracks 1 files")
    make_folder(root / "outs/deep", {"f": b"y"})
    ok(root, "dvc", "add", "-q", "outs/deep")
    for folder in (root / "outs/deep", root / "outs"):
        with pytest.raises(StoreError, match="which DVC tracks already"):
            adopt_other(root, folder)


@pytest.mark.slow
def test_a_folder_of_the_repository_that_nobody_tracks_is_adopted(root: Path) -> None:
    make_folder(root / "data/old")
    adopt_other(root, root / "data/old")
    assert contents(root / "data/old") == contents(root / "adopted/old") == FILES
    assert is_clean(root, "adopted/old.dvc")


def test_a_link_to_the_folder_is_the_folder(root: Path, old: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(old)
    assert (adopt_other(root, tmp_path / "alias").name, find(root, "old").kind) == ("old", "adopted")


@pytest.mark.parametrize("name", ["", "a/b", "..", "abcdef01", "x.part", "x.dvc", "a b", "-x"])
def test_names_that_are_no_names_are_refused(root: Path, old: Path, name: str) -> None:
    if name:
        refused(root, old, "expected letters", ConfigError, name=name)
    else:
        assert adopt_other(root, old, name=name).name == "old"


def test_a_taken_name_is_refused(root: Path, old: Path, tmp_path: Path) -> None:
    adopt_other(root, old)
    other = make_folder(tmp_path / "two/old", {"z": b"z"})
    with pytest.raises(StoreError, match="adopted from"):
        adopt_other(root, other)
    (old / "a").unlink()
    (old / "a").write_bytes(b"another")
    with pytest.raises(StoreError, match="another content now"):
        adopt_other(root, old)
    assert contents(root / "adopted/old") == FILES
    shutil.rmtree(root / ".eyas")
    with pytest.raises(StoreError, match="exists already"):
        adopt_other(root, old)


def test_files_in_the_place_of_the_copy_are_not_touched(root: Path, old: Path) -> None:
    make_folder(root / "adopted/old", {"mine": b"x"})
    refused(root, old, "files that .* does not: mine")
    (root / "adopted/old/mine").rename(root / "adopted/old/a")
    refused(root, old, "has another content")
    assert contents(root / "adopted/old")["a"] == b"x"


def test_engine_and_format_are_checked_before_anything(root: Path, old: Path) -> None:
    with pytest.raises(ConfigError, match="engine"):
        adopt(root, AdoptRequest(folder=old, engine=" "))
    with pytest.raises(ConfigError, match="expected one of speculators_v1"):
        adopt(root, AdoptRequest(folder=old, engine="vllm", layout="zip"))
    with pytest.raises(DataError, match="no layout that is known") as raised:
        adopt(root, AdoptRequest(folder=old, engine="vllm"))
    assert "FORMAT=other" in str(raised.value.hint)
    assert not (root / ".eyas/adopted").exists(), "a refusal leaves nothing"


@pytest.mark.parametrize(("mode", "match"), [(0o644, "files of another user"), (0o600, "unreadable files")])
def test_files_that_this_user_may_not_read_or_protect_are_refused(
    root: Path, old: Path, tmp_path: Path, mode: int, match: str
) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become somebody else")
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o711) if folder.is_relative_to("/tmp") and folder != Path("/tmp") else pytest.skip("closed")
    root.chmod(0o755)  # the other user reads its settings on the way to the files
    (old / "a").chmod(mode)
    code = "import sys; from pathlib import Path; from eyas.ops.adopt.source import find_files as f; f(*map(Path, sys.argv[1:]))"
    command = ["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-c", code, str(root), str(old)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": f"{REPOSITORY}/src"})
    assert match in done.stderr
    assert "'a'" in done.stderr


def test_a_running_extraction_is_waited_for(root: Path, old: Path) -> None:
    """Case 81: the lock of an extraction keeps adopt out."""
    with fs.volume_lock(root / ".eyas/extract.lock", "extract of x"), pytest.raises(EyasError, match="extract of x"):
        adopt_other(root, old)
    assert run(root, "git", "status", "--porcelain").stdout == ""
