"""Sets below ``imports/``: a kind of their own, no plan's, and needed by the drafter that was trained from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.generations.listing import find, list_generations, read_situation
from eyas.generations.reclaim import reclaimable, removed_files
from eyas.ops.gc.refusals import refusals
from eyas.ops.generations import as_json, as_text, list_all
from eyas.ops.retire import retire, retired_text
from states_repository import StatesRepository, manifest_of, md5

FILES = {"000/shard-0": b"a" * 5000, "000/shard-1": b"b" * 9000}
HOME = "imports/x"


@pytest.fixture
def repository(tmp_path: Path) -> StatesRepository:
    """With finished states of the pipeline, which are the planned ones."""
    made = StatesRepository(tmp_path / "r")
    made.publish({"000/own": b"own"}, engine="hf")
    identity = manifest_of({}, "hf")["identity"]
    (made.root / "data/plan.json").write_text(json.dumps({"identity": identity}))
    (made.root / ".gitignore").write_text("/data\n/.eyas\n/models\n/imports/*/hidden_states*\n/imports/*/drafter\n")
    return made


def import_set(repository: StatesRepository, *, drafter: bool, cached: bool = True, locked: bool = True) -> str:
    """Published states in ``imports/x``; in the cache and in a lock of their own as said. Gives their hash."""
    root, manifest = repository.root, json.dumps(manifest_of(FILES, "import")).encode()
    name = repository.put_folder(FILES)
    for path, data in FILES.items():
        repository.link(root / HOME / "hidden_states" / path, md5(data))
    (root / f"{HOME}/hidden_states.json").write_bytes(manifest)
    if not cached:
        for one in (name, *(md5(data) for data in FILES.values())):
            repository.object_path(one).unlink()
    states = {"path": f"{HOME}/hidden_states", "hash": "md5", "md5": name, "size": 14000, "nfiles": 2}
    listed = {
        "path": f"{HOME}/hidden_states.json",
        "hash": "md5",
        "md5": repository.put(manifest),
        "size": len(manifest),
    }
    stages = {"import": {"cmd": "true", "outs": [states, listed]}}
    specs = {
        "import": {"cmd": "true", "wdir": "../..", "outs": [states["path"], listed["path"]]},
        "train": {"cmd": "true", "wdir": "../..", "deps": [states["path"]], "outs": [f"{HOME}/drafter"]},
    }
    if drafter:
        repository.link(root / f"{HOME}/drafter", repository.put(b"weights"))
        made = {"path": f"{HOME}/drafter", "hash": "md5", "md5": md5(b"weights"), "size": 7}
        stages["train"] = {"cmd": "true", "deps": [dict(states)], "outs": [made]}
    if locked:
        repository.write_yaml(f"{HOME}/dvc.yaml", {"stages": specs})
        repository.write_yaml(f"{HOME}/dvc.lock", {"schema": "2.0", "stages": stages})
    repository.commit()
    return name


def imported(repository: StatesRepository, name: str):
    return {g.hash: g for g in list_generations(read_situation(repository.root))}[name]


def test_it_is_imported_and_never_stale(repository):
    name = import_set(repository, drafter=True)
    one = imported(repository, name)
    assert (one.kind, one.path, one.is_stale, one.is_needed) == ("imported", f"{HOME}/hidden_states", False, True)
    assert one.named_by == ("workspace", "branch main")
    assert {(g["kind"], g["state"]) for g in as_json(list_all(repository.root))} == {
        ("imported", "current"), ("pipeline", "current"),
    }  # fmt: skip
    assert f"in {HOME}/hidden_states" in as_text(list_all(repository.root))


def test_it_is_proposed_to_be_retired_only_without_a_drafter(repository):
    name = import_set(repository, drafter=True)
    assert reclaimable(repository.root).retirable == ()
    import_set(repository, drafter=False)
    ((hashed, _, num_bytes),) = reclaimable(repository.root).retirable
    assert (hashed, num_bytes >= 14000) == (name, True)


def test_a_set_that_no_lock_names_is_listed_and_is_not_gcs(repository):
    name = import_set(repository, drafter=False, cached=False, locked=False)
    one = imported(repository, name)
    assert (one.kind, one.path, one.is_stale, one.is_kept) == ("unrecorded", f"{HOME}/hidden_states", False, True)
    assert (one.stored_bytes, one.freed_now_bytes) == (14000, 0)
    found = read_situation(repository.root)
    assert removed_files(found) == []
    assert reclaimable(repository.root).retirable == ()
    assert not [refusal for refusal in refusals(found, (), is_locked=True) if HOME in refusal.what]


def test_a_finished_set_that_dvc_did_not_come_to_record_is_not_deleted(repository):
    """Its objects are in the cache and unnamed: gc would take them, and the set with them."""
    name = import_set(repository, drafter=False, locked=False)
    (refusal,) = [r for r in refusals(read_situation(repository.root), (), is_locked=True) if HOME in r.what]
    assert "make train-from GEN=x" in refusal.hint
    retire(repository.root, name[:8])
    found = read_situation(repository.root)
    assert not [r for r in refusals(found, (), is_locked=True) if HOME in r.what]
    assert sum(file.size_bytes for file in removed_files(found)) == 14000


def test_a_retired_set_goes_whole(repository):
    name = import_set(repository, drafter=True)
    done = retire(repository.root, name[:8])
    assert (done.kind, done.edited) == ("imported", (f"{HOME}/dvc.lock",))
    assert f"undo: git checkout {HOME}/dvc.lock" in retired_text(done)
    repository.commit()
    assert find(repository.root, name[:8]).is_retired
    found = read_situation(repository.root)
    assert sum(file.size_bytes for file in removed_files(found)) == 14000
    assert repository.object_path(name) in repository.gc_would_remove()
