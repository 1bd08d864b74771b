"""A repository as far as the budget reads it, and its capture."""

from __future__ import annotations

import re
from pathlib import Path

from eyas import config, fs
from eyas.canonical import canonical_json, to_plain
from eyas.contracts import CaptureIdentity, CapturePlan
from eyas.ops import budget as room
from eyas.plan.build import build_plan
from eyas.plan.identity import capture_identity
from fake_target import HIDDEN_SIZE, make_target

ROOT = Path(__file__).parents[3]
LENGTHS = [30, 21, 14, 9, 8, 7, 7, 5, 3, 2]
NUM_TOKENS = sum(LENGTHS)
TOKEN_BYTES = 4 * HIDDEN_SIZE * 2


class World:
    """A repository as far as the budget reads it, made of files alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.set(engine="fake", boundaries="[1, 2, 3]", shard_bytes=4096, reserve_bytes=1000)
        fs.write_record(root / room.TARGET, make_target())
        self.write_index("f" * 64)
        self.plan()

    def set(self, **extract) -> None:
        path = self.root / "params.yaml"
        text = (path if path.exists() else ROOT / "params.yaml").read_text()
        head, tail = text.split("\nextract:\n")
        for key, value in extract.items():
            tail, found = re.subn(rf"(?m)^  {key}: .*$", f"  {key}: {value}", tail, count=1)
            assert found == 1, key
        path.write_text(f"{head}\nextract:\n{tail}")

    def write_index(self, tokens: str) -> None:
        rows = {"num_trained_aux_rows": 50, "num_trained_last_rows": 40}
        fs.write_record(self.root / room.TOKENS_INDEX, {"tokens_sha256": tokens, **rows})

    @property
    def capture(self) -> CaptureIdentity:
        params = config.load(self.root / "params.yaml")
        index = fs.read_json(self.root / room.TOKENS_INDEX)
        return capture_identity(params.extract, make_target(), params.target, index["tokens_sha256"])

    def plan(self) -> CapturePlan:
        plan = build_plan([(f"{i:016x}", n) for i, n in enumerate(LENGTHS)], self.capture, HIDDEN_SIZE, (50, 40))
        fs.write_record(self.root / room.PLAN, plan)
        return plan

    def write_shards(self, folder: Path, num_shards: int) -> list[dict]:
        """Stand-ins of the first shards: only their sizes are looked at."""
        entries = []
        for shard in fs.read_record(CapturePlan, self.root / room.PLAN).shards[:num_shards]:
            num_tokens = sum(sample.num_tokens for sample in shard.samples)
            data = bytes(num_tokens * 5 + shard.payload_bytes // 2)
            fs.write_bytes(folder / shard.path, data)
            counts = {"num_samples": len(shard.samples), "num_tokens": num_tokens}
            entries.append({"path": shard.path, "size_bytes": len(data), "md5": "0" * 32, **counts})
        return entries

    def write_spool(self, num_shards: int) -> list[dict]:
        spool = self.root / ".eyas/spool" / self.capture.digest
        entries = self.write_shards(spool / "states", num_shards)
        lines = [canonical_json({"shard": {"path": e["path"], "entry": e, "failed": []}, "xxh3": ""}) for e in entries]
        fs.write_text(spool / "journal.jsonl", "\n".join(lines) + "\n")
        return entries

    def manifest(self, entries: list[dict], **capture) -> dict:
        stored = self.capture
        return {
            "identity": stored.digest if not capture else "e" * 64,
            "capture": to_plain(stored) | capture,
            "num_planned_samples": 10, "num_planned_tokens": NUM_TOKENS, "failed": [],
            "num_stored_samples": sum(entry["num_samples"] for entry in entries),
            "num_stored_tokens": sum(entry["num_tokens"] for entry in entries),
            "stored_bytes": sum(entry["size_bytes"] for entry in entries),
            "shards": entries,
        }  # fmt: skip
