"""Stage export: models/target.json + data/draft_vocab + models/drafter → models/export.

What its model cards say comes from data/hidden_states.json and reports/acceptance.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from eyas import config, console, fs
from eyas.canonical import digest
from eyas.contracts import AcceptanceReport, CheckpointMeta, ShardManifest, TargetIdentity
from eyas.errors import ExportError
from eyas.export.card import Evidence
from eyas.export.write import export
from eyas.stages import common
from eyas.target import locate
from eyas.target.load import read_ends
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.checkpoint import load_drafter

NAMES = ("TARGET_JSON", "DRAFT_VOCAB", "STATES_JSON", "DRAFTER", "ACCEPTANCE_JSON", "EXPORT")


def main(argv: Sequence[str]) -> None:
    """Write the drafter for every configured server, check it, print where each file went."""
    target_path, vocab_path, states_path, drafter_path, acceptance_path, out = common.paths("export", NAMES, argv)
    params = config.load()
    with common.stage_run("export", [target_path, vocab_path, drafter_path, acceptance_path], [out]) as run:
        target = fs.read_record(TargetIdentity, target_path)
        ends = read_ends(locate.ensure(target, params.target))
        drafter, meta = load_drafter(drafter_path, ends.embedding_VD)
        vocab = DraftVocab.read(vocab_path)
        if meta.target != target.digest:
            raise ExportError(
                f"{drafter_path} was trained for target {meta.target[:16]}, {target_path} is {target.digest[:16]}",
                "`dvc repro export`",
            )
        if not (torch.equal(vocab.d2t_W, drafter.d2t) and torch.equal(vocab.t2d_V, drafter.t2d)):
            raise ExportError(
                f"{drafter_path} was trained with another draft vocab than {vocab_path}", "`dvc repro export`"
            )
        evidence = _read_evidence(states_path, acceptance_path, meta)
        record = export(drafter, meta, target, params.export, out, evidence)
        run.facts["max_logit_difference"] = record.max_logit_difference
    rows = [(file.path, console.human_bytes(file.size_bytes), file.sha256[:16]) for file in record.files]
    console.emit(console.table(rows, ("file", "size", "sha256")))
    spelled = ", ".join(f"{server} {list(ids)}" for server, ids in record.layer_ids.items())
    console.emit(
        f"boundaries {list(record.boundaries)} ({spelled}); logits differ from fp32 by at most "
        f"{record.max_logit_difference:.3g}; every name is loaded, none is missing"
    )


def _read_evidence(states_path: Path, acceptance_path: Path, meta: CheckpointMeta) -> Evidence:
    """What the cards say; of an imported drafter no states are known that it was trained on.

    Raises:
        ExportError: The states or the numbers are of another checkpoint.
    """
    manifest = fs.read_record(ShardManifest, states_path)
    acceptance = fs.read_record(AcceptanceReport, acceptance_path)
    if acceptance.drafter != digest(meta):
        raise ExportError(
            f"{acceptance_path} is of drafter {acceptance.drafter[:16]}, expected {digest(meta)[:16]}",
            "`dvc repro --force --single-item evaluate` judges this one",
        )
    if not meta.capture_identity:
        return Evidence(manifest=None, acceptance=acceptance)
    if manifest.identity != meta.capture_identity:
        raise ExportError(
            f"{states_path} is capture {manifest.identity[:16]}, the drafter was trained on "
            f"{meta.capture_identity[:16]}",
            "`dvc repro export`",
        )
    return Evidence(manifest=manifest, acceptance=acceptance)


if __name__ == "__main__":
    console.run_main(main)
