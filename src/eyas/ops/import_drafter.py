"""A public EAGLE-3 checkpoint of SGLang's or speculators' form as a drafter of ours, and exported for every server.

    folder → TO/drafter, TO/draft_vocab, TO/export

Weights, maps and rotary positions stay what they are: an export that is imported and exported again is the same
files. What eyas cannot hold is refused: a trained embedding, a layer of another kind, another target.

Letters: V target vocab, W draft vocab, E drafter hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from eyas import config, fs
from eyas.contracts import CheckpointMeta, ExportMeta, TargetIdentity
from eyas.drafter.foreign import EMBEDDING, HEAD, ForeignDrafter, content_hash, read_checkpoint
from eyas.drafter.init import draft_head
from eyas.drafter.model import Drafter
from eyas.errors import TrainError
from eyas.export.write import export
from eyas.target import locate
from eyas.target.load import TargetEnds, read_ends
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.checkpoint import publish_drafter
from eyas.train.warm_start import written_boundaries


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedDrafter:
    """What came of a checkpoint."""

    form: str
    content: str
    """Hash of the files that were read."""
    meta: CheckpointMeta
    export: ExportMeta


def import_drafter(root: Path, source: Path, out: Path) -> ImportedDrafter:
    """Read a checkpoint for the repository's target and write it as ours.

    Args:
        root: The repository: ``models/target.json`` and ``params.yaml``.
        source: The checkpoint's folder.
        out: Replaced as a whole; gets ``drafter/``, ``draft_vocab/`` and ``export/``.

    Raises:
        TrainError: It is no drafter that can be read, or is one of another target.
        ExportError: No server could run it.
        StoreError: A file is missing or damaged.
    """
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    params = config.load(root / config.PARAMS_PATH)
    ends = read_ends(locate.ensure(target, params.target))
    checkpoint = read_checkpoint(source)
    boundaries, _ = written_boundaries(checkpoint.facts, target)
    drafter = to_drafter(checkpoint, target, ends)
    meta = CheckpointMeta(
        shape=drafter.shape,
        boundaries=boundaries,
        capture_identity="",
        target=target.digest,
        tokens="",
        num_steps=0,
        num_trained_rows=0,
        ttt_steps=0,
        seed=0,
        revision=0,
        files=(),
        warm_start=content_hash(source),
    )
    if drafter.shape.norm_before_residual:  # SGLang's residual is the raw hidden state
        params.export.servers = ["vllm"]
    with fs.atomic_dir(out) as part:
        meta = publish_drafter(part / "drafter", drafter, meta)
        DraftVocab(drafter.d2t, drafter.t2d).write(part / "draft_vocab")
        record = export(drafter, meta, target, params.export, part / "export")
    return ImportedDrafter(form=checkpoint.facts.form, content=meta.warm_start, meta=meta, export=record)


def to_drafter(checkpoint: ForeignDrafter, target: TargetIdentity, ends: TargetEnds) -> Drafter:
    """The checkpoint as a drafter, its draft ids in rising order of their target ids.

    Raises:
        TrainError: It is of another target, or carries an embedding that the target's cannot stand in for.
    """
    shape = checkpoint.shape
    problems = [
        f"{name}: {theirs:,}, the target has {ours:,}"
        for name, theirs, ours in (
            ("vocab_size", shape.vocab_size, target.vocab_size),
            ("hidden_size", shape.target_hidden_size, target.hidden_size),
        )
        if theirs != ours
    ]
    embedding_VE = ends.embedding_VD.to(torch.bfloat16)
    theirs_VE = checkpoint.embedding_VE
    if not problems and theirs_VE is not None and not torch.equal(theirs_VE.to(torch.bfloat16), embedding_VE):
        share = float((theirs_VE.to(torch.bfloat16) != embedding_VE).float().mean())
        problems.append(f"{EMBEDDING}: {share:.2%} of it is not the target's; eyas drafters read the target's own")
    if problems:
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise TrainError(f"the checkpoint is a drafter of another target than {target.source}:\n{lines}")
    target_ids_W, order_W = checkpoint.target_ids_W.sort()
    d2t_W = target_ids_W - torch.arange(len(target_ids_W))
    t2d_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
    t2d_V[target_ids_W] = True
    weights = dict(checkpoint.weights)
    weights[HEAD] = weights[HEAD][order_W] if HEAD in weights else draft_head(ends.head_VD, d2t_W)
    drafter = Drafter(shape)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])
    drafter.set_target(embedding_VE, d2t_W, t2d_V)
    return drafter.eval()


def imported_rows(done: ImportedDrafter, out: Path) -> list[tuple[str, str]]:
    """What was written, as a table."""
    shape = done.meta.shape
    return [
        ("form", done.form),
        ("content", done.content),
        ("boundaries", ", ".join(map(str, done.meta.boundaries))),
        ("draft vocab", f"{shape.draft_vocab_size:,} of {shape.vocab_size:,}"),
        ("drafter", f"{out}/drafter, {out}/draft_vocab"),
        *((server, f"{out}/export/{server}, layer ids {list(ids)}") for server, ids in done.export.layer_ids.items()),
    ]
