"""What is printed: tables, and a reader that goes away."""

import os
import signal
import subprocess
import sys

import pytest

from eyas import console
from eyas.errors import EyasError


def test_a_cell_of_several_lines_takes_one():
    assert console.table([("a\nb\x85c\u2028d", 1), ("e", 22)]) == "a b c d   1\ne        22"


def test_an_error_that_quotes_a_file_commands_no_terminal(capsys):
    """A tensor, key or path of somebody else's may be named anything."""
    with pytest.raises(SystemExit), console.user_errors():
        raise EyasError("fc\x1b[31m\r\x9b.weight: é missing\n- next", "`ls`")
    assert capsys.readouterr().err == "error: fc\\x1b[31m\\r\\x9b.weight: é missing\n- next\n\nhint: `ls`\n"


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_library_loses_is_raised_by_the_loop_around_it(number):
    """Code of Ray's may swallow it; what the shell sees is as if it had not."""
    code = f"""
import os, time
from eyas import console

def main(_):
    try:
        os.kill(os.getpid(), {number.value})
        time.sleep(10)
    except KeyboardInterrupt:
        pass
    console.stop_if_interrupted()
    print("went on")

console.run_main(main)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + number, "")


def test_an_interrupt_of_one_command_is_none_of_the_next():
    with pytest.raises(SystemExit), console.user_errors():
        signal.raise_signal(signal.SIGINT)
    console.stop_if_interrupted()
