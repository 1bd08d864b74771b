"""Extraction on a Ray cluster of separate nodes on this machine: the same bytes, through kills, at what cost.

``hashes``: real samples through transformers, here and with 1, 2 and 4 workers. ``kills``: the fake engine, so that a run
takes seconds, while workers and nodes are killed at random. ``overhead``: real samples, here and with one worker in
turns; counted is the CPU time from the open engine to the last shard, of driver and worker and of Ray's own processes,
which take some all the time: on a busy machine, where the same work takes longer, more of it. Starting Ray and a worker is
not in it and stands beside it.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.canonical import digest
from eyas.contracts import CapturePlan, TargetIdentity, TokenSample
from eyas.engines.loop import Executor, ExtractLimits, Run, extract, here
from eyas.engines.ray.driver import WORKERS_VARIABLE, RayExecutor
from eyas.engines.registry import EngineSpec
from eyas.ops.bench.random_target import identity
from eyas.ops.bench.ray_nodes import Nodes
from eyas.plan.build import build_plan
from eyas.plan.watch import Watch
from eyas.target.locate import ensure
from eyas.tokens.dataset import iter_tokens

COUNTS = (1, 2, 4)
HASH_TOKENS, HASH_SHARDS = 6_000, 12
OVERHEAD_TOKENS, OVERHEAD_SHARDS, OVERHEAD_ROUNDS = 24_000, 8, 2
KILL_SHAPE = {"num_layers": 6, "hidden_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096}
KILL_SAMPLES, KILL_NODES, MOST_KILLS, NODE_SHARE = 240, 2, 3, 0.34
TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with its tokens, and the engine for it."""

    plan: CapturePlan
    tokens: Mapping[str, TokenSample]
    spec: EngineSpec

    def run(self, folder: Path, executor: Executor | None) -> str:
        """Extract below a folder; gives the hash of every published byte, and removes them."""
        shutil.rmtree(folder, ignore_errors=True)
        out, manifest = folder / "data/hidden_states", folder / "data/hidden_states.json"
        limits = ExtractLimits(reserve_bytes=1 << 30, max_failed_samples=0)
        extract(
            self.plan, self.tokens, self.spec.make(), limits, out=out, manifest_path=manifest, home=folder / ".eyas",
            executor=executor,
        )  # fmt: skip
        found = digest([fs.tree_digests(out), fs.hash_file(manifest)])
        shutil.rmtree(folder)
        return found


def real_case(root: Path, num_tokens: int, num_shards: int) -> Case:
    """The first samples of a repository's plan, and transformers on its target."""
    params, plan = config.load(root / config.PARAMS_PATH), fs.read_record(CapturePlan, root / "data/plan.json")
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    tokens = {sample.sample_id: sample for sample in iter_tokens(root / "data/tokens")}
    chosen: dict[str, TokenSample] = {}
    for planned in (sample for shard in plan.shards for sample in shard.samples):
        chosen[planned.sample_id] = tokens[planned.sample_id]
        if sum(len(sample.input_ids) for sample in chosen.values()) >= num_tokens:
            break
    spec = EngineSpec(
        name="hf", target=target, folder=ensure(target, params.target).resolve(), boundaries=plan.capture.boundaries,
        dtype=params.target.dtype, device="cpu", options={},
    )  # fmt: skip
    return _case(spec, chosen, num_shards, batch_tokens=1024, template=plan)


def fake_case(plan: CapturePlan) -> Case:
    """Samples of random ids and the fake engine, a third of a gigabyte in all."""
    dice, tokens = random.Random(0), {}  # noqa: S311 - samples, the same each time
    for number in range(KILL_SAMPLES):
        name, length = f"{number:016x}", dice.randrange(100, 600)
        tokens[name] = TokenSample(
            sample_id=name, conversation_id=name, source="random", split="train", variant="greedy",
            input_ids=tuple(dice.randrange(1000) for _ in range(length)), loss_mask=(1,) * length,
        )  # fmt: skip
    spec = EngineSpec(
        name="fake", target=replace(identity("tiny"), **KILL_SHAPE), folder=None, boundaries=(1, 3, 5), dtype="bfloat16", device="cpu",
        options={},
    )  # fmt: skip
    return _case(spec, tokens, 40, batch_tokens=2048, template=plan)


def _case(
    spec: EngineSpec, tokens: Mapping[str, TokenSample], num_shards: int, batch_tokens: int, template: CapturePlan
) -> Case:
    lengths = [(name, len(sample.input_ids)) for name, sample in tokens.items()]
    num_states = (len(spec.boundaries) + 1) * spec.target.hidden_size
    facts = spec.make().describe()
    capture = dataclasses.replace(
        template.capture, target=spec.target.digest, tokens=digest(lengths), boundaries=spec.boundaries, codec="blosc2",
        engine=facts.name, engine_version=facts.version, engine_options=facts.options, batch_tokens=batch_tokens,
        shard_bytes=sum(length for _, length in lengths) * num_states * 2 // num_shards,
    )  # fmt: skip
    return Case(build_plan(lengths, capture, spec.target.hidden_size), tokens, spec)


def hashes(work: Path, root: Path) -> dict[str, Any]:
    """Hash of everything published, without a cluster and by number of workers."""
    case = real_case(root, HASH_TOKENS, HASH_SHARDS)
    found = {"local": case.run(work, None)}
    with Nodes(max(COUNTS)):
        for count in COUNTS:
            executor = RayExecutor(case.spec)
            with _workers(count):
                found[str(count)] = case.run(work, executor)
            made = {finish.worker for finish in executor.finishes}
            console.log(f"scale: {count} workers, of whom {len(made)} made shards: {found[str(count)][:16]}")
    return {"hashes": found, "hashes_equal": len(set(found.values())) == 1, "hash_shards": len(case.plan.shards)}


@contextmanager
def _workers(count: int) -> Iterator[None]:
    before = os.environ.get(WORKERS_VARIABLE)
    os.environ[WORKERS_VARIABLE] = str(count)
    try:
        yield
    finally:
        del os.environ[WORKERS_VARIABLE]
        if before is not None:
            os.environ[WORKERS_VARIABLE] = before


def kills(work: Path, root: Path, num_runs: int, seed: int) -> Iterator[dict[str, Any]]:
    """Runs with kills, the figures so far after each; ``lost`` counts those whose bytes are not the undisturbed run's."""
    case = fake_case(fs.read_record(CapturePlan, root / "data/plan.json"))
    expected, dice = case.run(work, None), random.Random(seed)  # noqa: S311 - moments, no secret
    lost, kinds, lost_workers = 0, list[str](), 0
    with Nodes(KILL_NODES) as nodes, ThreadPoolExecutor(1) as pool:
        for number in range(num_runs):
            executor = RayExecutor(case.spec)
            # The run in a thread: Ray starts nodes from the main one alone.
            running = pool.submit(case.run, work, executor)
            struck = _strike(nodes, dice, executor, running, len(case.plan.shards))
            is_lost = running.result() != expected
            kinds, lost, lost_workers = kinds + struck, lost + is_lost, lost_workers + executor.num_lost_workers
            console.log(f"scale: run {number + 1} of {num_runs}: {struck}, {'lost' if is_lost else 'whole'}")
            yield {
                "kill_runs": number + 1, "kills": len(kinds), "lost": lost, "lost_workers": lost_workers,
                "kill_kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            }  # fmt: skip


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


@dataclass(slots=True)
class _Meter:
    """CPU seconds of this process and its workers, and of Ray's own processes, noted all the while."""

    notes: list[tuple[float, tuple[float, float]]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        while not self.ended.wait(TICK_S):
            self.notes.append((time.monotonic(), _tree_cpu_s(os.getpid())))

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """CPU seconds from one moment to another."""
        begin, end = (min(self.notes, key=lambda note: abs(note[0] - at_s))[1] for at_s in (begin_s, end_s))
        return {"cpu_s": end[0] - begin[0], "daemons_cpu_s": end[1] - begin[1]}


def _tree_cpu_s(root: int) -> tuple[float, float]:
    """Of a process and the workers below it, and of everything else below it: Ray's own processes."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    below, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below, grew = below | more, bool(more)
    working = {pid for pid in below if pid == root or b"ray::Worker" in _command(pid)}
    second = os.sysconf("SC_CLK_TCK")
    return tuple(sum(ticks.get(pid, 0) for pid in pids) / second for pids in (working, below - working))  # type: ignore[return-value]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def overhead(work: Path, root: Path) -> dict[str, Any]:
    """One worker against none, in turns."""
    case = real_case(root, OVERHEAD_TOKENS, OVERHEAD_SHARDS)
    rows: list[dict[str, float]] = []
    for number in range(OVERHEAD_ROUNDS):
        for kind in ("local", "ray") if number % 2 == 0 else ("ray", "local"):
            rows.append({"is_ray": float(kind == "ray")} | _timed(case, work, kind == "ray"))
            console.log(f"scale: overhead, {kind}: {rows[-1]}")

    def middle(key: str, is_ray: bool) -> float:
        return statistics.median(row[key] for row in rows if bool(row["is_ray"]) is is_ray)

    local_s = middle("cpu_s", False)
    return {
        "ray_overhead": (middle("cpu_s", True) + middle("daemons_cpu_s", True)) / local_s - 1,
        "ray_overhead_without_daemons": middle("cpu_s", True) / local_s - 1,
        "ray_overhead_wall": middle("wall_s", True) / middle("wall_s", False) - 1,
        "ray_start_s": middle("start_s", True), "local_start_s": middle("start_s", False),
        "overhead_rows": rows, "overhead_tokens": case.plan.num_tokens, "machine": config.machine(),
    }  # fmt: skip


def _timed(case: Case, work: Path, is_ray: bool) -> dict[str, float]:
    """Seconds and CPU seconds from the open engine to the last shard."""
    marks: list[float] = []
    meter = _Meter()
    thread = threading.Thread(target=meter.work, daemon=True)
    thread.start()
    begin_s = time.monotonic()
    with _workers(1):
        executor = RayExecutor(case.spec)

        def local(run: Run, watch: Watch) -> None:
            opened = run.engine.open

            def note() -> None:
                opened()
                marks.append(time.monotonic())

            run.engine.open = note  # type: ignore[method-assign]
            here(run, watch)

        def noted(run: Run, watch: Watch) -> None:
            (executor if is_ray else local)(run, watch)

        case.run(work, _ended_at(noted, executor, marks, is_ray))
    meter.ended.set()
    thread.join()
    ready_s, end_s = marks
    return {"start_s": ready_s - begin_s, "wall_s": end_s - ready_s, **meter.between(ready_s, end_s)}


def _ended_at(executor: Executor, ray: RayExecutor, marks: list[float], is_ray: bool) -> Executor:
    """Notes the moments of the open engine and of the last shard; ending the cluster is in neither."""

    def run_it(run: Run, watch: Watch) -> None:
        executor(run, watch)
        if is_ray:
            marks[:] = [min(at_s for at_s, _ in ray.workers.values()), max(finish.at_s for finish in ray.finishes)]
        else:
            marks.append(time.monotonic())

    return run_it
