"""The target's final norm, applied to the last stream as the target's own code applies it.

vLLM hands out the last layer's output before the norm; eyas stores it after. The mean square is float32; a Llama-type
norm rounds the normed state to the weights' dtype and then multiplies, a Gemma-type one (1 + w) multiplies in float32
and rounds last. Equal to transformers' modules to the bit.

Letters: T tokens of a sample, D target hidden size.
"""

from __future__ import annotations

import torch

from eyas.contracts import FinalNorm


def apply_final_norm(last_TD: torch.Tensor, weight_D: torch.Tensor, norm: FinalNorm) -> torch.Tensor:
    """States after the norm, in the dtype of those before it.

    Args:
        last_TD: The last layer's output, in the dtype the target runs in.
        weight_D: As stored.
        norm: Facts of the norm, of kind ``rms_norm``.
    """
    wide_TD = last_TD.float()
    normed_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(dim=-1, keepdim=True) + norm.eps)
    if norm.weight_offset:
        return (normed_TD * (norm.weight_offset + weight_D.to(last_TD.dtype).float())).to(last_TD.dtype)
    return weight_D.to(last_TD.dtype) * normed_TD.to(last_TD.dtype)
