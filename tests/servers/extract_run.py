"""A small extraction through a real SGLang, in this process or as a program: ``python extract_run.py MODEL ROOT``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from saved_target import make_target

from eyas import fs
from eyas.contracts import CaptureIdentity, FileDigest
from eyas.engines.base import Engine
from eyas.engines.loop import ExtractLimits, extract
from eyas.engines.sglang.engine import SglangEngine
from eyas.plan.build import build_plan
from eyas.tokens.dataset import make_sample

BOUNDARIES = (2, 3, 4)
CHUNK = 256
OPTIONS = {"chunked_prefill_size": CHUNK, "max_running_requests": 1}
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK, 2048 - 8, 2048 - 7)
"""Every edge of a chunk, and the longest that a context of 2,048 takes."""


class Run:
    """A plan with its tokens, and the folder to extract into.

    Args:
        model: A saved model.
        root: Everything goes below it, but for the server's log.
        num_samples: Beside those of ``LENGTHS``.
    """

    def __init__(self, model: Path, root: Path, num_samples: int = 60) -> None:
        rng, self.root = random.Random(0), root
        self.target = make_target(model)
        lengths = [*LENGTHS, *(rng.randrange(10, 600) for _ in range(num_samples))]
        samples = [
            make_sample(
                [rng.randrange(20, self.target.vocab_size) for _ in range(length)], [1] * length,
                conversation_id=f"{index:016x}", source="random", split="train", variant="given",
            )
            for index, length in enumerate(lengths)
        ]  # fmt: skip
        self.tokens = {sample.sample_id: sample for sample in samples}
        self.engine = SglangEngine(self.target, model, BOUNDARIES, dtype="bfloat16", **OPTIONS)
        facts = self.engine.describe()
        capture = CaptureIdentity(
            target="a" * 64, tokens="b" * 64, boundaries=BOUNDARIES, final_hidden="post_norm", dtype="bfloat16",
            codec="raw", engine=facts.name, engine_version=facts.version, engine_options=facts.options, image="",
            shard_bytes=1_200_000, batch_tokens=1024, revision=1,
        )  # fmt: skip
        lengths_by_id = [(name, len(sample.input_ids)) for name, sample in self.tokens.items()]
        self.plan = build_plan(lengths_by_id, capture, self.target.hidden_size)
        self.out, self.manifest_path = root / "hidden_states", root / "hidden_states.json"
        self.journal = root / ".eyas/spool" / self.plan.identity / "journal.jsonl"

    @property
    def num_stored(self) -> int:
        """Shards that are finished and not published."""
        return len(self.journal.read_text().splitlines()) if self.journal.exists() else 0

    def extract(self, probe: Callable[[Engine], None] | None = None, reserve_bytes: int = 0) -> int:
        """Extract; gives the number of shards that an earlier run left."""
        limits = ExtractLimits(reserve_bytes=reserve_bytes, max_failed_samples=0)
        result = extract(
            self.plan, self.tokens, self.engine, limits,
            out=self.out, manifest_path=self.manifest_path, home=self.root / ".eyas", probe=probe,
        )  # fmt: skip
        return result.num_resumed_shards

    def hashes(self) -> tuple[FileDigest, ...]:
        """Every published byte, by path."""
        return (*fs.tree_digests(self.out), fs.file_digest(self.manifest_path, self.root))


if __name__ == "__main__":
    from eyas import console

    console.run_main(lambda argv: Run(Path(argv[0]), Path(argv[1])).extract())
