"""The server benchmark on a real SGLang: its own counters say what the walk says, and its text is plain greedy text."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saved_target import make_target

from eyas import fs
from eyas.config import ExportConfig, Params
from eyas.contracts import CheckpointMeta, TargetIdentity
from eyas.errors import ExportError, ServerError
from eyas.export.write import export
from eyas.ops.serve import run
from eyas.ops.serve.run import ServeRequest, serve_bench
from eyas.train.checkpoint import publish_drafter
from learned_drafter import STEPS, learn, prompts, shape_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
BOUNDARIES = (2, 3, 4)


class Words:
    """A tokenizer whose words are numbers."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_options: Any) -> list[int]:
        return [int(word) for message in messages for word in message["content"].split()]

    def decode(self, ids: list[int], **_options: Any) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory) -> Path:
    """A repository with a tiny target, a drafter that has learned some of its texts, and its export."""
    root, folder = tmp_path_factory.mktemp("repository"), models["llama"]
    target = make_target(folder)
    drafter = learn(folder, target, BOUNDARIES)
    meta = CheckpointMeta(
        shape=shape_of(target, 4), boundaries=BOUNDARIES, capture_identity="0" * 64, target=target.digest, tokens="0" * 64,
        num_steps=1, num_trained_rows=1, ttt_steps=STEPS, seed=0, revision=1, files=(),
    )  # fmt: skip
    meta = publish_drafter(root / "models/drafter", drafter, meta)
    export(drafter, meta, target, ExportConfig(servers=["sglang"]), root / "models/export")
    fs.write_record(root / "models/target.json", target)
    asked = prompts(8, target.vocab_size) + prompts(4, target.vocab_size, seed=9)
    lines = [json.dumps({"question": " ".join(map(str, ids)), "answer": ""}) for ids in asked]
    (root / "test.jsonl").write_text("\n".join(lines) + "\n")
    turns = [{"turns": [" ".join(map(str, ids)), " ".join(map(str, ids[:3]))]} for ids in asked[:3]]
    (root / "question.jsonl").write_text("\n".join(map(json.dumps, turns)) + "\n")
    return root


@pytest.fixture(autouse=True)
def surroundings(python, models, tmp_path, monkeypatch):
    params = Params()
    params.target.device, params.evaluate.dtype = "cpu", "float32"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", str(python))
    monkeypatch.setattr(run.config, "load", lambda _path: params)
    monkeypatch.setattr(run, "ensure", lambda *_: models["llama"])
    monkeypatch.setattr(run, "load_tokenizer", lambda *_: Words())


def test_server_tau_is_offline_tau_and_output_is_plain_greedy(trained):
    sets = (f"gsm8k={trained / 'test.jsonl'}", f"mt_bench={trained / 'question.jsonl'}")
    request = ServeRequest(sets=sets, batch_sizes=(1, 8), num_prompts=0, max_new_tokens=40, chain_length=STEPS)
    found = serve_bench(trained, request)
    assert json.loads((trained / "reports/serve.json").read_text()) == json.loads(json.dumps(found))
    assert found["lossless"]
    for batch in found["batches"].values():
        assert batch["equality"]["num_equal_tokens"] == batch["equality"]["num_tokens"] > 200
    asked = found["sets"]["gsm8k"]
    assert asked["num_same_rounds"] == asked["num_prompts"] == 12
    turns = found["sets"]["mt_bench"]
    assert turns["num_same_rounds"] == turns["num_prompts"] == 6  # three conversations of two turns
    assert turns["tau_server"] == turns["tau_offline"]
    assert found["tau_server"] == found["tau_offline"]
    assert 1.3 < found["tau_server"] < STEPS + 1  # a drafter that never or always hits would show little
    assert set(found["speedup"]) == {"1", "8"}


def test_a_foreign_export_is_refused_before_a_server_starts(trained, tmp_path):
    target = fs.read_record(TargetIdentity, trained / "models/target.json")
    (tmp_path / "models").symlink_to(trained / "models")
    record = trained / "models/export/export.json"
    before = record.read_bytes()
    try:
        record.unlink()
        record.write_text(before.decode().replace(json.loads(before)["drafter"], "f" * 64))
        with pytest.raises(ExportError, match=r"of drafter ffffffffffffffff, expected"):
            serve_bench(tmp_path, ServeRequest(sets=("human_eval",)))
    finally:
        record.unlink()
        record.write_bytes(before)
    assert target.vocab_size == 512


@pytest.mark.slow
def test_a_drafter_that_the_server_refuses_is_told_with_its_log(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(run.versions, "drafting_arguments", lambda *_: ["--speculative-algorithm", "NONSENSE"])
    request = ServeRequest(sets=(f"gsm8k={trained / 'test.jsonl'}",), batch_sizes=(1,), num_prompts=1, max_new_tokens=2)
    with pytest.raises(ServerError, match=r"did not start(.|\n)*NONSENSE"):
        serve_bench(trained, request)


def strike(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[int]:
    """Let ``act`` have the server's process while it answers; returns the processes that were started."""
    asked, pids = run.run_pass, []

    def run_pass(session, *rest):
        if not pids:
            assert members(session.server.pid)
            pids.append(session.server.pid)
            threading.Timer(0.2, act, [session.server.pid]).start()
        return asked(session, *rest)

    monkeypatch.setattr(run, "run_pass", run_pass)
    return pids


def members(group: int) -> list[str]:
    """Processes of a group that run: those that only wait to be reaped aside."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = entry.read_text().rpartition(")")
            state, _, of_group = rest.split()[:3]
            if int(of_group) == group and state != "Z":
                found.append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "error", "told"),
    [
        (lambda pid: os.kill(pid, signal.SIGKILL), ServerError, r"ended by SIGKILL(.|\n)*server-1\.log ends with"),
        (lambda _: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt, None),
    ],
    ids=["killed", "interrupted"],
)
def test_an_end_in_the_middle_leaves_no_process_and_no_report(trained, monkeypatch, act, error, told):
    (trained / "reports/serve.json").unlink(missing_ok=True)
    pids = strike(monkeypatch, act)
    request = ServeRequest(sets=(f"gsm8k={trained / 'test.jsonl'}",), batch_sizes=(1,), num_prompts=0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(error, match=told):
            serve_bench(trained, request)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not members(pids[0])
    assert not (trained / "reports/serve.json").exists()
