"""A written export against the checkpoint it says it is: every file of every server, and the record itself.

    models/export, models/drafter, models/target.json → nothing to say, or one error with every fault by name

What is read is the folder alone; what it should hold is worked out again from the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import fs
from eyas.canonical import digest
from eyas.config import ExportConfig
from eyas.contracts import SCHEMA_VERSION, CheckpointMeta, ExportMeta, TargetIdentity
from eyas.errors import ConfigError, ExportError
from eyas.export import check, compare
from eyas.export.tensors import server_tensors
from eyas.export.write import RECORD_FILE, server_layer_ids

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter


def verify_export(folder: Path, drafter: Drafter, meta: CheckpointMeta, target: TargetIdentity) -> ExportMeta:
    """Check a written export; returns its record.

    Args:
        folder: ``models/export``, or a copy.
        drafter: The checkpoint, float32, with the target's embedding.
        meta: Its record.
        target: The model it drafts for.

    Raises:
        ExportError: Some server would run something else; every fault is listed by name.
        StoreError: There is no record, or it is damaged.
    """
    record = fs.read_record(ExportMeta, folder / RECORD_FILE)
    _refuse_unknown(record, folder)
    problems = list(_record_problems(record, meta, target))
    tensors, blamed = compare.drafter_tensors(drafter), {RECORD_FILE}
    differences: list[float] = []
    for server in record.servers:
        ids = server_layer_ids(server, meta, target)
        expected = server_tensors(server, meta.shape, tensors, record.dtype)
        found, read = check.examine(folder / server, server, meta.shape, ids, record.dtype, expected)
        problems += [f"{server}: {text}" for text in found]
        if found:
            blamed.add(server)
        else:
            moved = compare.require_same_logits(server, meta.shape, read, drafter, record.dtype)
            differences.append(moved)
    if differences and not math.isclose(max(differences), record.max_logit_difference, rel_tol=0.01, abs_tol=1e-4):
        problems.append(
            f"{RECORD_FILE}: max_logit_difference {record.max_logit_difference:.4g}, measured {max(differences):.4g}"
        )
    problems += _file_problems(folder, record, blamed)
    if problems:
        raise ExportError(
            f"{folder} is not the export of this checkpoint:\n{check.listed(problems)}",
            "`dvc repro --force --single-item export` writes it again",
        )
    return record


def _refuse_unknown(record: ExportMeta, folder: Path) -> None:
    """A record is no reason to read other folders than the servers', or to round to other dtypes than ours."""
    try:
        ExportConfig(servers=list(record.servers), dtype=record.dtype).check()
    except ConfigError as error:
        raise ExportError(
            f"{folder / RECORD_FILE}: {error.message}", "`dvc repro --force --single-item export` writes it again"
        ) from None


def _record_problems(record: ExportMeta, meta: CheckpointMeta, target: TargetIdentity) -> Iterator[str]:
    expected = {
        "schema_version": SCHEMA_VERSION,
        "drafter": digest(meta),
        "target": target.digest,
        "capture_identity": meta.capture_identity,
        "boundaries": meta.boundaries,
        "layer_ids": {server: server_layer_ids(server, meta, target) for server in record.servers},
    }
    for name, value in expected.items():
        if getattr(record, name) != value:
            yield f"{RECORD_FILE}: {name} {getattr(record, name)}, expected {value}"


def _file_problems(folder: Path, record: ExportMeta, blamed: set[str]) -> Iterator[str]:
    """Files that are not the record's; of a server with a fault of its own nothing is said twice."""
    found = {file.path: file for file in fs.tree_digests(folder) if file.path != RECORD_FILE}
    named = {file.path: file for file in record.files}
    for path in sorted(set(found) | set(named)):
        if path.split("/")[0] in blamed:
            continue
        if path not in named:
            yield f"{path}: not in {RECORD_FILE}"
        elif found.get(path) != named[path]:
            yield f"{path}: {'missing' if path not in found else 'not the bytes that ' + RECORD_FILE + ' names'}"
