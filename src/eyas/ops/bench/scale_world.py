"""A repository with very many samples, format-true and tiny: one value a row, so that what counts is their number.

Tokens, plan, shards, journal, DVC's lists and ``dvc.lock`` are those of a real capture by the fake engine, written
without its fsyncs; sixteen samples a shard, about what 1 GiB holds of Kimi's states.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eyas import config, fs
from eyas.canonical import canonical_json
from eyas.contracts import (
    CapturePlan,
    FinalNorm,
    PlannedShard,
    ShardEntry,
    StoredSample,
    TargetIdentity,
    TokenSample,
)
from eyas.ops.bench.gc import MANIFEST, STATES, ScriptedProject
from eyas.ops.bench.replay import manifest_of
from eyas.shards.format import ShardContent, block_name, checksum, lay_out, pack_header, shard_facts
from eyas.shards.handover import HOME
from eyas.shards.spool import Spool
from eyas.shards.writer import FinishedShard
from eyas.tokens.dataset import make_sample, write_tokens

MEAN_TOKENS, SAMPLES_PER_SHARD = 64, 16
VOCAB_SIZE, NUM_LAYERS, BOUNDARIES = 163_840, 61, (3, 31, 59)
BYTES_PER_TOKEN = 2 * (len(BOUNDARIES) + 1)
SEED = 0
SHORTEST, LONGEST = 8, 1024


def make_world(root: Path, params: Path, num_samples: int) -> None:
    """Make the repository: everything up to states that are finished in the spool, published and recorded.

    Args:
        root: An absent folder.
        params: A ``params.yaml`` whose ``extract`` section is replaced in parts.
        num_samples: Samples of the plan.
    """
    project = ScriptedProject(root)
    fs.write_text(root / config.PARAMS_PATH, _params(params.read_text(encoding="utf-8")))
    fs.write_record(root / "models/target.json", _target())
    write_tokens(root / "data/tokens", _samples(num_samples))
    subprocess.run(
        [sys.executable, "-m", "eyas.ops.bench.scale_plan", "plan"], cwd=root, check=True, capture_output=True
    )
    plan = fs.read_record(CapturePlan, root / "data/plan.json")
    spool = Spool(root / HOME, plan.capture)
    spool.prepare()
    entries = []
    with (spool.folder / "journal.jsonl").open("wb") as journal:
        for shard in plan.shards:
            entry = _write_shard(spool.states, plan, shard)
            journal.write(spool.line(FinishedShard(path=shard.path, entry=entry), shard))
            entries.append(entry)
    _publish(project, plan, spool, entries)


def _params(text: str) -> str:
    """The parameters with the fake engine and shards of so many of these samples."""
    wanted = {
        "engine": "fake",
        "codec": "raw",
        "boundaries": f"[{', '.join(map(str, BOUNDARIES))}]",
        "shard_bytes": str(SAMPLES_PER_SHARD * MEAN_TOKENS * BYTES_PER_TOKEN),
    }
    head, tail = re.sub(r"num_layers: \d+", f"num_layers: {NUM_LAYERS}", text).split("\nextract:\n")
    lines = tail.split("\n")
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    kept = [line for line in lines[:end] if line.strip().partition(":")[0] not in wanted and not line.startswith("  -")]
    return "\n".join([head, "extract:", *(f"  {key}: {value}" for key, value in wanted.items()), *kept, *lines[end:]])


def _target() -> TargetIdentity:
    return TargetIdentity(
        source="wheel:none==1",
        revision="0" * 64,
        files=(),
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        num_layers=NUM_LAYERS,
        hidden_size=1,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(2,),
        tokenizer_sha256="0" * 64,
        chat_template_sha256="0" * 64,
    )


def _samples(num_samples: int) -> Iterator[TokenSample]:
    """Log-normal lengths, ids that tell the samples apart, a prompt of a third, every twentieth held out."""
    sigma = 0.8
    lengths = np.random.default_rng(SEED).lognormal(math.log(MEAN_TOKENS) - sigma**2 / 2, sigma, num_samples)
    for index, length in enumerate(np.clip(lengths, SHORTEST, LONGEST).astype(int).tolist()):
        ids = [index // 1000, index % 1000, *range(1000, 998 + length)]
        mask = [0] * (length // 3) + [1] * (length - length // 3)
        held_out = "held_out" if index % 20 == 0 else "train"
        name = f"{index:016x}"
        yield make_sample(ids, mask, conversation_id=name, source="made", split=held_out, variant="given")


def _write_shard(states: Path, plan: CapturePlan, shard: PlannedShard) -> ShardEntry:
    """A whole shard of ones: of the samples only their ids and lengths are looked at here."""
    samples = tuple(
        StoredSample(
            sample_id=s.sample_id,
            num_tokens=s.num_tokens,
            conversation_id=s.sample_id,
            source="made",
            split="held_out" if s.sample_id.endswith("0") else "train",
            variant="given",
        )
        for s in shard.samples
    )
    rows = tuple((s.num_tokens, s.num_tokens) for s in samples)
    facts = shard_facts(plan.capture, shard.path, plan.hidden_size)
    content = ShardContent(samples=samples, rows=rows, encoded_bytes={})
    fill = {"I32": b"\1\0\0\0", "BF16": b"\x80\x3f", "U8": b"\1"}
    blocks = {b.name: fill[b.dtype] * math.prod(b.shape) for b in lay_out(facts, content)}
    assert block_name(0, "aux") in blocks
    data = pack_header(facts, content, {name: checksum(block) for name, block in blocks.items()})
    data += b"".join(blocks.values())
    path = states / shard.path
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o444)
    return ShardEntry(
        path=shard.path,
        size_bytes=len(data),
        md5=hashlib.md5(data, usedforsecurity=False).hexdigest(),
        num_samples=len(samples),
        num_tokens=sum(s.num_tokens for s in samples),
    )


def _publish(project: ScriptedProject, plan: CapturePlan, spool: Spool, entries: list[ShardEntry]) -> None:
    """Names in the workspace and in the cache for what lies in the spool, and the manifest."""
    manifest = manifest_of(plan, entries)
    for entry in entries:
        for name in (project.root / STATES / entry.path, project.cached(entry.md5)):
            name.parent.mkdir(parents=True, exist_ok=True)
            os.link(spool.states / entry.path, name)
    data = (canonical_json(manifest) + "\n").encode()
    listed = [{"path": entry.path, "md5": entry.md5, "size_bytes": entry.size_bytes} for entry in entries]
    shutil.copyfile(project.cached(project.record(listed, data)), project.root / MANIFEST)
    fs.write_bytes(spool.folder / "manifest.json", data)
    project.commit("states")
