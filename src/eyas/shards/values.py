"""Rows of states that hold what is no number, and rows of zeros, at the speed of memory.

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

INFINITY_BITS, SIGN_BIT = 0x7F80, 0x8000
"""Of bfloat16: from infinity on, by sign, bits are no number; the sign bit alone is minus zero."""


def row_faults(states_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with a value that is not finite, and rows whose values are all zero.

    Args:
        states_TD: Any floating dtype, on the CPU; bfloat16 is four times as fast as the others.

    Returns:
        Two bool [T].
    """
    if states_TD.dtype != torch.bfloat16:
        largest_T = states_TD.abs().amax(dim=1)  # NaN and infinity win over every number
        return ~largest_T.isfinite(), largest_T == 0
    # as integers infinity and NaN are the largest of their sign; two looks at the bits are quicker than one at floats
    bits_TD = states_TD.view(torch.int16).numpy()
    largest_T, most_bits_T = bits_TD.max(axis=1), bits_TD.view(np.uint16).max(axis=1)
    broken_T = (largest_T >= INFINITY_BITS) | (most_bits_T >= SIGN_BIT + INFINITY_BITS)
    no_positive_T = (largest_T == 0) | (largest_T == -SIGN_BIT)  # the latter: minus zeros alone
    return torch.from_numpy(broken_T), torch.from_numpy(no_positive_T & (most_bits_T <= SIGN_BIT))
