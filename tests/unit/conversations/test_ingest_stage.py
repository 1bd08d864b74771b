"""The ingest stage: its printed account, its run record, and when DVC runs it again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas.errors import ConfigError
from eyas.stages import ingest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with params for a local JSONL and four rows."""
    monkeypatch.chdir(tmp_path)
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["data"] |= {"format": "jsonl", "name": "mine", "prompt_sets": [], "held_out_share": 0.5}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("a", "b", "a")] + [{"messages": []}]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_every_count_is_printed_and_recorded(project, capsys):
    ingest.main(["raw", "out"])
    printed = capsys.readouterr().out
    lines = [line.rsplit(maxsplit=1) for line in printed.splitlines()]
    counts = {what.strip(): number for what, number in lines}
    assert counts["records read"] == "4"
    assert counts["rejected: no turns"] == "1"
    assert counts["duplicates"] == "1"
    assert (counts["kept: mine, train"], counts["kept: mine, held_out"]) == ("1", "1")
    record = json.loads((project / "reports" / "runs" / "ingest.json").read_text())
    assert record["facts"]["counts"]["records read"] == 4
    assert record["writes"]["out"]


def test_a_wrong_number_of_paths_is_a_usage_error(project):
    with pytest.raises(ConfigError, match="1 paths, expected 2"):
        ingest.main(["raw"])


@pytest.mark.slow
def test_case_6_dvc_reruns_an_edit_in_place_of_the_same_size(project):
    """The repository's own ingest stage under the real DVC: content decides, not path, size or mtime."""
    stage = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["ingest"]
    stage["cmd"] = stage["cmd"].replace("python", sys.executable, 1)
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"ingest": stage}}))
    params = yaml.safe_load((project / "params.yaml").read_text())
    params["data"]["path"] = "raw"
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "DVC_NO_ANALYTICS": "1"}

    def dvc(*args: str) -> str:
        command = [sys.executable, "-m", "dvc", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    dvc("init", "--no-scm", "-q")
    dvc("repro")
    first = (project / "data" / "conversations" / "conversations.parquet").read_bytes()
    assert "up to date" in dvc("status")
    source = project / "raw" / "a.jsonl"
    size = source.stat().st_size
    os.utime(source, (1, 1))
    assert "up to date" in dvc("status")  # touched only
    source.write_text(source.read_text().replace('"b"', '"c"'))
    assert source.stat().st_size == size
    assert "Running stage" in dvc("repro")
    assert (project / "data" / "conversations" / "conversations.parquet").read_bytes() != first
    shutil.rmtree(project / ".dvc")
