"""What a plan lists, counts and warns of; its bytes are ``st_blocks`` of files that the test knows to go."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from eyas.ops.gc.plan import GcPlan, make_plan
from eyas.ops.gc.text import plan_text, plan_values
from states_repository import MANIFEST, STATES, StatesRepository, md5

OLD = {f"shards-000/{i}.safetensors": bytes([i]) * (5000 * i) for i in range(1, 4)}
NEW = {f"shards-000/{i}.safetensors": bytes([i + 100]) * 7000 for i in range(1, 4)}


@pytest.fixture
def repository(tmp_path):
    return StatesRepository(tmp_path / "repo")


def disk_bytes(paths) -> int:
    return sum({path.stat().st_ino: path.stat().st_blocks * 512 for path in paths}.values())


def plan_of(repository) -> GcPlan:
    return make_plan(repository.root, None)


def pivot(repository) -> tuple[str, str]:
    """An old generation that only a commit names, a new one in use."""
    old = repository.publish(OLD, engine="vllm")
    repository.commit("old states")
    new = repository.publish(NEW, engine="sglang")
    repository.commit("new states")
    return old, new


def retire(repository) -> None:
    """The stage's entry leaves ``dvc.lock``; the files stay."""
    repository.write_yaml("dvc.lock", {"schema": "2.0", "stages": {}})
    repository.commit("retire")


def test_nothing_to_do(repository):
    repository.publish(OLD)
    repository.commit()
    plan = plan_of(repository)
    assert (plan.plan_id, plan.freed_bytes, plan.is_empty) == ("", 0, True)
    assert "nothing to delete" in plan_text(plan)


def test_old_generation_goes_by_name_and_size(repository):
    """Case 86: the old set stands there with engine, samples, size and the commit that named it; then its total."""
    old, new = pivot(repository)
    plan = plan_of(repository)
    values = plan_values(plan)
    (row,) = values["generations"]
    assert (row["hash"], row["engine"], row["num_samples"]) == (old, "vllm 7", 6)
    assert row["last_named_by"].split()[1] == repository.git("rev-parse", "HEAD~1")[:10]
    lists = {path for path in repository.objects() if f"{path.parent.name}{path.name}" == new}
    going = {path for path in repository.objects() if path.stat().st_nlink == 1} - lists
    assert {f"{path.parent.name}{path.name}" for path in going} == set(plan.going.objects)
    assert {old, *map(md5, OLD.values())} < set(plan.going.objects)
    assert values["freed_bytes"] == row["freed_bytes"] == disk_bytes(going)
    assert [one["hash"] for one in values["kept"]] == [new]
    assert values["kept"][0]["why"] == "named by workspace, branch main"
    text = plan_text(plan)
    assert f"make gc CONFIRM={plan.plan_id}" in text
    assert "vllm" in text
    assert plan_of(repository).plan_id == plan.plan_id


def test_hard_links_of_the_workspace_go_along(repository):
    """Case 82: objects of states that lie in the workspace free nothing by themselves; the plan takes both names."""
    name = repository.publish(OLD)
    repository.commit()
    retire(repository)
    plan = plan_of(repository)
    assert {one.path for one in plan.going.names} == {MANIFEST, *(f"{STATES}/{path}" for path in OLD)}
    assert plan.freed_bytes == disk_bytes(repository.objects())
    assert plan.held.num_files == 0
    assert name in plan.going.objects
    assert next(iter(plan.going.names)).path == MANIFEST  # what announces the set goes first


def test_a_name_that_nobody_knows_holds_its_bytes(repository, tmp_path):
    """Case 82: a hard link elsewhere keeps the blocks; they are not promised, and the hint finds the link."""
    pivot(repository)
    before = plan_of(repository)
    kept_elsewhere = repository.object_path(md5(OLD["shards-000/3.safetensors"]))
    os.link(kept_elsewhere, tmp_path / "elsewhere")
    plan = plan_of(repository)
    assert plan.freed_bytes == before.freed_bytes - disk_bytes([kept_elsewhere])
    assert (plan.held.num_files, plan.held.num_bytes) == (1, disk_bytes([kept_elsewhere]))
    assert f"find / -xdev -samefile {kept_elsewhere}" in plan_text(plan)
    assert plan.plan_id != before.plan_id


def test_what_two_generations_share_stays_while_one_is_kept(repository):
    shared = {"shards-000/0.safetensors": b"s" * 30_000}
    repository.publish(OLD | shared, engine="vllm")
    repository.commit()
    repository.publish(NEW | shared, engine="sglang")
    repository.commit()
    plan = plan_of(repository)
    assert md5(shared["shards-000/0.safetensors"]) not in plan.going.objects
    assert set(map(md5, OLD.values())) < set(plan.going.objects)
    assert set(map(md5, NEW.values())).isdisjoint(plan.going.objects)


def test_two_generations_that_share_free_it_once(repository):
    shared = {"shards-000/0.safetensors": b"s" * 30_000}
    for engine, files in (("a", OLD), ("b", NEW)):
        repository.publish(files | shared, engine=engine)
        repository.commit()
    last = repository.publish({"x": b"x"}, engine="c")
    repository.commit()
    plan = plan_of(repository)
    going = {path for path in repository.objects() if path.stat().st_nlink == 1} - {repository.object_path(last)}
    assert sum(row.freed_bytes for row in plan.rows) == plan.freed_bytes == disk_bytes(going)
    assert len(plan.rows) == 2


def test_objects_that_are_links_of_each_other(repository):
    """`dvc cache migrate` links DVC 2's objects into DVC 3's place: one inode, two objects, kept while one is."""
    _, _ = pivot(repository)
    old, new = OLD["shards-000/2.safetensors"], NEW["shards-000/2.safetensors"]
    before = plan_of(repository)
    for data in (old, new):
        place = repository.object_path(md5(data), legacy=True)
        place.parent.mkdir(exist_ok=True)
        os.link(repository.object_path(md5(data)), place)
    plan = plan_of(repository)
    assert set(plan.going.objects) - set(before.going.objects) == {f"dos2unix:{md5(data)}" for data in (old, new)}
    assert plan.freed_bytes == before.freed_bytes == sum(row.freed_bytes for row in plan.rows)
    assert plan.held.num_files == 0
    theirs = repository.gc_would_remove()
    assert {os.fspath(repository.object_path(md5(d), legacy=True)) for d in (old, new)} <= set(map(os.fspath, theirs))


def test_strays_are_what_dvc_takes_along(repository):
    pivot(repository)
    for place in ("files/md5/ab/tmpXYZ.tmp", "ab/half"):
        path = repository.root / ".dvc/cache" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 5000)
    plan = plan_of(repository)
    assert set(plan.going.strays) == {"files/md5/ab/tmpXYZ.tmp", "ab/half"}
    ours = {os.fspath(plan.cache / path) for path in plan.going.strays}
    ours |= {plan_path(repository, name) for name in plan.going.objects}
    assert {os.path.realpath(path) for path in ours} == {
        os.path.realpath(path) for path in repository.gc_would_remove()
    }


def plan_path(repository, name: str) -> str:
    return os.fspath(repository.object_path(name))


def test_states_without_a_manifest_go_by_their_inodes(repository):
    repository.publish(OLD)
    lock = repository.root / "dvc.lock"
    (repository.root / MANIFEST).unlink()
    repository.commit()
    assert lock.exists()
    retire(repository)
    replaced = repository.root / STATES / "shards-000/1.safetensors"
    replaced.unlink()
    replaced.write_bytes(OLD["shards-000/1.safetensors"])
    names = {one.path for one in plan_of(repository).going.names}
    assert names == {f"{STATES}/shards-000/{i}.safetensors" for i in (2, 3)}


def test_a_file_that_was_written_again_stays(repository):
    """Same size, other content: not what was recorded. Nobody deletes it for being in the way."""
    repository.publish(OLD)
    repository.commit()
    retire(repository)
    mine = repository.root / STATES / "shards-000/2.safetensors"
    mine.unlink()
    mine.write_bytes(bytes(len(OLD["shards-000/2.safetensors"])))
    plan = plan_of(repository)
    assert plan.going.changed == (f"{STATES}/shards-000/2.safetensors",)
    assert f"{STATES}/shards-000/2.safetensors" not in {one.path for one in plan.going.names}
    assert any("hold something else" in warning for warning in plan.warnings)


def test_a_file_whose_object_is_lost_and_that_nobody_knows_stays(repository):
    repository.publish(OLD)
    repository.commit()
    retire(repository)
    repository.object_path(md5(OLD["shards-000/2.safetensors"])).unlink()
    assert plan_of(repository).going.changed == (f"{STATES}/shards-000/2.safetensors",)


def spool_of(repository, engine: str, *, is_retired: bool) -> str:
    identity = md5(engine.encode()) * 2
    folder = repository.root / ".eyas/spool" / identity
    (folder / "states").mkdir(parents=True)
    (folder / "states/0.safetensors").write_bytes(b"s" * 50_000)
    (folder / "journal.jsonl").write_text("{}\n")
    if is_retired:
        (folder / "retired").touch()
    return identity


def test_only_a_retired_spool_goes(repository):
    repository.publish(OLD)
    repository.commit()
    left = spool_of(repository, "left", is_retired=False)
    assert plan_of(repository).is_empty
    retired = spool_of(repository, "retired", is_retired=True)
    plan = plan_of(repository)
    assert {one.path for one in plan.going.names} == {
        f".eyas/spool/{retired}/{path}" for path in ("states/0.safetensors", "journal.jsonl", "retired")
    }
    assert list(plan.going.names)[-1].path.endswith("retired")
    folder = repository.root / ".eyas/spool" / retired
    assert plan.freed_bytes == disk_bytes(path for path in folder.rglob("*") if path.is_file())
    assert left not in json.dumps(plan_values(plan)["names"])


def test_a_spool_twin_goes_with_its_generation(repository):
    name = repository.publish(OLD)
    repository.commit()
    identity = json.loads((repository.root / MANIFEST).read_text())["identity"]
    spool = repository.root / ".eyas/spool" / identity
    shutil.copytree(repository.root / STATES, spool / "states", copy_function=os.link)
    shutil.copy(repository.root / MANIFEST, spool / "manifest.json")
    assert plan_of(repository).is_empty
    retire(repository)
    plan = plan_of(repository)
    assert {one.folder for one in plan.going.names} == {STATES, f".eyas/spool/{identity}"}
    assert {one.generation for one in plan.going.names} == {name}
    assert plan.freed_bytes == disk_bytes([*repository.objects(), spool / "manifest.json"])


def test_old_drafters_are_listed_by_path(repository):
    repository.publish(OLD, drafter=b"first drafter")
    repository.commit()
    repository.publish(OLD, drafter=b"second drafter" * 9)
    repository.commit()
    plan = plan_of(repository)
    assert [(row.title, row.num_objects) for row in plan.rows] == [("models/drafter", 1)]
    assert set(plan.going.objects) == {md5(b"first drafter")}


def test_no_remote_means_the_only_copy(repository):
    """Case 83: what goes exists nowhere else, and that is said."""
    pivot(repository)
    assert any("only copy" in warning for warning in plan_of(repository).warnings)


@pytest.mark.parametrize(("num_missing", "is_warned"), [(0, False), (1, True)])
def test_what_a_remote_has(repository, tmp_path, num_missing, is_warned):
    old, _ = pivot(repository)
    remote = tmp_path / "remote"
    shutil.copytree(repository.root / ".dvc/cache", remote)
    for data in list(OLD.values())[:num_missing]:
        (remote / "files/md5" / md5(data)[:2] / md5(data)[2:]).unlink()
    with (repository.root / ".dvc/config").open("a") as handle:
        handle.write("['remote \"store\"']\n    url = ../../remote\n")
    repository.commit()
    plan = plan_of(repository)
    (row,) = [row for row in plan.rows if row.hash == old]
    assert row.num_pushed == row.num_objects - num_missing
    assert any("in no remote" in warning for warning in plan.warnings) == is_warned
    assert not any("only copy" in warning for warning in plan.warnings)


def test_a_remote_that_is_not_there_is_unknown(repository):
    pivot(repository)
    with (repository.root / ".dvc/config").open("a") as handle:
        handle.write("['remote \"store\"']\n    url = /no/such/folder\n")
    repository.commit()
    plan = plan_of(repository)
    assert plan.rows[0].num_pushed is None
    assert "unknown" in plan_text(plan)
    assert plan.plan_id


def test_a_branch_of_a_remote_keeps_nothing_and_that_is_said(repository):
    old, _ = pivot(repository)
    repository.git("update-ref", "refs/remotes/origin/theirs", "HEAD~1")
    plan = plan_of(repository)
    assert old in plan.going.objects
    assert any("origin/theirs" in warning for warning in plan.warnings)


def test_never_named_is_said(repository):
    repository.publish(OLD)
    repository.commit()
    repository.put(b"nobody's")
    plan = plan_of(repository)
    assert [row.title for row in plan.rows] == ["named by no commit"]
    assert any("named by no commit that is left" in warning for warning in plan.warnings)


def test_a_pin_keeps(repository):
    old, _ = pivot(repository)
    repository.git("tag", "keep/before", "HEAD~1")
    plan = plan_of(repository)
    assert plan.is_empty
    whys = {one["hash"]: one["why"] for one in plan_values(plan)["kept"]}
    assert whys[old] == "pinned: tag keep/before"


def test_the_drafter_that_was_trained_from_what_goes_is_named(repository):
    repository.publish(OLD, drafter=b"weights")
    repository.commit("old states")
    repository.publish(NEW, drafter=b"others")
    repository.commit("new states")
    plan = plan_of(repository)
    drafter = f"models/drafter {md5(b'weights')[:10]}"
    assert plan.rows[0].used_by == (drafter,)
    assert len(plan.rows[0].identity) == 64
    assert any(drafter in warning and "trained from it" in warning for warning in plan.warnings)


def test_reports_that_the_run_cache_of_dvc_keeps_are_told_from_rubbish(repository):
    """DVC keeps reports of finished runs there, which no commit names and no gc of its counts."""
    repository.publish(OLD)
    repository.commit()
    report, plots = repository.put(b"a report"), repository.put_folder({"loss.tsv": b"1"})
    repository.put(b"rubbish")
    outs = [{"path": "r", "hash": "md5", "md5": report}, {"path": "p", "hash": "md5", "md5": plots}]
    for name, text in (("1", {"cmd": "true", "outs": outs}), ("2", "no yaml: [")):
        repository.write_yaml(f".dvc/cache/runs/ab/abcd/{name}", text)
    plan = plan_of(repository)
    titles = {row.title: row.num_objects for row in plan.rows}
    assert titles == {"reports in DVC's run cache": 3, "named by no commit": 1}
    assert any("run again" in warning for warning in plan.warnings)
