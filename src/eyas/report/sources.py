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
    CapturePlan,
    CheckpointMeta,
    ExportMeta,
    ShardManifest,
    TargetIdentity,
    TokenReport,
)
from eyas.errors import ConfigError, StoreError
from eyas.report.figures import Figures

Record = TypeVar("Record")
CURVES = Path("reports/train/plots/metrics")
SERIES_INDEX = re.compile(r"^(.*?)(?:/step)?[_./-]?(\d+)$")
COSTS = ("wall_s", "cpu_s", "peak_rss_bytes")
SPEEDS = ("tokens", "tokens_per_second", "tokens_per_cpu_second")
PAGE_STAGE = "report"
"""Its own last run is no matter of the page: it would tell of the page before, and never be the same twice."""
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
class StoredGeneration:
    """One version of the hidden states that this repository has or names."""

    name: str
    kind: str
    engine: str
    num_samples: int
    num_tokens: int
    stored_bytes: int
    is_whole: bool
    is_current: bool
    """The workspace's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that is known about the last run."""

    params: config.Params | None
    target: TargetIdentity | None
    tokens: TokenReport | None
    plan: CapturePlan | None
    manifest: ShardManifest | None
    checkpoint: CheckpointMeta | None
    acceptance: Figures | None
    export: ExportMeta | None
    throughput: dict[str, dict[str, float]]
    runs: dict[str, dict[str, Any]]
    """Run records by stage, in pipeline order."""
    curves: tuple[Curve, ...]
    outputs: tuple[Output, ...]
    store_bench: Figures
    """What ``make bench-store`` measured: speeds of disk and codec."""
    serve: Figures
    """What ``make serve-bench`` measured."""
    generations: tuple[StoredGeneration, ...] = ()


def gather(root: Path, *, generations: bool = False) -> Sources:
    """Read what is there below ``root``. The same files give the same sources: nothing is asked of clock or disk.

    Args:
        root: A repository, or a folder with its records.
        generations: Look for versions of the hidden states as well, by git and DVC.

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
        acceptance=_acceptance(root / "reports/acceptance.json"),
        export=_record(ExportMeta, root / "models/export/export.json"),
        throughput=_notes(throughput, SPEEDS) if throughput.is_file() else {},
        runs=_runs(root / "reports/runs"),
        curves=read_curves(root / CURVES),
        outputs=_outputs(root / "dvc.lock"),
        store_bench=_figures(root / "reports/bench/store.json"),
        serve=_figures(root / "reports/serve.json"),
        generations=_generations(root) if generations else (),
    )


def _acceptance(path: Path) -> Figures | None:
    """The report of acceptance, of whichever version: it grows, and a page must not wait for that."""
    if not path.is_file():
        return None
    found = Figures.of(fs.read_json(path))
    if found.number("tau") is None:
        raise StoreError(f"{path} is no AcceptanceReport: it has no tau", "run `dvc repro -s -f evaluate`")
    return found


def _figures(path: Path) -> Figures:
    return Figures.of(fs.read_json(path) if path.is_file() else None)


def _generations(root: Path) -> tuple[StoredGeneration, ...]:
    from eyas.generations.listing import list_generations, read_situation

    try:
        found = list_generations(read_situation(root))
    except StoreError:
        return ()  # no git repository, as in a scratch copy: there are no versions then
    return tuple(
        StoredGeneration(
            name=one.name,
            kind=one.kind,
            engine=one.facts.engine,
            num_samples=one.facts.num_samples,
            num_tokens=one.facts.num_tokens,
            stored_bytes=one.stored_bytes,
            is_whole=one.is_whole,
            is_current="workspace" in one.named_by,
        )
        for one in sorted(found, key=lambda one: (-one.stored_bytes, one.hash))
    )


def _record(kind: type[Record], path: Path) -> Record | None:
    return fs.read_record(kind, path) if path.is_file() else None


def _params(path: Path) -> config.Params | None:
    try:
        return config.load(path)
    except ConfigError:
        return None  # the page describes what ran; a file that is being edited must not stop it


def _runs(folder: Path) -> dict[str, dict[str, Any]]:
    found = {s: path for s in STAGES if s != PAGE_STAGE and (path := folder / f"{s}.json").is_file()}
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
            Output(str(out["path"]), stage, int(out.get("size", 0)), int(out.get("nfiles", 1)), str(out.get("md5", "")))
            for stage in STAGES
            if stage in stages and stage != PAGE_STAGE
            for out in stages[stage].get("outs", ())
        )
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is no lock file of DVC: {error}", "`git checkout dvc.lock`, then `dvc repro`"
        ) from None
