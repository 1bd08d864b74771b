"""What is printed: tables, and a reader that goes away."""

import os
import subprocess
import sys

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
