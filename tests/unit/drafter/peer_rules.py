"""Which (row, step) pairs the peers train, bool [T,S]; the parity tests show that these are their rules."""

import torch
import torch.nn.functional as F


def specforge_trains(mask_T, in_vocab_T, steps):
    """SpecForge 0.2.0: row t at step k iff mask[t+k] and the argmax at t+k+1 is in the draft vocab."""
    T = len(mask_T)
    trains_TS = torch.zeros(T, steps, dtype=torch.bool)
    for k in range(steps):
        n = T - k - 1
        trains_TS[:n, k] = mask_T[k : k + n] & in_vocab_T[k + 1 :]
    return trains_TS


def speculators_trains(mask_T, steps):
    """speculators 0.9.0: row t at step k iff mask[t+k+1] and that token exists."""
    padded = F.pad(mask_T, (0, steps))
    return torch.stack([padded[k + 1 : k + 1 + len(mask_T)] for k in range(steps)], 1)
