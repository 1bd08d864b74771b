"""Which foreign samples are held out: other projects' files do not say, and a drafter cannot be judged on what it learnt.

A sample's opening is what stands before the assistant's first token. Samples of one opening stay on one side, as the
pipeline does with conversations; which openings are held out depends on their content alone, not on file order.

Letters: T tokens of a sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from eyas.contracts import TokenSample


def hold_out(samples: Sequence[TokenSample], share: float) -> list[TokenSample]:
    """The same samples with their split.

    Args:
        samples: In any order.
        share: Of openings, rounded; at least one opening on either side when there are two.
    """
    openings = [_opening(sample) for sample in samples]
    ranked = sorted(set(openings))
    num_held_out = max(min(max(round(share * len(ranked)), 1), len(ranked) - 1), 0)
    held_out = set(ranked[:num_held_out])
    return [
        dataclasses.replace(sample, split="held_out" if opening in held_out else "train")
        for sample, opening in zip(samples, openings, strict=True)
    ]


def _opening(sample: TokenSample) -> str:
    """Digest of the ids before the first masked one; of all where none is masked."""
    end = sample.loss_mask.index(1) if 1 in sample.loss_mask else len(sample.input_ids)
    return hashlib.sha256(np.asarray(sample.input_ids[:end], dtype="<i4").tobytes()).hexdigest()
