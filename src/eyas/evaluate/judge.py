"""Judging a drafter: the walk over held-out documents, then real decoding of their prompts.

    held-out hidden states → drafts of every row → walks;  prompts + target → both decodings → comparison

The drafter runs in float32 on both ways, so that a draft does not depend on who runs beside it.

Letters: T rows of a document, S draft steps, V target vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from eyas import console
from eyas.config import EvaluateConfig
from eyas.contracts import AcceptanceReport, CheckpointMeta, TargetIdentity
from eyas.drafter.chain import DraftChain
from eyas.drafter.judged import ahead, target_argmax
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document
from eyas.drafter.walk import spans, walk
from eyas.engines.decode import BlockDecoder
from eyas.errors import EvaluateError
from eyas.evaluate.compare import Compared, Comparison
from eyas.evaluate.cost import predictions
from eyas.evaluate.decode import Decoded, DecodeTimes, Prompt, batches, decode_batch
from eyas.evaluate.documents import walk_document
from eyas.evaluate.drafting import draft_and_weigh, draft_documents
from eyas.evaluate.modes import GreedyChain
from eyas.evaluate.report import HeldOut, acceptance_report, agreement_of_rounds, held_out
from eyas.evaluate.summary import LONGEST_CHAIN, WalkedDocument
from eyas.evaluate.worst import DecodeText, worst_documents
from eyas.shards.reader import ShardReader, StoredStates
from eyas.target.load import TargetEnds

PACK_TOKENS = 1024
"""Tokens of documents drafted side by side; they never see each other."""


def judge(
    *,
    drafter: Drafter,
    untrained: Drafter,
    meta: CheckpointMeta,
    ends: TargetEnds,
    reader: ShardReader,
    target: TargetIdentity,
    load_target: Callable[[], Any],
    config: EvaluateConfig,
    decode_text: DecodeText | None = None,
) -> tuple[AcceptanceReport, dict[str, Any]]:
    """Evaluate one checkpoint.

    Args:
        drafter: The trained drafter.
        untrained: The same shape as initialised, the baseline.
        meta: The checkpoint's record.
        ends: The target's embedding and head.
        reader: Stored hidden states, held-out documents among them.
        target: Identity of the target.
        load_target: Loads the target for decoding; called once.
        config: Chain length, limits, dtype and seed.
        decode_text: Ids to text, to show the documents of lowest tau; without it none are shown.

    Returns:
        The record, and facts for the run record (times, agreement of walk and real rounds).

    Raises:
        EvaluateError: Nothing was held out, the states are of another capture, or decoding is not lossless.
    """
    _check_belong_together(meta, reader, target)
    _require_finite(drafter)
    chosen = held_out(reader.samples)
    walked, baseline = _walk_all(drafter, untrained, reader, chosen, ends.head_VD, config)
    model = load_target()
    comparison = Comparison(model, drafter, meta, target, ends.head_VD, config)
    room = target.max_position_embeddings - config.max_new_tokens - comparison.slack()
    prompts, answers = read_prompts(reader, chosen, config.decode_prompts, room)
    decoded, times = decode_all(drafter, model, meta, target, prompts, answers, config)
    compared = comparison.run(prompts)
    result = acceptance_report(
        walked=walked,
        untrained=baseline,
        decoded=decoded,
        modes=compared.checks(config),
        trained_sources=chosen.trained_sources,
        meta=meta,
        config=config,
    )
    first_answers = {prompt.sample_id: answer for prompt, answer in zip(prompts, answers, strict=True)}
    rounds = agreement_of_rounds(walked, decoded, first_answers)
    if decode_text is not None:
        result = dataclasses.replace(result, worst=worst_documents(walked, reader, decode_text))
    return result, _facts(result, times, compared, config) | {"rounds": rounds}


def _facts(result: AcceptanceReport, times: DecodeTimes, compared: Compared, config: EvaluateConfig) -> dict[str, Any]:
    """What was measured on this machine."""
    taus = {int(length): tau for length, tau in result.tau_by_chain.items()}
    return {
        "decode": {
            "num_tokens": times.num_tokens,
            "speculative_s": round(times.speculative_s, 3),
            "plain_s": round(times.plain_s, 3),
            "speculative_tokens_per_s": round(times.num_tokens / max(times.speculative_s, 1e-9), 1),
            "plain_tokens_per_s": round(times.num_tokens / max(times.plain_s, 1e-9), 1),
        },
        "modes": compared.facts(config.chain_length),
        "costs": {
            "single" if suffix else "batch": dataclasses.asdict(costs) | {"predicted_speedup": predictions(costs, taus)}
            for suffix, costs in compared.costs.items()
        },
    }


def _check_belong_together(meta: CheckpointMeta, reader: ShardReader, target: TargetIdentity) -> None:
    """Drafter, states and target must be of one training; a drafter that was imported was trained on none of ours."""
    capture = reader.manifest.capture
    if meta.capture_identity and reader.manifest.identity != meta.capture_identity:
        raise EvaluateError(
            f"the drafter was trained on states {meta.capture_identity[:16]}, "
            f"these are {reader.manifest.identity[:16]}, expected the same",
            "`dvc repro train`",
        )
    if meta.boundaries != capture.boundaries:
        raise EvaluateError(
            f"the drafter reads boundaries {list(meta.boundaries)}, the states have {list(capture.boundaries)}, "
            "expected the same",
            f"`make repro` with extract.boundaries={list(meta.boundaries)}",
        )
    if capture.target != target.digest:
        raise EvaluateError(
            f"the states are of target {capture.target[:16]}, this is {target.digest[:16]}, expected the same",
            "`dvc repro extract`",
        )
    if meta.target != target.digest:
        raise EvaluateError(
            f"the drafter was trained for target {meta.target[:16]}, this is {target.digest[:16]}, expected the same",
            "`dvc repro train`",
        )


def _require_finite(drafter: Drafter) -> None:
    """Of NaN any token is the argmax, so a broken drafter would pass for a poor one."""
    for name, weight in drafter.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise EvaluateError(f"the drafter's {name} holds NaN or infinite values", "`dvc repro --force train`")


def _walk_all(
    drafter: Drafter,
    untrained: Drafter,
    reader: ShardReader,
    chosen: HeldOut,
    head_VD: torch.Tensor,
    config: EvaluateConfig,
) -> tuple[list[WalkedDocument], list[WalkedDocument]]:
    """Every held-out document with the trained and the untrained drafter; states are read once."""
    walked: list[WalkedDocument] = []
    baseline: list[WalkedDocument] = []
    progress = console.Progress("evaluate walks", sum(s.num_tokens for s in chosen.samples))
    for group in document_groups(reader, chosen):
        argmaxes = [target_argmax(stored, head_VD) for stored in group]
        walked += walk_group(
            drafter, group, argmaxes, config.chain_length, head_VD=head_VD, temperature=config.temperature
        )
        baseline += walk_group(untrained, group, argmaxes, config.chain_length)
        progress.advance(sum(s.sample.num_tokens for s in group))
    progress.close()
    return walked, baseline


def document_groups(reader: ShardReader, chosen: HeldOut) -> Iterator[list[StoredStates]]:
    """Held-out documents as they are drafted: up to ``PACK_TOKENS`` side by side."""
    group: list[StoredStates] = []
    for sample in chosen.samples:
        if group and sum(s.sample.num_tokens for s in group) + sample.num_tokens > PACK_TOKENS:
            yield group
            group = []
        group.append(reader.read(sample.sample_id))
    yield group


def walk_group(
    drafter: Drafter,
    group: Sequence[StoredStates],
    argmaxes: Sequence[np.ndarray],
    chain_length: int,
    *,
    head_VD: torch.Tensor | None = None,
    temperature: float = 0.0,
) -> list[WalkedDocument]:
    """Draft every row of some documents at once and walk each of them.

    Args:
        drafter: With the target's embedding and draft vocab set.
        group: Documents as stored.
        argmaxes: Per document, see ``drafter.judged.target_argmax``.
        chain_length: S of the headline.
        head_VD: The target's head; with it all chain lengths are walked, and sampling is judged too.
        temperature: At which it is judged; 0 judges greedy alone.
    """
    documents = [Document(s.input_ids_T, s.loss_mask_T, s.aux_TAD, s.last_TD) for s in group]
    longest = chain_length if head_VD is None else max(chain_length, LONGEST_CHAIN)
    if head_VD is not None and temperature:
        drafted = draft_and_weigh(drafter, documents, longest, head_VD, temperature)
    else:
        drafted = draft_documents(drafter, documents, longest)
    t2d_V = drafter.t2d.cpu().numpy()
    return [
        walk_document(
            states.sample,
            states.input_ids_T.numpy().astype(np.int64),
            states.loss_mask_T.numpy(),
            one.draft_TS,
            argmax_T,
            t2d_V,
            chain_length=chain_length,
            shares=one.shares,
        )
        for states, argmax_T, one in zip(group, argmaxes, drafted, strict=True)
    ]


def walked_alike(drafter: Drafter, decoded: Sequence[Decoded], chain_length: int) -> list[bool]:
    """Whether the walk over each decoded text, with the states of its decoding, takes the loop's own rounds."""
    found = []
    for one in decoded:
        assert one.document is not None
        (drafted,) = draft_documents(drafter, [one.document], chain_length)
        ids_T = one.document.ids_T.numpy()
        (span,) = spans(one.document.mask_T.numpy())
        rounds = walk(drafted.draft_TS == ahead(ids_T, chain_length), *span)
        pairs = tuple((r.num_emitted, r.num_accepted) for r in rounds)
        found.append(pairs == tuple(zip(one.round_sizes, one.round_accepted, strict=True)))
    return found


def read_prompts(
    reader: ShardReader, chosen: HeldOut, per_set: int, room: int
) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """Prompts to decode and the stored first answers; ``per_set`` 0 takes all of every set.

    A document that opens with an assistant token has no prompt and is left out, and so is a prompt longer
    than ``room``: the target's context less what decoding adds.

    Raises:
        EvaluateError: No prompt is left, so that losslessness would be claimed of nothing.
    """
    prompts: list[Prompt] = []
    answers: list[tuple[int, ...]] = []
    taken: dict[str, int] = {}
    for sample in chosen.samples:
        if per_set and taken.get(sample.source, 0) >= per_set:
            continue
        states = reader.read(sample.sample_id)
        found = spans(states.loss_mask_T.numpy())
        if not found or not 0 < found[0][0] <= room:
            continue
        start, end = found[0]
        taken[sample.source] = taken.get(sample.source, 0) + 1
        prompts.append(Prompt(sample.sample_id, sample.source, tuple(states.input_ids_T[:start].tolist())))
        answers.append(tuple(states.input_ids_T[start:end].tolist()))
    if not prompts:
        raise EvaluateError(
            f"none of {len(chosen.samples):,} held-out documents has a prompt of 1 to {room:,} tokens to decode",
            "lower evaluate.max_new_tokens: the target's context must hold prompt, answer and drafts",
        )
    return prompts, answers


def decode_all(
    drafter: Drafter,
    model: Any,
    meta: CheckpointMeta,
    target: TargetIdentity,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    config: EvaluateConfig,
) -> tuple[list[Decoded], DecodeTimes]:
    """Decode every prompt both ways, in fixed batches.

    Raises:
        EvaluateError: A prompt's two outputs differ.
    """
    times, decoded = DecodeTimes(), {}
    progress = console.Progress("evaluate decodes", len(prompts), unit="prompts")
    for batch in batches(prompts, [min(len(a), config.max_new_tokens) for a in answers], config.batch_size):
        longest = max(len(prompts[i].ids) for i in batch)
        decoder = BlockDecoder(
            model, len(batch), longest + config.max_new_tokens + config.chain_length, meta.boundaries
        )
        results = decode_batch(
            decoder,
            GreedyChain(DraftChain(drafter, config.chain_length, len(batch), decoder.max_length)),
            [prompts[i] for i in batch],
            chain_length=config.chain_length,
            max_new_tokens=config.max_new_tokens,
            eos_ids=target.eos_token_ids,
            times=times,
        )
        alike = walked_alike(drafter, results, config.chain_length)
        for place, one, same in zip(batch, results, alike, strict=True):
            decoded[place] = dataclasses.replace(one, walked_alike=same, document=None)
        progress.advance(len(batch))
    progress.close()
    return [decoded[i] for i in range(len(prompts))], times
