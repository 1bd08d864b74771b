"""What the guard reads and says, without DVC; the real dvc is in ``shards/test_guarded_dvc.py``."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas import config, fs
from eyas.contracts import CaptureIdentity, CapturePlan, EngineFacts, PlannedShard, ShardEntry, ShardManifest
from eyas.errors import ConfigError, StoreError
from eyas.ops import guard
from eyas.ops import published as store
from eyas.plan.cache import cache_object

CAPTURE = CaptureIdentity(
    target="1" * 64, tokens="2" * 64, boundaries=(1, 2), final_hidden="post_norm", dtype="bfloat16", codec="raw",
    last_rows="all", engine="fake", engine_version="1", engine_options={"device": "cpu"}, image="", shard_bytes=4096,
    batch_tokens=64, revision=1,
)  # fmt: skip


def finish(root: Path, num_shards: int = 3, **changes) -> ShardManifest:
    """A finished capture as files, committed by hand: cache objects, ``dvc.lock`` and the plan's own entry."""
    entries = []
    for index in range(num_shards):
        path = f"{index // 64:03d}/shard-{index:05d}.safetensors"
        data = index.to_bytes(8, "little")
        fs.write_bytes(root / store.STATES / path, data) if num_shards < 100 else _quick(root, path, data)
        md5 = fs.hash_file(root / store.STATES / path, "md5")
        entries.append(ShardEntry(path=path, size_bytes=8, md5=md5, num_samples=1, num_tokens=2))
    manifest = ShardManifest(
        identity=CAPTURE.digest, capture=CAPTURE, hidden_size=1, shards=tuple(entries), stored_bytes=8 * num_shards,
        engine=EngineFacts(name="fake", version="1", options={}, deterministic=True),
        num_planned_samples=num_shards, num_planned_tokens=2 * num_shards,
        num_stored_samples=num_shards, num_stored_tokens=2 * num_shards,
    )  # fmt: skip
    fs.write_record(root / store.MANIFEST, dataclasses.replace(manifest, **changes))
    plan(root, num_shards)
    return manifest


def _quick(root: Path, path: str, data: bytes) -> None:
    (root / store.STATES / path).parent.mkdir(parents=True, exist_ok=True)
    (root / store.STATES / path).write_bytes(data)


def plan(root: Path, num_shards: int, **changes) -> None:
    capture = dataclasses.replace(CAPTURE, **changes)
    paths = [f"{index // 64:03d}/shard-{index:05d}.safetensors" for index in range(num_shards)]
    record = CapturePlan(
        identity=capture.digest, capture=capture, hidden_size=1, num_streams=3, num_samples=num_shards,
        num_tokens=2 * num_shards, payload_bytes=1, trained_payload_bytes=1, token_bytes=1,
        shards=tuple(PlannedShard(path=path, payload_bytes=1, batches=()) for path in paths),
    )  # fmt: skip
    fs.write_record(root / store.PLAN, record)


def commit(root: Path) -> store.Published:
    """What DVC writes, by the public formats of ``dvc.yaml``, ``dvc.lock`` and its cache."""
    published = store.read_published(root / store.MANIFEST)
    assert published is not None
    for file in published.all_files:
        path = root / (store.MANIFEST if file is published.manifest else f"{store.STATES}/{file.path}")
        cache_object(root, file.md5).parent.mkdir(parents=True, exist_ok=True)
        os.link(path, cache_object(root, file.md5))
    fs.write_text(cache_object(root, published.states_md5), "[]")
    plan_md5 = fs.hash_file(root / store.PLAN, "md5")
    spec = {"cmd": "run", "deps": [store.PLAN], "params": ["extract"], "outs": list(store.OUTS)}
    outs = [(store.STATES, published.states_md5), (store.MANIFEST, published.manifest.md5)]
    lock = {
        "plan": {"cmd": "p", "outs": [{"path": store.PLAN, "md5": plan_md5}]},
        "extract": {
            "cmd": "run",
            "deps": [{"path": store.PLAN, "md5": plan_md5}],
            "params": {"params.yaml": {"extract": {"reserve_bytes": 1}}},
            "outs": [{"path": path, "md5": md5} for path, md5 in outs],
        },
    }
    fs.write_record(root / "dvc.yaml", {"stages": {"extract": spec}})  # JSON is YAML
    fs.write_record(root / "dvc.lock", {"stages": lock})
    fs.write_record(root / "params.yaml", {"extract": {"reserve_bytes": 1}})
    return published


@pytest.fixture
def proven(tmp_path):
    finish(tmp_path)
    published = commit(tmp_path)
    store.remember(tmp_path, published)
    assert guard.look(tmp_path).state == "current"
    return tmp_path, published


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


SHARD = f"{store.STATES}/000/shard-00001.safetensors"
CHANGES = {
    "command": lambda root, _: edit(root / "dvc.yaml", '"cmd":"run"', '"cmd":"run  "'),
    "dependency added": lambda root, _: edit(root / "dvc.yaml", '"deps":[', '"deps":["more",'),
    "parameter": lambda root, _: edit(root / "params.yaml", '"reserve_bytes":1', '"reserve_bytes":2'),
    "lock's parameter": lambda root, _: edit(root / "dvc.lock", '"reserve_bytes":1', '"reserve_bytes":2'),
    "plan's hash": lambda root, p: edit(root / "dvc.lock", fs.hash_file(root / store.PLAN, "md5"), "0" * 32),
    "lock's states": lambda root, p: edit(root / "dvc.lock", p.states_md5, f"{'0' * 32}.dir"),
    "lock gone": lambda root, _: (root / "dvc.lock").unlink(),
    "record gone": lambda root, _: (root / store.RECORD).unlink(),
    "record torn": lambda root, _: (root / store.RECORD).write_text('{"stage": '),
    "shard touched": lambda root, _: os.utime(root / SHARD, ns=(1, 1)),
    "shard of another inode": lambda root, _: replace_keeping_times(root / SHARD),
    "cache object gone": lambda root, p: cache_object(root, p.files[1].md5).unlink(),
    "cache object replaced": lambda root, p: replace_keeping_times(cache_object(root, p.files[1].md5)),
    "folder object gone": lambda root, p: cache_object(root, p.states_md5).unlink(),
    "manifest of another inode": lambda root, _: replace_keeping_times(root / store.MANIFEST),
    "file added": lambda root, _: (root / store.STATES / "000/more").write_text(""),
}


def replace_keeping_times(path: Path) -> None:
    stat, data = path.stat(), path.read_bytes()
    other = path.with_name("other")
    other.write_bytes(data)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_taken_as_proven_after_any_change(proven, change):
    root, published = proven
    assert store.is_proven(root, published)
    CHANGES[change](root, published)
    assert not store.is_proven(root, published)


def test_what_is_not_in_the_lock_is_not_remembered(tmp_path):
    finish(tmp_path)
    published = commit(tmp_path)
    edit(tmp_path / "dvc.lock", published.states_md5, f"{'0' * 32}.dir")
    store.remember(tmp_path, published)
    assert not (tmp_path / store.RECORD).exists()


def test_another_identity_is_refused_by_field(tmp_path):
    """Case 35."""
    finish(tmp_path)
    commit(tmp_path)
    plan(tmp_path, 3, boundaries=(1, 3), engine_options={"device": "cuda"}, tokens="3" * 64)
    with pytest.raises(StoreError) as caught:
        guard.look(tmp_path)
    rows = [line.split() for line in caught.value.message.splitlines()]
    for row in (["boundaries", "[1,", "2]", "[1,", "3]"], ["engine_options.device", "cpu", "cuda"]):
        assert row in rows
    assert ["tokens", f"{'2' * 16}…", f"{'3' * 16}…"] in rows
    assert not [row for row in rows if row[0] in ("codec", "target", "revision")]
    assert "FORCE=1" in caught.value.hint
    assert guard.look(tmp_path, force=True).state == "forced"


def test_a_plan_of_other_shards_under_the_same_identity_is_refused(tmp_path):
    finish(tmp_path)
    commit(tmp_path)
    plan(tmp_path, 2)
    with pytest.raises(StoreError, match="the plan is not"):
        guard.look(tmp_path)


def test_a_short_shard_is_damage_and_not_a_reason_to_wipe(tmp_path):
    finish(tmp_path)
    commit(tmp_path)
    (tmp_path / SHARD).write_bytes(b"half")
    with pytest.raises(StoreError, match="4 bytes, expected 8") as caught:
        guard.look(tmp_path)
    assert "make repair" in caught.value.hint


@pytest.mark.parametrize(
    ("old", "new"), [("warm_start: ''", "warm_start: models/drafter"), ("  lr: 0.002", "  lr: -1")]
)
def test_a_wrong_parameter_is_told_before_dvc_empties_what_it_would_train_again(tmp_path, monkeypatch, old, new):
    text = (Path(__file__).parents[3] / "params.yaml").read_text()
    assert text.count(old) == 1
    (tmp_path / "params.yaml").write_text(text.replace(old, new))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("dvc was called"))
    with pytest.raises(ConfigError, match=r"train\.(warm_start|lr)"):
        guard.run(tmp_path, ["dvc", "repro", "train"], force=False)


PIN = "eyas@sha256:" + "0" * 64


def pin(root: Path, section: str) -> None:
    """Our own parameters, with an image in which this does not run."""
    params = config.load(Path(__file__).parents[3] / "params.yaml")
    changed = dataclasses.replace(getattr(params, section), image=PIN)
    fs.write_text(root / "params.yaml", config.to_yaml(dataclasses.replace(params, **{section: changed})))


def test_a_pinned_image_is_asked_for_before_anything_runs(tmp_path, monkeypatch):
    """Nothing was captured yet: the hours of earlier stages would end in a refusal."""
    pin(tmp_path, "extract")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("dvc was called"))
    with pytest.raises(ConfigError, match=r"extract\.image pins .*, this runs in no container"):
        guard.run(tmp_path, ["dvc", "repro"], force=False)


@pytest.mark.parametrize(
    ("goals", "status", "refused"),
    [
        (["train"], '{"train": [{}]}', True),
        (["report"], "{}", False),
        ([], '{"train": [{}]}', True),
        (["extract"], "", False),
    ],
)
def test_another_image_than_the_trainings_is_refused_where_it_would_train(proven, monkeypatch, goals, status, refused):
    """The drafter is still there then; a training that is up to date needs no image."""
    root, _ = proven
    pin(root, "train")
    asked = []

    def dvc(command, **_):
        asked.append([word for word in command if word in ("status", "repro")])
        return subprocess.CompletedProcess(command, 0, status, "")

    monkeypatch.setattr(subprocess, "run", dvc)
    monkeypatch.setattr(guard, "look", lambda root, force: guard.Verdict(state="current", note=""))
    if refused:
        with pytest.raises(ConfigError, match=r"train\.image pins"):
            guard.run(root, ["dvc", "repro", *goals], force=False)
        assert asked[-1] == ["status"]
    else:
        assert guard.run(root, ["dvc", "repro", *goals], force=False) == 0


def test_an_empty_repository_goes_on(tmp_path):
    plan(tmp_path, 3)
    assert guard.look(tmp_path).state == "empty"
    (tmp_path / store.PLAN).unlink()
    with pytest.raises(StoreError, match="dvc repro plan"):
        guard.look(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"identity": 1}', "[]", "no JSON"])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    finish(tmp_path)
    (tmp_path / store.MANIFEST).write_text(text)
    with pytest.raises(StoreError, match=store.MANIFEST):
        guard.look(tmp_path)


def test_it_answers_in_half_a_second_and_imports_neither_torch_nor_dvc(tmp_path):
    finish(tmp_path, num_shards=5_000)
    store.remember(tmp_path, commit(tmp_path))
    script = (
        "import sys, time; start = time.perf_counter(); from pathlib import Path; from eyas.ops import guard; "
        "state = guard.look(Path()).state; "
        "print(state, time.perf_counter() - start, sorted({'torch', 'dvc', 'hydra'} & sys.modules.keys()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    best_s, deadline_s = 9.0, time.monotonic() + 20
    while best_s > 0.5 and time.monotonic() < deadline_s:  # the machine may be busy
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True)
        state, seconds, modules = done.stdout.decode().split(" ", 2)
        assert (state, json.loads(modules.replace("'", '"'))) == ("current", [])
        best_s = min(best_s, float(seconds))
    assert best_s <= 0.5


@pytest.mark.parametrize("home", ["", "imports/other/"])
def test_a_finished_training_is_kept_until_the_lock_and_the_cache_hold_its_drafter(tmp_path, home):
    """Also that of an imported set, whose pipeline has a lock of its own."""
    (tmp_path / ".dvc").mkdir()
    kept = tmp_path / ".eyas/train/0123/finished/drafter"
    kept.mkdir(parents=True)
    (kept / "checkpoint.json").write_text("{}")
    md5 = fs.hash_file(kept / "checkpoint.json", "md5")
    guard.settle(tmp_path)
    assert kept.is_dir(), "no lock"
    out = {"path": f"{home}models/drafter", "md5": "00ff.dir"}
    fs.write_text(tmp_path / home / "dvc.lock", json.dumps({"schema": "2.0", "stages": {"train": {"outs": [out]}}}))
    fs.write_text(cache_object(tmp_path, "00ff.dir"), json.dumps([{"md5": md5, "relpath": "checkpoint.json"}]))
    guard.settle(tmp_path)
    assert kept.is_dir(), "the cache lost it"
    fs.write_text(cache_object(tmp_path, md5), "{}")
    guard.settle(tmp_path)
    assert not kept.parent.parent.exists()
