"""The arithmetic of the drafter on rows: what training unrolls and what decoding runs step by step.

    aux [R,A,D] → fc → hidden [R,E]
    [norm(embedding) ; norm(hidden)] → q, k, v → attention → o → + residual → MLP → output [R,E]
    output → norm → head                         output (EAGLE-3.1: its norm) → hidden of the next step

Letters: R rows, A aux streams, D target hidden, E drafter hidden, N heads' width (queries, or keys and values),
H heads, K head dim.
"""

from __future__ import annotations

import torch

from eyas.contracts import DrafterShape
from eyas.drafter.differentiable import gated_linear_add, linear, linear_add, norm, norm_linear
from eyas.drafter.weights import LayerWeights


def fuse(weights: LayerWeights, shape: DrafterShape, aux_RAD: torch.Tensor) -> torch.Tensor:
    """Step 0's hidden state [R,E] from the aux streams (any float dtype)."""
    aux_RAD = aux_RAD.to(weights.fc.value.dtype)
    if shape.fc_norm:
        normed = [
            norm(aux_RAD[:, a].contiguous(), gain, shape.rms_norm_eps)[0] for a, gain in enumerate(weights.fc_norms)
        ]
        return linear(torch.cat(normed, 1), weights.fc)
    return linear(aux_RAD.flatten(1), weights.fc)


def project_embedding(
    weights: LayerWeights, shape: DrafterShape, embedding_RE: torch.Tensor, queries: bool
) -> torch.Tensor:
    """The embedding half of q, or of k and v, [R,N]: a token needs it once for all TTT steps."""
    weight = weights.q_embedding if queries else weights.kv_embedding
    embedding_RE = embedding_RE.to(weight.value.dtype)
    return norm_linear(embedding_RE, weights.embedding_norm, weight, shape.rms_norm_eps)[0]


def finish_layer(
    weights: LayerWeights, shape: DrafterShape, residual_RE: torch.Tensor, mixed_RHK: torch.Tensor
) -> torch.Tensor:
    """The layer's raw output [R,E] after attention mixed the values."""
    middle_RE = linear_add(mixed_RHK.flatten(1), weights.o, residual_RE)
    gate_up_RX, middle_RE = norm_linear(middle_RE, weights.mlp_norm, weights.gate_up, shape.rms_norm_eps)
    return gated_linear_add(gate_up_RX, weights.down, middle_RE)


def finish_step(
    weights: LayerWeights, shape: DrafterShape, output_RE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``lm_head`` reads, and the hidden state of the next step (raw, or normed in EAGLE-3.1)."""
    normed_RE, output_RE = norm(output_RE, weights.norm, shape.rms_norm_eps)
    return normed_RE, normed_RE if shape.norm_output else output_RE
