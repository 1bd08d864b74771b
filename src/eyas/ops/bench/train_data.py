"""The same sequences for every trainer of ``eyas bench train``, each in the files that it reads, and a common start.

Real states of this repository, neighbouring samples put together and cut to sequences of one length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eyas import fs
from eyas.canonical import to_plain
from eyas.config.schema import DrafterConfig
from eyas.contracts import DrafterShape, TargetIdentity
from eyas.drafter.init import init_drafter, resolve_shape
from eyas.engines.base import CapturedSample
from eyas.errors import StoreError
from eyas.ops.bench.replay import NEEDED, Source, load, manifest_of
from eyas.ops.bench.store import ROUND, write
from eyas.rows import stored_rows
from eyas.shards.layouts.base import ExportFacts, LayoutSample
from eyas.shards.layouts.norms import final_scale, to_pre_norm
from eyas.shards.layouts.registry import make_writer
from eyas.target.load import TargetEnds, read_ends
from eyas.target.store import target_dir
from eyas.tokens.draft_vocab import DraftVocab

SEQUENCE_TOKENS, NUM_SEQUENCES = 1024, 8


def prepare(root: Path, folder: Path, share: float = 0.0) -> dict[str, Any]:
    """Write every layout below a folder.

    Args:
        root: A repository with published states.
        folder: Empty.
        share: Of the rows that train, the last of each sequence; 0: those of the answers.

    Returns:
        What all jobs share: paths, shape, ``sample_ids`` in file order, ``trained_share`` of rows.

    Raises:
        StoreError: The repository has no states, or too few for one sequence.
    """
    source = _sequences(load(root), share)
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    target_folder = (root / target_dir(target)).resolve()
    ends, vocab = read_ends(target_folder), DraftVocab.read(root / "data/draft_vocab")
    boundaries = source.plan.capture.boundaries
    plain = DrafterConfig(fc_norm=False, norm_output=False)  # what all trainers can be told to train
    shape = resolve_shape(plain, target, target_folder, len(boundaries), vocab.draft_vocab_size)
    _write_start(folder, shape, ends, vocab, source)
    entries = write(source, folder / "eyas", 1)
    (folder / "eyas" / ROUND.format(0)).rename(folder / "eyas/shards")
    fs.write_record(folder / "eyas/manifest.json", manifest_of(source.plan, entries))
    scale = final_scale(target.final_norm, ends.final_norm_D)
    for layout in ("speculators", "specforge"):
        writer, version = make_writer(layout, "", vocab.d2t_W, vocab.t2d_V)
        samples = list(_layout_samples(source))
        for index, sample in enumerate(samples):
            last_TD = to_pre_norm(sample.last_TD, scale) if writer.final_hidden == "pre_norm" else sample.last_TD
            with fs.atomic_writer(folder / layout / writer.path(index)) as handle:
                writer.write(handle, dataclasses.replace(sample, last_TD=last_TD))
        facts = ExportFacts(
            layout=layout,
            trainer_version=version,
            capture_identity=source.plan.identity,
            boundaries=boundaries,
            layer_ids=(*boundaries, target.num_layers),
            final_hidden=writer.final_hidden,
            hidden_size=source.plan.hidden_size,
        )
        writer.write_side_files(folder / layout, facts, ((s.input_ids_T, s.loss_mask_T) for s in samples))
    rows = [stored_rows(sample.loss_mask, "trained") for sample in source.tokens.values()]
    return {
        "shape": to_plain(shape),
        "target": str(target_folder),
        "boundaries": list(boundaries),
        "weights": str(folder / "weights.safetensors"),
        "ends": str(folder / "ends.safetensors"),
        "data": {name: str(folder / name) for name in ("eyas", "speculators", "specforge")},
        "sample_ids": list(source.tokens),
        "sequence_tokens": SEQUENCE_TOKENS,
        "trained_share": sum(len(r.last_L) for r in rows) / (SEQUENCE_TOKENS * len(rows)),
    }


def _sequences(source: Source, share: float) -> Source:
    """Sequences of exactly ``SEQUENCE_TOKENS``, in a fixed order."""
    joined = source.joined(SEQUENCE_TOKENS)
    states, tokens, N = {}, {}, SEQUENCE_TOKENS
    whole = [name for name, sample in joined.tokens.items() if len(sample.input_ids) >= N]
    if not whole:
        raise StoreError(f"the states hold fewer than {N:,} tokens, expected a sequence of as many", NEEDED)
    num_masked = round((1 - share) * N)
    own_mask = (0,) * num_masked + (1,) * (N - num_masked)
    for name in whole[:NUM_SEQUENCES]:
        sample, captured = joined.tokens[name], joined.states[name]
        tokens[name] = dataclasses.replace(
            sample, split="train", input_ids=sample.input_ids[:N], loss_mask=own_mask if share else sample.loss_mask[:N]
        )
        states[name] = CapturedSample(
            name, captured.input_ids_T[:N], captured.aux_TAD[:N].contiguous(), captured.last_TD[:N].contiguous()
        )
    return Source(states, tokens, joined.plan).planned_as()


def _layout_samples(source: Source) -> Iterator[LayoutSample]:
    for name, sample in source.tokens.items():
        captured = source.states[name]
        yield LayoutSample(
            torch.tensor(sample.input_ids), torch.tensor(sample.loss_mask), captured.aux_TAD, captured.last_TD
        )


def _write_start(folder: Path, shape: DrafterShape, ends: TargetEnds, vocab: DraftVocab, source: Source) -> None:
    """First weights, and the target's ends, for all trainers."""
    from safetensors.torch import save

    first = next(iter(source.states.values()))
    drafter = init_drafter(shape, ends, vocab.d2t_W, vocab.t2d_V, first.aux_TAD, seed=0)
    weights = {name: parameter.detach().contiguous() for name, parameter in drafter.named_parameters()}
    fs.write_bytes(folder / "weights.safetensors", save(weights))
    tensors = {"embedding": ends.embedding_VD, "head": ends.head_VD.clone(), "d2t": vocab.d2t_W, "t2d": vocab.t2d_V}
    fs.write_bytes(folder / "ends.safetensors", save({name: t.contiguous() for name, t in tensors.items()}))
