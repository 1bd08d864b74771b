"""The step bench at a size for a CPU: the command itself."""

import json
import subprocess
import sys

SIZES = "--device cpu --hidden 64 --inner 96 --heads 4 --kv-heads 2 --vocab 300 --draft-vocab 200 --tokens 200 --doc 60"


def test_it_trains_and_counts_the_rows_of_its_share():
    command = [sys.executable, "-m", "eyas.ops.bench.train_step", *SIZES.split()]
    found = subprocess.run(
        [*command, "--ttt", "2", "--share", "1.0", "0.5", "--steps", "6"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    whole, half = map(json.loads, found.stdout.splitlines())
    # documents of 60, 62, 64 (60 + n·37 mod 7) and the rest; a row needs the next token and its successor in the span
    lengths = [60, 62, 64, 14]
    assert sum(lengths) == 200
    assert whole["trained"] == [sum(T - 2 for T in lengths), sum(T - 3 for T in lengths)]
    assert half["trained"] == [sum(T - T // 2 - 1 for T in lengths), sum(T - T // 2 - 2 for T in lengths)]
    assert whole["losses"][-1] < whole["losses"][0]
    assert whole["step_ms"] > 0
