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
    chosen_R = argmax(logits_RV)
    if not any(temperatures):
        return chosen_R.tolist()
    device = logits_RV.device
    temperature_R1 = torch.tensor([t or 1.0 for t in temperatures], device=device)[:, None]
    highest_R1 = logits_RV.gather(1, chosen_R[:, None]).float()
    weights_RV = (logits_RV.float() - highest_R1).div_(temperature_R1).exp_()
    for row, top_p in enumerate(top_ps):
        if top_p < 1:
            weights_RV[row] = _nucleus(weights_RV[row], top_p)
    sampled_R = _invert(weights_RV, torch.tensor(uniforms, dtype=torch.float32, device=device))
    greedy_R = torch.tensor([t == 0 for t in temperatures], device=device)
    return torch.where(greedy_R, chosen_R, sampled_R).tolist()


def argmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """Index of the first highest logit per row, in an eighth of ``torch.argmax``'s time in bf16."""
    blocks_RCK = _blocks(logits_RV, float("-inf"))
    block_R = blocks_RCK.amax(-1).argmax(-1)
    inside_RK = blocks_RCK[torch.arange(len(block_R), device=block_R.device), block_R]
    return block_R * BLOCK + inside_RK.argmax(-1)


def _blocks(values_RV: torch.Tensor, filler: float) -> torch.Tensor:
    missing = -values_RV.shape[1] % BLOCK
    padded = functional.pad(values_RV, (0, missing), value=filler) if missing else values_RV
    return padded.reshape(len(values_RV), -1, BLOCK)


def _nucleus(weights_V: torch.Tensor, top_p: float) -> torch.Tensor:
    wanted = top_p * weights_V.sum()
    head = weights_V.topk(min(HEAD, len(weights_V))).values
    if head.sum() < wanted:
        head = weights_V.sort(descending=True).values
    before = head.cumsum(0) - head
    smallest = head[before < wanted][-1]
    return torch.where(weights_V >= smallest, weights_V, 0.0)


def _invert(weights_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """First token at which each row's cumulative weight exceeds its share of the whole."""
    num_rows = len(weights_RV)
    blocks_RCK = _blocks(weights_RV, 0.0)
    mass_RC = blocks_RCK.sum(-1).cumsum(-1)
    draw_R1 = (uniform_R.clamp(max=BELOW_ONE) * mass_RC[:, -1])[:, None]
    block_R1 = (mass_RC <= draw_R1).sum(-1, keepdim=True)
    before_R1 = functional.pad(mass_RC, (1, 0)).gather(1, block_R1)
    inside_RK = blocks_RCK[torch.arange(num_rows, device=weights_RV.device), block_R1[:, 0]].cumsum(-1)
    rest_R1 = torch.minimum(draw_R1 - before_R1, inside_RK[:, -1:] * BELOW_ONE)
    return block_R1[:, 0] * BLOCK + (inside_RK <= rest_R1).sum(-1)
