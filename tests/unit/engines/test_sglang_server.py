"""Servers of the sglang engine: refused, attached to, ended; against a double that fails on demand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sglang_world import BOUNDARIES, OPTIONS, capture, check_equal, make_sample, make_samples

from eyas.engines.registry import make_engine
from eyas.engines.sglang import session
from eyas.engines.sglang.server import Server
from eyas.errors import DiskError, EyasError, ServerError
from eyas.plan import interpreter
from fake_target import make_target

pytestmark = pytest.mark.usefixtures("sglang_double")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("radix", "disable_radix_cache = False.*--disable-radix-cache"),
        ("another model", "hidden size 17, the plan expects 16"),
        ("broken start", "did not start: it ended with code 1.*no such model"),
    ],
)
def test_a_server_of_another_kind_is_refused(engine, fail, fault, message):
    fail(**{fault: -1})
    with pytest.raises(EyasError) as raised:
        engine.open()
    assert re.search(message, str(raised.value), re.DOTALL), str(raised.value)


def test_a_server_that_never_comes_up_is_given_up(engine, fail, monkeypatch):
    monkeypatch.setenv("EYAS_SGLANG_START_S", "1")
    fail(**{"never up": -1})
    start_s = time.monotonic()
    with pytest.raises(ServerError, match="not ready after 1 s"):
        engine.open()
    assert time.monotonic() - start_s < 20


def test_a_sample_beyond_the_context_is_refused_before_a_server_starts(engine):
    """Case 25: as long as the context is too long."""
    engine.announce([make_sample("long", (5,) * 128)])
    with pytest.raises(ServerError, match="longest sample has 128 tokens, the server takes 121"):
        engine.open()


def test_too_little_shared_memory_is_refused_with_the_way_to_more(engine, monkeypatch):
    monkeypatch.setattr(session, "free_shm_bytes", lambda: 4096)
    engine.announce(make_samples(3))
    with pytest.raises(DiskError, match="/dev/shm has") as raised:
        engine.open()
    assert "--shm-size" in (raised.value.hint or "")


@pytest.mark.parametrize(
    "text",
    ["--quantization fp8", "--quant=fp8", "--dtype float16", "--kv-cache-dtype fp8_e5m2", "--schedule-policy lof",
     "--load-format dummy", "--chunked-prefill-size 64", "-tp 2", "--mem-fraction-static 0.9 --model-path /other", "'"],
)  # fmt: skip
def test_further_arguments_that_may_decide_the_states_are_refused(engine, monkeypatch, text):
    """They stand in no identity: states of either kind would be one capture."""
    monkeypatch.setenv("EYAS_SGLANG_ARGS", text)
    with pytest.raises(ServerError, match="EYAS_SGLANG_ARGS"):
        engine.open()


def test_further_arguments_that_change_no_state_are_passed_on(engine, monkeypatch):
    monkeypatch.setenv("EYAS_SGLANG_ARGS", "--mem-fraction-static 0.7 --watchdog-timeout=600")
    found = session.command(engine._wanted, "python", 1)
    assert found[-3:] == ["--mem-fraction-static", "0.7", "--watchdog-timeout=600"]


def test_an_attached_server_is_used_and_left_running(engine, tmp_path, monkeypatch):
    first = make_engine(
        "sglang", target=make_target(), folder=tmp_path, boundaries=BOUNDARIES, dtype="bfloat16", options=OPTIONS
    )
    first.open()
    running = first.keeper.session
    socket_path = running.link._path
    running.link.close()
    monkeypatch.setenv("EYAS_SGLANG_URL", running.client.url)
    monkeypatch.setenv("EYAS_SGLANG_API_KEY", running.client.headers["Authorization"].removeprefix("Bearer "))
    with pytest.raises(ServerError, match="EYAS_CAPTURE_SOCKET does not name"):
        engine.open()
    monkeypatch.setenv("EYAS_CAPTURE_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(ServerError, match=r"runs without eyas' plugin\n\nhint: .*sglang-command"):
        engine.open()
    monkeypatch.setenv("EYAS_CAPTURE_SOCKET", str(socket_path))
    samples = make_samples(10)
    engine.announce(samples)
    engine.open()
    check_equal(capture(engine, samples)[0], samples)
    engine.close()
    assert not running.server.exit
    first.close()
    assert running.server.exit


def test_its_key_is_not_in_the_list_of_processes(engine):
    """Everybody on a machine sees the arguments of a program; the key stands in a file that its owner alone reads."""
    engine.open()
    running = engine.keeper.session
    key = running.client.headers["Authorization"].removeprefix("Bearer ")
    arguments = Path(f"/proc/{running.server.pid}/cmdline").read_bytes().decode().split("\0")
    assert len(key) == 32
    assert not [argument for argument in arguments if key in argument]
    assert key not in Path(f"/proc/{running.server.pid}/environ").read_text()
    file = Path(arguments[arguments.index("--config") + 1])
    assert file.stat().st_mode & 0o777 == 0o600
    assert key in file.read_text()
    engine.close()
    assert not file.exists()


def test_shared_memory_has_no_name_once_both_sides_have_it(engine):
    """Whatever ends us then, nothing is left in /dev/shm."""
    samples = make_samples(5)
    engine.announce(samples)
    engine.open()
    assert not list(Path("/dev/shm").glob(f"eyas-arena-{os.getpid()}-*"))
    assert not engine.keeper.session.arena.path.exists()
    check_equal(capture(engine, samples)[0], samples)


def test_no_orphan_survives_when_we_are_killed(tmp_path):
    """The watcher ends the server's whole group when the pipe to us closes."""
    script = (
        "import sys, time; from pathlib import Path; from eyas.engines.sglang.server import Server;"
        "import os; s = Server(['/bin/sh', '-c', 'trap \"\" TERM; sleep 300 & sleep 300'], os.environ, Path('log'));"
        "print(s.pid, flush=True); time.sleep(300)"
    )
    ours = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert ours.stdout is not None
    group = int(ours.stdout.readline())
    os.killpg(group, 0)
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        if all("Z" in Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] for p in members(group)):
            return  # dead, and waiting for whoever took them over
        time.sleep(0.05)
    raise AssertionError(f"group {group} lives on")


def members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


def test_a_server_whose_watcher_cannot_start_is_ended(tmp_path, monkeypatch):
    """No more processes: nobody would end this server when we are killed."""
    started, popen = [], subprocess.Popen

    def fails_second(*arguments, **named):
        if started:
            raise BlockingIOError("no more processes")
        started.append(popen(*arguments, **named))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", fails_second)
    with pytest.raises(BlockingIOError):
        Server(["sleep", "100"], os.environ, tmp_path / "log")
    assert started[0].poll() == -signal.SIGKILL


def test_an_interpreter_may_be_named_from_here(tmp_path, monkeypatch):
    """It is started elsewhere."""
    (tmp_path / "mine").symlink_to(sys.executable)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", "mine")
    assert interpreter.sglang_python() == str(tmp_path / "mine")
