"""Exports and imports for people, line by line."""

from __future__ import annotations

from eyas import console
from eyas.ops.exchange.states import ImportReport
from eyas.shards.layouts.export import ExportResult


def export_rows(result: ExportResult) -> list[tuple[str, object]]:
    """An export for people, line by line."""
    record = result.record
    return [
        ("layout", f"{record.facts.layout} for trainer {record.facts.trainer_version}"),
        ("samples", f"{record.num_samples:,}, the first {record.num_train_samples:,} of the training split"),
        ("tokens", f"{record.num_tokens:,}"),
        ("states", "lossy: rounded by the set's codec" if record.facts.is_lossy else "as captured"),
        ("last", record.facts.final_hidden),
        ("layer ids", ", ".join(map(str, record.facts.layer_ids))),
        ("size", console.human_bytes(result.num_bytes)),
        ("taken over", f"{result.num_resumed:,} files of an earlier run, verified"),
    ]


def import_rows(report: ImportReport) -> list[tuple[str, object]]:
    """An import for people, line by line."""
    return [
        ("files", f"{report.num_files:,} = {report.num_imported:,} imported + {len(report.bad):,} bad"),
        ("tokens", f"{report.num_tokens:,}"),
        ("states", "lossy: rounded by a codec" if report.is_lossy else "as the files hold them"),
        ("boundaries", ", ".join(map(str, report.boundaries))),
        ("last", f"{report.final_hidden} in the files, post_norm in the set; {report.decided_by}"),
        ("identity", report.identity),
        *(("bad", f"{file.path}: {file.problem}") for file in report.bad),
    ]
