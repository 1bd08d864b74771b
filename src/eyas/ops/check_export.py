"""Check a written export against the checkpoint it is of: what ``export`` checked, at any later time, of any copy."""

from __future__ import annotations

from pathlib import Path

from eyas import config, fs
from eyas.contracts import ExportMeta, TargetIdentity
from eyas.export.verify import verify_export
from eyas.target import locate
from eyas.target.load import read_ends
from eyas.train.checkpoint import load_drafter


def check_export(root: Path, folder: Path, drafter_folder: Path) -> ExportMeta:
    """The record of a right export.

    Args:
        root: The repository.
        folder: ``models/export``, or a copy of it.
        drafter_folder: The checkpoint.

    Raises:
        ExportError: A server would run something else; every fault is listed by name.
        StoreError: A record is missing or damaged.
    """
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    ends = read_ends(locate.ensure(target, config.load(root / config.PARAMS_PATH).target))
    drafter, meta = load_drafter(drafter_folder, ends.embedding_VD)
    return verify_export(folder, drafter, meta, target)


def checked_rows(record: ExportMeta) -> list[tuple[str, str]]:
    """What was checked, as a table."""
    rows = [(server, f"layer ids {list(record.layer_ids[server])}") for server in record.servers]
    return [
        *rows,
        ("boundaries", ", ".join(map(str, record.boundaries))),
        ("files", f"{len(record.files)}, every byte the record's"),
        ("keys and tensors", f"every one the checkpoint's in {record.dtype}; none missing, none skipped"),
        ("logits", "equal to the checkpoint's"),
    ]
