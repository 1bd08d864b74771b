"""docs/formats.md names every key that eyas writes, section by section."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from eyas import contracts
from eyas.stages.common import stage_run
from eyas.tokens.dataset import Reject, TokenIndex
from eyas.train.checkpoint import Best, MetricRow, RunState

ROOT = Path(__file__).parents[2]
RECORDS = {
    "models/target.json": (contracts.TargetIdentity, contracts.FinalNorm),
    "data/conversations/": (contracts.Conversation, contracts.Answer),
    "data/tokens/": (contracts.TokenSample, TokenIndex, Reject),
    "reports/tokens.json": (contracts.TokenReport,),
    "data/plan.json": (
        contracts.CapturePlan,
        contracts.CaptureIdentity,
        contracts.PlannedShard,
        contracts.PlannedSample,
    ),
    "models/drafter/": (contracts.CheckpointMeta, contracts.DrafterShape),
    "reports/acceptance.json": (
        contracts.AcceptanceReport,
        contracts.SetAcceptance,
        contracts.ChainAcceptance,
        contracts.SampledAcceptance,
        contracts.DecodeCheck,
        contracts.ModeCheck,
        contracts.WorstDocument,
        contracts.WorstRound,
    ),
    "models/export/": (contracts.ExportMeta,),
    ".eyas/": (RunState, Best, MetricRow),
}
SHARD_RECORDS = (
    contracts.StoredSample,
    contracts.ShardManifest,
    contracts.ShardEntry,
    contracts.FailedSample,
    contracts.EngineFacts,
)


def sections() -> dict[str, str]:
    """Text of docs/formats.md by the first path in each heading."""
    parts = re.split(r"^## ", (ROOT / "docs/formats.md").read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for part in parts:
        heading, _, text = part.partition("\n")
        found[re.findall(r"`([^`]+)`", heading)[0] if "`" in heading else heading] = text
    return found


def keys_in(text: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", text))


def fields(*records: type) -> set[str]:
    return {field.name for record in records for field in dataclasses.fields(record)}  # type: ignore[arg-type]


@pytest.mark.parametrize("path", RECORDS)
def test_every_key_of_a_record_is_described(path: str) -> None:
    everywhere = keys_in(sections()["Rules for all"]) | {"schema_version", "files", "path"}
    assert fields(*RECORDS[path]) - keys_in(sections()[path]) - everywhere == set()


def test_every_key_of_shards_and_manifest_is_described() -> None:
    assert fields(*SHARD_RECORDS) - keys_in((ROOT / "docs/formats/shards.md").read_text()) == set()


def test_every_record_of_an_artifact_is_in_this_list() -> None:
    listed = {record for records in RECORDS.values() for record in records} | set(SHARD_RECORDS)
    passing = {contracts.FileDigest}  # a part of others
    there = {value for value in vars(contracts).values() if dataclasses.is_dataclass(value)}
    assert there - listed - passing == set()


def test_every_key_of_run_records_and_throughput_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with stage_run("plan", [], []) as run:
        run.num_tokens = 5
    for path, part in (("reports/runs/plan.json", None), ("reports/throughput.json", "plan")):
        written = json.loads((tmp_path / path).read_text())
        keys = set(written[part] if part else written)
        assert keys - keys_in(sections()[path.replace("plan", "<stage>")]) == set()


def test_every_metric_of_training_is_described() -> None:
    sources = "".join((ROOT / "src/eyas/train" / name).read_text() for name in ("metrics.py", "validation.py"))
    named = {name.replace("{k}", "<k>") for name in re.findall(r'values(?: = {|\[)f?"([a-z_/{}]+)"', sources)}
    assert len(named) == 9
    assert named - set(re.findall(r"`([^`]+)`", sections()["reports/train/"])) == set()


def test_every_environment_variable_is_on_the_map() -> None:
    read = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        if "os.environ" in text:
            read |= set(re.findall(r"\b(EYAS_[A-Z_]+)\b", text))
            read |= set(re.findall(r"os\.environ(?:\.get\(|\[)[\"']([A-Z_]+)", text))
    # a prefix is no name, PATHs are the system's, MAKELEVEL is make's, and the last three are set, not read
    known = {
        "PATH",
        "PYTHONPATH",
        "MAKELEVEL",
        "EYAS_PEER_",
        "CUDA_VISIBLE_DEVICES",
        "TOKENIZERS_PARALLELISM",
        "TORCHDYNAMO_DISABLE",
    }
    table = (ROOT / "docs/map.md").read_text().split("## Environment variables")[1].split("\n## ")[0]
    assert read - set(re.findall(r"`([A-Z_]+)`", table)) - known == set()
