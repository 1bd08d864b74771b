"""What a list says of each generation, against arithmetic over files that the test laid down."""

from __future__ import annotations

import builtins
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas import fs
from eyas.generations.listing import find, list_generations, read_situation
from states_repository import MANIFEST, STATES, StatesRepository, manifest_of, md5

BLOCK = 4096


@pytest.fixture
def repository(tmp_path) -> StatesRepository:
    return StatesRepository(tmp_path / "r")


def listed(repository: StatesRepository, *, commits: bool = False):
    return list_generations(read_situation(repository.root, commits=commits))


def by_hash(repository: StatesRepository, *, commits: bool = False):
    return {g.hash: g for g in listed(repository, commits=commits)}


def shards(*lengths: int, fill: bytes = b"x") -> dict[str, bytes]:
    return {f"{i // 2:03d}/shard-{i}": bytes([65 + i]) + fill * (length - 1) for i, length in enumerate(lengths)}


def blocks(*lengths: int) -> int:
    """Bytes on a disk with blocks of 4096."""
    return sum(-(-length // BLOCK) * BLOCK for length in lengths)


def list_bytes(repository: StatesRepository, name: str) -> int:
    return repository.object_path(name).stat().st_size


def test_fields_of_the_generation_in_the_workspace(repository):
    files = shards(5000, 300, 9000)
    name = repository.publish(files, engine="vllm", drafter=b"weights")
    repository.commit()
    (one,) = listed(repository)
    own = blocks(5000, 300, 9000, list_bytes(repository, name))
    assert (one.kind, one.hash, one.path, one.name) == ("pipeline", name, STATES, name[:10])
    assert (one.facts.engine, one.facts.engine_version, one.facts.codec) == ("vllm", "7", "raw")
    assert (one.facts.num_samples, one.facts.num_tokens) == (6, 30)
    assert one.facts.payload_bytes == 30 * 4 * 2 * 3, "30 tokens, 4 values of 2 bytes, 2 boundaries and the last states"
    assert (one.stored_bytes, one.disk_bytes) == (14300, own)
    assert (one.num_objects, one.num_missing, one.is_whole) == (4, 0, True)
    assert (one.is_kept, one.is_stale, one.is_retired) == (True, False, False)
    assert (one.freed_now_bytes, one.freed_bytes) == (0, own)
    assert one.named_by == ("workspace", "branch main")
    assert one.used_by == (f"models/drafter {md5(b'weights')[:10]}",)


def test_only_the_workspace_is_stale_when_another_identity_is_planned(repository):
    repository.publish(shards(10), engine="vllm")
    repository.commit()
    planned = {"identity": manifest_of({}, "hf")["identity"], "samples": ["x" * 70000]}
    (repository.root / "data/plan.json").write_text(json.dumps(planned))
    assert [g.is_stale for g in listed(repository)] == [True]
    planned["identity"] = manifest_of({}, "vllm")["identity"]
    (repository.root / "data/plan.json").write_text(json.dumps(planned))
    assert [g.is_stale for g in listed(repository)] == [False]


def test_only_commits_name_it_gc_frees_what_no_kept_one_shares(repository):
    shared = {"000/same": b"s" * 5000}
    old = repository.publish(shared | {"000/old": b"o" * 9000})
    first = repository.commit()
    second = repository.publish(shared | {"000/new": b"n" * 100})
    repository.commit()
    found = by_hash(repository, commits=True)
    free = blocks(9000, list_bytes(repository, old))
    assert (found[old].is_kept, found[old].freed_now_bytes, found[old].freed_bytes) == (False, free, free)
    assert found[old].named_by == (f"commit {first[:10]}",)
    assert found[second].freed_bytes == blocks(5000, 100, list_bytes(repository, second)), "once both are unnamed"
    assert [g.hash for g in listed(repository)] == [second]


def test_what_an_output_of_another_name_keeps_is_not_free(repository):
    files = shards(5000, 5001)
    old = repository.publish(files)
    repository.commit()
    repository.publish(shards(10))
    copy = {"path": "copy", "hash": "md5", "md5": old, "size": 10001, "nfiles": 2}
    repository.write_yaml("copy.dvc", {"outs": [copy]})
    repository.commit()
    (one,) = [g for g in listed(repository, commits=True) if g.hash == old]
    assert one.freed_now_bytes == 0


def test_a_shard_that_is_an_output_of_its_own_too_is_not_freed_with_the_folder(repository):
    files = shards(5000, 9000)
    name = repository.publish(files)
    alone = {"path": "z", "hash": "md5", "md5": md5(files["000/shard-1"]), "size": 9000}
    repository.write_yaml("z.dvc", {"outs": [alone]})
    repository.commit()
    (one,) = listed(repository)
    assert one.disk_bytes == blocks(5000, 9000, list_bytes(repository, name))
    assert one.freed_bytes == blocks(5000, list_bytes(repository, name))


def test_one_file_twice_in_a_folder_is_one_object(repository):
    name = repository.publish({"a": b"z" * 5000, "b": b"z" * 5000, "c": b"y"})
    repository.commit()
    (one,) = listed(repository)
    assert (one.num_objects, one.num_missing, one.stored_bytes) == (3, 0, 10001)
    assert one.disk_bytes == blocks(5000, 1, list_bytes(repository, name))


def test_lost_objects_are_counted_and_a_lost_list_is_everything(repository):
    files = shards(10, 20, 30)
    name = repository.publish(files)
    repository.commit()
    repository.object_path(md5(files["000/shard-1"])).unlink()
    (one,) = listed(repository)
    assert (one.num_objects, one.num_missing) == (4, 1)
    repository.object_path(name).unlink()
    (one,) = listed(repository)
    assert (one.num_objects, one.num_missing, one.is_whole) == (4, 4, False)
    assert one.facts.num_tokens == 30, "its manifest is still there"


def test_facts_without_a_manifest_are_the_parameters(repository):
    repository.publish(shards(10), engine="sglang")
    repository.commit()
    manifest = repository.object_path(md5((repository.root / MANIFEST).read_bytes()))
    manifest.unlink()
    (one,) = listed(repository)
    assert (one.facts.engine, one.facts.codec, one.facts.num_tokens) == ("sglang", "raw", 0)


def test_hard_links_outside_keep_the_bytes(repository, tmp_path):
    """Case 82: a name that nobody knows of keeps its inode; a known one goes with the generation."""
    files = shards(5000, 9000)
    name = repository.publish(files)
    repository.commit()
    os.link(repository.root / STATES / "000/shard-0", tmp_path / "elsewhere")
    (one,) = listed(repository)
    assert one.freed_bytes == blocks(9000, list_bytes(repository, name))


def test_a_workspace_of_copies_counts_twice_on_disk_and_when_freed(repository):
    files = shards(5000)
    name = repository.publish(files)
    path = repository.root / STATES / "000/shard-0"
    path.unlink()
    path.write_bytes(files["000/shard-0"])
    (one,) = listed(repository)
    both = blocks(5000, 5000, list_bytes(repository, name))
    assert (one.disk_bytes, one.freed_bytes) == (both, both)


def test_what_can_be_freed_comes_first(repository):
    sizes = {}
    for length in (9000, 100000, 30000):
        sizes[repository.publish(shards(length))] = length
        repository.commit()
    *commits_only, kept = listed(repository, commits=True)
    assert [sizes[g.hash] for g in commits_only] == [100000, 9000]
    assert (sizes[kept.hash], kept.freed_now_bytes) == (30000, 0)
    freed = [g.freed_now_bytes for g in listed(repository, commits=True)]
    assert freed == sorted(freed, reverse=True)


def test_no_shard_is_read(repository, monkeypatch):
    """Shards of 80,000 objects are a terabyte: only lists, manifests, git and DVC's files may be opened."""
    repository.publish(shards(5000, 300, 9000))
    repository.commit()
    repository.publish(shards(700))
    repository.commit()
    shard_inodes = {p.stat().st_ino for p in repository.objects() if p.read_bytes()[:1] not in (b"[", b"{")}
    opened = []

    def watch(real):
        def call(path, *rest, **options):
            if not isinstance(path, int) and Path(path).exists():
                opened.append(Path(path).stat().st_ino)
            return real(path, *rest, **options)

        return call

    for module, name in ((builtins, "open"), (io, "open"), (os, "open")):
        monkeypatch.setattr(module, name, watch(getattr(module, name)))
    assert len(listed(repository, commits=True)) == 2
    assert opened, "the lists at least"
    assert not shard_inodes & set(opened)


def test_shards_of_wrong_content_change_nothing(repository):
    repository.publish(shards(5000, 300))
    repository.commit()
    before = listed(repository)
    path = repository.object_path(md5(shards(5000, 300)["000/shard-0"]))
    path.chmod(0o644)
    path.write_bytes(b"?" * 5000)
    assert listed(repository) == before


# ── spools and states that nothing records ────────────────────────────────────────────────────


def spool(repository: StatesRepository, identity: str, files: dict[str, bytes], *, is_done: bool, link: bool = False):
    folder = repository.root / ".eyas/spool" / identity
    for path, data in files.items():
        (folder / "states" / path).parent.mkdir(parents=True, exist_ok=True)
        if link:
            os.link(repository.root / STATES / path, folder / "states" / path)
        else:
            (folder / "states" / path).write_bytes(data)
    if is_done:
        (folder / "manifest.json").write_text(json.dumps(manifest_of(files) | {"identity": identity}))
    return folder


def test_an_unfinished_spool_is_listed_with_what_it_has(repository):
    spool(repository, "ab" * 32, shards(5000, 300), is_done=False)
    (one,) = listed(repository)
    assert (one.kind, one.hash, one.path) == ("spool", "ab" * 32, f".eyas/spool/{'ab' * 32}/states")
    assert (one.stored_bytes, one.disk_bytes, one.freed_bytes) == (5300, blocks(5000, 300), blocks(5000, 300))
    assert (one.is_kept, one.freed_now_bytes, one.num_objects, one.named_by) == (True, 0, 2, ())


def test_a_retired_spool_is_free_now(repository):
    folder = spool(repository, "ab" * 32, shards(5000, 300), is_done=False)
    (folder / "retired").touch()
    (one,) = listed(repository)
    assert (one.is_retired, one.is_kept, one.freed_now_bytes) == (True, False, blocks(5000, 300))


def test_the_spool_of_recorded_states_is_part_of_them(repository):
    files = shards(5000, 300)
    name = repository.publish(files)
    repository.commit()
    spool(repository, "ab" * 32, files, is_done=True, link=True)
    (one,) = listed(repository)
    assert (one.hash, one.kind) == (name, "pipeline")
    assert one.disk_bytes == one.freed_bytes == blocks(5000, 300, list_bytes(repository, name))


def test_published_states_that_no_lock_names(repository):
    files = shards(5000, 300)
    repository.publish(files)
    repository.commit()
    other = shards(7000)
    for path in (repository.root / STATES).rglob("shard-*"):
        path.unlink()
    (repository.root / STATES / "000/shard-0").write_bytes(other["000/shard-0"])
    (repository.root / MANIFEST).unlink()
    (repository.root / MANIFEST).write_text(json.dumps(manifest_of(other, "hf")))
    unrecorded, recorded = sorted(listed(repository), key=lambda g: g.kind, reverse=True)
    assert (unrecorded.kind, recorded.kind) == ("unrecorded", "pipeline")
    assert (unrecorded.stored_bytes, unrecorded.num_objects, unrecorded.num_missing) == (7000, 1, 0)
    assert unrecorded.freed_now_bytes == 0, "gc deletes only what was recorded once"


def test_a_spool_that_is_written_meanwhile(repository, monkeypatch):
    """An extraction renames its files under the list's eyes."""
    folder = spool(repository, "ab" * 32, shards(10, 20, 30), is_done=False)
    real = os.scandir

    def scandir(path):
        entries = real(path)
        if os.fspath(path).endswith("states/000"):
            names = list(entries)
            (folder / "states/000/shard-0").rename(folder / "states/000/shard-0.moved")
            return _Entries(names)
        return entries

    monkeypatch.setattr(os, "scandir", scandir)
    (one,) = listed(repository)
    assert one.stored_bytes in (20 + 30, 10 + 20 + 30)


def test_an_object_that_is_removed_meanwhile(repository, monkeypatch):
    files = shards(10, 20)
    repository.publish(files)
    repository.commit()
    victim = repository.object_path(md5(files["000/shard-0"]))
    real = os.scandir

    def scandir(path):
        entries = list(real(path))
        if Path(path) == victim.parent:
            victim.unlink()
        return _Entries(entries)

    monkeypatch.setattr(os, "scandir", scandir)
    (one,) = listed(repository)
    assert one.num_missing == 1


class _Entries(list):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


# ── names that people type ────────────────────────────────────────────────────────────────────


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(1, 20000), min_size=1, max_size=4), min_size=1, max_size=5), st.data())
def test_sums_over_random_generations(tmp_path_factory, lengths, data):
    """Freed now, freed alone and on disk, for generations that share shards; the model is sets of contents."""
    repository = StatesRepository(tmp_path_factory.mktemp("g") / "r")
    contents: dict[str, dict[str, bytes]] = {}
    for row in lengths:
        files = {f"{i}": bytes([data.draw(st.integers(0, 2))]) * length for i, length in enumerate(row)}
        contents[repository.publish(files)] = files
        last = repository.publish(files)
        repository.commit()
    sizes = {md5(d): len(d) for files in contents.values() for d in files.values()}
    sizes |= {name: list_bytes(repository, name) for name in contents}
    objects = {name: {name, *map(md5, files.values())} for name, files in contents.items()}
    for generation in listed(repository, commits=True):
        own = objects[generation.hash]
        alone = own if generation.hash == last else own - objects[last]
        assert generation.disk_bytes == sum(blocks(sizes[o]) for o in own)
        assert generation.freed_bytes == sum(blocks(sizes[o]) for o in alone)
        assert generation.freed_now_bytes == (0 if generation.hash == last else generation.freed_bytes)
        assert generation.num_objects == len(own)


def test_the_hash_is_the_one_that_dvc_gives(repository):
    """The test's own idea of DVC's layout, against the real ``dvc add``."""
    from dvc.repo import Repo

    files = shards(10, 20, 30)
    for path, content in files.items():
        fs.write_bytes(repository.root / "adopted/x" / path, content)
    with Repo(os.fspath(repository.root)) as repo:
        repo.add([os.fspath(repository.root / "adopted/x")])
    objects = repository.objects()
    name = repository.put_folder(files)
    assert repository.objects() == objects
    (one,) = listed(repository)
    assert (one.hash, one.kind, one.name, one.num_objects, one.stored_bytes) == (name, "adopted", "x", 4, 60)
    assert find(repository.root, "x").hash == name


def test_a_drafter_trained_from_an_import_uses_the_adopted_generation(repository):
    adopted = repository.put_folder({"hs_0.safetensors": b"x" * 50})
    imported = repository.put_folder({"000/shard-00000.safetensors": b"y" * 60})
    drafter = repository.put(b"weights")
    entry = {"hash": "md5", "size": 50, "nfiles": 1}
    repository.write_yaml("adopted/old.dvc", {"outs": [{"path": "old", "md5": adopted, **entry}]})
    stages = {
        "import": {"cmd": "true", "deps": ["adopted/old"], "outs": ["imports/old/hidden_states"]},
        "train": {"cmd": "true", "deps": ["imports/old/hidden_states"], "outs": ["imports/old/drafter"]},
    }
    repository.write_yaml("imports/old/dvc.yaml", {"stages": {n: {**s, "wdir": "../.."} for n, s in stages.items()}})
    states = {"path": "imports/old/hidden_states", "md5": imported, **entry}
    locked = {
        "import": {"cmd": "true", "deps": [{"path": "adopted/old", "md5": adopted, **entry}], "outs": [states]},
        "train": {
            "cmd": "true",
            "deps": [states],
            "outs": [{"path": "imports/old/drafter", "md5": drafter, "hash": "md5", "size": 7}],
        },
    }
    repository.write_yaml("imports/old/dvc.lock", {"schema": "2.0", "stages": locked})
    repository.commit()
    found = {generation.hash: generation.used_by for generation in listed(repository)}
    assert found[adopted] == found[imported] == (f"imports/old/drafter {drafter[:10]}",)
