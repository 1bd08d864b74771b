"""Anchors: the unroll at a few rows of each sample instead of all that train.

A sample of many trained rows costs ``train.anchors`` rows a step, one of few costs all of its own. Rows are
thrown anew each time it comes, from the key alone: neither its companions nor any library's generator matter.
Every row still gives its step-0 keys and values, so an anchor computes what it computes in a dense run.

Losses stay means over trained positions, so the weights of samples change: of samples with more trained rows
than anchors each weighs alike at step 0, where a dense run weighs them by the length of their answers. Later
steps count the anchors whose span goes on that far.

Letters: T tokens of a document, S TTT steps.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def anchor_key(seed: int, step: int, sample_id: str) -> str:
    """What decides a sample's anchors at an optimizer step; a sample comes at another step in every epoch."""
    return f"{seed}:{step}:{sample_id}"


def anchored_TS(trains_TS: torch.Tensor, num_anchors: int, key: str) -> torch.Tensor:
    """Which rows train at which steps when only anchors do; unchanged when no more rows than that train.

    Every row throws one die, whatever trains: fewer anchors are a subset of more, and what else trains does not
    decide between two rows.

    Args:
        trains_TS: Bool, of a dense run.
        num_anchors: Rows to keep.
        key: From ``anchor_key``.
    """
    rows = trains_TS.any(1).nonzero()[:, 0]
    if len(rows) <= num_anchors:
        return trains_TS
    T = len(trains_TS)
    dice_T = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * T), "<u8")
    chosen = rows[np.argsort(dice_T[rows.numpy()], kind="stable")[:num_anchors]]
    kept_TS = torch.zeros_like(trains_TS)
    kept_TS[chosen] = trains_TS[chosen]
    return kept_TS
