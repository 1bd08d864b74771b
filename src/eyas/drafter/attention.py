"""Exact attention of TTT rows over packed documents, in memory linear in the tokens.

At step k a row sees the step-0 keys of its own document up to itself, and its own keys of steps 1 … k.
The softmax runs over both together. Nothing of size rows x tokens ever exists: the forward pass keeps the
log-sum-exp of each row, the backward pass computes probabilities again, tile by tile (``tiles``; ``kernels``).

Keys and values of all steps lie in one ``Keys`` and are read by many later steps; their gradients are summed
there as the backward pass comes by, and handed on once, by the step that made them. That order is safe because
step k+1 starts from the output of step k: when the backward pass reaches step k, all later steps are done.

Letters: T tokens of the pack, R rows, H heads, G key-value heads, C = 2 G, K head dim, X heads of a row, U
tokens that queries read, S TTT steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from eyas.drafter.pointwise import Rotation, add_and_rotate, add_and_rotate_backward
from eyas.drafter.precision import wide_dtype
from eyas.drafter.rows import Pack
from eyas.drafter.spans import AttentionPlan
from eyas.drafter.tiles import attend_backward as tiles_backward
from eyas.drafter.tiles import attend_forward as tiles_forward


class Keys:
    """Keys and values of all steps, and the sums of their gradients.

    Args:
        pack: Documents and rows.
        shape: (G, K).
        like: A tensor with the device and dtype of products.
    """

    def __init__(self, pack: Pack, shape: tuple[int, int], like: torch.Tensor) -> None:
        self.pack, (G, K) = pack, shape
        later = [n for n in pack.num_rows[1:] if n]
        self.shared_TCK = like.new_empty(0)  # C = 2 G: keys, then values
        self.own = like.new_empty(len(later), later[0] if later else 0, 2 * G, K)
        self._grad_dtype = wide_dtype(like.dtype)
        self._grad_shared: torch.Tensor | None = None
        self._grad_own: torch.Tensor | None = None

    @property
    def grad_shared_TCK(self) -> torch.Tensor:
        """Sum so far, float32."""
        if self._grad_shared is None:
            self._grad_shared = torch.zeros_like(self.shared_TCK, dtype=self._grad_dtype)
        return self._grad_shared

    @property
    def grad_own(self) -> torch.Tensor:
        """Sum so far of every later step's own keys and values, in the dtype of products."""
        if self._grad_own is None:
            self._grad_own = torch.zeros_like(self.own)
        return self._grad_own

    def forget_gradients(self) -> None:
        """Free the sums: the backward pass is over."""
        self._grad_shared = self._grad_own = None


class Embedded:
    """The embedding halves of q [U,H,K] and of k and v [T,2G,K], and the sums of their gradients.

    One token needs them once for all steps. ``q_places_T`` says where a token's q lies, see ``Pack``.
    """

    def __init__(self, q_UHK: torch.Tensor, kv_TCK: torch.Tensor) -> None:
        self.q_UHK, self.kv_TCK = q_UHK, kv_TCK
        self._grads: dict[str, torch.Tensor] = {}

    def grad(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The sum of "q" or "kv" so far."""
        if name not in self._grads:
            self._grads[name] = torch.zeros_like(like, dtype=wide_dtype(like.dtype))
        return self._grads[name]

    def take(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The whole sum in the dtype of products; forgotten here."""
        return self._grads.pop(name).to(like.dtype)


class _Rotate(torch.autograd.Function):
    """(hidden half [R,X,K], embedding half) → rotated heads [R,X,K]; the first step hands on what all summed up."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RXK: torch.Tensor,
        embedded_TXK: torch.Tensor,
        embedded: Embedded,
        name: str,
        places_R: torch.Tensor,
        rotation: Rotation,
        num_turned: int,
        is_last_backward: bool,
    ) -> torch.Tensor:
        ctx.arguments = embedded, name, places_R, rotation, num_turned, is_last_backward
        ctx.set_materialize_grads(False)
        out_RXK = torch.empty_like(hidden_RXK, memory_format=torch.contiguous_format)
        return add_and_rotate(hidden_RXK, embedded_TXK, places_R, rotation, num_turned, out_RXK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RXK: torch.Tensor) -> Any:  # type: ignore[override]
        embedded, name, places_R, rotation, num_turned, is_last = ctx.arguments
        like = embedded.q_UHK if name == "q" else embedded.kv_TCK
        grad_sum = embedded.grad(name, like)
        back_RXK = torch.empty_like(grad_RXK)
        add_and_rotate_backward(grad_RXK, places_R, rotation, num_turned, grad_sum, back_RXK)
        return back_RXK, embedded.take(name, like) if is_last else None, None, None, None, None, None, None


class _RotateOwn(torch.autograd.Function):
    """A later step's [q ; k ; v] hidden half [R,H+2G,K] → rotated q [R,H,K]; k and v go into ``keys.own``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RXK: torch.Tensor,
        embedded: Embedded,
        keys: Keys,
        step: int,
        places: tuple[torch.Tensor, torch.Tensor],
        rotation: Rotation,
    ) -> torch.Tensor:
        R, H = len(hidden_RXK), embedded.q_UHK.shape[1]
        G = embedded.kv_TCK.shape[1] // 2
        ctx.arguments = embedded, keys, step, places, rotation
        add_and_rotate(hidden_RXK[:, H:], embedded.kv_TCK, places[1], rotation, G, keys.own[step - 1, :R])
        q_RHK = hidden_RXK.new_empty(R, H, hidden_RXK.shape[2])
        return add_and_rotate(hidden_RXK[:, :H], embedded.q_UHK, places[0], rotation, H, q_RHK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q_RHK: torch.Tensor) -> Any:  # type: ignore[override]
        embedded, keys, step, places, rotation = ctx.arguments
        (R, H, K), C = grad_q_RHK.shape, keys.own.shape[2]
        grad_kv_RCK = keys.grad_own[step - 1, :R]
        sums = embedded.grad("q", embedded.q_UHK), embedded.grad("kv", embedded.kv_TCK)
        back_RXK = grad_q_RHK.new_empty(R, H + C, K)
        add_and_rotate_backward(grad_q_RHK, places[0], rotation, H, sums[0], back_RXK[:, :H])
        add_and_rotate_backward(grad_kv_RCK, places[1], rotation, C // 2, sums[1], back_RXK[:, H:])
        return back_RXK, None, None, None, None, None


def rotate_first(
    q_hidden_RHK: torch.Tensor,
    kv_hidden_TCK: torch.Tensor,
    embedded: Embedded,
    keys: Keys,
    rotations: tuple[Rotation, Rotation],
) -> torch.Tensor:
    """Step 0: rotated queries of the rows; every token's keys and values go into ``keys``."""
    pack, G = keys.pack, kv_hidden_TCK.shape[1] // 2
    keys.shared_TCK = _Rotate.apply(
        kv_hidden_TCK, embedded.kv_TCK, embedded, "kv", pack.next_places_T, rotations[1], G, True
    )
    H = q_hidden_RHK.shape[1]
    return _Rotate.apply(  # type: ignore[no-any-return]
        q_hidden_RHK, embedded.q_UHK, embedded, "q", pack.q_places(0), rotations[0], H, True
    )


def rotate_own(hidden_RXK: torch.Tensor, embedded: Embedded, keys: Keys, step: int, rotation: Rotation) -> torch.Tensor:
    """A later step: rotated queries of its rows; their own keys and values go into ``keys``."""
    R = len(hidden_RXK)
    places = keys.pack.q_places(step)[:R], keys.pack.kv_places(step)[:R]
    return _RotateOwn.apply(hidden_RXK, embedded, keys, step, places, rotation)  # type: ignore[no-any-return]


def attend(q_RHK: torch.Tensor, keys: Keys, step: int) -> torch.Tensor:
    """Mixed values [R,H,K] of the rows that run at ``step``; call once a step, in order."""
    plan = keys.pack.attention[step]
    return _Attend.apply(q_RHK, keys.shared_TCK, keys, step, plan)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    """(queries [R,H,K], step-0 keys and values) → mixed values [R,H,K]."""

    @staticmethod
    def forward(
        ctx: Any, q_RHK: torch.Tensor, shared_TCK: torch.Tensor, keys: Keys, step: int, plan: AttentionPlan
    ) -> torch.Tensor:
        ctx.arguments = keys, step, plan
        if q_RHK.is_cuda:
            from eyas.drafter.kernels.attend import attend_forward

            mixed_RHK, lse_RH = attend_forward(q_RHK, shared_TCK, keys.own, step, plan)
        else:
            mixed_RHK, lse_RH = tiles_forward(q_RHK, shared_TCK, keys.own[:step], plan)
        ctx.save_for_backward(q_RHK, shared_TCK, mixed_RHK, lse_RH)
        return mixed_RHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHK: torch.Tensor) -> Any:  # type: ignore[override]
        keys, step, plan = ctx.arguments
        q_RHK, shared_TCK, mixed_RHK, lse_RH = ctx.saved_tensors
        saved = q_RHK, mixed_RHK, lse_RH
        sums = keys.grad_shared_TCK, keys.grad_own[:step]
        if q_RHK.is_cuda:
            from eyas.drafter.kernels.attend import attend_backward

            grad_q_RHK = attend_backward(grad_RHK, saved, shared_TCK, keys.own, sums, step, plan)
        else:
            grad_q_RHK = tiles_backward(grad_RHK, saved, shared_TCK, keys.own[:step], sums, plan)
        if step:
            return grad_q_RHK, None, None, None, None
        grad_shared_TCK = sums[0].to(shared_TCK.dtype)
        keys.forget_gradients()
        return grad_q_RHK, grad_shared_TCK, None, None, None
