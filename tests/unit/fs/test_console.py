"""What is printed: tables, and a reader that goes away."""

import os
import signal
import subprocess
import sys

import pytest

from eyas import console


def test_a_cell_of_several_lines_takes_one():
    assert console.table([("a\nb\x85c\u2028d", 1), ("e", 22)]) == "a b c d   1\ne        22"


def test_a_reader_that_stops_reading_ends_a_command_quietly():
    """As after ``| head``: exit code 141 like any program that SIGPIPE ended, and not a word on stderr."""
    code = "from eyas import console\nconsole.run_main(lambda _: [console.emit('x' * 100) for _ in range(10_000)])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1000)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize("then", ["raise", "raise KeyboardInterrupt from None"])
def test_a_command_that_is_asked_to_end_cleans_up_like_after_ctrl_c(then):
    """A container that is stopped, a job at its time limit: exit code 143, and every ``finally`` has run.

    Ray, and whatever else waits in C, raises an interrupt of its own for that of the signal.
    """
    code = (
        "import time\nfrom eyas import console\n"
        f"def sleep():\n try:\n  time.sleep(60)\n except KeyboardInterrupt:\n  {then}\n"
        "def main(_):\n try:\n  console.emit('up')\n  sleep()\n finally:\n  console.emit('cleaned')\n"
        "console.run_main(main)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        said, log = process.communicate(timeout=30)
    assert process.returncode == 143
    assert said == "cleaned\n"
    assert "the same command goes on" in log


def test_whoever_handles_the_signal_already_keeps_it():
    def own(number, frame):
        return

    before = signal.signal(signal.SIGTERM, own)
    try:
        with console.user_errors():
            assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
