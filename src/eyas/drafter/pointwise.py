"""The arithmetic between matrix products: norm, gate, rotation; each forward and backward.

On a CUDA device one Triton kernel each (``kernels``), elsewhere torch. Inputs and outputs have the dtype of
products; inside, all is float32 (float64 when the input is), and gains are float32 masters.

Letters: R rows, E width, I inner width of the MLP, X heads of a row (queries, keys, values), K head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from eyas.drafter.precision import widened


class Rotation(NamedTuple):
    """Cosines and signed sines [P,K] by position, and which position each row has."""

    cos_PK: torch.Tensor
    sin_PK: torch.Tensor
    positions_R: torch.Tensor
    shift: int
    """Added to every position: the TTT step."""


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def rms_norm(x_RE: torch.Tensor, gain_E: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``gain * x / rms(x)`` in x's dtype, and 1 / rms [R,1] for the way back."""
    if _on_gpu(x_RE):
        from eyas.drafter.kernels.norm import norm_forward

        return norm_forward(x_RE, gain_E, eps)
    wide_RE = widened(x_RE)
    inverse_R1 = wide_RE.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide_RE * inverse_R1).mul_(gain_E).to(x_RE.dtype), inverse_R1


def rms_norm_backward(
    x_RE: torch.Tensor,
    inverse_R1: torch.Tensor,
    gain_E: torch.Tensor,
    grad_RE: torch.Tensor,
    residual_RE: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x (``residual_RE``, the gradient that went past the norm, added) and of the gain [E]."""
    if _on_gpu(x_RE):
        from eyas.drafter.kernels.norm import norm_backward

        return norm_backward(x_RE, inverse_R1, gain_E, grad_RE, residual_RE)
    unit_RE, grad_RE = widened(x_RE) * inverse_R1, widened(grad_RE)
    grad_gain_E = torch.linalg.vecdot(grad_RE, unit_RE, dim=0)
    scaled_RE = grad_RE * gain_E
    mean_R1 = torch.linalg.vecdot(scaled_RE, unit_RE)[:, None].div_(x_RE.shape[1])
    scaled_RE.sub_(unit_RE.mul_(mean_R1)).mul_(inverse_R1)
    if residual_RE is not None:
        scaled_RE.add_(residual_RE)
    return scaled_RE.to(x_RE.dtype), grad_gain_E


def gate(gate_up_RX: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` [R,I] of ``[gate ; up]`` [R,2I]."""
    if _on_gpu(gate_up_RX):
        from eyas.drafter.kernels.gate import gate_forward

        return gate_forward(gate_up_RX)
    gate_RI, up_RI = gate_up_RX.chunk(2, 1)
    return F.silu(gate_RI).mul_(up_RI)


def gate_backward(gate_up_RX: torch.Tensor, grad_RI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of ``[gate ; up]`` [R,2I], and the activation [R,I] once more. A GPU writes them over the arguments."""
    if _on_gpu(gate_up_RX):
        from eyas.drafter.kernels.gate import gate_backward as on_gpu

        return on_gpu(gate_up_RX, grad_RI)
    gate_RI, up_RI = gate_up_RX.chunk(2, 1)
    sigmoid_RI = gate_RI.sigmoid()
    silu_RI = gate_RI * sigmoid_RI
    grad_RX = torch.empty_like(gate_up_RX)
    grad_gate_RI, grad_up_RI = grad_RX.chunk(2, 1)
    torch.mul(grad_RI, silu_RI, out=grad_up_RI)
    # silu' = s + silu (1 - s)
    torch.addcmul(sigmoid_RI, silu_RI, 1 - sigmoid_RI, out=grad_gate_RI)
    grad_gate_RI.mul_(up_RI).mul_(grad_RI)
    return grad_RX, silu_RI.mul_(up_RI)


def rotate(x_RXK: torch.Tensor, rotation: Rotation, inverse: bool = False) -> torch.Tensor:
    """Turn heads by the angles of their rows' positions, or back. Torch only; see ``add_and_rotate``."""
    index_R = rotation.positions_R + rotation.shift
    cos_R1K, sin_R1K = rotation.cos_PK[index_R][:, None], rotation.sin_PK[index_R][:, None]
    turned_RXK = x_RXK.roll(x_RXK.shape[-1] // 2, -1) * sin_R1K
    return torch.addcmul(turned_RXK.neg_() if inverse else turned_RXK, x_RXK, cos_R1K)


def add_and_rotate(
    hidden_RXK: torch.Tensor,
    embedded_TXK: torch.Tensor,
    places_R: torch.Tensor,
    rotation: Rotation,
    num_turned: int,
    out_RXK: torch.Tensor,
) -> torch.Tensor:
    """``hidden + embedded[places]`` with the first ``num_turned`` heads rotated.

    Args:
        hidden_RXK: The hidden half of the projection.
        embedded_TXK: The embedding half of every token that some row reads.
        places_R: Which of them each row reads; -1 reads zeros.
        rotation: Angles.
        num_turned: Queries and keys turn, values do not.
        out_RXK: Result; heads lie side by side, rows may lie apart. Returned.
    """
    if _on_gpu(hidden_RXK):
        from eyas.drafter.kernels.rotary import rotate_forward

        return rotate_forward(hidden_RXK, embedded_TXK, places_R, rotation, num_turned, out_RXK)
    # -1 reads the last token: a row that trains nothing
    both_RXK = torch.add(hidden_RXK, embedded_TXK[places_R], out=out_RXK)
    if num_turned:
        both_RXK[:, :num_turned] = rotate(both_RXK[:, :num_turned], rotation)
    return both_RXK


def add_and_rotate_backward(
    grad_RXK: torch.Tensor,
    places_R: torch.Tensor,
    rotation: Rotation,
    num_turned: int,
    grad_embedded_TXK: torch.Tensor,
    out_RXK: torch.Tensor,
) -> torch.Tensor:
    """Gradient of ``hidden`` into ``out_RXK``; the same is added to ``grad_embedded_TXK`` at ``places_R``."""
    if _on_gpu(grad_RXK):
        from eyas.drafter.kernels.rotary import rotate_backward

        return rotate_backward(grad_RXK, places_R, rotation, num_turned, grad_embedded_TXK, out_RXK)
    back_RXK = out_RXK.copy_(grad_RXK)
    if num_turned:
        back_RXK[:, :num_turned] = rotate(grad_RXK[:, :num_turned], rotation, inverse=True)
    read_RXK = (back_RXK * (places_R >= 0)[:, None, None]).to(grad_embedded_TXK.dtype)
    grad_embedded_TXK.index_add_(0, places_R.clamp_min(0), read_RXK)
    return back_RXK
