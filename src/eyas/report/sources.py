"""What the report and the console summary read: records, run notes and curves of one working tree.

Everything is optional: a missing input is shown as not measured, never made up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eyas import config, fs
from eyas.contracts import (
    AcceptanceReport,
    CapturePlan,
    CheckpointMeta,
    ExportMeta,
    ShardManifest,
    TargetIdentity,
    TokenReport,
)
from eyas.errors import ConfigError, StoreError

Record = TypeVar("Record")
CURVES = Path("reports/train/plots/metrics")
SERIES_INDEX = re.compile(r"^(.*?)(?:/step)?[_./-]?(\d+)$")
COSTS = ("wall_s", "cpu_s", "peak_rss_bytes")
SPEEDS = ("tokens", "tokens_per_second", "tokens_per_cpu_second")
STAGES = ("fetch", "ingest", "respond", "tokenize", "plan", "extract", "train", "evaluate", "export", "report")


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over optimizer steps; ``group`` is its name without the TTT step at its end, ``label`` that step."""

    name: str
    group: str
    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """One output as ``dvc.lock`` states it: no hashing needed to say what is there."""

    path: str
    stage: str
    size_bytes: int
    num_files: int
    md5: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that is known about the last run."""

    params: config.Params | None
    target: TargetIdentity | None
    tokens: TokenReport | None
    plan: CapturePlan | None
    manifest: ShardManifest | None
    checkpoint: CheckpointMeta | None
    acceptance: AcceptanceReport | None
    export: ExportMeta | None
    throughput: dict[str, dict[str, float]]
    runs: dict[str, dict[str, Any]]
    """Run records by stage, in pipeline order."""
    curves: tuple[Curve, ...]
    outputs: tuple[Output, ...]
    free_bytes: int


def gather(root: Path) -> Sources:
    """Read what is there below ``root``.

    Raises:
        StoreError: A file is there but damaged or of another version.
    """
    throughput = root / "reports/throughput.json"
    return Sources(
        params=_params(root / config.PARAMS_PATH),
        target=_record(TargetIdentity, root / "models/target.json"),
        tokens=_record(TokenReport, root / "reports/tokens.json"),
        plan=_record(CapturePlan, root / "data/plan.json"),
        manifest=_record(ShardManifest, root / "data/hidden_states.json"),
        checkpoint=_record(CheckpointMeta, root / "models/drafter/checkpoint.json"),
        acceptance=_record(AcceptanceReport, root / "reports/acceptance.json"),
        export=_record(ExportMeta, root / "models/export/export.json"),
        throughput=_notes(throughput, SPEEDS) if throughput.is_file() else {},
        runs=_runs(root / "reports/runs"),
        curves=read_curves(root / CURVES),
        outputs=_outputs(root / "dvc.lock"),
        free_bytes=fs.free_bytes(root),
    )


def _record(kind: type[Record], path: Path) -> Record | None:
    return fs.read_record(kind, path) if path.is_file() else None


def _params(path: Path) -> config.Params | None:
    try:
        return config.load(path)
    except ConfigError:
        return None  # the page describes what ran; a file that is being edited must not stop it


def _runs(folder: Path) -> dict[str, dict[str, Any]]:
    found = {stage: path for stage in STAGES if (path := folder / f"{stage}.json").is_file()}
    return {stage: _note(fs.read_json(path), COSTS, path) for stage, path in found.items()}


def _notes(path: Path, numbers: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: _note(note, numbers, path) for name, note in _note(fs.read_json(path), (), path).items()}


def _note(note: Any, numbers: Sequence[str], path: Path) -> dict[str, Any]:
    if not isinstance(note, dict) or not all(isinstance(note.get(name), (int, float)) for name in numbers):
        raise StoreError(f"{path} is no note of a run", f"remove it, the stage's next run writes it: rm {path}")
    return note


def read_curves(folder: Path) -> tuple[Curve, ...]:
    """Curves from DVCLive's TSV files (columns ``step`` and one value), sorted by name.

    Raises:
        StoreError: A file has no such columns or a cell is no number.
    """
    curves = []
    for path in sorted(folder.rglob("*.tsv")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        match = SERIES_INDEX.match(name)
        group, label = (match[1], f"step {match[2]}") if match else (name, name)
        curves.append(Curve(name, group, label, _points(path)))
    return tuple(curves)


def _points(path: Path) -> tuple[tuple[float, float], ...]:
    header, *rows = [line.split("\t") for line in path.read_text().splitlines() if line]
    try:
        step = header.index("step")
        value = next(i for i in reversed(range(len(header))) if i != step and header[i] != "timestamp")
        return tuple((float(row[step]), float(row[value])) for row in rows)
    except (ValueError, StopIteration, IndexError) as error:
        raise StoreError(f"{path} is no table of step and value: {error}", "run `dvc repro -s -f train`") from None


def _outputs(path: Path) -> tuple[Output, ...]:
    import yaml

    if not path.is_file():
        return ()
    try:
        stages = (yaml.safe_load(path.read_text()) or {}).get("stages", {})
        return tuple(
            Output(out["path"], stage, out.get("size", 0), out.get("nfiles", 1), out.get("md5", ""))
            for stage in STAGES
            if stage in stages
            for out in stages[stage].get("outs", ())
        )
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is no lock file of DVC: {error}", "`git checkout dvc.lock`, then `dvc repro`"
        ) from None
