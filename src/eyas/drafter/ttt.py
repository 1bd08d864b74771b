"""The training-time test (TTT): the drafter unrolled over its own outputs, on packed documents.

``unroll`` gives what ``lm_head`` reads at every step; ``ttt_loss`` trains on it; ``draft_tokens`` is what
evaluation asks for. All three run on the same rows (see ``drafter.rows``) and the same attention.

Letters: T tokens of the pack, R rows that run, S TTT steps, E drafter hidden.
"""

from __future__ import annotations

import torch

from eyas.drafter.attention import RowAttention
from eyas.drafter.model import Drafter, Qkv
from eyas.drafter.rows import Pack


def unroll(drafter: Drafter, pack: Pack, ttt_steps: int | None = None) -> list[torch.Tensor]:
    """Run the drafter on its own outputs.

    At step k the row at place t reads its hidden state (``fc``'s at step 0, then its own last output),
    token t+k+1 from the data, position + k, the step-0 keys of its document up to itself, and its own
    keys of steps 1 … k.

    Args:
        drafter: With the target's embedding set.
        pack: Documents and rows; its S bounds the steps.
        ttt_steps: Steps to run; all of the pack's by default.

    Returns:
        Per step k what ``lm_head`` reads, [num_rows[k], E], for the first ``num_rows[k]`` of ``pack.rows_R``.
    """
    steps = len(pack.num_rows) if ttt_steps is None else ttt_steps
    num_rows = [n for n in pack.num_rows[:steps] if n > 0]
    outputs: list[torch.Tensor] = []
    if not num_rows:
        return outputs
    fused_TE = drafter.fuse(pack.aux_TAD)
    # the last token of a document is read by no row of it at step 0, and nothing follows it
    embedding_NE, hidden_NE = (half_NE.contiguous() for half_NE in drafter.midlayer.self_attn.weights_NE())
    embedded_TN = drafter.project_embeddings(pack.ids_T, embedding_NE)
    qkv_T = drafter.project(fused_TE, embedded_TN.roll(-1, 0), pack.positions_T, hidden_NE)
    attention = RowAttention(pack, qkv_T)
    hidden_RE = fused_TE[pack.rows_R]
    qkv = Qkv(*(x[pack.rows_R] for x in qkv_T))
    for k, count in enumerate(num_rows):
        rows_R = pack.rows_R[:count]
        hidden_RE = hidden_RE[:count]
        if k:
            positions_R = pack.positions_T[rows_R] + k
            qkv = drafter.project(
                hidden_RE, embedded_TN[(rows_R + k + 1).clamp_max(len(pack.ids_T) - 1)], positions_R, hidden_NE
            )
        output_RE = drafter.layer(hidden_RE, qkv, lambda own, k=k: attention(own, k))
        normed_RE, hidden_RE = drafter.finish(output_RE)
        outputs.append(normed_RE)
    return outputs


@torch.no_grad()
def draft_tokens(drafter: Drafter, pack: Pack) -> torch.Tensor:
    """Greedy draft of every row: target-vocab ids [R,S] of token t+k+2, -1 where the row does not train."""
    ids_RS = torch.full((len(pack.rows_R), len(pack.num_rows)), -1)
    for k, normed_RE in enumerate(unroll(drafter, pack)):
        ids_RS[: len(normed_RE), k] = drafter.target_ids(drafter.logits(normed_RE).argmax(-1))
    return ids_RS.masked_fill(~pack.trains_RS, -1)
