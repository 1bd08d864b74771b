"""Choosing the next token of every row: greedy, or by one uniform number per row.

The uniform number is a hash of (seed, prompt, position), so a row's sampled text depends on nothing that
runs beside it. Inverting the cumulative distribution in two levels costs one pass over the vocab; the
vocab is never sorted unless ``top_p`` is below 1, and then only its head.

Letters: R rows, V target vocab, C blocks of the vocab.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.nn import functional

BLOCK = 256
HEAD = 1024
"""Nucleus candidates that are sorted first; a row whose nucleus is larger sorts its whole vocab."""
BELOW_ONE = 1 - 2**-20
"""Keeps a draw inside the mass when rounding would put it at the very end."""


def draw_key(seed: int, prompt_ids: Sequence[int]) -> bytes:
    """What a request's uniform numbers derive from."""
    return hashlib.sha256(repr((seed, tuple(prompt_ids))).encode()).digest()


def uniform(key: bytes, position: int) -> float:
    """The uniform number in [0, 1) of one position of an answer."""
    word = hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return (int.from_bytes(word, "little") >> 11) * 2.0**-53


def choose(
    logits_RV: torch.Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> list[int]:
    """The next token of every row.

    Args:
        logits_RV: Logits of any float dtype.
        temperatures: Per row; 0 takes the argmax.
        top_ps: Per row, the nucleus' mass; 1 keeps all.
        uniforms: Per row, in [0, 1).
    """
    chosen_R = logits_RV.argmax(-1)
    if not any(temperatures):
        return chosen_R.tolist()
    temperature_R1 = torch.tensor([t or 1.0 for t in temperatures], device=logits_RV.device)[:, None]
    probs_RV = torch.softmax(logits_RV.float() / temperature_R1, dim=-1)
    for row, top_p in enumerate(top_ps):
        if top_p < 1:
            probs_RV[row] = _nucleus(probs_RV[row], top_p)
    sampled_R = _invert(probs_RV, torch.tensor(uniforms, dtype=torch.float32, device=logits_RV.device))
    greedy_R = torch.tensor([t == 0 for t in temperatures], device=logits_RV.device)
    return torch.where(greedy_R, chosen_R, sampled_R).tolist()


def _nucleus(probs_V: torch.Tensor, top_p: float) -> torch.Tensor:
    head = probs_V.topk(min(HEAD, len(probs_V))).values
    if head.sum() < top_p:
        head = probs_V.sort(descending=True).values
    before = head.cumsum(0) - head
    smallest = head[before < top_p][-1]
    return torch.where(probs_V >= smallest, probs_V, 0.0)


def _invert(probs_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """First token at which each row's cumulative mass exceeds its draw."""
    num_rows, vocab_size = probs_RV.shape
    blocks_RCK = functional.pad(probs_RV, (0, -vocab_size % BLOCK)).view(num_rows, -1, BLOCK)
    mass_RC = blocks_RCK.sum(-1).cumsum(-1)
    draw_R1 = (uniform_R.clamp(max=BELOW_ONE) * mass_RC[:, -1])[:, None]
    block_R1 = (mass_RC <= draw_R1).sum(-1, keepdim=True)
    before_R1 = functional.pad(mass_RC, (1, 0)).gather(1, block_R1)
    inside_RK = blocks_RCK[torch.arange(num_rows, device=probs_RV.device), block_R1[:, 0]].cumsum(-1)
    rest_R1 = torch.minimum(draw_R1 - before_R1, inside_RK[:, -1:] * BELOW_ONE)
    return block_R1[:, 0] * BLOCK + (inside_RK <= rest_R1).sum(-1)
