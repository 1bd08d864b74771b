"""What Ray costs an extraction: the same work here and by one worker of a Ray of this machine, in turns.

Counted are the seconds from the open engine to the last shard, the goal being 5 % more at most; starting Ray and a worker
stands beside it. Beside the seconds stand CPU seconds of driver and worker, of Ray's own processes, and of everybody else: where
others work, the seconds say little.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas import config, console
from eyas.engines.loop import Executor, Run, here
from eyas.engines.ray.driver import RayExecutor
from eyas.ops.bench.scale_cases import Case, long_case, workers
from eyas.plan.watch import Watch

NUM_SHARDS = 12
TICK_S = 1.0


@dataclass(slots=True)
class _Meter:
    """CPU seconds of every process of ours and of all of the machine, noted all the while."""

    notes: list[tuple[float, dict[int, float], float]] = field(default_factory=list)
    """When; by process, also of those that have ended; of the machine."""
    working: set[int] = field(default_factory=lambda: {os.getpid()})
    """This process and those that are workers by now; the others are Ray's own."""
    ended: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        known: dict[int, float] = {}
        while not self.ended.wait(TICK_S):
            now = _tree_cpu_s(os.getpid())
            known = known | now
            self.working |= {pid for pid in now if b"ray::Worker" in _command(pid)}
            self.notes.append((time.monotonic(), known, _machine_cpu_s()))

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """CPU seconds from one moment to another."""
        (_, begin, all_begin), (_, end, all_end) = (
            min(self.notes, key=lambda note: abs(note[0] - at_s)) for at_s in (begin_s, end_s)
        )
        took = {pid: cpu_s - begin.get(pid, 0.0) for pid, cpu_s in end.items()}
        own_s = sum(cpu_s for pid, cpu_s in took.items() if pid in self.working)
        daemons_s = sum(took.values()) - own_s
        return {"cpu_s": own_s, "daemons_cpu_s": daemons_s, "others_cpu_s": all_end - all_begin - own_s - daemons_s}


def _machine_cpu_s() -> float:
    """Of all processes since the machine started: user, nice, system, interrupts."""
    _, user, nice, system, _, _, irq, softirq = Path("/proc/stat").read_text().split("\n", 1)[0].split()[:8]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def _tree_cpu_s(root: int) -> dict[int, float]:
    """Of a process and of each one below it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    below, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below, grew = below | more, bool(more)
    return {pid: ticks[pid] / os.sysconf("SC_CLK_TCK") for pid in below}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def overhead(work: Path, root: Path, num_tokens: int, num_rounds: int) -> Iterator[dict[str, Any]]:
    """One worker against none, in turns: medians, after each pair of turns."""
    case, rows = long_case(root, num_tokens, NUM_SHARDS), list[dict[str, Any]]()
    for number in range(num_rounds):
        for kind in ("local", "ray") if number % 2 == 0 else ("ray", "local"):
            rows.append({"kind": kind} | _timed(case, work, kind == "ray"))
            console.log(f"scale: overhead, {rows[-1]}")
        yield _figures(case, rows)


def _figures(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    def middle(key: str, kind: str) -> float:
        return statistics.median(row[key] for row in rows if row["kind"] == kind)

    local_s = middle("cpu_s", "local")
    return {
        "ray_overhead": middle("wall_s", "ray") / middle("wall_s", "local") - 1,
        "ray_overhead_cpu": (middle("cpu_s", "ray") + middle("daemons_cpu_s", "ray")) / local_s - 1,
        "ray_overhead_cpu_without_daemons": middle("cpu_s", "ray") / local_s - 1,
        "ray_start_s": middle("start_s", "ray"), "local_start_s": middle("start_s", "local"),
        "overhead_rows": rows, "overhead_tokens": case.plan.num_tokens, "overhead_shards": len(case.plan.shards),
        "overhead_machine": config.machine(),
    }  # fmt: skip


def _timed(case: Case, work: Path, is_ray: bool) -> dict[str, float]:
    """Seconds and CPU seconds from the open engine to the last shard."""
    marks: list[float] = []
    meter = _Meter()
    thread = threading.Thread(target=meter.work, daemon=True)
    thread.start()
    begin_s = time.monotonic()
    with workers(1):
        case.run(work, _on_ray(RayExecutor(case.spec), marks) if is_ray else _here(marks))
    meter.ended.set()
    thread.join()
    ready_s, end_s = marks
    return {"start_s": ready_s - begin_s, "wall_s": end_s - ready_s, **meter.between(ready_s, end_s)}


def _here(marks: list[float]) -> Executor:
    """Makes the shards in this process, and notes when the engine was open and when the last shard was done."""

    def run_it(run: Run, watch: Watch) -> None:
        opened = run.engine.open

        def noted() -> None:
            opened()
            marks.append(time.monotonic())

        run.engine.open = noted  # type: ignore[method-assign]
        here(run, watch)
        marks.append(time.monotonic())

    return run_it


def _on_ray(executor: RayExecutor, marks: list[float]) -> Executor:
    """The same by a worker; ending the cluster is not in it."""

    def run_it(run: Run, watch: Watch) -> None:
        executor(run, watch)
        marks.extend(
            [min(at_s for at_s, _ in executor.workers.values()), max(finish.at_s for finish in executor.finishes)]
        )

    return run_it
