"""How a trainer is driven from another process: a job in a file, orders on stdin, answers on stdout.

    driver.py JOB.json      → {"ready": true}
    stdin: "8"              → 8 optimizer steps, {"cpu_s", "wall_s", "num_tokens", "losses", what ``end`` adds}
    stdin: end of file      → {"peak_bytes"}

Needs the standard library alone; torch's threads are set by the environment.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "EYAS-BENCH "
"""Begins every answer, because trainers print to stdout too."""
Step = Callable[[int], tuple[int, float | None]]
"""Optimizer step by number → tokens it saw, its loss where it was taken."""


def serve(
    make: Callable[[dict[str, Any]], Step],
    begin: Callable[[], None] = lambda: None,
    end: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Make a trainer from the job named on the command line and obey until stdin ends.

    Args:
        make: The trainer.
        begin: Before the clock of an order starts.
        end: Before it stops: waits for a device, says what is to be added to the answer.
    """
    step, done = make(json.loads(Path(sys.argv[1]).read_text())), 0
    _answer({"ready": True})
    for line in sys.stdin:
        begin()
        cpu_s, wall_s = _cpu_s(), time.perf_counter()
        seen = [step(number) for number in range(done, done + int(line))]
        more = end()
        done += len(seen)
        _answer(
            {
                "cpu_s": _cpu_s() - cpu_s,
                "wall_s": time.perf_counter() - wall_s,
                "num_tokens": sum(tokens for tokens, _ in seen),
                "losses": [loss for _, loss in seen],
                **more,
            }
        )
    _answer({"peak_bytes": _peak_bytes()})


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(value) + "\n")
    sys.stdout.flush()


def _cpu_s() -> float:
    """Processor seconds of all threads of this process, the system's included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _peak_bytes() -> int:
    """Most memory this process ever held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
