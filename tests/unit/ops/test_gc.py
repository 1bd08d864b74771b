"""A confirmed plan carried out by the real DVC: what it checks before, what is left after, what it says of both."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from eyas.errors import EyasError
from eyas.generations import ledger
from eyas.ops.gc.collect import collect, outcome_text
from eyas.ops.gc.intent import read_intent, write_plan
from eyas.ops.gc.plan import GcPlan, make_plan
from states_repository import MANIFEST, STATES, StatesRepository, md5

OLD, NEW = ({f"sub/{i}.safetensors": bytes([i + seed]) * 5000 for i in range(3)} for seed in (1, 100))


@pytest.fixture
def repository(tmp_path):
    made = StatesRepository(tmp_path / "repo")
    made.new = made.publish(NEW, engine="sglang")
    made.commit("new")
    made.git("branch", "keeps")
    made.old = made.publish(OLD, engine="vllm")
    made.commit("old")
    made.write_yaml("dvc.lock", {"schema": "2.0", "stages": {}})
    made.commit("retire")
    return made


def confirmed(repository) -> GcPlan:
    plan = make_plan(repository.root, None)
    write_plan(repository.root, plan.plan_id, plan.projects, plan.snapshot)
    return plan


def test_exactly_the_plan_goes(repository):
    plan = confirmed(repository)
    kept = {path for path in repository.objects() if f"{path.parent.name}{path.name}" not in plan.going.objects}
    stranger = repository.root / STATES / "sub/notes.txt"
    stranger.write_text("mine")
    event = collect(repository.root, plan.plan_id)
    assert repository.objects() == kept
    assert [path.name for path in (repository.root / STATES).rglob("*") if path.is_file()] == ["notes.txt"]
    assert not (repository.root / MANIFEST).exists()
    assert event["promised_bytes"] == event["expected_bytes"] == plan.freed_bytes
    assert [one["hash"] for one in event["generations"]] == [repository.old]
    assert ledger.read(repository.root)[-1]["plan_id"] == plan.plan_id
    assert ledger.read(repository.root)[-1]["commit"] == repository.git("rev-parse", "HEAD")
    assert "noted in .eyas/ledger.jsonl" in outcome_text(event)
    assert collect(repository.root, plan.plan_id)["run"] == event["run"]  # again: nothing left to do
    assert make_plan(repository.root, None).is_empty
    with pytest.raises(EyasError, match="no plan has the id"):
        collect(repository.root, "0123456789abcdef")


CHANGES = {
    "commit": (lambda r: r.commit("more"), r"HEAD: \w{10} then"),
    "new branch": (lambda r: r.git("branch", "extra"), "new branch extra"),
    "new tag": (lambda r: r.git("tag", "v1"), "new tag v1"),
    "branch gone": (lambda r: r.git("branch", "-D", "keeps"), "branch keeps is gone"),
    "branch moved": (lambda r: r.git("branch", "-f", "keeps", "HEAD"), "branch keeps was moved"),
    "object": (lambda r: r.put(b"new object"), "1 object of the cache: new"),
    "link": (
        lambda r: os.link(r.object_path(md5(OLD["sub/0.safetensors"])), r.root / "link"),
        "object of the cache: other size, inode or number of names",
    ),
    "name": (lambda r: (r.root / STATES / "sub/1.safetensors").unlink(), "name outside the cache: gone"),
    "written": (lambda r: os.utime(r.root / MANIFEST), "name outside the cache: other size"),
    "stray": (lambda r: (r.cache / md5(OLD["sub/0.safetensors"])[:2] / "tmp").touch(), "file that is no object: new"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changed_is_said(repository, name):
    plan = confirmed(repository)
    before = repository.objects()
    change, expected = CHANGES[name]
    change(repository)
    with pytest.raises(EyasError, match=expected):
        collect(repository.root, plan.plan_id)
    assert before <= repository.objects() | {repository.cache / "none"}
    assert read_intent(repository.root) is None


@pytest.mark.slow
def test_dvc_that_would_remove_something_else_is_an_error(repository):
    """A file of DVC's that ``.dvcignore`` hides from DVC: eyas keeps what it names, DVC would not."""
    name = repository.put(b"hidden")
    repository.write_yaml("hidden/x.dvc", {"outs": [{"path": "x", "hash": "md5", "md5": name, "size": 6}]})
    (repository.root / ".dvcignore").write_text("/hidden\n")
    repository.commit("hidden")
    plan = confirmed(repository)
    before = repository.objects()
    with pytest.raises(EyasError, match="would remove 1 objects more and 0 fewer"):
        collect(repository.root, plan.plan_id)
    assert repository.objects() == before
    assert read_intent(repository.root) is None


def hold_dvc_lock_once_begun(repository, held: list[bool]) -> threading.Thread:
    """Take DVC's own lock as soon as the intent is there: after the dry run, before the removal."""
    import fcntl

    def watch() -> None:
        while not (repository.root / ".eyas/gc/intent.json").exists():
            time.sleep(0.001)
        with (repository.root / ".dvc/tmp/lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            held.append(True)
            while held:
                time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.slow
def test_dvc_that_fails_leaves_the_intent(repository):
    plan = confirmed(repository)
    before, names = repository.objects(), {one.path for one in plan.going.names}
    held: list[bool] = []
    thread = hold_dvc_lock_once_begun(repository, held)
    with pytest.raises(EyasError, match=r"dvc gc .* ended with"):
        collect(repository.root, plan.plan_id)
    held.clear()
    thread.join()
    assert repository.objects() == before
    assert all((repository.root / path).exists() for path in names)
    (refusal,) = make_plan(repository.root, None).refusals
    assert refusal.hint == f"finish it: make gc CONFIRM={plan.plan_id}"
    with pytest.raises(EyasError, match="was interrupted, expected its id"):
        collect(repository.root, "0123456789abcdef")
    event = collect(repository.root, plan.plan_id)
    assert event["expected_bytes"] == plan.freed_bytes
    assert len(ledger.read(repository.root)) == 1


def interrupted(repository) -> GcPlan:
    """A gc that was stopped right after it wrote down what goes."""
    from eyas.ops.gc import collect as gc
    from eyas.ops.gc.intent import read_plan

    plan = confirmed(repository)
    gc._begin(repository.root, read_plan(repository.root, plan.plan_id) or {})
    return plan


def test_what_is_named_again_meanwhile_is_left(repository):
    """A new tag on the old commit: its objects and its names in the workspace stay; the rest of the plan goes."""
    other = repository.put(b"other rubbish" * 1000)
    plan = interrupted(repository)
    repository.git("tag", "wanted", "HEAD~1")
    event = collect(repository.root, plan.plan_id)
    assert event["generations"] == []
    assert event["kept_again"] == [repository.old]
    assert event["num_names"] == 0
    assert (event["num_objects"], event["expected_bytes"]) == (1, 16_384)
    assert not repository.object_path(other).exists()
    assert {path: (repository.root / STATES / path).read_bytes() for path in OLD} == OLD
    assert all(repository.object_path(md5(data)).read_bytes() == data for data in OLD.values())
    assert any("left alone: 4" in note for note in event["notes"])


@pytest.mark.slow
def test_a_gc_that_goes_on_deletes_nothing_that_was_not_confirmed(repository):
    plan = interrupted(repository)
    repository.git("branch", "-D", "keeps")
    kept = [repository.object_path(md5(data)) for data in NEW.values()]
    event = collect(repository.root, plan.plan_id)
    assert all(path.exists() for path in kept)
    assert any("were not confirmed" in note for note in event["notes"])
    again = confirmed(repository)
    assert {repository.new, *map(md5, NEW.values())} <= set(again.going.objects)
    collect(repository.root, again.plan_id)
    assert repository.objects() == set()


@pytest.mark.slow
def test_names_that_hold_something_else_now_stay(repository):
    plan = interrupted(repository)
    mine = repository.root / STATES / "sub/1.safetensors"
    mine.unlink()
    mine.write_bytes(b"written since")
    event = collect(repository.root, plan.plan_id)
    assert mine.read_bytes() == b"written since"
    assert not (repository.root / STATES / "sub/0.safetensors").exists()
    assert any("1 changed since" in note for note in event["notes"])


@pytest.mark.slow
def test_an_uncommitted_change_stops_a_gc_that_goes_on(repository):
    plan = interrupted(repository)
    repository.git("checkout", "-q", "HEAD~1", "--", "dvc.lock")
    before = repository.objects()
    with pytest.raises(EyasError, match=r"not committed: dvc\.lock"):
        collect(repository.root, plan.plan_id)
    assert repository.objects() == before
    repository.git("checkout", "-q", "HEAD", "--", "dvc.lock")
    collect(repository.root, plan.plan_id)


@pytest.mark.slow
def test_a_spool_that_is_taken_up_again_stays(repository):
    spool = repository.root / ".eyas/spool" / ("b" * 64)
    (spool / "states").mkdir(parents=True)
    (spool / "states/0.safetensors").write_bytes(b"s" * 9000)
    (spool / "journal.jsonl").write_text("{}\n")
    (spool / "retired").touch()
    plan = interrupted(repository)
    (spool / "retired").unlink()  # what an extraction of that identity does first
    event = collect(repository.root, plan.plan_id)
    assert (spool / "states/0.safetensors").read_bytes() == b"s" * 9000
    assert any("left alone: 3" in note for note in event["notes"])


def test_a_deleted_file_that_is_open_is_named(repository):
    """Case 82's cousin: the bytes are gone from every folder and not free."""
    from eyas.ops.gc.measure import open_files

    path = repository.object_path(md5(OLD["sub/0.safetensors"]))
    stat = path.stat()
    with path.open("rb"):
        (repository.root / STATES / "sub/0.safetensors").unlink()
        path.unlink()
        (holder,) = open_files({(stat.st_dev, stat.st_ino): 8192})
        assert (holder.pid, holder.num_bytes) == (os.getpid(), 8192)
    assert open_files({(stat.st_dev, stat.st_ino): 8192}) == []


@pytest.mark.slow
def test_the_ledger_is_json_for_ever(repository):
    plan = confirmed(repository)
    collect(repository.root, plan.plan_id)
    (line,) = (repository.root / ".eyas/ledger.jsonl").read_text().splitlines()
    event = json.loads(line)
    wanted = {"event", "when", "plan_id", "commit", "user", "generations", "promised_bytes", "measured_bytes", "notes"}
    assert wanted <= event.keys()
    assert event["generations"][0]["engine"] == "vllm 7"
