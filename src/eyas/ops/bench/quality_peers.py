"""The peers' side of a quality bench: our states in their layouts, their own trainers, their drafters as ours.

Every peer gets the same samples in the same packs in the same order as our trainer of the same seed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas import console, fs
from eyas.batches.loader import order_of
from eyas.batches.order import Cursor
from eyas.batches.split import split_samples
from eyas.config.schema import TrainConfig
from eyas.contracts import DrafterShape
from eyas.drafter.init import resolve_shape
from eyas.drafter.model import Drafter
from eyas.errors import EyasError
from eyas.ops.bench.quality_ours import Setup
from eyas.ops.exchange.states import export_states
from eyas.shards.layouts.registry import read_export_record
from eyas.target.load import TensorFiles
from eyas.tokens.draft_vocab import DraftVocab

SCRIPTS = Path(__file__).parent / "peers"
WARM_STEPS = {"cpu": 4, "cuda": 60}
NUM_WORKERS = {"cpu": 0, "cuda": 4}
SAME_COST = ("lr", "warmup_ratio", "norm_before_residual")
"""Settings that do not change a step's seconds."""
BEST_RATES = {"adamw": 1e-3, "muon": 2e-3}
"""Rates with the highest tau on the default data (docs/performance.md), for the optimizer that ours is not."""
PLANNED_STEPS = 4
"""Packs are planned for this many times our steps; a peer that does more begins again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a peer."""

    peer: str
    name: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """One drafter to be trained by a peer."""

    variant: Variant
    budget: str
    """``steps`` as many as ours, or ``time``: as many as the peer makes in the seconds of ours."""
    seed: int
    num_steps: int


def variants(ours: TrainConfig) -> list[Variant]:
    """Each peer by its own defaults, and with the best rate that we know of each optimizer it offers."""
    rates = {**BEST_RATES, ours.optimizer: ours.lr}
    speculators = {"norm_before_residual": True, "ttt_steps": 3, "step_decay": 1.0, "max_grad_norm": 1.0}
    shared = {
        "adamw_lr": rates["adamw"],
        "betas": list(ours.betas),
        "weight_decay": ours.weight_decay,
        "warmup_steps": ours.warmup_steps,
        "min_lr_share": ours.min_lr_share,
    }
    adapted = {
        "norm_before_residual": False,
        "ttt_steps": ours.ttt_steps,
        "step_decay": ours.step_decay,
        "max_grad_norm": ours.max_grad_norm,
    }
    specforge = {"ttt_steps": 7, "lr": 1e-4, "warmup_ratio": 0.015}
    named = [
        ("speculators", "its defaults", speculators),
        ("speculators", "its defaults, raw residual", {**speculators, "norm_before_residual": False}),
        ("speculators", "our AdamW", {**adapted, "ours": shared}),
        ("speculators", "our Muon", {**adapted, "ours": {**shared, "muon_lr": rates["muon"]}}),
        ("specforge", "its defaults", specforge),
        ("specforge", "our AdamW rate and TTT", {**specforge, "lr": rates["adamw"], "ttt_steps": ours.ttt_steps}),
    ]
    return [Variant(peer=peer, name=name, settings=settings) for peer, name, settings in named]


class Peer:
    """One peer: its copy of the states, and its driver in its own interpreter.

    Args:
        name: ``speculators`` or ``specforge``; also the layout.
        python: An interpreter that imports it.
        setup: The run whose states it gets.
        seeds: Of the packs.
        scratch: Emptied by the caller; holds states, jobs and results.
    """

    def __init__(self, name: str, python: str, setup: Setup, seeds: Sequence[int], scratch: Path) -> None:
        self.name, self._python, self._setup = name, python, setup
        self._folder = scratch / name
        states = self._folder / "states"
        export_states(setup.root, name, states, "")
        tensors = TensorFiles(setup.target_folder)
        embedding_key = tensors.name("embedding")
        batches, max_tokens = _batches(setup, states, seeds)
        device = setup.params.train.device
        self._job = {
            "states": str(states),
            "target": str(_target(setup.target_folder, self._folder / "target")),
            "embedding_key": embedding_key,
            "head_key": tensors.name("head") if tensors.has("head") else embedding_key,
            "layer_ids": list(setup.manifest.boundaries),
            "device": device,
            "batches": batches,
            "max_tokens": max_tokens,
        }

    def seconds_per_step(self, asked: Sequence[Variant], seed: int) -> dict[str, float]:
        """By name of variant, measured alone on the machine, compilation not counted."""
        alike: dict[str, list[Variant]] = {}
        for variant in asked:
            costs = {key: value for key, value in variant.settings.items() if key not in SAME_COST}
            alike.setdefault(json.dumps(costs), []).append(variant)
        runs = [
            self._run(PeerRun(variant=group[0], budget="speed", seed=seed, num_steps=1)) for group in alike.values()
        ]
        facts = self._start("speed", runs, WARM_STEPS[self._job["device"]])
        return {
            variant.name: float(fact["seconds_per_step"])
            for group, fact in zip(alike.values(), facts, strict=True)
            for variant in group
        }

    def train(self, runs: Sequence[PeerRun]) -> list[tuple[Drafter, dict[str, Any]]]:
        """Train some drafters in one process; each comes back as one of ours with its facts."""
        label = f"{runs[0].variant.name}-seed-{runs[0].seed}".replace(" ", "_").replace(",", "")
        asked = [self._run(run) for run in runs]
        facts = self._start(label, asked)
        return [
            (to_drafter(load_file(Path(one["out"]) / "drafter.safetensors"), run, self._setup), fact)
            for run, one, fact in zip(runs, asked, facts, strict=True)
        ]

    def _run(self, run: PeerRun) -> dict[str, Any]:
        label = f"{run.variant.name}, {run.budget}, seed {run.seed}"
        return {
            "name": f"{self.name}: {label}",
            "seed": run.seed,
            "num_steps": run.num_steps,
            "settings": run.variant.settings,
            "out": str(self._folder / "drafters" / label.replace(", ", "-").replace(" ", "_")),
        }

    def _start(self, label: str, runs: list[dict[str, Any]], warm_steps: int = 0) -> list[dict[str, Any]]:
        job_path = self._folder / f"{label}.json"
        # a process that is timed has the machine to itself, the others share it
        num_workers = NUM_WORKERS[self._job["device"]] if warm_steps else min(1, NUM_WORKERS[self._job["device"]])
        timing = {"warm_steps": warm_steps, "num_workers": num_workers}
        environment = os.environ if warm_steps else {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        fs.write_text(job_path, json.dumps({**self._job, **timing, "runs": runs}))
        script = SCRIPTS / f"{self.name}_quality.py"
        log_path = job_path.with_suffix(".log")
        with log_path.open("w") as log:
            command = [self._python, str(script), str(job_path)]
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        if done.returncode:
            tail = "\n".join(log_path.read_text().splitlines()[-15:])
            raise EyasError(f"{self.name} ended with {done.returncode}, expected 0:\n{tail}", f"see {log_path}")
        return [json.loads((Path(run["out"]) / "facts.json").read_text()) for run in runs]


def train_all(peers: dict[str, Peer], runs: Sequence[PeerRun], jobs: int) -> Iterable[tuple[PeerRun, Drafter, dict]]:
    """Train every run, each variant and seed in a process of its own, ``jobs`` of them side by side.

    Raises:
        EyasError: Processes failed, each named; what the others trained was given before.
    """
    grouped: dict[tuple[str, str, int], list[PeerRun]] = {}
    for run in runs:
        grouped.setdefault((run.variant.peer, run.variant.name, run.seed), []).append(run)
    groups, failed = list(grouped.values()), list[EyasError]()
    with ThreadPoolExecutor(jobs) as pool:
        trained = [(group, pool.submit(peers[group[0].variant.peer].train, group)) for group in groups]
        for group, future in trained:
            try:
                results = future.result()
            except EyasError as error:
                failed.append(error)
                continue
            for run, (drafter, facts) in zip(group, results, strict=True):
                console.log(f"bench: {run.variant.peer}, {run.variant.name}, {run.budget}, seed {run.seed}: trained")
                yield run, drafter, facts
    if failed:
        raise EyasError("\n".join(error.message for error in failed), "; ".join(error.hint or "" for error in failed))


def to_drafter(tensors: dict[str, torch.Tensor], run: PeerRun, setup: Setup) -> Drafter:
    """A peer's weights in a drafter of ours.

    Raises:
        RuntimeError: They do not fit.
    """
    vocab = DraftVocab.read(setup.vocab_folder)
    plain = dataclasses.replace(
        setup.params.drafter,
        fc_norm=False,
        norm_output=False,
        norm_before_residual=run.variant.settings.get("norm_before_residual", False),
    )
    shape: DrafterShape = resolve_shape(
        plain, setup.identity, setup.target_folder, len(setup.manifest.boundaries), vocab.draft_vocab_size
    )
    drafter = Drafter(shape)
    drafter.load_state_dict({**tensors, "d2t": vocab.d2t_W, "t2d": vocab.t2d_V})
    drafter.set_target(setup.ends.embedding_VD.to(torch.bfloat16), vocab.d2t_W, vocab.t2d_V)
    return drafter.eval()


def _batches(setup: Setup, states: Path, seeds: Sequence[int]) -> tuple[dict[str, list[list[int]]], int]:
    """Packs of our trainer by seed, as numbers of exported samples, and the tokens of the longest."""
    ours = setup.params.train
    number = {s.sample_id: index for index, s in enumerate(read_record(states).samples)}
    num_tokens = {s.sample_id: s.num_tokens for s in setup.reader.samples}
    batches, max_tokens = {}, 0
    for seed in seeds:
        samples, _ = split_samples(setup.reader.samples, ours.validation_share, seed)
        order = order_of(setup.reader, samples, ours.batch_tokens, seed, ours.shuffle_shards)
        plan = order.plan(Cursor(), ours.packs_per_step)
        steps: list[list[str]] = [[]]
        while len(steps) <= ours.num_steps * PLANNED_STEPS:
            planned = next(plan)
            steps[-1] += planned.sample_ids
            if planned.ends_step:
                steps.append([])
        steps.pop()
        max_tokens = max(max_tokens, *(sum(num_tokens[i] for i in step) for step in steps))
        batches[str(seed)] = [[number[i] for i in step] for step in steps]
    return batches, max_tokens


def read_record(states: Path) -> Any:
    """The export's record, which must be there."""
    record = read_export_record(states)
    assert record is not None, states
    return record


def _target(source: Path, folder: Path) -> Path:
    """The target by links, with the index of tensors that both peers look for."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        (folder / path.name).symlink_to(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        from safetensors import safe_open

        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            names = sorted(tensors.keys())
        fs.write_text(index, json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}))
    return folder
