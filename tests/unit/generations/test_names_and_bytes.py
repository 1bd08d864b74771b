"""Names outside the cache, lists that are lost, and what deleting names really gives back on a volume."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.generations.freed import freed_bytes
from eyas.generations.kept import kept_objects, projects_kept
from eyas.generations.listing import read_situation
from eyas.generations.objects import scan_cache
from eyas.generations.reclaim import reclaimable, removed_files, removed_objects
from eyas.generations.revisions import read_revisions
from eyas.generations.trees import read_trees
from states_repository import STATES, StatesRepository, manifest_of, md5

FILES = {"000/a": b"a" * 5000, "001/b": b"b" * 100}


@pytest.fixture
def repository(tmp_path) -> StatesRepository:
    return StatesRepository(tmp_path / "r")


def trees(repository: StatesRepository):
    found = read_trees(repository.root, read_revisions(repository.root, commits=False))
    return {tree.kind: tree for tree in found}


# ── trees ─────────────────────────────────────────────────────────────────────────────────────


def test_the_workspace_is_what_its_manifest_lists(repository):
    name = repository.publish(FILES)
    (repository.root / STATES / "000/stranger").write_bytes(b"not listed")
    (repository.root / STATES / "001/b").unlink()
    (repository.root / STATES / "001/b").write_bytes(b"another size")
    tree = trees(repository)["workspace"]
    assert (tree.generation, tree.num_listed, set(tree.files)) == (name, 2, {"000/a"})
    stat = (repository.root / STATES / "000/a").stat()
    assert tree.files["000/a"][:5] == (5000, stat.st_blocks * 512, stat.st_dev, stat.st_ino, 2)
    assert tree.disk_bytes == 8192


@pytest.mark.parametrize("manifest", [None, "[]", "{", '{"shards": 1, "identity": "x"}', '{"shards": [{"path": 1}]}'])
def test_states_without_a_manifest_are_nobodys(repository, manifest):
    repository.publish(FILES)
    (repository.root / f"{STATES}.json").unlink()
    if manifest is not None:
        (repository.root / f"{STATES}.json").write_text(manifest)
    assert trees(repository) == {}


def adopted(repository: StatesRepository, folder: Path, name: str = "old") -> str:
    """What an adoption leaves: the copy, the origin and what it noted, by hand."""
    listed = []
    for path, data in FILES.items():
        for place in (folder, repository.root / "adopted" / name):
            (place / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        os.link(folder / path, repository.root / "adopted" / name / path)
        stat = (folder / path).stat()
        listed.append({"path": path, "size_bytes": len(data), "inode": stat.st_ino, "mtime_ns": stat.st_mtime_ns})
    generation = repository.put_folder(FILES)
    home = repository.root / ".eyas/adopted" / name
    home.mkdir(parents=True)
    (home / "source.json").write_text("{}")
    stat = (home / "source.json").stat()
    witness = [stat.st_ino, stat.st_ctime_ns]
    noted = {"generation": generation, "folder": os.fspath(folder), "files": listed, "witness": witness}
    (home / "origin.json").write_text(json.dumps(noted))
    return generation


def test_an_adopted_folder_and_its_origin(repository, tmp_path):
    generation = adopted(repository, tmp_path / "origin")
    found = trees(repository)
    assert set(found) == {"adopted", "origin"}
    assert {tree.generation for tree in found.values()} == {generation}
    assert found["origin"].files == found["adopted"].files
    assert found["origin"].folder == tmp_path / "origin"


@pytest.mark.parametrize("change", ["content", "replaced", "longer", "gone"])
def test_what_was_changed_in_the_origin_is_no_longer_ours(repository, tmp_path, change):
    adopted(repository, tmp_path / "origin")
    path = tmp_path / "origin/000/a"
    if change in ("replaced", "gone"):
        path.unlink()
    if change != "gone":
        with path.open("ab" if change == "longer" else "wb") as handle:
            handle.write(b"c" * 5000)
        os.utime(path, ns=(1, 1))
    assert set(trees(repository)["origin"].files) == {"001/b"}


@pytest.mark.parametrize("noted", ["{}", "[]", "{", '{"generation": "x", "folder": "/y", "files": [{"path": "a"}]}'])
def test_a_damaged_note_of_an_adoption_is_no_tree(repository, tmp_path, noted):
    adopted(repository, tmp_path / "origin")
    (repository.root / ".eyas/adopted/old/origin.json").write_text(noted)
    assert trees(repository) == {}


def test_a_spool_that_is_whole_and_one_that_is_settled(repository):
    spool = repository.root / ".eyas/spool"
    for name in ("1" * 64, "2" * 64 + ".settled.part"):
        for path, data in FILES.items():
            (spool / name / "states" / path).parent.mkdir(parents=True, exist_ok=True)
            (spool / name / "states" / path).write_bytes(data)
    (spool / ("1" * 64) / "manifest.json").write_text(json.dumps(manifest_of(FILES)))
    tree = trees(repository)["spool"]
    assert (tree.generation, tree.identity) == (repository.put_folder(FILES), "1" * 64)
    assert set(tree.files) == set(FILES)


# ── lists that are lost ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("damage", ["missing", "cut", "another folder's", "no list"])
def test_a_lost_list_of_something_kept_is_a_problem_and_not_an_empty_folder(repository, damage):
    """DVC would take its files for unused, and delete them."""
    name = repository.publish(FILES)
    repository.commit()
    path = repository.object_path(name)
    path.chmod(0o644)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": path.read_bytes()[:-9], "another folder's": b"[]", "no list": b"x"}[damage])
    kept = kept_objects(read_revisions(repository.root, commits=False), scan_cache(repository.root))
    (problem,) = kept.problems
    assert name in problem
    assert STATES in problem
    assert reclaimable(repository.root).problem == problem
    assert reclaimable(repository.root).free_now_bytes == 0


def test_a_lost_list_of_something_that_only_commits_name_is_none(repository):
    old = repository.publish(FILES)
    repository.commit()
    repository.publish({"c": b"c"})
    repository.commit()
    repository.object_path(old).unlink()
    found = read_situation(repository.root, commits=True)
    assert found.kept.problems == ()
    assert {md5(data) for data in FILES.values()} <= set(found.cache.objects) - found.kept.names


def test_what_another_project_keeps_in_the_same_cache(repository, tmp_path):
    other = StatesRepository(tmp_path / "other")
    other.publish(FILES)
    other.commit()
    repository.publish({"c": b"c"} | FILES)
    repository.commit()
    cache = scan_cache(repository.root)
    theirs = projects_kept([other.root], cache)
    problem = [p for p in theirs.problems if os.fspath(other.root) in p]
    assert problem, "its list is in another cache: nobody can say what it keeps"
    repository.put_folder(FILES)
    theirs = projects_kept([other.root], scan_cache(repository.root))
    assert theirs.problems == ()
    assert {md5(data) for data in FILES.values()} < theirs.names


# ── freed bytes on a volume ───────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def volume(request, tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    options = ["-t", "tmpfs", "-o", "size=64m", "tmpfs"]
    if request.param == "ext4":
        image = folder.with_suffix(".img")
        with image.open("wb") as handle:
            handle.truncate(96 << 20)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no ext4 can be made here: {made.stderr.strip()}")
        options = ["-o", "loop", os.fspath(image)]
    done = subprocess.run(["mount", *options, folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def free(folder: Path) -> int:
    os.sync()
    volume = os.statvfs(folder)
    return volume.f_bfree * volume.f_frsize


@pytest.mark.parametrize("seed", range(5))
def test_promised_bytes_are_what_the_volume_gets_back(volume, seed):
    """Case 82. Random shards, links and copies; then everything that the room says goes is deleted."""
    chance = random.Random(seed)
    repository = StatesRepository(volume / f"{seed}")
    outside = volume / f"{seed}-outside"
    outside.mkdir()
    for _ in range(3):
        contents = [chance.randbytes(1) * chance.choice((1, 4096, 5000, 200_000)) for _ in range(4)]
        repository.publish({f"{i}": data for i, data in enumerate(contents)})
        if chance.random() < 0.5:
            os.link(repository.root / STATES / "0", outside / f"{chance.random()}")
        if chance.random() < 0.5:
            path = repository.root / STATES / "1"
            path.unlink()
            path.write_bytes(contents[1])
        repository.commit()
    if chance.random() < 0.5:
        repository.write_yaml("dvc.lock", {"schema": "2.0", "stages": {}})
        repository.commit()
    found = read_situation(repository.root)
    promised = freed_bytes([*removed_objects(found), *removed_files(found)], found.shared)
    before = free(volume)
    for name in set(found.cache.objects) - found.kept.names:
        found.cache.path(name).unlink()
    for tree in found.trees:
        for path in tree.files if tree.generation not in found.kept.names else ():
            (tree.folder / path).unlink()
    assert free(volume) - before == promised
    assert reclaimable(repository.root).free_now_bytes == 0
