"""Which stored samples train and which validate: decided by conversations, so that no answer is on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eyas.contracts import StoredSample


def split_samples(
    samples: Sequence[StoredSample], validation_share: float, seed: int
) -> tuple[list[StoredSample], list[StoredSample]]:
    """Samples to train on and samples to validate with, in stored order; held-out ones are in neither.

    Args:
        samples: Every stored sample.
        validation_share: Of the training conversations, rounded; from 0 exclusive at least one conversation on
            either side when there are two.
        seed: Enters the hashes that choose.
    """
    training = [sample for sample in samples if sample.split == "train"]
    conversations = sorted({sample.conversation_id for sample in training}, key=lambda name: _dice(seed, name))
    count = round(validation_share * len(conversations))
    if validation_share > 0:
        count = max(0, min(max(count, 1), len(conversations) - 1))
    chosen = set(conversations[:count])
    return (
        [sample for sample in training if sample.conversation_id not in chosen],
        [sample for sample in training if sample.conversation_id in chosen],
    )


def _dice(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"validation:{seed}:{name}".encode(), digest_size=16).digest()
