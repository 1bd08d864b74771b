"""What the parts of ``bench.scale`` that run on Ray extract: a plan with its tokens, and the engine for it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from eyas import config, fs
from eyas.canonical import digest
from eyas.contracts import CaptureIdentity, CapturePlan, TargetIdentity, TokenSample
from eyas.engines.loop import Executor, ExtractLimits, extract
from eyas.engines.ray.driver import WORKERS_VARIABLE
from eyas.engines.registry import EngineSpec
from eyas.ops.bench.random_target import identity, make_samples
from eyas.plan.build import build_plan
from eyas.plan.identity import capture_identity
from eyas.target.locate import ensure
from eyas.tokens.dataset import iter_tokens

KILL_SHAPE = {"num_layers": 6, "hidden_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096}
KILL_SAMPLES, KILL_SHARDS = 240, 40
LONGEST = 2048
"""Context of which half is the longest sample of ``long_case``."""


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
    plan = fs.read_record(CapturePlan, root / "data/plan.json")
    tokens = {sample.sample_id: sample for sample in iter_tokens(root / "data/tokens")}
    chosen: dict[str, TokenSample] = {}
    for planned in (sample for shard in plan.shards for sample in shard.samples):
        chosen[planned.sample_id] = tokens[planned.sample_id]
        if sum(len(sample.input_ids) for sample in chosen.values()) >= num_tokens:
            break
    return _case(_hf(root), chosen, num_shards, batch_tokens=1024)


def long_case(root: Path, num_tokens: int, num_shards: int) -> Case:
    """Samples of random ids, as many as are wanted, and transformers on a repository's target."""
    spec = _hf(root)
    samples = make_samples(num_tokens, spec.target.vocab_size, LONGEST)
    return _case(spec, samples, num_shards, batch_tokens=4096)


def fake_case() -> Case:
    """Samples of random ids and the fake engine, a third of a gigabyte in all."""
    dice, tokens = random.Random(0), {}  # noqa: S311 - samples, the same each time
    for number in range(KILL_SAMPLES):
        name, length = f"{number:016x}", dice.randrange(100, 600)
        tokens[name] = TokenSample(
            sample_id=name, conversation_id=name, source="random", split="train", variant="greedy",
            input_ids=tuple(dice.randrange(1000) for _ in range(length)), loss_mask=(1,) * length,
        )  # fmt: skip
    spec = EngineSpec(
        name="fake", target=replace(identity("tiny"), **KILL_SHAPE), folder=None, boundaries=(1, 3, 5), dtype="bfloat16",
        device="cpu", options={},
    )  # fmt: skip
    return _case(spec, tokens, KILL_SHARDS, batch_tokens=2048)


def _hf(root: Path) -> EngineSpec:
    params, target = config.load(root / config.PARAMS_PATH), fs.read_record(TargetIdentity, root / "models/target.json")
    return EngineSpec(
        name="hf", target=target, folder=ensure(target, params.target).resolve(),
        boundaries=capture_identity(params.extract, target, params.target, "").boundaries, dtype=params.target.dtype,
        device="cpu", options={},
    )  # fmt: skip


def _case(spec: EngineSpec, tokens: Mapping[str, TokenSample], num_shards: int, batch_tokens: int) -> Case:
    lengths = [(name, len(sample.input_ids)) for name, sample in tokens.items()]
    num_states, facts = (len(spec.boundaries) + 1) * spec.target.hidden_size, spec.make().describe()
    capture = CaptureIdentity(
        target=spec.target.digest, tokens=digest(lengths), boundaries=spec.boundaries, final_hidden="post_norm",
        dtype="bfloat16", codec="blosc2", engine=facts.name, engine_version=facts.version, engine_options=facts.options,
        image="", shard_bytes=sum(length for _, length in lengths) * num_states * 2 // num_shards,
        batch_tokens=batch_tokens, revision=3, last_rows="all",
    )  # fmt: skip
    return Case(build_plan(lengths, capture, spec.target.hidden_size), tokens, spec)


@contextmanager
def workers(count: int) -> Iterator[None]:
    """So many workers, whatever the nodes have room for."""
    before = os.environ.get(WORKERS_VARIABLE)
    os.environ[WORKERS_VARIABLE] = str(count)
    try:
        yield
    finally:
        del os.environ[WORKERS_VARIABLE]
        if before is not None:
            os.environ[WORKERS_VARIABLE] = before
