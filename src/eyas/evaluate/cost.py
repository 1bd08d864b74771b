"""What a round costs here, and the speed-up that follows from it. Seconds of this machine: for the run record alone.

    speed-up of chains of S = tau(S) x plain / (check(S + 1) + S x draft + extend(S + 1))

``plain`` is a forward of one token per row, ``check`` one of S + 1, ``draft`` a step of the drafter, ``extend`` its
reading of what was accepted. Prefills are left out, as in the decoding that is timed.

Letters: B rows, J tokens per row, A aux streams, D target hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eyas.drafter.chain import DraftChain
from eyas.drafter.model import Drafter
from eyas.engines.decode import BlockDecoder
from eyas.evaluate.decode import Prompt
from eyas.evaluate.summary import LONGEST_CHAIN

NUM_REPEATS = 5


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Median seconds, for one batch size."""

    batch_size: int
    plain_s: float
    draft_s: float
    """One step of a chain."""
    check_s: dict[int, float]
    """By chain length."""
    extend_s: dict[int, float]
    """By chain length."""

    def speedup(self, chain_length: int, tau: float) -> float:
        """Of speculative over plain decoding."""
        round_s = self.check_s[chain_length] + self.extend_s[chain_length] + chain_length * self.draft_s
        return tau * self.plain_s / round_s


@torch.inference_mode()
def measure(decoder: BlockDecoder, drafter: Drafter, prompts: Sequence[Prompt], chain_length: int) -> RoundCosts:
    """Time every part behind the given prompts; chains of 1 to 7 and of the given length.

    Args:
        decoder: Of as many rows as prompts, with room for the longest chain behind them.
        drafter: To time.
        prompts: What the rows hold.
        chain_length: See above.
    """
    B, lengths = decoder.batch_size, sorted({*range(1, LONGEST_CHAIN + 1), chain_length})
    prefill = decoder.prefill([p.ids for p in prompts])
    assert prefill.aux_RPAD is not None
    start_B = torch.tensor([len(p.ids) for p in prompts])
    chain = DraftChain(drafter, lengths[-1], B, decoder.max_length)
    blocks = {J: torch.ones(B, J, dtype=torch.long) for J in (1, *(length + 1 for length in lengths))}
    aux_BPAD = prefill.aux_RPAD
    chain.extend(aux_BPAD, torch.ones(aux_BPAD.shape[:2], dtype=torch.long), torch.zeros_like(start_B), start_B)
    aux_BJAD = aux_BPAD[:, :1].expand(-1, lengths[-1] + 1, -1, -1)
    parts: dict[tuple[str, int], Callable[[], object]] = {("draft", 0): chain.draft}
    for J, ids_BJ in blocks.items():
        parts["check", J - 1] = lambda ids_BJ=ids_BJ: decoder.forward(ids_BJ, start_B)
        parts["extend", J - 1] = lambda ids_BJ=ids_BJ, J=J: chain.extend(
            aux_BJAD[:, :J], ids_BJ, start_B, torch.full_like(start_B, J)
        )
    medians = _medians_s(decoder, parts)
    return RoundCosts(
        batch_size=B,
        plain_s=medians["check", 0],
        draft_s=medians["draft", 0] / lengths[-1],
        check_s={length: medians["check", length] for length in lengths},
        extend_s={length: medians["extend", length] for length in lengths},
    )


def predictions(costs: RoundCosts, taus: Mapping[int, float]) -> dict[str, float]:
    """Speed-up by chain length, for the lengths that were measured."""
    return {str(s): round(costs.speedup(s, tau), 3) for s, tau in sorted(taus.items()) if s in costs.check_s}


def _medians_s(
    decoder: BlockDecoder, parts: Mapping[tuple[str, int], Callable[[], object]]
) -> dict[tuple[str, int], float]:
    """Median seconds of each; in turn, so that what else the machine does meets all alike."""
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in parts}
    for repeat in range(NUM_REPEATS + 1):
        for key, act in parts.items():
            decoder.settle()
            started_s = time.perf_counter()
            act()
            decoder.settle()
            if repeat:  # the first of a shape prepares kernels
                seconds[key].append(time.perf_counter() - started_s)
    return {key: statistics.median(values) for key, values in seconds.items()}
