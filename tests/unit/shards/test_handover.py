"""Publication by links, the spool's twin and what DVC is told: no byte twice, none read back, none lost."""

import errno
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import test_extract_crash
from dvc_repository import MANIFEST, STATES, DvcRepository
from extract_cases import Case, EditedEngine, in_child
from test_extract_crash import die_at, end

from eyas import fs
from eyas.contracts import ShardManifest
from eyas.errors import StoreError
from eyas.plan.cache import cache_object, hashes, locked_stage, object_finder
from eyas.shards import handover
from eyas.shards.handover import StoredFile

OUTS = ("data/hidden_states", "data/hidden_states.json")


@pytest.fixture
def case(tmp_path):
    """An extraction in a folder that DVC manages."""
    (tmp_path / "run/.dvc").mkdir(parents=True)
    return Case(tmp_path / "run", num_samples=12)


def shard_paths(case: Case) -> list[str]:
    return [shard.path for shard in case.plan.shards]


def commit(case: Case) -> dict[str, str]:
    """What a commit by links leaves: every file in the cache under its hash, and a lock that names the set."""
    manifest = fs.read_record(ShardManifest, case.manifest_path)
    files = [(entry.md5, case.out / entry.path) for entry in manifest.shards]
    manifest_md5 = fs.hash_file(case.manifest_path, "md5")
    for md5, path in (*files, (manifest_md5, case.manifest_path)):
        cache_object(case.root, md5).parent.mkdir(parents=True, exist_ok=True)
        os.link(path, cache_object(case.root, md5))
    dir_md5 = handover.dir_md5(handover.stored_files(fs.read_json(case.manifest_path)))
    fs.write_text(cache_object(case.root, dir_md5), "[]")
    return {OUTS[0]: dir_md5, OUTS[1]: manifest_md5}


def settle(case: Case, locked: dict[str, str]) -> list[str]:
    return handover.settle(case.home, locked, OUTS, object_finder(case.root))


def test_published_states_are_links_to_the_spool(case):
    case.extract()
    for path in shard_paths(case):
        assert (case.out / path).samefile(case.spool / "states" / path)
    assert not list(case.root.rglob("*.part"))


def test_a_wiped_output_is_published_again_without_capturing(case):
    """DVC died before ``dvc.lock`` was written; its next run deletes the outputs first."""
    case.extract()
    hashes_before = case.hashes()
    subprocess.run(["rm", "-r", case.out, case.manifest_path], check=True)
    engine = EditedEngine()
    result = case.extract(engine)
    assert (engine.num_opened, engine.asked, result.num_tokens) == (0, [], 0)
    assert case.hashes() == hashes_before


def test_half_a_wiped_output_is_published_again_without_capturing(case):
    case.extract()
    hashes_before = case.hashes()
    (case.out / shard_paths(case)[0]).unlink()
    engine = EditedEngine()
    case.extract(engine)
    assert (engine.asked, case.hashes()) == ([], hashes_before)


def test_a_shard_that_only_lies_in_the_output_is_not_captured_again(case):
    case.extract()
    hashes_before = case.hashes()
    (case.spool / "states" / shard_paths(case)[0]).unlink()
    engine = EditedEngine()
    case.extract(engine)
    assert (engine.asked, case.hashes()) == ([], hashes_before)


def test_two_different_files_for_one_shard_are_refused(case):
    case.extract()
    path = case.out / shard_paths(case)[1]
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StoreError, match="hold states of"):
        case.extract()
    assert case.manifest_path.exists()


def test_where_links_are_impossible_the_states_move(case, monkeypatch):
    def no_link(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    case.extract()
    assert not case.spool.exists()
    assert len(fs.tree_digests(case.out)) == len(case.plan.shards)


def test_a_spool_is_settled_only_when_the_cache_holds_exactly_its_set(case):
    case.extract()
    locked = commit(case)
    a_shard = cache_object(case.root, fs.read_record(ShardManifest, case.manifest_path).shards[0].md5)
    assert settle(case, {}) == []
    assert settle(case, locked | {OUTS[1]: "0" * 32}) == []
    assert settle(case, locked | {OUTS[0]: f"{'0' * 32}.dir"}) == []
    a_shard.rename(a_shard.with_suffix(".away"))
    assert settle(case, locked) == []
    a_shard.write_bytes(b"short")
    assert settle(case, locked) == []
    a_shard.with_suffix(".away").replace(a_shard)
    cache_object(case.root, locked[OUTS[0]]).rename(case.root / "dir object")
    assert settle(case, locked) == []
    assert (case.spool / "states").is_dir()
    (case.root / "dir object").rename(cache_object(case.root, locked[OUTS[0]]))
    assert settle(case, locked) == [case.plan.identity]
    assert not case.spool.exists()
    assert len(fs.tree_digests(case.out)) == len(case.plan.shards)


def test_a_half_removed_spool_is_removed_the_next_time_and_never_resumed(case):
    case.extract()
    case.spool.rename(case.spool.with_name(case.spool.name + handover.SETTLED_SUFFIX))
    assert settle(case, {}) == []
    assert list((case.home / "spool").iterdir()) == []


def test_an_unfinished_spool_is_never_settled(case):
    case.extract()
    locked = commit(case)
    (case.spool / "manifest.json").unlink()
    assert settle(case, locked) == []
    (case.spool / "manifest.json").write_bytes(b'{"shards": 7}')
    assert settle(case, locked) == []


@pytest.mark.parametrize("before", [True, False])
def test_killed_at_calls_of_a_publication_by_links(tmp_path, monkeypatch, before):
    """Then DVC wipes the outputs, or a run by hand finds them: either way the same bytes."""
    kill_at_calls(tmp_path, monkeypatch, range(3, 1000, 9), before)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_killed_at_every_call_of_a_publication_by_links(tmp_path, monkeypatch, before):
    kill_at_calls(tmp_path, monkeypatch, range(1, 1000), before)


def kill_at_calls(tmp_path: Path, monkeypatch, numbers: range, before: bool) -> None:
    monkeypatch.setattr(test_extract_crash, "CALLS", (*test_extract_crash.CALLS, "link"))
    whole = Case(tmp_path / "whole", num_samples=8)
    assert end(in_child(whole.extract)) == 0
    hashes_whole = whole.hashes()
    for number in numbers:
        case = whole.at(tmp_path / str(number))
        (case.root / ".dvc").mkdir(parents=True)

        def run(case=case, number=number):
            die_at(number, before)
            case.extract()

        code = end(in_child(run))
        assert code in (0, -signal.SIGKILL)
        published = case.manifest_path.exists()
        if number % 2:
            subprocess.run(["rm", "-rf", case.out, case.manifest_path], check=True)
        engine = EditedEngine()
        case.extract(engine)
        assert case.hashes() == hashes_whole, f"killed at call {number}"
        assert not (published and engine.asked), f"killed at call {number}: captured again"
        if code == 0:
            break
    assert 40 < number < 999


def test_the_name_of_a_folder_is_the_one_that_dvc_gives_it():
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.tree import Tree

    files = [StoredFile(f"{i // 64:03d}/shard-{i:05d}.safetensors", i, f"{i:032x}") for i in (70, 3, 64, 0)]
    tree = Tree()
    for file in files:
        tree.add(tuple(file.path.split("/")), None, HashInfo("md5", file.md5))
    tree.digest()
    assert handover.dir_md5(files) == tree.hash_info.value


def test_outside_a_dvc_repository_nothing_is_handed_over(tmp_path):
    case = Case(tmp_path, num_samples=3)
    manifest = case.extract().manifest
    assert not handover.hand_over(tmp_path, manifest, case.out, case.manifest_path)
    assert not (tmp_path / ".dvc").exists()


def test_a_dvc_that_works_otherwise_is_left_to_hash_by_itself(case, capsys):
    """``.dvc`` alone is no repository: DVC refuses it, the stage goes on."""
    manifest = case.extract().manifest
    assert not handover.hand_over(case.root, manifest, case.out, case.manifest_path)
    assert "DVC reads the shards once" in capsys.readouterr().err


# ── the real dvc ──────────────────────────────────────────────────────────────────────────────


def read_chars() -> int:
    """Bytes that this process and its ended children read, cached or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("handed_over", [True, False])
def test_the_commit_reads_the_shards_only_without_the_handover(tmp_path, handed_over):
    num_bytes, environment = 192 << 20, os.environ | {"DVC_SITE_CACHE_DIR": str(tmp_path / "site")}
    run = partial(subprocess.run, cwd=tmp_path, env=environment, check=True, capture_output=True)
    run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"])
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n[cache]\n    type = hardlink\n")
    (tmp_path / "dvc.yaml").write_text("stages:\n  s:\n    cmd: 'true'\n    outs: [out]\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/shard").write_bytes(os.urandom(num_bytes))
    md5 = fs.hash_file(tmp_path / "out/shard", "md5")
    if handed_over:
        os.environ["DVC_SITE_CACHE_DIR"] = str(tmp_path / "site")
        try:
            assert handover.register(tmp_path, [(tmp_path / "out/shard", md5, num_bytes)])
        finally:
            del os.environ["DVC_SITE_CACHE_DIR"]
    before = read_chars()
    run([sys.executable, "-m", "dvc", "commit", "-q", "-f", "s"])
    num_read = read_chars() - before
    assert (num_read < num_bytes // 2) if handed_over else (num_read >= num_bytes)
    assert (tmp_path / "out/shard").samefile(cache_object(tmp_path, md5))
    assert hashes(locked_stage(tmp_path, "s"), "outs") == {
        "out": handover.dir_md5([StoredFile("shard", num_bytes, md5)])
    }


def test_a_file_of_another_size_than_its_entry_is_not_registered(tmp_path, monkeypatch):
    """A wrong hash handed over would become the truth."""
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], cwd=tmp_path, check=True)
    for name in ("short", "right"):
        (tmp_path / name).write_bytes(b"12345")
    assert handover.register(tmp_path, [(tmp_path / "short", "0" * 32, 6), (tmp_path / "right", "1" * 32, 5)])
    paths = [tmp_path / "short", tmp_path / "right"]
    assert handover.known_md5s(tmp_path, paths) == {tmp_path / "right": "1" * 32}
    (tmp_path / "right").write_bytes(b"54321 and more")
    assert handover.known_md5s(tmp_path, paths) == {}


@pytest.mark.slow
def test_dvc_sees_ordinary_outputs(tmp_path):
    """status, checkout, push and pull with a local remote, after an extraction whose hashes were handed over."""
    repository = DvcRepository(tmp_path / "repository")
    repository.made()
    root, before = repository.root, repository.hashes()
    assert repository.spools == []
    for entry in json.loads((root / MANIFEST).read_bytes())["shards"]:
        assert (root / STATES / entry["path"]).samefile(cache_object(root, entry["md5"]))
    assert json.loads(repository.run("dvc", "status", "--json", "extract").stdout) == {}
    repository.ok("dvc", "remote", "add", "-d", "there", str(tmp_path / "remote"))
    repository.ok("dvc", "push", "-q", "extract")
    repository.ok("rm", "-r", STATES, MANIFEST)
    repository.ok("dvc", "checkout", "-q", "extract")
    assert repository.hashes() == before
    repository.ok("rm", "-rf", STATES, MANIFEST, ".dvc/cache")
    repository.ok("dvc", "pull", "-q", "extract")
    assert repository.hashes() == before
    assert json.loads(repository.run("dvc", "status", "--json", "extract").stdout) == {}
