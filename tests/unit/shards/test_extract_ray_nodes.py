"""What a node of a cluster must have, and its own disk; workers are threads here."""

import dataclasses
import hashlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray_threads import flip, run_on

from eyas import fs
from eyas.contracts import EngineFacts
from eyas.engines.fake import FakeEngine
from eyas.engines.ray import driver
from eyas.errors import DiskError, StoreError, TargetError
from eyas.target import store
from fake_target import make_target

HOLDER = """
import os, pathlib, sys, time
from eyas.engines.ray.node_disk import own_folder
if len(sys.argv) > 3:
    os.setuid(int(sys.argv[3]))
with own_folder(pathlib.Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / "000").mkdir()
    (folder / "000/shard-00000.safetensors.part").write_bytes(b"half")
    print("up", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process of this node that is a worker with a folder on its disk; gives its folder."""
    begun = []

    def begin(name: str, root: Path = tmp_path / "node", *user: str):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", HOLDER, str(root), name, *user]
        begun.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
        assert begun[-1].stdout.readline() == b"up\n"
        return begun[-1], root / name

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def test_what_killed_workers_left_on_a_node_s_disk_goes_and_what_living_ones_have_stays(
    case, unbroken, on_threads, monkeypatch, tmp_path, holder
):
    monkeypatch.setenv("EYAS_RAY_SPOOL", str(tmp_path / "node"))
    identity = case.plan.identity[:16]
    killed, left = holder(f"{identity}-w1-aaaaaa")
    living, kept = holder(f"{identity}-w2-aaaaaa")
    (tmp_path / "node/somebody-else").mkdir()
    killed.kill()
    killed.wait()
    assert left.is_dir()
    run_on(case)
    assert not left.exists()
    assert (kept / "000/shard-00000.safetensors.part").exists()
    assert living.poll() is None
    assert {path.name for path in (tmp_path / "node").iterdir() if path.is_dir()} == {kept.name, "somebody-else"}
    assert case.hashes() == unbroken


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be two users")
def test_two_users_of_a_node_share_a_folder_on_its_disk(holder):
    """Each removes what its own killed workers left, and leaves the other's alone."""
    one, other, identity = "65533", "65534", "0" * 16
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o1777)
        killed, left = holder(f"{identity}-w1-aaaaaa", root, one)
        killed.kill()
        killed.wait()
        kept = [holder(f"{identity}-w1-bbbbbb", root, other)[1]]
        assert left.exists()
        kept += [holder(f"{identity}-w2-aaaaaa", root, one)[1]]
        assert not left.exists()
        kept += [holder(f"{identity}-w2-bbbbbb", root, other)[1]]
        assert all((folder / "000/shard-00000.safetensors.part").exists() for folder in kept)


def test_the_reserve_is_kept_on_a_node_s_disk_too(case, on_threads, monkeypatch, tmp_path):
    node, free_bytes = tmp_path / "node", fs.free_bytes
    monkeypatch.setenv("EYAS_RAY_SPOOL", str(node))
    monkeypatch.setattr(fs, "free_bytes", lambda path: 800_000 if path.is_relative_to(node) else free_bytes(path))
    with pytest.raises(DiskError) as caught:
        run_on(case, reserve_bytes=900_000)
    host, said = (
        socket.gethostname(),
        r"needs [\d,]+ bytes; 800,000 bytes are free and extract\.reserve_bytes keeps [\d,]+ of",
    )
    assert re.match(f"node {host}: EYAS_RAY_SPOOL={node}: 000/shard-0000\\d.safetensors {said}", caught.value.message)
    assert f"df -h {node}" in caught.value.hint
    assert not case.spool.exists()


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("{}/file/node", "cannot be written to: Not a directory"),
        ("{}/file", "cannot be written to: it is no folder"),
        ("{}/link to nothing", "cannot be written to: it is no folder"),
        ("spool", "expected a path from / on"),  # below the repository, which all nodes share
        ("~/spool", "expected a path from / on"),
    ],
)
def test_a_node_s_disk_that_is_none_is_named(case, on_threads, monkeypatch, tmp_path, named, reason):
    (tmp_path / "file").touch()
    (tmp_path / "link to nothing").symlink_to(tmp_path / "nothing/there")
    named = named.format(tmp_path)
    monkeypatch.setenv("EYAS_RAY_SPOOL", named)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DiskError) as caught:
        run_on(case)
    assert f"node {socket.gethostname()}: EYAS_RAY_SPOOL={named}" in caught.value.message
    assert caught.value.message.endswith(reason)


def test_a_node_s_own_disk_comes_first_when_it_is_named(case, unbroken, on_threads, monkeypatch, tmp_path):
    (tmp_path / "node").mkdir()
    (tmp_path / "a link").symlink_to("node")
    monkeypatch.setenv("EYAS_RAY_SPOOL", str(tmp_path / "a link"))
    seen = []
    monkeypatch.setattr(
        driver, "verify_file", lambda path, entry, identity: seen.append(entry.path) or (None, [])
    )  # a copy is read through
    run_on(case)
    assert case.hashes() == unbroken
    assert sorted(seen) == [shard.path for shard in case.plan.shards]
    assert not [path for path in (tmp_path / "node").iterdir() if path.is_dir()]


def test_a_node_with_another_engine_is_refused(case, on_threads):
    def edit(name, news):
        if news.ready is None:
            return news
        facts = EngineFacts(name="fake", version="2", options={}, deterministic=True)
        return dataclasses.replace(news, ready=dataclasses.replace(news.ready, host="node-7", facts=facts))

    on_threads.edit = staticmethod(edit)
    with pytest.raises(StoreError, match="node node-7 has the engine fake 2, the plan was made for fake 1"):
        run_on(case)


def test_a_node_with_another_eyas_is_refused(case, on_threads):
    """Somebody pulled while a run went on: a worker that was hired later would write other bytes."""

    def edit(name, news):
        return dataclasses.replace(news, ready=news.ready and dataclasses.replace(news.ready, host="n7", code="other"))

    on_threads.edit = staticmethod(edit)
    with pytest.raises(StoreError, match="node n7 runs another eyas"):
        run_on(case)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A target's folder, its identity, and the paths that were hashed since."""
    folder, hashed, hash_file = tmp_path / "targets/weights", [], fs.hash_file
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    target = dataclasses.replace(make_target(), files=fs.tree_digests(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fs, "hash_file", lambda path, *more: hashed.append(path.name) or hash_file(path, *more))
    return folder, target, hashed


def test_the_target_s_files_of_a_node_are_hashed_once(case, unbroken, on_threads, files):
    folder, target, hashed = files
    run_on(case, folder=folder, target=target)
    assert len(on_threads.made[0].specs) == 2
    of_target = [name for name in hashed if not name.endswith(".py")]
    assert sorted(of_target) == ["config.json", "model.safetensors"]
    assert case.hashes() == unbroken


def test_files_as_the_fetch_left_them_are_not_hashed(case, on_threads, files):
    folder, target, hashed = files
    stamps = store.stamps(target, folder)
    fs.write_record(
        folder.with_suffix(".json"), store.FetchedTarget(request="", identity=target, stamps=stamps)
    )  # as the volume of the fetch has it
    run_on(case, folder=folder, target=target)
    assert not [name for name in hashed if not name.endswith(".py")]


@pytest.mark.parametrize("fault", ["another revision", "half copied", "missing"])
def test_a_node_with_other_files_of_the_target_is_refused_before_anything_is_captured(
    case, on_threads, files, monkeypatch, fault
):
    folder, target, _ = files
    path, digest = folder / "model.safetensors", target.files[1]
    if fault == "another revision":
        flip(path)
        said = f"has SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}, expected {digest.sha256}"
    elif fault == "half copied":
        path.write_bytes(path.read_bytes()[:5000])
        said = "has 5,000 bytes, expected 10,240"
    else:
        path.unlink()
        said = "is missing"
    opened = []
    monkeypatch.setattr(FakeEngine, "open", opened.append)
    with pytest.raises(TargetError) as caught:
        run_on(case, folder=folder, target=target)
    assert caught.value.message == f"node {socket.gethostname()}: {folder}: model.safetensors {said}"
    assert not opened
    assert not case.spool.exists()


def test_a_node_that_does_not_see_the_volume_is_refused(case, on_threads, monkeypatch):
    hire = on_threads.hire

    def elsewhere(self, spec, gpus):
        hire(self, dataclasses.replace(spec, incoming=case.root / "not/there"), gpus)

    monkeypatch.setattr(on_threads, "hire", elsewhere)
    with pytest.raises(StoreError, match="does not see"):
        run_on(case)


def test_a_shard_that_was_handed_out_and_never_arrived_goes_out_again(case, unbroken, on_threads, monkeypatch, capfd):
    """Nobody is told of a call that got lost: that worker has no work, and would be waited for without end."""
    monkeypatch.setenv("EYAS_WATCHDOG_S", "1")
    monkeypatch.setenv("EYAS_RAY_WORKERS", "1")
    give, lost = on_threads.give, []

    def lossy(self, name, planned, samples):
        if lost:
            give(self, name, planned, samples)
        else:
            lost.append(planned.path)

    monkeypatch.setattr(on_threads, "give", lossy)
    _, executor = run_on(case)
    assert (len(lost), executor.num_lost_workers) == (1, 1)
    assert "answers, but nothing went on there for 1 s" in capfd.readouterr().err
    assert case.hashes() == unbroken
