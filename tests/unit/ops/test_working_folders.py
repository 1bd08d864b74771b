"""Rings and cached shards that trainings leave: shown by every list, and a ring that nobody holds is gc's to take."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from budget_world import World
from gc_cases import Project, environment, make_pivot

from eyas.errors import StoreError
from eyas.generations.working import read_working
from eyas.shards.ring import Ring

IDENTITY = "ab" * 32
NAME = f".eyas/ring/{IDENTITY}"


def write_ring(root: Path, identity: str = IDENTITY, num_shards: int = 2) -> Path:
    """A ring as a killed training leaves it: shards with records, one half written, a request."""
    folder = root / ".eyas/ring" / identity
    for kind, index in [("pinned", 7), *(("states", i) for i in range(num_shards - 1))]:
        path = folder / kind / f"000/shard-{index:05d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"__metadata__": {"format": "eyas-shard", "identity": identity}}, separators=(",", ":"))
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + os.urandom(30_000 + index))
        path.with_name(path.name + ".json").write_text("{}")
    (folder / "states/000/shard-00044.safetensors.part").write_bytes(b"half a shard")
    (folder / "states/000/shard-00000.safetensors.again.3").touch()
    (root / ".eyas/ring.lock").touch()
    return folder


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def hold(path: Path):
    """A living process that holds a lock."""
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(99)"
    process = subprocess.Popen([sys.executable, "-c", code, os.fspath(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def working(project: Project) -> list[dict]:
    return project.plan()["working"]


@pytest.fixture
def project(tmp_path):
    project, *_ = make_pivot(tmp_path / "repo")
    return project


def test_a_ring_that_nobody_holds_goes_by_a_plan_with_what_it_is(project):
    folder = write_ring(project.root)
    before, size = project.objects, disk_bytes(folder)
    plan = project.plan()
    [ring] = plan["working"]
    assert (ring["kind"], ring["path"], ring["state"], ring["num_shards"]) == ("ring", NAME, "idle", 2)
    assert (ring["disk_bytes"], ring["freed_now_bytes"]) == (size, size)
    assert f"headers name capture {IDENTITY[:10]}" in ring["note"]
    [row] = [one for one in plan["others"] if "ring" in one["title"]]
    assert row["freed_bytes"] == size
    assert "no process holds .eyas/ring.lock" in row["title"]
    assert plan["freed_bytes"] == sum(one["freed_bytes"] for one in plan["generations"] + plan["others"])
    event = project.gc(plan["plan_id"])
    assert not folder.exists()
    assert event["num_names"] >= 6
    assert event["expected_bytes"] == event["promised_bytes"] == plan["freed_bytes"]
    assert project.objects < before, "what the plan had besides went as well"
    assert working(project) == []


def test_a_ring_that_a_living_process_holds_stays_and_is_shown(project):
    """By the kernel's lock: the text in the file, and the process that is named there, say nothing."""
    folder = write_ring(project.root)
    (project.root / ".eyas/ring.lock").write_text(f"ring, pid {os.getpid()}, since long ago")
    assert working(project)[0]["state"] == "idle", "the named process lives and holds nothing"
    holder = hold(project.root / ".eyas/ring.lock")
    try:
        plan = project.plan()
        assert plan["working"][0]["state"] == "held"
        assert plan["working"][0]["freed_now_bytes"] == 0
        assert not [one for one in plan["others"] if "ring" in one["title"]]
        project.gc(plan["plan_id"])
        assert folder.exists()
    finally:
        holder.kill()
        holder.wait()
    assert working(project)[0]["state"] == "idle"


def test_a_plan_made_before_a_training_took_its_ring_again_deletes_nothing(project):
    folder = write_ring(project.root)
    plan = project.plan()
    holder = hold(project.root / ".eyas/ring.lock")
    try:
        done = project.eyas("gc", "--confirm", plan["plan_id"])
        assert done.returncode == 2
        assert "names outside the cache: gone" in done.stderr
    finally:
        holder.kill()
        holder.wait()
    assert len(list(folder.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("notes.txt", b"mine", "notes.txt is no part of a ring"),
        ("states/000/shard-00003.safetensors", b"\x08\0\0\0\0\0\0\0another!", "is no shard of capture"),
    ],
)
def test_a_folder_that_holds_anything_else_is_not_offered(project, path, content, says):
    folder = write_ring(project.root)
    (folder / path).write_bytes(content)
    [ring] = working(project)
    assert ring["state"] == "unclear"
    assert says in ring["note"]
    project.gc(project.plan()["plan_id"])
    assert (folder / path).read_bytes() == content


def test_another_name_than_an_identity_is_no_ring(project):
    write_ring(project.root).rename(project.root / ".eyas/ring/backup")
    assert working(project)[0]["state"] == "unclear"


def test_a_shard_that_changed_since_the_plan_makes_it_void(project):
    folder = write_ring(project.root)
    plan = project.plan()
    (folder / "states/000/shard-00000.safetensors.json").write_text('{"another": 1}')
    assert project.eyas("gc", "--confirm", plan["plan_id"]).returncode == 2
    assert folder.exists()


def test_the_cache_of_shards_is_shown_and_left_alone(project):
    folder = project.root / ".eyas/shard_cache"
    folder.mkdir(parents=True)
    (folder / ("c" * 32)).write_bytes(os.urandom(70_000))
    (folder / f"{'d' * 32}.99999.part").write_bytes(os.urandom(9000))
    (folder / "lock").touch()
    plan = project.plan()
    [cache] = plan["working"]
    assert (cache["kind"], cache["num_shards"], cache["disk_bytes"]) == ("shard_cache", 2, disk_bytes(folder))
    project.gc(plan["plan_id"])
    assert len(list(folder.iterdir())) == 3
    assert "rm -r .eyas/shard_cache" in project.eyas("gc-plan").stdout


def test_generations_and_doctor_show_them(project):
    size = disk_bytes(write_ring(project.root))
    (project.root / ".eyas/shard_cache").mkdir()
    (project.root / ".eyas/shard_cache" / ("c" * 32)).write_bytes(os.urandom(70_000))
    listed = json.loads(project.eyas("generations", "--json").stdout)
    assert [one["disk_bytes"] for one in listed if one["kind"] == "ring"] == [size]
    text = project.eyas("generations").stdout
    assert NAME in text
    assert ".eyas/shard_cache: 73.7 kB" in text
    found = {one["name"]: one for one in json.loads(project.eyas("doctor", "--json").stdout)}
    assert found[NAME]["state"] == "found"
    assert "make gc-plan" in found[NAME]["hint"]
    assert "73.7 kB" in found[".eyas/shard_cache"]["value"]


def test_the_budget_counts_them(tmp_path):
    """``gc could free`` has the ring, with its bytes in a row of its own."""
    root = tmp_path / "repo"
    root.mkdir()
    World(root)
    project = Project.__new__(Project)
    project.root = root
    for command in (("git", "init", "-q"), ("git", "add", "-A"), ("git", "commit", "-qm", "a"), ("dvc", "init", "-q")):
        subprocess.run(command, cwd=root, env=environment(), check=True, capture_output=True)
    before = json.loads(project.eyas("budget", "--json").stdout)
    assert before["working"] == []
    size = disk_bytes(write_ring(root))
    after = json.loads(project.eyas("budget", "--json").stdout)
    assert after["reclaimable_bytes"] - before["reclaimable_bytes"] == size
    assert [one["disk_bytes"] for one in after["working"]] == [size]
    assert f"{size:,} bytes" in next(line for line in project.eyas("budget").stdout.splitlines() if NAME in line)
    with (root / ".eyas/ring.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = json.loads(project.eyas("budget", "--json").stdout)
    assert held["reclaimable_bytes"] == before["reclaimable_bytes"]
    assert held["working"][0]["state"] == "held"


def test_a_ring_that_was_left_empty_stands_in_no_trainings_way(tmp_path):
    """A training that is killed while its engine loads leaves folders alone, which no plan of gc can offer."""
    home = tmp_path / ".eyas"
    (home / "ring" / IDENTITY / "pinned/000").mkdir(parents=True)
    assert read_working(tmp_path).rings == ()
    Ring(home, "cd" * 32).prepare({})
    assert [path.name for path in (home / "ring").iterdir()] == ["cd" * 32]
    folder = write_ring(tmp_path)
    with pytest.raises(StoreError, match=f"{IDENTITY} is the ring of another capture"):
        Ring(home, "cd" * 32).prepare({})
    assert len(list(folder.rglob("*.safetensors"))) == 2
