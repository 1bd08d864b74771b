"""The guard around the real dvc: what would have been captured again is healed, what would be lost is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dvc_repository import EXTRACT, MANIFEST, STATES, DvcRepository
from ruamel.yaml import YAML

from eyas import fs
from eyas.plan.cache import cache_object, locked_stage

pytestmark = pytest.mark.slow
FILES_OF_A_COMMIT = ("dvc.lock", "params.yaml")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished capture for all; each test leaves it finished."""
    repository = DvcRepository(tmp_path_factory.mktemp("guarded") / "repository")
    repository.made()
    return repository, repository.hashes()


def is_clean(repository: DvcRepository) -> bool:
    return json.loads(repository.run("dvc", "status", "--json", "extract").stdout) == {}


def healed(finished) -> str:
    """Run what make runs: nothing is captured, DVC is content, the bytes are the same."""
    repository, before = finished
    repository.forget_runs()
    said = repository.made()
    assert not repository.stage_ran
    assert is_clean(repository)
    assert repository.hashes() == before
    return said


def test_nothing_to_do_is_seen_without_asking_dvc(finished):
    said = healed(finished)
    assert "up to date" in said
    assert "Stage 'extract'" not in said


def test_a_parameter_outside_the_identity_costs_no_capture(finished):
    """Without the guard DVC would delete the states: shown by its own dry run."""
    repository, _ = finished
    repository.set(reserve_bytes=7)
    repository.ok("dvc", "repro", "-q", "plan")
    assert "Running stage 'extract'" in repository.ok("dvc", "repro", "--dry", "extract")
    assert "nothing was captured" in healed(finished)
    assert locked_stage(repository.root, "extract")["params"]["params.yaml"]["extract.reserve_bytes"] == 7


def test_the_executor_reruns_nothing(finished):
    """It decides no byte and is tracked by no stage: DVC finds nothing changed, with or without the guard."""
    repository, _ = finished
    assert is_clean(repository)
    repository.set(executor="ray")
    assert json.loads(repository.run("dvc", "status", "--json", "plan", "extract").stdout) == {}
    assert is_clean(repository)
    assert "Running stage 'extract'" not in repository.ok("dvc", "repro", "--dry", "extract")
    healed(finished)
    repository.set(executor="local")


def test_a_lock_of_an_earlier_pipeline_costs_no_capture(finished):
    """It has the section `extract` as a whole: DVC would run the stage, the guard notes the states anew."""
    repository, _ = finished
    path = repository.root / "dvc.lock"
    noted = YAML(typ="safe").load(path)
    for name in ("plan", "extract"):
        values = noted["stages"][name]["params"]["params.yaml"]
        section = {key.removeprefix("extract."): values.pop(key) for key in list(values) if key.startswith("extract.")}
        values["extract"] = section
    with path.open("w") as handle:
        YAML().dump(noted, handle)
    assert not is_clean(repository)
    assert "nothing was captured" in healed(finished)


def test_one_lost_cache_object_is_healed_from_the_workspace(finished):
    """Case 84."""
    repository, _ = finished
    entry = json.loads((repository.root / MANIFEST).read_bytes())["shards"][1]
    cached = cache_object(repository.root, entry["md5"])
    cached.unlink()
    assert not is_clean(repository)
    assert "nothing was captured" in healed(finished)
    assert cached.samefile(repository.root / STATES / entry["path"])


def test_a_lost_cache_object_beside_a_damaged_shard_is_refused(finished):
    """Case 84, and the state that DVC keeps says that nothing changed: the one file is hashed all the same."""
    repository, _ = finished
    entry = json.loads((repository.root / MANIFEST).read_bytes())["shards"][1]
    path = repository.root / STATES / entry["path"]
    data, stat = path.read_bytes(), path.stat()
    cache_object(repository.root, entry["md5"]).unlink()
    flip(path, stat)
    done = repository.make()
    assert (done.returncode, path.exists()) == (2, True)
    assert entry["path"] in done.stderr
    assert "make repair" in done.stderr
    path.chmod(0o644)
    path.write_bytes(data)
    healed(finished)


def flip(path: Path, stat: os.stat_result) -> None:
    path.chmod(0o644)
    with path.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_touched_or_deleted_lock_is_written_again(finished):
    repository, _ = finished
    lock = repository.root / "dvc.lock"
    text = lock.read_text()
    lock.write_text(text.replace("reserve_bytes: ", "reserve_bytes: 1"))
    healed(finished)
    lock.unlink()
    assert "nothing was captured" in healed(finished)


def test_a_missing_shard_is_linked_back_from_the_cache(finished):
    repository, _ = finished
    entry = json.loads((repository.root / MANIFEST).read_bytes())["shards"][0]
    (repository.root / STATES / entry["path"]).unlink()
    assert "linked back" in healed(finished)
    repository.ok("rm", "-r", STATES, MANIFEST)
    repository.set(reserve_bytes=9)
    assert "linked back" in healed(finished)


def test_a_touched_shard_is_hashed_and_found_the_same(finished):
    repository, _ = finished
    entry = json.loads((repository.root / MANIFEST).read_bytes())["shards"][0]
    os.utime(repository.root / STATES / entry["path"])
    healed(finished)


def test_a_stray_file_is_refused_instead_of_costing_the_set(finished):
    repository, _ = finished
    stray = repository.root / STATES / "000/notes.txt"
    stray.write_text("mine")
    done = repository.make("train")
    assert (done.returncode, stray.read_text()) == (2, "mine")
    assert "000/notes.txt" in done.stderr
    stray.unlink()
    healed(finished)


def test_another_identity_is_refused_on_every_way_to_the_stage(finished):
    """Case 35: who holds what, how large, what differs, whether it is safe, what to do."""
    repository, before = finished
    manifest = json.loads((repository.root / MANIFEST).read_bytes())
    repository.set(revision=99)
    size = f"{manifest['stored_bytes'] / 1000:.1f} kB"
    for stage in ("extract", "train", ""):
        done = repository.make(stage)
        assert done.returncode == 2
        for text in ("10 samples", "106 tokens", size, "revision", "99", "FORCE=1", "no commit names it"):
            assert text in done.stderr
    repository.ok("git", "add", "dvc.lock")
    repository.ok("git", "commit", "-qm", "states")
    commit = repository.ok("git", "rev-parse", "--short", "HEAD").strip()
    assert f"named by commit {commit}" in repository.make().stderr
    cached = cache_object(repository.root, manifest["shards"][0]["md5"])
    cached.rename(cached.with_suffix(".away"))
    assert "the only copy" in repository.make().stderr
    cached.with_suffix(".away").rename(cached)
    assert repository.hashes() == before
    repository.set(revision=manifest["capture"]["revision"])
    healed(finished)


def test_a_stage_downstream_runs_after_a_heal(finished):
    repository, before = finished
    repository.set(reserve_bytes=8)
    repository.forget_runs()
    repository.made("train")
    assert not repository.stage_ran
    assert (repository.root / "models/drafter").read_bytes() == (repository.root / MANIFEST).read_bytes()
    assert repository.hashes() == before


def test_force_captures_the_other_identity(tmp_path):
    repository = DvcRepository(tmp_path / "repository")
    repository.made()
    first = json.loads((repository.root / MANIFEST).read_bytes())["identity"]
    repository.set(revision=99)
    assert repository.make().returncode == 2
    repository.made("extract", "--force")
    assert json.loads((repository.root / MANIFEST).read_bytes())["identity"] != first
    assert (repository.captured_tokens, repository.spools, is_clean(repository)) == (106, [], True)


def test_after_a_checkout_by_git_alone_the_wanted_states_are_named(tmp_path):
    """Both sets lie in the cache; the hint's own command exchanges them, and nothing is captured."""
    repository = DvcRepository(tmp_path / "repository")
    repository.made()
    first, lock, params = repository.hashes(), *((repository.root / name).read_text() for name in FILES_OF_A_COMMIT)
    repository.set(revision=99)
    repository.made("extract", "--force")
    for name, text in zip(FILES_OF_A_COMMIT, (lock, params), strict=True):
        (repository.root / name).write_text(text)
    done = repository.make()
    hint = f"dvc checkout {STATES} {MANIFEST}"
    assert (done.returncode, hint in done.stderr) == (2, True)
    repository.ok(*hint.split())
    assert repository.hashes() == first
    repository.forget_runs()
    repository.made()
    assert (repository.stage_ran, is_clean(repository), repository.spools) == (False, True, [])
    assert repository.hashes() == first


def kill_dvc_after_publication(repository: DvcRepository) -> None:
    """SIGKILL to DVC and its stage as soon as the manifest is there: ``dvc.lock`` knows nothing."""
    dvc = subprocess.Popen(
        ["dvc", "repro", "-q", "extract"], cwd=repository.root, env=repository.environment, start_new_session=True
    )
    deadline_s = time.monotonic() + 100
    while not (repository.root / MANIFEST).exists():
        assert time.monotonic() < deadline_s
        assert dvc.poll() is None
        time.sleep(0.001)
    os.killpg(dvc.pid, signal.SIGKILL)
    dvc.wait()
    assert not locked_stage(repository.root, "extract"), "killed too late"


def test_a_kill_before_the_lock_costs_no_capture(tmp_path):
    """By make: the guard records what lies there. By a bare ``dvc repro``, which wipes it: the twin is published."""
    repository = DvcRepository(tmp_path / "repository")
    kill_dvc_after_publication(repository)
    before = repository.hashes()
    repository.forget_runs()
    assert "nothing was captured" in repository.made()
    assert (repository.stage_ran, is_clean(repository), repository.spools) == (False, True, [])
    assert repository.hashes() == before

    other = DvcRepository(tmp_path / "other")
    kill_dvc_after_publication(other)
    other.ok("dvc", "repro", "-q", "extract")
    assert (other.captured_tokens, is_clean(other)) == (0, True)
    assert other.hashes() == before
    assert "settled" in other.ok(sys.executable, "-m", "eyas.cli", "settle")
    assert other.spools == []


def test_a_missing_shard_that_no_cache_has_is_the_only_one_captured(tmp_path):
    repository = DvcRepository(tmp_path / "repository")
    repository.made()
    before = repository.hashes()
    manifest = json.loads((repository.root / MANIFEST).read_bytes())
    entry = manifest["shards"][-1]
    (repository.root / STATES / entry["path"]).unlink()
    cache_object(repository.root, entry["md5"]).unlink()
    repository.made()
    assert repository.captured_tokens == entry["num_tokens"] < manifest["num_stored_tokens"]
    assert (repository.hashes(), is_clean(repository), repository.spools) == (before, True, [])


def test_an_extraction_by_hand_is_kept_from_a_running_one(tmp_path):
    repository = DvcRepository(tmp_path / "repository")
    repository.made()
    with fs.volume_lock(repository.root / ".eyas/extract.lock", "somebody"):
        for done in (repository.make(), repository.run(sys.executable, *EXTRACT)):
            assert done.returncode == 2
            assert "is locked by somebody, pid" in done.stderr
