"""States on a folder as DVC's remote, without a server: what is said on the way, and a training that reads from there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import yaml
from dvc_repository import MANIFEST, STATES, DvcRepository

from eyas import console
from eyas.ops.remote import pull, push, verify_remote
from eyas.shards.remote import Secrets

REMOTES = "['remote \"nas\"']\n    url = /nas\n['remote \"store\"']\n    url = s3://bucket\n"
LENGTHS = tuple(5 + (7 * i) % 26 for i in range(30))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """States captured once, and committed by DVC."""
    repository = DvcRepository(tmp_path_factory.mktemp("made") / "repository", LENGTHS)
    repository.made()
    return repository


@pytest.fixture
def root(made, tmp_path, monkeypatch):
    """A copy of it with a remote, in which DVC is called as a user calls it."""
    folder = tmp_path / "repository"
    shutil.copytree(made.root, folder, symlinks=True)
    with (folder / ".dvc/config.local").open("a") as file:
        file.write(f"    remote = there\n['remote \"there\"']\n    url = {tmp_path}/shared\n")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    return folder


def test_push_pull_and_verify_say_how_far_they_are(root, capsys, monkeypatch):
    """Hours pass with a real set: objects done, of how many, and bytes that were looked at."""
    monkeypatch.setattr(console, "PLAIN_PROGRESS_EVERY_S", 0.0)
    for name, value in (("TQDM_MININTERVAL", "0"), ("TQDM_MINITERS", "1")):
        monkeypatch.setenv(name, value)  # or DVC's bars leave out what takes milliseconds
    done = push(root)
    said = capsys.readouterr().err
    num_shards = done.num_objects - 2
    assert f"push: {num_shards}/{num_shards} objects" in said
    assert re.search(rf"(?m)^remote: {done.num_objects}/{done.num_objects} objects, .* left  [\d.,]+ k?B$", said), said
    verify_remote(root)
    said = capsys.readouterr().err
    counts = [int(count) for count in re.findall(rf"(?m)^remote: (\d+)/{done.num_objects} objects", said)]
    assert counts == list(range(1, done.num_objects + 1))
    for path in (STATES, ".dvc/cache", ".dvc/tmp"):
        shutil.rmtree(root / path, ignore_errors=True)
    (root / MANIFEST).unlink()
    pull(root)
    said = capsys.readouterr().err
    assert re.search(rf"(?m)^pull: {num_shards}/\d+ objects", said), said
    assert re.search(rf"(?m)^pulled: {num_shards}/{num_shards} objects", said), said


@pytest.mark.parametrize("command", [("push",), ("pull",), ("verify", "--remote")])
@pytest.mark.parametrize(
    ("settings", "named", "error", "hint"),
    [
        ("", "", "no DVC remote is configured, expected one", "`dvc remote add -d NAME URL`"),
        ("", "nas", "no DVC remote is configured, expected one", "`dvc remote add -d NAME URL`"),
        (REMOTES, "", "no DVC remote is the default one, expected one of: nas, store", "one of them: REMOTE=NAME"),
        (REMOTES, "nos", "no DVC remote is called 'nos', expected one of: nas, store", "one of them: REMOTE=NAME"),
    ],
)
def test_a_remote_that_is_not_configured_is_told_at_once(made, command, settings, named, error, hint):
    """`make pull` said five times that the cache is not up to date."""
    local = made.root / ".dvc/config.local"
    before = local.read_text()
    local.write_text(before + settings)
    done = made.run(sys.executable, "-m", "eyas.cli", *command, *((f"--remote={named}",) if named else ()))
    local.write_text(before)
    assert done.returncode == 2
    said, _, helps = done.stderr.partition("\n\nhint: ")
    assert said.startswith(f"error: {error}")
    assert hint in helps
    assert "docs/remotes.md" in helps


def test_what_lasts_not_long_says_nothing(root, capsys, monkeypatch):
    monkeypatch.setattr(console, "PLAIN_PROGRESS_EVERY_S", 600.0)  # however slow this machine is
    push(root)
    assert "objects" not in capsys.readouterr().err


def test_what_dvc_says_of_a_failure_is_told_and_its_bars_are_not(root, tmp_path, monkeypatch, capsys):
    """A file is in the place of the remote's folder."""
    monkeypatch.setattr("eyas.ops.remote.ATTEMPTS", 1)
    (tmp_path / "shared").write_text("")
    with pytest.raises(Exception, match=r"dvc push failed 1 times: .*(File exists|Not a directory)") as raised:
        push(root)
    assert not re.search(r"\d+%|\[00:|\x1b|\r", str(raised.value) + capsys.readouterr().err)


# ── the train stage, its states elsewhere ─────────────────────────────────────────────────────

TRAIN = """
import sys
from pathlib import Path
from eyas import fs
from eyas.contracts import ShardManifest
from eyas.shards.reader import ShardReader
from eyas.shards.shard_cache import shard_cache
manifest = fs.read_record(ShardManifest, Path("data/hidden_states.json"))
reader = ShardReader(Path("data/hidden_states"), manifest, shard_cache(Path(), manifest))
read = [str(float(reader.read(sample.sample_id).aux_TAD.double().sum())) for sample in reader.samples]
Path("models/drafter").write_text(f"{len(read)} {sum(map(float, read))}")
with open("runs", "a") as file:
    file.write("x")
"""


class Far:
    """A machine with the repository, the manifest and the tokens' hashes, whose states lie on a remote."""

    def __init__(self, root, environment):
        self.root, self.environment = root, environment | {"EYAS_SHARD_CACHE_BYTES": "9000", "DVC_NO_ANALYTICS": "1"}
        pipeline = yaml.safe_load((root / "dvc.yaml").read_text())
        pipeline["stages"]["train"] = {
            "cmd": f"{sys.executable} train.py", "deps": [STATES, MANIFEST], "params": ["train"],
            "outs": ["models/drafter"],
        }  # fmt: skip
        (root / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
        (root / "train.py").write_text(TRAIN)
        for word in ("push", "-q"), ("status", "extract"):
            assert self.run("dvc", *word).returncode == 0
        for path in (STATES, ".dvc/cache", ".dvc/tmp", ".eyas"):
            shutil.rmtree(root / path, ignore_errors=True)

    def run(self, *command):
        return subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)

    def train(self):
        return self.run(sys.executable, "-m", "eyas.cli", "train-far")

    def lock(self):
        return yaml.safe_load((self.root / "dvc.lock").read_text())["stages"]

    @property
    def num_runs(self):
        path = self.root / "runs"
        return len(path.read_text()) if path.exists() else 0


@pytest.fixture
def far(made, root):
    return Far(root, made.environment)


def test_a_training_from_a_remote_is_noted_as_dvc_itself_would(far):
    """DVC's own words for it: nothing is out of date here, nor where all of it lies in the workspace."""
    refused = far.run("dvc", "repro", "--single-item", "--allow-missing", "train")
    assert "No such file or directory" in refused.stderr, "DVC can by itself by now: eyas train-far may go"
    done = far.train()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (far.num_runs, (far.root / STATES).exists()) == (1, False)
    assert sum(path.stat().st_size for path in (far.root / ".eyas/shard_cache").iterdir()) <= 9000
    noted = {dep["path"]: dep["md5"] for dep in far.lock()["train"]["deps"]}
    assert noted == {out["path"]: out["md5"] for out in far.lock()["extract"]["outs"]}
    said = far.run("dvc", "repro", "--allow-missing", "--dry").stdout
    assert "Stage 'train' didn't change, skipping" in said
    assert far.train().returncode == 0
    assert far.num_runs == 1, "nothing changed"
    assert far.run("dvc", "pull", "-q", STATES, MANIFEST).returncode == 0
    assert "up to date" in far.run("dvc", "status", "train", "extract").stdout


def test_a_drafter_that_is_only_missing_here_is_not_trained_again(far):
    """Checked out from DVC's cache; where that lacks it too it is trained, as DVC would."""
    assert far.train().returncode == 0
    lock, drafter = far.lock(), (far.root / "models/drafter")
    drafter.unlink()
    done = far.train()
    assert (done.returncode, far.num_runs, drafter.exists()) == (0, 1, True), done.stderr
    drafter.unlink()
    shutil.rmtree(far.root / ".dvc/cache")
    done = far.train()
    assert (done.returncode, far.num_runs, drafter.exists()) == (0, 2, True), done.stderr
    assert far.lock() == lock


def test_other_parameters_of_the_training_train_again(far):
    assert far.train().returncode == 0
    path = far.root / "params.yaml"
    path.write_text(path.read_text().replace("num_steps: 1500", "num_steps: 1501"))
    assert far.train().returncode == 0
    assert far.num_runs == 2
    assert far.lock()["train"]["params"]["params.yaml"]["train"]["num_steps"] == 1501


def pinned(params):
    changed = yaml.safe_load(params)
    changed["train"]["image"] = f"eyas@sha256:{'0' * 64}"
    return yaml.safe_dump(changed)


def test_states_of_other_parameters_or_another_manifest_are_refused_and_the_drafter_stays(far):
    assert far.train().returncode == 0
    lock = (far.root / "dvc.lock").read_text()
    path, manifest = far.root / "params.yaml", far.root / MANIFEST
    params, listed = path.read_text(), manifest.read_bytes()
    for changed, other, said in (
        (path, params.replace("shard_bytes: 4096", "shard_bytes: 8192"), r"stage (plan|extract) is out of date"),
        (path, pinned(params), r"train\.image"),
        (manifest, listed.decode() + " ", "is not the one that dvc.lock names"),
        (manifest, None, f"{MANIFEST} is missing"),
    ):
        changed.unlink()
        if other is not None:
            changed.write_text(other)
        done = far.train()
        assert done.returncode == 2, done.stdout
        assert re.search(said, done.stderr), done.stderr
        path.write_text(params)
        manifest.unlink(missing_ok=True)
        manifest.write_bytes(listed)
    assert (far.num_runs, (far.root / "dvc.lock").read_text()) == (1, lock)
    assert (far.root / "models/drafter").exists()


def test_a_training_that_fails_is_not_noted(far):
    (far.root / "train.py").write_text("raise SystemExit(3)")
    done = far.train()
    assert done.returncode == 2
    assert "train" not in far.lock()


# ── what is said ──────────────────────────────────────────────────────────────────────────────


def test_texts_lose_what_settings_and_environment_hold(tmp_path, monkeypatch):
    """Settings of the repository, and of the user, where DVC takes credentials from as well."""
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "user"))
    for folder in ("user", ".dvc"):
        (tmp_path / folder).mkdir()
    (tmp_path / "user/config").write_text('[\'remote "q"\']\n    password = "hidden #4"\n')
    (tmp_path / ".dvc/config.local").write_text(
        "['remote \"r\"']\n    url = s3://x\n    secret_access_key = hidden-1\n"
    )
    secrets = Secrets(tmp_path, {"AWS_SESSION_TOKEN": "hidden-2", "AWS_REGION": "eu-west-1", "HOME": "/home/me"})
    said = secrets.out_of("hidden-1, hidden-2, hidden #4 in eu-west-1 at https://me:hidden-3@host/x")
    assert said == "***, ***, *** in eu-west-1 at https://***@host/x"
