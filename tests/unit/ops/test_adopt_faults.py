"""Kills, full disks, writers and file systems without links: what a failed adoption leaves, and that it goes on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from adopt_cases import (
    FILES,
    adopt_other,
    contents,
    environment,
    has_md5_names,
    is_clean,
    killed_at,
    make_folder,
    make_repository,
)

from eyas.errors import DiskError, StoreError
from eyas.ops.adopt import hashing as adopt_hash
from eyas.ops.adopt import place as adopt_place
from eyas.ops.adopt.hashing import hash_files, read_journal
from eyas.ops.adopt.source import FoundFile, find_files

FEW = {"a": b"first", "sub/b": b"second", "c": b"first"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "old")


# ── kills ─────────────────────────────────────────────────────────────────────────────────────


def adopt_through_kills(root: Path, folder: Path, numbers: Iterator[int]) -> int:
    """Adopt in children killed at the given changes of the file system, until one ends; gives how many were killed."""
    before, kills = contents(folder), 0
    while killed_at(next(numbers), lambda: adopt_other(root, folder)):
        kills += 1
        assert contents(folder) == before
        assert has_md5_names(root)
    return kills


def settled(root: Path, folder: Path, before: dict[str, bytes]) -> None:
    assert contents(folder) == before == contents(root / "adopted/old")
    assert not list(root.rglob("*.part"))
    assert is_clean(root, "adopted/old.dvc")
    inodes = {path.stat().st_ino for path in (root / "adopted/old").rglob("*") if path.is_file()}
    assert inodes <= {path.stat().st_ino for path in (root / ".dvc/cache").rglob("*") if path.is_file()}


def test_a_run_killed_again_and_again_comes_to_its_end(root: Path, tmp_path: Path) -> None:
    folder, draw = make_folder(tmp_path / "old", FEW), random.Random(4)
    kills = adopt_through_kills(root, folder, iter(lambda: draw.randint(8, 60), None))
    assert kills >= 1
    settled(root, folder, FEW)


@pytest.mark.slow
def test_a_kill_at_any_change_of_the_file_system_costs_nothing(tmp_path: Path) -> None:
    """Every point once, from a fresh repository each: the second run finishes, no byte is lost."""
    number, killed = 0, True
    while killed:
        number += 1
        root, folder = make_repository(tmp_path / f"{number}/r"), make_folder(tmp_path / f"{number}/old", FEW)
        killed = killed_at(number, lambda root=root, folder=folder: adopt_other(root, folder))
        assert contents(folder) == FEW
        assert has_md5_names(root)
        adopt_other(root, folder)
        if number % 6 == 1:
            settled(root, folder, FEW)
        shutil.rmtree(tmp_path / f"{number}")
    assert number > 30


@pytest.mark.slow
def test_ctrl_c_stops_at_once_and_keeps_what_was_hashed(root: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "old", {"a": b"small"})
    with (folder / "z").open("wb") as handle:
        handle.truncate(40 << 30)  # sparse: an hour of hashing
    journal = root / ".eyas/adopted/old/journal.jsonl"
    command = [sys.executable, "-m", "eyas.cli", "adopt", "--dir", str(folder), "--engine", "x", "--format", "other"]
    # A test run in the background of a shell has Ctrl-C switched off, and hands that down.
    listening = [
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    process = subprocess.Popen([*listening, *command], cwd=root, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    assert process.wait(60) == 130
    assert time.monotonic() - start_s < 10
    assert [file.path for file in read_journal(journal)] == ["a"]
    assert process.stderr is not None
    assert "goes on" in process.stderr.read()


# ── writers ───────────────────────────────────────────────────────────────────────────────────


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "change", ["rewrite", "add", *(pytest.param(c, marks=SLOW) for c in ("append", "replace", "remove"))]
)
def test_a_folder_that_is_written_to_is_refused(
    root: Path, old: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Between the last link and the end somebody writes: nothing is adopted, and the next run takes what is there."""
    whole = adopt_place.Placer.place_all

    def write_then(placer: adopt_place.Placer) -> None:
        whole(placer)
        _write(old, change)

    with monkeypatch.context() as patch:
        patch.setattr(adopt_place.Placer, "place_all", write_then)
        with pytest.raises(StoreError, match="changed while it was adopted"):
            adopt_other(root, old)
    assert not (root / "adopted/old.dvc").exists()


def _write(folder: Path, change: str) -> None:
    path = folder / "a"
    if change in ("append", "rewrite"):
        path.chmod(0o644)
        with path.open("ab" if change == "append" else "r+b") as handle:
            handle.write(b"!")
    elif change == "replace":
        shutil.copy(path, folder / "b.new")
        os.replace(folder / "b.new", path)
    elif change == "add":
        (folder / "late").write_bytes(b"x")
    else:
        path.unlink()


def test_a_file_that_grows_while_it_is_hashed_is_refused_and_not_noted(
    root: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.posix_fadvise

    def grow(fd: int, *rest: int) -> None:
        if os.fstat(fd).st_size == 5000:
            with (old / "sub/c").open("ab") as handle:
                handle.write(b"+")
        whole(fd, *rest)

    monkeypatch.setattr(adopt_hash.os, "posix_fadvise", grow)
    with pytest.raises(StoreError, match=r"sub/c changes while it is adopted: 5,000 bytes before"):
        adopt_other(root, old)
    assert "sub/c" not in {file.path for file in read_journal(root / ".eyas/adopted/old/journal.jsonl")}


def test_threads_give_the_same_md5s_as_the_library(tmp_path: Path) -> None:
    import hashlib

    folder = make_folder(tmp_path / "many", {f"{i % 7}/{i}": os.urandom(i * 3001) for i in range(60)})
    found = find_files(make_folder(tmp_path / "r", {"x": b""}), folder)
    expected = {path: hashlib.md5(data).hexdigest() for path, data in contents(folder).items()}
    for num_threads in (1, 3):
        assert hash_files(folder, found.files, tmp_path / f"j{num_threads}", num_threads) == expected


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b"1", b'{"path":"a"', b"\xff", b'{"md5":1,"x":2}', b'{"path":"a","md5":"0"}']
)
def test_damaged_lines_of_a_journal_are_passed_over(tmp_path: Path, line: bytes) -> None:
    file = FoundFile("b", 1, 2, 3)
    good = b'{"inode":3,"md5":"' + b"0" * 32 + b'","mtime_ns":2,"path":"b","size_bytes":1}\n'
    (tmp_path / "j").write_bytes(line + b"\n" + good)
    assert read_journal(tmp_path / "j") == {file: "0" * 32}


# ── mounts ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mount(tmp_path: Path) -> Iterator:
    """Mounts that are gone after the test."""
    mounted: list[Path] = []

    def make(*options: str, at: str = "mnt") -> Path:
        folder = tmp_path / at
        folder.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mount {' '.join(options)}: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in reversed(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=True)


def make_image(path: Path, kind: str, size_bytes: int) -> Path:
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"no mkfs.{kind}")
    with path.open("wb") as handle:
        handle.truncate(size_bytes)
    subprocess.run([f"mkfs.{kind}", "-q", str(path)], check=True, capture_output=True)
    return path


def test_another_file_system_is_refused_before_anything_is_read(root: Path, mount) -> None:
    folder = make_folder(mount("-t", "tmpfs", "tmpfs") / "old")
    with pytest.raises(DiskError, match=r"neither hard-linked nor reflinked.*eyas makes none") as raised:
        adopt_other(root, folder)
    assert "one mount" in str(raised.value.hint)
    assert not (root / ".eyas/adopted/old/journal.jsonl").exists()
    assert contents(folder) == FILES
    assert not list(root.rglob("*.part"))


def test_two_bind_mounts_of_one_file_system_are_two_mounts(root: Path, old: Path, mount) -> None:
    bound = mount("--bind", str(old))
    with pytest.raises(DiskError, match="neither hard-linked nor reflinked"):
        adopt_other(root, bound)
    assert contents(old) == FILES


@pytest.mark.slow
def test_a_cache_on_another_file_system_is_refused(root: Path, old: Path, mount) -> None:
    """Case 89: links into a cache on a second mount are impossible."""
    cache = mount("-t", "tmpfs", "tmpfs")
    (root / ".dvc/config.local").write_text(f"[cache]\n    dir = {cache}\n")
    with pytest.raises(DiskError, match="neither hard-linked nor reflinked"):
        adopt_other(root, old)


@pytest.mark.slow
def test_no_inode_left_is_a_full_disk_and_goes_on(mount) -> None:
    small = mount("-t", "tmpfs", "-o", "nr_inodes=220", "tmpfs")
    root, old = make_repository(small / "r"), make_folder(small / "old")
    fillers = []
    try:
        while True:
            fillers.append(small / f"filler{len(fillers)}")
            fillers[-1].write_bytes(b"")
    except OSError:
        fillers.pop()
    before = contents(old)
    for path in fillers[:25]:  # room for the first steps, not for all
        path.unlink()
    del fillers[:25]
    failures = 0
    while True:
        try:
            adopt_other(root, old)
            break
        except DiskError:
            failures += 1
            assert contents(old) == before
        for path in fillers[:15]:
            path.unlink()
        del fillers[:15]
    settled(root, old, before)
    assert failures or not fillers


def test_a_full_disk_in_the_journal_keeps_what_was_hashed(tmp_path: Path, mount) -> None:
    """The journal alone lies on a disk of 16 kB."""
    small = mount("-t", "tmpfs", "-o", "size=16k", "tmpfs")
    folder = make_folder(tmp_path / "many", {f"{i:03}": str(i).encode() for i in range(300)})
    found = find_files(make_folder(tmp_path / "r", {"x": b""}), folder)
    with pytest.raises(DiskError, match="disk full"):
        hash_files(folder, found.files, small / "journal.jsonl", 1)
    known = read_journal(small / "journal.jsonl")
    assert 50 < len(known) < 300
    shutil.copy(small / "journal.jsonl", tmp_path / "journal.jsonl")
    md5s = hash_files(folder, found.files, tmp_path / "journal.jsonl", 1)
    assert len(md5s) == 300
    assert len(read_journal(tmp_path / "journal.jsonl")) == 300
    assert {file.path: md5 for file, md5 in known.items()}.items() <= md5s.items()


@pytest.mark.parametrize("kind", ["btrfs", pytest.param("xfs", marks=pytest.mark.slow)])
def test_reflinks_where_the_cache_says_so(tmp_path: Path, mount, kind: str) -> None:
    """Three inodes over one set of blocks: the folder keeps its modes, and the volume its free space."""
    volume = mount("-o", "loop", str(make_image(tmp_path / "image", kind, 320 << 20)))
    root = make_repository(volume / "r")
    (root / ".dvc/config").write_text('[cache]\n    type = "reflink,hardlink"\n')
    old = make_folder(volume / "old", {f"{i}": os.urandom(20 << 20) for i in range(2)} | {"none": b""})
    os.sync()
    before, free = contents(old), os.statvfs(volume).f_bavail * os.statvfs(volume).f_bsize
    done = adopt_other(root, old)
    os.sync()
    assert free - os.statvfs(volume).f_bavail * os.statvfs(volume).f_bsize < 5 << 20
    assert done.ways == ("reflink", "reflink")
    assert {path.stat().st_nlink for path in old.iterdir()} == {1}
    assert {path.stat().st_mode & 0o777 for path in old.iterdir()} == {0o644}
    assert contents(old) == before == contents(root / "adopted/old")
    assert is_clean(root, "adopted/old.dvc")
    assert adopt_other(root, old).is_known


@pytest.mark.slow
def test_reflinks_across_bind_mounts_where_hardlinks_cannot(tmp_path: Path, mount) -> None:
    volume = mount("-o", "loop", str(make_image(tmp_path / "image", "btrfs", 200 << 20)))
    root = make_repository(volume / "r")
    old = make_folder(volume / "old")
    bound = mount("--bind", str(old), at="bound")
    assert adopt_other(root, bound, name="old").ways == ("reflink", "hardlink")
    assert contents(old) == FILES
    assert is_clean(root, "adopted/old.dvc")
