"""A tiny target, tokens and parameters on disk; the same training from a store and from a stream.

python stream_world.py FOLDER KEY=VALUE …    trains from the stream in FOLDER (the process that tests kill)
"""

import dataclasses
import json
import random
import sys
from pathlib import Path

import torch
import train_world as world
import yaml

from eyas import config, console, fs
from eyas.batches.streamed_set import stored_ratio, streamed_set
from eyas.contracts import CapturePlan, ShardManifest
from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.registry import make_engine
from eyas.plan.build import build_plan
from eyas.plan.identity import STORED, capture_identity
from eyas.shards.reader import ShardReader
from eyas.tokens import part
from eyas.tokens.dataset import make_sample, read_index, read_names, write_tokens
from eyas.tokens.part import planned_part
from eyas.tokens.table import TokenTable
from eyas.train import data
from eyas.train.distributed import World
from eyas.train.run import train
from eyas.train.streaming import open_stream

ROOT = Path(__file__).parents[3]
TRAIN = {"num_steps": 16, "checkpoint_every": 2, "packs_per_step": 2, "shuffle_shards": 3, "batch_tokens": 120}
WORKER = ["-m", "eyas.engines.streamed"]
CALIBRATION_ROWS = 60
"""Or the whole tiny set would be calibrated on, and pinned."""
CALIBRATED = (part, data)
"""Modules with a ``CALIBRATION_ROWS`` of their own."""


def calibrate_little():
    """For this whole process: one of a test's own."""
    for module in CALIBRATED:
        setattr(module, "CALIBRATION_ROWS", CALIBRATION_ROWS)  # noqa: B010 - a module's attribute, unknown to the type checker


def make_tokens(folder, num_samples=90):
    """Prompts of 3 tokens, answers of 6 to 40; every ninth is held out."""
    dice = random.Random(5)
    samples = []
    for i in range(num_samples):
        T = 9 + dice.randrange(35)
        ids, mask = [dice.randrange(world.V) for _ in range(T)], [0, 0, 0] + [1] * (T - 3)
        split = "held_out" if i % 9 == 8 else "train"
        samples.append(make_sample(ids, mask, conversation_id=f"c{i}", source="s", split=split, variant="greedy"))
    write_tokens(folder, samples)


def make_project(root, last_rows="all", codec="blosc2", num_samples=90):
    """``params.yaml``, ``models/target.json`` and ``data/tokens``."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["extract"] |= {
        "engine": "fake", "boundaries": [1, 2, 3], "codec": codec, "last_rows": last_rows, "shard_bytes": 30_000,
        "batch_tokens": 80, "reserve_bytes": 1000, "max_failed_samples": 0,
    }  # fmt: skip
    root.mkdir(parents=True, exist_ok=True)
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    fs.write_record(root / "models/target.json", world.make_identity())
    make_tokens(root / "data/tokens", num_samples)
    world.make_inputs(root)


def make_plan(root, source) -> CapturePlan:
    params, tokens = config.load(root / "params.yaml"), root / "data/tokens"
    identity, stored = world.make_identity(), STORED[source]
    capture = capture_identity(params.extract, identity, params.target, read_index(tokens).tokens_sha256, stored)
    planned = planned_part(tokens, stored)
    return build_plan(planned.lengths, capture, identity.hidden_size, planned.trained_rows)


def capture_set(root, source):
    """The stored states: all of them, or the part that an evaluation reads."""
    plan = make_plan(root, source)
    engine = make_engine("fake", target=world.make_identity(), folder=None, boundaries=(1, 2, 3), dtype="bfloat16")
    out, manifest = root / f"{source}/hidden_states", root / f"{source}/hidden_states.json"
    limits = ExtractLimits(reserve_bytes=0, max_failed_samples=0)
    tokens = TokenTable(root / "data/tokens", root)
    extract(plan, tokens, engine, limits, out=out, manifest_path=manifest, home=root / ".eyas")
    return ShardReader(out, fs.read_record(ShardManifest, manifest))


def inputs_of(root, reader, **changes):
    return dataclasses.replace(world.make_inputs(root, reader=reader, **{**TRAIN, **changes}), manifest=reader.manifest)


def run_store(root, **changes):
    """Train from stored states; the published drafter's bytes."""
    reader = capture_set(root, "store")
    folder = root / "from_store"
    inputs = inputs_of(root, reader, **changes)
    train(inputs, folder / "runs", folder / "drafter", folder / "metrics", World(0, 1, torch.device("cpu")))
    return weights(folder)


def part_of(tokens, manifest, settings):
    return streamed_set(tokens, manifest.capture, manifest.hidden_size, settings, stored_ratio(manifest))


def manifest_of(root, source="stream"):
    return fs.read_record(ShardManifest, root / source / "hidden_states.json")


def stored_part(root, source="stream"):
    return ShardReader(root / source / "hidden_states", manifest_of(root, source))


def stream_samples(root):
    return read_names(root / "data/tokens")


def num_tokens(root):
    return read_index(root / "data/tokens").num_tokens


def stream_inputs(root, worker=None, part="stream", **changes):
    """Inputs whose states are captured while training goes on."""
    reader = stored_part(root, part)
    inputs, tokens = inputs_of(root, reader, source="stream", **changes), root / "data/tokens"
    streamed = part_of(tokens, reader.manifest, inputs.config)
    manifest_path = root / part / "hidden_states.json"
    command = [sys.executable, *(worker or WORKER), "models/target.json", str(tokens), str(manifest_path)]
    return dataclasses.replace(
        inputs, stream=lambda processes: open_stream(streamed, command, processes, root / ".eyas")
    )


def run_stream(root, processes=None, folder="from_stream", **how):
    """Train from the stream; (drafter's bytes, outcome)."""
    inputs, place = stream_inputs(root, **how), root / folder
    alone = World(0, 1, torch.device("cpu"))
    meta, outcome = train(inputs, place / "runs", place / "drafter", place / "metrics", processes or alone)
    assert meta.capture_identity == inputs.manifest.identity
    return weights(place), outcome


def weights(folder):
    return (folder / "drafter/drafter.safetensors").read_bytes()


if __name__ == "__main__":
    calibrate_little()
    place = Path(sys.argv[1])
    chosen = {key: json.loads(value) for key, _, value in (one.partition("=") for one in sys.argv[2:])}

    def main(_):
        _, outcome = run_stream(place, **chosen)
        fs.write_record(place / "outcome.json", outcome.stream)

    console.run_main(main)
