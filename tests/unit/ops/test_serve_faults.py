"""What becomes of a pass when its server fails: a real process with a log, over HTTP, that fails on demand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.engines.sglang import session
from eyas.engines.sglang.session import Session, Wanted
from eyas.errors import ServerError
from eyas.ops.serve.measure import make_requests, run_pass
from fake_target import make_target

TESTS = Path(__file__).parents[2]
PASS = """
import signal
from pathlib import Path
from eyas import console
from eyas.engines.sglang.session import Session
from eyas.ops.serve.measure import make_requests, run_pass
from test_serve_faults import wanted

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def main(_argv):
    session = Session(wanted(Path(".")), 1, 0, 0)
    try:
        print(session.server.pid, flush=True)
        run_pass(session, make_requests([[5, 6]], 3), 1, (2,))
    finally:
        session.close()

console.run_main(main)
"""


def wanted(folder: Path) -> Wanted:
    return Wanted(
        target=make_target(), folder=folder, boundaries=(), dtype="bfloat16", device="cpu", version="0.5.23", options={}
    )


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS / 'sglang_double'}:{TESTS.parent / 'src'}")
    monkeypatch.setenv("EYAS_DOUBLE_FAULTS", str(tmp_path / "faults.json"))


def ask(num_prompts: int = 6) -> None:
    """A pass, and the proof that its server is gone."""
    opened = Session(wanted(Path.cwd()), 1, 0, 0)
    try:
        done = run_pass(opened, make_requests([[5 + i, 6] for i in range(num_prompts)], 3), 2, (2,))
        assert [text.ids[0] for text in done.texts] == [5 + i for i in range(num_prompts)]
    finally:
        opened.close()
        assert opened.server is not None
        assert opened.server.exit


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"killed": 4}, r"the server: it was ended by SIGKILL(.|\n)*server-1\.log ends with"),
        ({"hang": 4}, r"no answer for 1 s \(EYAS_WATCHDOG_S\)"),
        ({"dropped": 2}, "prompt [0-5]: lost"),
        ({"broken start": 0}, r"did not start: it ended with code 1(.|\n)*double: no such model"),
    ],
)
def test_a_server_that_fails_ends_the_pass_with_its_log(fault, told, monkeypatch):
    monkeypatch.setenv("EYAS_WATCHDOG_S", "1")
    Path("faults.json").write_text(json.dumps(fault))
    with pytest.raises(ServerError, match=told):
        ask()


def test_a_pass_ends_and_its_server_too():
    ask()


def test_a_port_that_somebody_took_is_no_server_of_ours(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(session, "free_port", lambda: taken.getsockname()[1])
        monkeypatch.setattr(session.Client, "is_healthy", lambda *_: False)  # it answers nothing
        with pytest.raises(ServerError, match=r"did not start(.|\n)*Address already in use"):
            ask()


@pytest.mark.slow
def test_an_interrupt_leaves_no_server(tmp_path):
    (tmp_path / "faults.json").write_text(json.dumps({"hang": -1}))
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(TESTS), str(TESTS / "unit"), str(Path(__file__).parent)])
    run = subprocess.Popen(
        [sys.executable, "-c", PASS], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=20)
    assert run.returncode in (130, -signal.SIGINT), said
    assert "Traceback" not in said
    assert not Path(f"/proc/{pid}").exists()
