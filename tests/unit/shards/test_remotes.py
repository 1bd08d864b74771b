"""States on S3 (a real server over HTTP) and on a shared folder: moved, verified, read through a bounded cache."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("moto", reason="`make test-remotes` installs the server and runs these")
pytest.importorskip("dvc_s3", reason="`make test-remotes` installs the plugin and runs these")

import torch
from dvc_repository import MANIFEST, STATES, DvcRepository
from s3_server import BUCKET, KEY, SECRET, S3Server

from eyas import fs
from eyas.batches.loader import BatchLoader, order_of
from eyas.batches.order import Cursor
from eyas.contracts import ShardManifest
from eyas.errors import ConfigError, RemoteError
from eyas.ops.gc.remote import pushed_objects
from eyas.ops.remote import push, verify_remote
from eyas.shards.reader import ShardReader
from eyas.shards.remote import RemoteStore
from eyas.shards.shard_cache import ShardCache

LENGTHS = tuple(5 + (7 * i) % 26 for i in range(40))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """States captured once, and committed by DVC."""
    repository = DvcRepository(tmp_path_factory.mktemp("made") / "repository", LENGTHS)
    repository.made()
    return repository


@pytest.fixture
def server():
    running = S3Server()
    yield running
    running.stop()


class Repository:
    """A copy of the made one, with a remote."""

    def __init__(self, made: DvcRepository, root: Path, url: str, endpoint: str = "") -> None:
        shutil.copytree(made.root, root, symlinks=True)
        self.root, self.environment = root, made.environment
        (root / ".dvc/config.local").write_text(
            f"[core]\n    site_cache_dir = {root}/.dvc/tmp/site\n    remote = there\n"
            f"['remote \"there\"']\n    url = {url}\n"
            + (
                f"    endpointurl = {endpoint}\n    access_key_id = {KEY}\n    secret_access_key = {SECRET}\n"
                * bool(endpoint)
            )
        )
        self.manifest = fs.read_record(ShardManifest, root / MANIFEST)

    def eyas(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "eyas.cli", *arguments]
        return subprocess.run(command, cwd=self.root, env=self.environment | more, capture_output=True, text=True)

    def hashes(self) -> dict[str, str]:
        return {p.path: p.sha256 for p in fs.tree_digests(self.root / STATES)} | {
            "m": fs.hash_file(self.root / MANIFEST)
        }

    def forget(self) -> None:
        """A machine that has the repository and none of its data."""
        for path in (STATES, ".dvc/cache", ".dvc/tmp"):
            shutil.rmtree(self.root / path, ignore_errors=True)
        (self.root / MANIFEST).unlink()

    def reader(self, cache: ShardCache | None) -> ShardReader:
        return ShardReader(self.root / STATES, self.manifest, cache)

    def cache(self, num_shards: int) -> ShardCache:
        largest = max(entry.size_bytes for entry in self.manifest.shards)
        return ShardCache(self.root / "cache", num_shards * largest, RemoteStore(self.root), largest)


@pytest.fixture
def repository(made, server, tmp_path):
    return Repository(made, tmp_path / "repository", f"s3://{BUCKET}/store", server.url)


@pytest.fixture
def pushed(repository):
    assert not push(repository.root).problems
    return repository


def key_of(md5: str) -> str:
    return f"store/files/md5/{md5[:2]}/{md5[2:]}"


def same(found, expected):
    assert found.sample == expected.sample
    for name in ("input_ids_T", "loss_mask_T", "aux_TAD", "last_TD", "has_last_T"):
        assert torch.equal(getattr(found, name).nan_to_num(), getattr(expected, name).nan_to_num()), name


# ── push, pull, verify ────────────────────────────────────────────────────────────────────────


def test_what_was_pushed_comes_back(repository, server):
    before = repository.hashes()
    done = repository.eyas("push", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_objects"] == len(repository.manifest.shards) + 2
    assert {key_of(entry.md5) for entry in repository.manifest.shards} <= server.keys()
    assert repository.eyas("verify", "--remote").returncode == 0
    repository.forget()
    assert repository.eyas("pull").returncode == 0
    assert repository.hashes() == before


@pytest.mark.parametrize("kind", ["500", "cut"])
def test_a_flaky_remote_loses_nothing(repository, server, kind):
    before = repository.hashes()
    server.faults.kind, server.faults.share = kind, 0.15
    assert repository.eyas("push").returncode == 0
    repository.forget()
    assert repository.eyas("pull").returncode == 0
    assert server.faults.num_failed > 5
    server.faults.share = 0.0
    assert repository.hashes() == before
    assert repository.eyas("verify", "--remote").returncode == 0


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_a_killed_transfer_goes_on(repository, server, verb):
    before = repository.hashes()
    if verb == "pull":
        push(repository.root)
        repository.forget()
    server.faults.hold(12)  # it cannot end before it is killed
    command = [sys.executable, "-m", "eyas.cli", verb]
    running = subprocess.Popen(
        command, cwd=repository.root, env=repository.environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert server.faults.is_held.wait(120)
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    server.faults.let_go()
    done = repository.eyas(verb)
    assert done.returncode == 0, done.stderr
    assert repository.hashes() == before
    assert repository.eyas("verify", "--remote").returncode == 0


def test_what_a_remote_lost_or_changed_is_named(pushed, server):
    lost, changed = pushed.manifest.shards[0], pushed.manifest.shards[1]
    server.client.delete_object(Bucket=BUCKET, Key=key_of(lost.md5))
    server.damage(key_of(changed.md5))
    done = pushed.eyas("verify", "--remote", "there")
    assert done.returncode == 1
    assert f"problem: {lost.path}: missing, expected {lost.size_bytes:,} bytes" in done.stdout
    assert f"problem: {changed.path}: md5 " in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("problem")]) == 2
    assert len(verify_remote(pushed.root, share=0.0).problems) == 1  # sizes alone: the changed one is not seen


def test_a_pull_of_other_bytes_is_no_success(pushed, server):
    changed = pushed.manifest.shards[1]
    server.damage(key_of(changed.md5))
    pushed.forget()
    done = pushed.eyas("pull")
    assert done.returncode == 1
    assert f"problem: {changed.path}: md5 " in done.stdout


def test_gc_knows_what_s3_has(pushed, server):
    names = [entry.md5 for entry in pushed.manifest.shards]
    assert pushed_objects(pushed.root, dict.fromkeys([*names, "0" * 32], 1)) == set(names)
    server.client.delete_object(Bucket=BUCKET, Key=key_of(names[0]))
    assert pushed_objects(pushed.root, dict.fromkeys(names, 1)) == set(names[1:])
    server.stop()
    assert pushed_objects(pushed.root, dict.fromkeys(names, 1)) is None


def test_a_plan_of_gc_tells_what_a_bucket_holds(pushed, server):
    """Sizes come with the listing: in use is what dvc.lock names; an object that nothing names is told apart."""
    before = server.keys()
    server.client.put_object(Bucket=BUCKET, Key=key_of("0" * 32), Body=b"x" * 777)
    plan = json.loads(pushed.eyas("gc-plan", "--json").stdout)
    [held] = plan["remotes"]
    assert (held["remote"], held["is_known"], held["old"]) == ("there", True, [])
    assert held["needed"]["num_objects"] == len(before) == len(pushed.manifest.shards) + 2
    assert held["needed"]["num_bytes"] > pushed.manifest.stored_bytes
    assert (held["unnamed"]["num_objects"], held["unnamed"]["num_bytes"]) == (1, 777)
    assert server.keys() == {*before, key_of("0" * 32)}
    server.stop()
    assert not json.loads(pushed.eyas("gc-plan", "--json").stdout)["remotes"][0]["is_known"]


# ── reading through the cache ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["", "500", "cut", "flip"])
def test_every_sample_is_read_as_from_the_workspace(pushed, server, kind):
    expected = {s.sample_id: pushed.reader(None).read(s.sample_id) for s in pushed.reader(None).samples}
    shutil.rmtree(pushed.root / STATES)
    reader = pushed.reader(pushed.cache(2))
    server.faults.kind, server.faults.share, server.faults.methods = kind, 0.2 * bool(kind), ("GET",)
    assert {sample.sample_id for sample in reader.samples} == set(expected)
    for name in expected:
        same(reader.read(name), expected[name])
    assert (server.faults.num_failed > 0) == bool(kind)


def test_a_training_reads_within_the_bound_and_each_shard_once(pushed):
    local = pushed.reader(None)
    expected = [d.sample.sample_id for b in batches(local) for d in b.documents]
    shutil.rmtree(pushed.root / STATES)
    cache = pushed.cache(len(pushed.manifest.shards))
    found = [d.sample.sample_id for b in batches(pushed.reader(cache)) for d in b.documents]
    assert found == expected
    assert cache.num_fetched_bytes <= sum(entry.size_bytes for entry in pushed.manifest.shards)


def batches(reader: ShardReader):
    order = order_of(reader, [s for s in reader.samples if s.split == "train"], 60, 0)
    num = len(order.epoch(0))
    with BatchLoader(reader, (b for b, _ in zip(order.plan(Cursor()), range(num), strict=False))) as loader:
        found = list(loader)
    assert not [batch.damaged for batch in found if batch.damaged]
    return found


def sizes_in(folder: Path) -> dict[tuple[str, int], int]:
    """Bytes by name and inode."""
    found = {}
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            found[entry.name, entry.inode()] = entry.stat().st_size
    return found


def test_the_cache_never_holds_more_than_its_bound(pushed):
    cache, names = pushed.cache(3), [sample.sample_id for sample in pushed.reader(None).samples]
    bound = 3 * max(entry.size_bytes for entry in pushed.manifest.shards)
    assert len(pushed.manifest.shards) > 6
    shutil.rmtree(pushed.root / STATES)
    reader, seen, over = pushed.reader(cache), [], threading.Event()

    def watch() -> None:
        before: dict[tuple[str, int], int] = {}
        while not over.is_set():
            now = sizes_in(pushed.root / "cache")
            if now == before:  # a look takes time: what was let go and what came meanwhile were never there together
                seen.append(sum(now.values()))
            before = now

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(reader.read, names * 2):
            pass
    over.set()
    watching.join()
    seen.append(sum(sizes_in(pushed.root / "cache").values()))
    assert 0 < max(seen) <= bound
    assert cache.num_fetched_bytes > sum(entry.size_bytes for entry in pushed.manifest.shards)  # and made room for it


def test_what_was_read_last_stays(pushed):
    a, b, c, *_ = pushed.manifest.shards
    room = a.size_bytes + max(b.size_bytes, c.size_bytes)  # for two of them
    cache = ShardCache(pushed.root / "cache", room, RemoteStore(pushed.root), a.size_bytes)
    for entry in (a, b, a, c):
        with cache.open(entry):
            time.sleep(0.01)
    held = {path.name for path in (pushed.root / "cache").iterdir()}
    assert a.md5 in held
    assert c.md5 in held
    assert b.md5 not in held


def test_a_damaged_file_of_the_cache_is_fetched_anew(pushed):
    expected, name = pushed.reader(None), pushed.reader(None).samples[0].sample_id
    whole = expected.read(name)
    shutil.rmtree(pushed.root / STATES)
    reader = pushed.reader(pushed.cache(2))
    same(reader.read(name), whole)
    path = pushed.root / "cache" / pushed.manifest.shards[0].md5
    data = bytearray(path.read_bytes())
    data[-40:] = bytes(40)
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    same(reader.read(name), whole)


def test_a_damaged_remote_is_an_error_that_names_the_shard(pushed, server):
    entry = pushed.manifest.shards[0]
    name = pushed.reader(None).samples[0].sample_id
    server.damage(key_of(entry.md5))
    shutil.rmtree(pushed.root / STATES)
    reader = pushed.reader(pushed.cache(2))
    with pytest.raises(RemoteError, match=rf"{entry.path}: remote .* holds bytes of md5"):
        reader.read(name)
    server.client.delete_object(Bucket=BUCKET, Key=key_of(entry.md5))
    with pytest.raises(RemoteError, match=f"has no object {entry.md5}"):
        reader.read(name)


def test_a_bound_below_a_shard_is_refused(pushed):
    largest = max(entry.size_bytes for entry in pushed.manifest.shards)
    with pytest.raises(ConfigError, match="EYAS_SHARD_CACHE_BYTES: 10, expected at least"):
        ShardCache(pushed.root / "cache", 10, RemoteStore(pushed.root), largest)


def test_a_shared_folder_is_a_remote_too(made, tmp_path):
    repository = Repository(made, tmp_path / "repository", str(tmp_path / "shared"))
    before = repository.hashes()
    assert repository.eyas("push").returncode == 0
    assert repository.eyas("verify", "--remote").returncode == 0
    name = repository.reader(None).samples[3].sample_id
    expected = repository.reader(None).read(name)
    shutil.rmtree(repository.root / STATES)
    same(repository.reader(repository.cache(2)).read(name), expected)
    repository.forget()
    assert repository.eyas("pull").returncode == 0
    assert repository.hashes() == before


# ── credentials ───────────────────────────────────────────────────────────────────────────────


def everything_written(root: Path) -> bytes:
    """Every file of a repository but DVC's own settings."""
    files = (p for p in root.rglob("*") if p.is_file() and p.name != "config.local")
    return b"\0".join(p.read_bytes() for p in files)


INSIDE = {
    "AWS_ACCESS_KEY_ID": "AKIAENVENVENVENVENVE", "AWS_SECRET_ACCESS_KEY": "eNvEnVeNvEnVeNvEnVeNvEnVeNvEnVeNv",
    "AWS_MAX_ATTEMPTS": "1",  # what fails is tried again by eyas, which is what is looked at; botocore's own waits take minutes
}  # fmt: skip


@pytest.fixture
def quiet(repository):
    """Runs commands of which none may say a secret; nor may any have stored one in the end."""
    secrets = [KEY, SECRET, INSIDE["AWS_ACCESS_KEY_ID"], INSIDE["AWS_SECRET_ACCESS_KEY"], "pass-in-url"]

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        done = repository.eyas(*command, **INSIDE)
        assert not [secret for secret in secrets if secret in done.stdout + done.stderr], done.args
        return done

    yield run
    written = everything_written(repository.root)
    assert not [secret for secret in secrets if secret.encode() in written]


def test_credentials_are_neither_printed_nor_stored(quiet):
    for command in (("push",), ("verify", "--remote"), ("pull",)):
        done = quiet(*command)
        assert done.returncode == 0, done.stderr
    assert "there" in quiet("gc-plan", "--json").stdout


@pytest.mark.parametrize("command", [("push",), ("pull",), ("verify", "--remote"), ("gc-plan",)])
def test_nor_are_they_when_nothing_works(quiet, server, command):
    server.faults.share = 1.0
    done = quiet(*command)
    assert server.faults.num_failed > 0
    if command == ("gc-plan",):
        assert "does not answer" in done.stderr
    else:
        assert done.returncode == 2, done.stdout


@pytest.mark.parametrize("command", [("push", "--remote", "far"), ("verify", "--remote", "far"), ("gc-plan",)])
def test_nor_are_they_where_dvc_cannot_even_begin(repository, quiet, command):
    with (repository.root / ".dvc/config.local").open("a") as settings:
        settings.write("['remote \"far\"']\n    url = webdavs://me:pass-in-url@127.0.0.1:9/x\n")
    assert re.search(r"remote far(:| \(webdavs://\*\*\*@127)", quiet(*command).stderr)
