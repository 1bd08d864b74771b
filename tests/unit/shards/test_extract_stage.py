"""Stage ``extract`` as DVC runs it, with the fake engine; and the golden bytes of a capture."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from extract_cases import Case, make_target
from shard_cases import make_tokens

from eyas import fs
from eyas.canonical import digest
from eyas.config import ExtractConfig
from eyas.contracts import CapturePlan, ShardManifest
from eyas.errors import DiskError, PlanError
from eyas.plan.budget import stored_bytes
from eyas.shards.reader import ShardReader
from eyas.shards.verify import verify
from eyas.stages import extract as stage_extract
from eyas.stages import plan as stage_plan
from eyas.tokens.dataset import read_lengths, write_tokens

ROOT = Path(__file__).parents[3]
PLAN = ["models/target.json", "data/tokens", "data/plan.json"]
EXTRACT = [*PLAN, "data/hidden_states", "data/hidden_states.json"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Parameters, target and tokens as the stages before leave them."""
    monkeypatch.chdir(tmp_path)
    set_params()
    fs.write_record(Path("models/target.json"), make_target())
    tokens = make_tokens([5, 9, 14, 3, 8, 21, 7, 7, 2, 30])
    write_tokens(Path("data/tokens"), list(tokens.values()))
    stage_plan.main(PLAN)
    return tokens


def set_params(**extract):
    text = (ROOT / "params.yaml").read_text()
    head, tail = text.split("\nextract:\n")
    for key, value in {"engine": "fake", "shard_bytes": 4096, "reserve_bytes": 0, **extract}.items():
        tail, found = re.subn(rf"(?m)^  {key}: .*$", f"  {key}: {value}", tail, count=1)
        assert found == 1
    Path("params.yaml").write_text(f"{head}\nextract:\n{tail}")


def test_the_stage_publishes_prints_and_records(repository, capsys):
    capsys.readouterr()
    stage_extract.main(EXTRACT)
    manifest = fs.read_record(ShardManifest, Path(EXTRACT[-1]))
    assert verify(Path(EXTRACT[-2]), manifest, repository) == []
    assert len(ShardReader(Path(EXTRACT[-2]), manifest).samples) == 10
    num_tokens = sum(len(s.input_ids) for s in repository.values())
    out = capsys.readouterr().out
    assert re.search(r"samples +10\b", out)
    assert re.search(rf"tokens +{num_tokens}\b", out)
    assert fs.read_json(Path("reports/throughput.json"))["extract"]["tokens"] == num_tokens
    assert not list(Path(".eyas/spool").iterdir())
    before = fs.read_json(Path("reports/runs/extract.json"))["facts"]["budget"]
    assert before["expected_bytes"] == stored_bytes(fs.read_record(CapturePlan, Path(PLAN[-1])))
    assert before["expected_bytes"] < before["free_bytes"] <= before["volume_bytes"]
    assert before["reserve_bytes"] == 0


@pytest.mark.parametrize("change", [{"boundaries": "[1, 2]"}, {"revision": 4}, {"batch_tokens": 100}])
def test_a_plan_of_other_parameters_is_refused(repository, change):
    """Case 35: a changed parameter with an old plan."""
    identity = fs.read_json(Path("data/plan.json"))["identity"]
    set_params(**change)
    with pytest.raises(PlanError, match=identity) as caught:
        stage_extract.main(EXTRACT)
    assert "dvc repro plan" in str(caught.value)
    assert not Path("data/hidden_states").exists()


def test_a_plan_of_other_tokens_is_refused(repository):
    """Case 36: as many tokens, in other rows."""
    write_tokens(Path("data/tokens"), list(make_tokens([5, 9, 14, 3, 8, 21, 7, 7, 2, 30], seed=9).values()))
    with pytest.raises(PlanError, match="capture identity"):
        stage_extract.main(EXTRACT)


def test_reordered_rows_are_the_same_capture(repository):
    """Case 36: samples are named by content, so another order of rows is no other data and changes no byte."""
    stage_extract.main(EXTRACT)
    before = fs.tree_digests(Path(EXTRACT[-2])), fs.hash_file(Path(EXTRACT[-1]))
    write_tokens(Path("data/tokens"), list(reversed(repository.values())))
    assert read_lengths(Path("data/tokens")) == [(s.sample_id, len(s.input_ids)) for s in reversed(repository.values())]
    stage_plan.main(PLAN)
    stage_extract.main(EXTRACT)
    assert (fs.tree_digests(Path(EXTRACT[-2])), fs.hash_file(Path(EXTRACT[-1]))) == before


def dvc_config(text: str) -> None:
    Path(".dvc").mkdir()
    Path(".dvc/config").write_text(text)


def test_a_cache_beyond_hardlinks_is_refused_before_anything_is_captured(repository, monkeypatch):
    """Case 22: the stage itself asks with a real link."""

    def refuse(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    dvc_config("[cache]\n    type = hardlink\n")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(DiskError, match="cannot hold hardlinks"):
        stage_extract.main(EXTRACT)
    assert not Path(".eyas/spool").exists()


def test_a_copying_cache_needs_room_for_two(repository, monkeypatch):
    """Case 21: the stage counts with the repository's own cache.type."""
    needed = stored_bytes(fs.read_record(CapturePlan, Path(PLAN[-1])))
    monkeypatch.setattr(fs, "free_bytes", lambda _: needed * 3 // 2)
    dvc_config("[cache]\n    type = copy\n")
    with pytest.raises(DiskError, match="needs the shards twice") as caught:
        stage_extract.main(EXTRACT)
    assert "hardlink" in caught.value.hint
    Path(".dvc/config").write_text("[cache]\n    type = hardlink\n")
    stage_extract.main(EXTRACT)
    assert Path(EXTRACT[-1]).exists()


@pytest.mark.parametrize("key", ["num_tokens", "num_samples", "payload_bytes", "hidden_size", "shards"])
def test_a_plan_edited_under_its_identity_is_refused(repository, key):
    """Or an account would be published that counts tokens which nobody planned."""
    plan = fs.read_json(Path("data/plan.json"))
    plan[key] = plan[key][::-1] if key == "shards" else plan[key] + 1
    fs.write_record(Path("data/plan.json"), plan)
    with pytest.raises(PlanError, match="not those of its own identity"):
        stage_extract.main(EXTRACT)
    assert not Path("data/hidden_states").exists()


def test_an_error_ends_the_process_with_code_2_and_a_hint(repository):
    set_params(reserve_bytes=10**18)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "eyas.stages.extract", *EXTRACT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "does not fit" in done.stderr
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("data/hidden_states.json").exists()


GOLDEN = {
    3: {
        "raw": "5c3a5bce7285776719f14516392112a4f99ce64aafe32443c394cd6fb1cf3ad7",
        "blosc2": "101410e9deb92777eb55d227c25b94c41907863c3435726183fd369f335a083e",
    }
}
"""Digest of every byte that a tiny fake capture publishes, by ``extract.revision`` and codec."""


def test_the_bytes_of_a_capture_are_those_of_its_revision(tmp_path):
    """The extract stage does not depend on source files: this test stands in for that dependency."""
    revision = ExtractConfig().revision
    found = {}
    for codec in GOLDEN[revision]:
        case = Case(tmp_path / codec, num_samples=12, codec=codec, revision=revision)
        case.extract()
        found[codec] = digest(case.hashes())
    assert found == GOLDEN[revision], (
        "extraction gives other bytes than before. If that is a mistake, undo it. If it is meant, raise "
        "extract.revision (its default in config/schema.py and params.yaml) and add the new digest here: "
        "every stored capture must then be made again."
    )
