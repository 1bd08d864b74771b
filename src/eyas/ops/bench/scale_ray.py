"""Extraction on a Ray cluster of separate nodes on this machine: the same bytes, through kills.

``hashes``: real samples through transformers, here and with 1, 2 and 4 workers. ``kills``: the fake engine, so that a run
takes seconds, while workers and nodes are killed at random.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eyas import config, console
from eyas.engines.ray.driver import RayExecutor
from eyas.errors import EyasError
from eyas.ops.bench.ray_nodes import Nodes
from eyas.ops.bench.scale_cases import fake_case, real_case, workers

COUNTS = (1, 2, 4)
HASH_TOKENS, HASH_SHARDS = 6_000, 12
KILL_NODES, MOST_KILLS, NODE_SHARE = 2, 3, 0.34


def hashes(work: Path, root: Path) -> dict[str, Any]:
    """Hash of everything published, without a cluster and by number of workers."""
    case = real_case(root, HASH_TOKENS, HASH_SHARDS)
    found = {"local": case.run(work, None)}
    with Nodes(max(COUNTS)):
        for count in COUNTS:
            executor = RayExecutor(case.spec)
            with workers(count):
                found[str(count)] = case.run(work, executor)
            made = {finish.worker for finish in executor.finishes}
            console.log(f"scale: {count} workers, of whom {len(made)} made shards: {found[str(count)][:16]}")
    return {"hashes": found, "hashes_equal": len(set(found.values())) == 1, "hash_shards": len(case.plan.shards)}


def kills(work: Path, num_runs: int, seed: int) -> Iterator[dict[str, Any]]:
    """Runs with kills, the figures so far after each; ``lost`` counts those whose bytes are not the undisturbed run's."""
    case, begin_s = fake_case(), time.monotonic()
    expected, dice = case.run(work, None), random.Random(seed)  # noqa: S311 - moments, no secret
    lost, kinds, lost_workers = 0, list[str](), 0
    with Nodes(KILL_NODES) as nodes, ThreadPoolExecutor(1) as pool:
        for number in range(num_runs):
            executor = RayExecutor(case.spec)
            # The run in a thread: Ray starts nodes from the main one alone.
            running = pool.submit(case.run, work, executor)
            struck = _strike(nodes, dice, executor, running, len(case.plan.shards))
            is_lost = _outcome(running) != expected
            kinds, lost, lost_workers = kinds + struck, lost + is_lost, lost_workers + executor.num_lost_workers
            console.log(f"scale: run {number + 1} of {num_runs}: {struck}, {'lost' if is_lost else 'whole'}")
            yield {
                "kill_runs": number + 1, "kills": len(kinds), "lost": lost, "lost_workers": lost_workers,
                "kill_kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
                "kill_runs_s": time.monotonic() - begin_s, "kill_machine": config.machine(),
            }  # fmt: skip


def _outcome(running: Future[str]) -> str:
    """Hash of what a run published; that it ended by an error is none."""
    try:
        return running.result()
    except EyasError as error:
        console.log(f"scale: the run ended: {error}")
        return ""


def _strike(
    nodes: Nodes, dice: random.Random, executor: RayExecutor, running: Future[str], num_shards: int
) -> list[str]:
    """Kill workers and nodes at random moments of a run, up to ``MOST_KILLS`` times; gives what was killed."""

    def alive() -> list[int]:
        pids = [ready.pid for _, ready in list(executor.workers.values())]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    struck = []
    for moment in sorted(dice.randrange(num_shards) for _ in range(dice.randrange(1, MOST_KILLS + 1))):
        while len(executor.finishes) < moment or not alive():
            if running.done():
                return struck
            time.sleep(0.005)
        time.sleep(dice.random() * 0.2)
        if dice.random() < NODE_SHARE:
            nodes.kill_one(dice)
            struck.append("node")
        elif pids := alive():
            os.kill(dice.choice(pids), signal.SIGKILL)
            struck.append("worker")
    return struck
