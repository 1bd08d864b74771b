"""ingest of a hub dataset through the real ``datasets`` library and a small hub on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.config import DataConfig
from eyas.conversations.ingest import ingest
from eyas.conversations.table import read_conversations
from eyas.errors import DataError

LOCAL_HUB = Path(__file__).parents[1] / "target" / "local_hub.py"
CODE = """
import sys
from pathlib import Path
from eyas import console
from eyas.config import DataConfig
from eyas.conversations.ingest import ingest
commit, split, out = sys.argv[1:]
with console.user_errors():
    ingest(DataConfig(name="hub", format="hub", location="me/chat", revision=commit, hub_split=split), Path("raw"), Path(out))
"""


@pytest.fixture
def local_hub():
    spec = importlib.util.spec_from_file_location("local_hub", LOCAL_HUB)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_dataset_at_a_commit_is_streamed(local_hub, tmp_path):
    """In a process of its own: the endpoint is read when the client is imported."""
    (tmp_path / "files" / "data").mkdir(parents=True)
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(5)]
    (tmp_path / "files" / "data" / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    hub = local_hub.LocalHub("datasets", "me/chat", tmp_path / "files")
    with hub.serve() as url:
        env = os.environ | {
            "HF_ENDPOINT": url,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

        def run(commit: str, split: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", CODE, commit, split, str(tmp_path / "out")]
            return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

        refused = run("main", "train")
        assert refused.returncode == 2
        assert f"set data.revision: {local_hub.COMMIT}" in refused.stderr
        wrong_split = run(local_hub.COMMIT, "nope")
        assert (wrong_split.returncode, "split 'nope', cannot be read" in wrong_split.stderr) == (2, True)
        done = run(local_hub.COMMIT, "train")
        assert done.returncode == 0, done.stderr
    texts = sorted(r.messages[0]["content"] for r in read_conversations(tmp_path / "out"))
    assert texts == ["q0", "q1", "q2", "q3", "q4"]


def test_a_moving_revision_is_refused(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    config = DataConfig(name="hub", format="hub", location="me/chat", revision="main")
    with pytest.raises(DataError, match=r"git ls-remote https://huggingface\.co/datasets/me/chat main"):
        ingest(config, tmp_path, tmp_path / "out")
