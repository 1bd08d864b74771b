"""The lock: the second one is told who holds it, across processes and PID namespaces."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOLD = """
import sys, time
from pathlib import Path
from eyas import console, fs
def main(argv):
    with fs.volume_lock(Path(argv[0]), "extract of 1234"):
        print("held", flush=True)
        time.sleep(float(argv[1]))
console.run_main(main)
"""
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


def start(prefix: list[str], lock: Path, seconds: float) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*prefix, sys.executable, "-c", HOLD, str(lock), str(seconds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param([], id="two processes"),
        pytest.param(
            NAMESPACE,
            id="two PID namespaces",
            marks=pytest.mark.skipif(not can_unshare(), reason="unshare --pid is not permitted here"),
        ),
    ],
)
def test_the_second_says_who_holds_it_and_ends_with_2(tmp_path, prefix):
    lock, before_s = tmp_path / "deep/extract.lock", time.time()
    first = start(prefix, lock, 60)
    try:
        assert first.stdout.readline() == "held\n"
        second = start(prefix, lock, 0)
        out, err = second.communicate(timeout=30)
        assert (second.returncode, out) == (2, "")
        held = re.search(r"is locked by extract of 1234, pid (\d+), since (.{19}), on (\S+): (.*)", err)
        assert held
        assert held[1] == (str(first.pid) if not prefix else "1")
        assert abs(time.mktime(time.strptime(held[2], "%Y-%m-%d %H:%M:%S")) - before_s) < 60
        assert held[3] == socket.gethostname()
        assert Path(sys.executable).name in held[4]
        assert "hint: " in err
        assert "Traceback" not in err
    finally:
        first.kill()
        first.wait()
    deadline_s = time.monotonic() + 10
    while (third := start([], lock, 0)).wait() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert third.returncode == 0, "a lock ends with its holder"
