"""What a drafter would draft on known texts, and how often the target would accept it when both sample.

The unroll runs on the text itself. That is exact for every round, greedy or sampled: step k is only ever asked when
the k drafts before it were accepted, so they are the text's own tokens.

Letters: X tables, T tokens, R rows of a pack, L teachers, S draft steps, V target vocab, W draft vocab, D target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, Pack, pack_documents
from eyas.drafter.ttt import draft_tokens, unroll

FILL_MULTIPLE = 64
"""Packs are filled up to this many tokens and rows: few sizes of products (see ``drafter.precision``)."""
CHUNK_ROWS = 512
"""Rows of logits in memory at a time."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Probabilities of one document at a temperature, float64 [T,S]; 0 where a row is not asked.

    Row t at step k stands for token t + k + 2; p is the target's distribution of it, q the drafter's.
    """

    overlap_TS: np.ndarray
    """Sum over tokens of min(p, q): a draft drawn from q is accepted with this probability."""
    of_draft_TS: np.ndarray
    """p of the drafter's likeliest token."""
    of_text_TS: np.ndarray
    """min(1, q(x) / p(x)) of the text's token x: how probably x, once emitted, was an accepted draft."""
    covered_T: np.ndarray
    """Of token t: p inside the draft vocab; NaN where no row is asked."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """One document's drafts: target ids [T,S], -1 where a row is not asked, and what sampling would do."""

    draft_TS: np.ndarray
    shares: Shares | None


def draft_documents(drafter: Drafter, documents: Sequence[Document], num_steps: int) -> list[Drafted]:
    """Greedy drafts of every row.

    Args:
        drafter: With the target's embedding and draft vocab set.
        documents: Drafted side by side; they never see each other.
        num_steps: S, whatever was trained.
    """
    pack = pack_documents(documents, num_steps, FILL_MULTIPLE)
    # rows that fill up lie behind every document and draft nothing
    draft_TS = torch.full((len(pack.ids_T), num_steps), -1)
    draft_TS[pack.rows_R] = draft_tokens(drafter, pack).cpu()
    return [Drafted(draft_TS[span.start : span.end].numpy(), None) for span in pack.documents]


@torch.no_grad()
def draft_and_weigh(
    drafter: Drafter, documents: Sequence[Document], num_steps: int, head_VD: torch.Tensor, temperature: float
) -> list[Drafted]:
    """``draft_documents``, and acceptance when sampling.

    Args:
        drafter: Likewise.
        documents: Likewise; ``last_TD`` holds the rows that ``drafter.rows.rows_to_read`` names.
        num_steps: Likewise.
        head_VD: The target's head, in the dtype the target runs it in.
        temperature: Above 0, of both.
    """
    pack = pack_documents(documents, num_steps, FILL_MULTIPLE)
    T = len(pack.ids_T)
    place_of_TS = pack.rows_R[:, None] + torch.arange(num_steps) + 1
    teachers_L = torch.unique(place_of_TS[pack.trains_RS.cpu()])
    last_TD = torch.cat([document.last_TD for document in documents])
    share_LW, covered_L = _target_shares(drafter, last_TD[teachers_L], head_VD, temperature)
    teacher_T = torch.full((T,), -1)
    teacher_T[teachers_L] = torch.arange(len(teachers_L))
    draft_TS = torch.full((T, num_steps), -1)
    tables_XTS = torch.zeros(3, T, num_steps, dtype=torch.float64)
    for step, normed_RE in enumerate(unroll(drafter, pack)):
        for begin in range(0, len(normed_RE), CHUNK_ROWS):
            part = slice(begin, min(begin + CHUNK_ROWS, len(normed_RE)))
            asked_R = pack.trains_RS[part, step].cpu()
            rows_R = pack.rows_R[part].cpu()[asked_R]
            logits_RW = drafter.logits(normed_RE[part])[asked_R]
            p_RW = share_LW[teacher_T[rows_R + step + 1]]
            best_R, values = _weigh(drafter, logits_RW, p_RW, pack.ids_T[rows_R + step + 2], temperature)
            draft_TS[rows_R, step] = drafter.target_ids(best_R)
            tables_XTS[:, rows_R, step] = values
    covered_T = torch.full((T,), float("nan"), dtype=torch.float64)
    covered_T[teachers_L + 1] = covered_L.double()
    return _cut(pack, draft_TS, tables_XTS, covered_T)


def _cut(pack: Pack, draft_TS: torch.Tensor, tables_XTS: torch.Tensor, covered_T: torch.Tensor) -> list[Drafted]:
    drafted = []
    for span in pack.documents:
        own = slice(span.start, span.end)
        overlap_TS, of_draft_TS, of_text_TS = (table_TS[own].numpy() for table_TS in tables_XTS)
        shares = Shares(overlap_TS, of_draft_TS, of_text_TS, covered_T[own].numpy())
        drafted.append(Drafted(draft_TS[own].numpy(), shares))
    return drafted


def _target_shares(
    drafter: Drafter, last_LD: torch.Tensor, head_VD: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's probabilities of the draft vocab's tokens [L,W], and their sums [L]."""
    ids_W = drafter.target_ids(torch.arange(drafter.shape.draft_vocab_size, device=drafter.d2t.device)).cpu()
    parts = []
    for part_RD in last_LD.split(CHUNK_ROWS):
        filled_RD = F.pad(part_RD.to(head_VD.dtype), (0, 0, 0, -len(part_RD) % FILL_MULTIPLE))
        logits_RV = F.linear(filled_RD, head_VD)[: len(part_RD)].float() / temperature
        parts.append((logits_RV[:, ids_W] - logits_RV.logsumexp(-1, keepdim=True)).exp())
    share_LW = torch.cat(parts) if parts else torch.zeros(0, len(ids_W))
    return share_LW, share_LW.sum(-1)


def _weigh(
    drafter: Drafter, logits_RW: torch.Tensor, p_RW: torch.Tensor, text_R: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest draft id [R], and overlap, p of it, and min(1, q/p) of the text's token, [3,R]."""
    q_RW = (logits_RW.float() / temperature).softmax(-1)
    best_R = logits_RW.argmax(-1)
    overlap_R = torch.minimum(p_RW, q_RW).sum(-1)
    is_inside_R = drafter.t2d[text_R]
    text_R1 = (drafter.t2d.long().cumsum(0)[text_R] - 1).clamp_min(0)[:, None]
    p_R, q_R = (x_RW.gather(1, text_R1)[:, 0].double() for x_RW in (p_RW, q_RW))
    of_text_R = torch.where(is_inside_R, (q_R / p_R.clamp_min(1e-300)).clamp_max(1.0), 0.0)
    of_draft_R = p_RW.gather(1, best_R[:, None])[:, 0]
    return best_R, torch.stack([overlap_R.double().clamp_max(1.0), of_draft_R.double(), of_text_R])
