"""A repository with states of the fake engine, as an extraction leaves it, and ways to damage them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from eyas import fs
from eyas.contracts import CaptureIdentity, EngineFacts, ShardManifest, TokenSample
from eyas.engines.base import CapturedSample, Engine
from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.registry import make_engine
from eyas.plan.build import build_plan
from eyas.tokens.dataset import make_sample, tokens_sha256, write_tokens
from fake_target import HIDDEN_SIZE, make_target

STATES, MANIFEST = Path("data/hidden_states"), Path("data/hidden_states.json")
LIMITS = ExtractLimits(reserve_bytes=0, max_failed_samples=0)


class CountingEngine:
    """The fake engine; counts the batches it runs and may give another bit or no promise."""

    def __init__(self, *, deterministic: bool = True, change: bool = False) -> None:
        self.inner: Engine = make_engine(
            "fake", target=make_target(), folder=None, boundaries=(1, 2, 3), dtype="bfloat16"
        )
        self.deterministic, self.change = deterministic, change
        self.batches: list[tuple[str, ...]] = []
        self.num_opened = 0

    def announce(self, samples):
        pass

    def open(self) -> None:
        self.num_opened += 1

    def close(self) -> None:
        pass

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        self.batches.append(tuple(sample.sample_id for sample in batch))
        for captured in self.inner.capture(batch):
            if self.change:
                captured.last_TD[0, 0] += 1
            yield captured

    def generate(self, requests):
        return self.inner.generate(requests)

    def describe(self) -> EngineFacts:
        return EngineFacts(name="fake", version="1", options={}, deterministic=self.deterministic)


def make_repository(root: Path, *, codec: str = "raw", last_rows: str = "all", engine: Engine | None = None) -> Path:
    """Tokens, plan and published states; shards of several batches each."""
    rng = random.Random(1)
    samples = [
        make_sample(
            [rng.randrange(1000) for _ in range(n)],
            [int(t >= n // 3) for t in range(n)],
            conversation_id=f"{n:016x}",
            source="a",
            split="train",
            variant="given",
        )
        for n in range(12, 36)
    ]
    write_tokens(root / "data/tokens", samples)
    capture = CaptureIdentity(
        target=make_target().digest,
        tokens=tokens_sha256(root / "data/tokens"),
        boundaries=(1, 2, 3),
        final_hidden="post_norm",
        dtype="bfloat16",
        codec=codec,
        last_rows=last_rows,
        engine="fake",
        engine_version="1",
        engine_options={},
        image="",
        shard_bytes=200 * 4 * HIDDEN_SIZE * 2,
        batch_tokens=70,
        revision=1,
    )
    lengths = [(sample.sample_id, len(sample.input_ids)) for sample in samples]
    plan = build_plan(lengths, capture, HIDDEN_SIZE)
    fs.write_record(root / "data/plan.json", plan)
    by_id = {sample.sample_id: sample for sample in samples}
    places = {"out": root / STATES, "manifest_path": root / MANIFEST, "home": root / ".eyas"}
    extract(plan, by_id, engine or CountingEngine(), LIMITS, **places)
    return root


def link_into_cache(root: Path) -> None:
    """What a commit with ``cache.type = hardlink`` leaves: each file a read-only hard link of its object."""
    (root / ".dvc").mkdir(exist_ok=True)
    (root / ".dvc/config").write_text("[cache]\n    type = hardlink\n")
    for entry in manifest_of(root).shards:
        path, cached = root / STATES / entry.path, object_of(root, entry.md5)
        cached.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, cached)
        path.chmod(0o444)


def manifest_of(root: Path) -> ShardManifest:
    return fs.read_record(ShardManifest, root / MANIFEST)


def object_of(root: Path, md5: str) -> Path:
    return root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def flip(path: Path, offset: int) -> None:
    """Change one bit in place: every hard link sees it."""
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)[0]
        handle.seek(offset)
        handle.write(bytes([byte ^ 16]))
    path.chmod(mode)


def replace(path: Path, content: bytes) -> None:
    """Other bytes in the same inode."""
    path.chmod(0o644)
    path.write_bytes(content)
