"""Exact attention of TTT rows over packed documents, in memory linear in the tokens.

At step k a row sees the step-0 keys of its own document up to itself, and its own keys of steps 1 … k.
The softmax runs over both together. Nothing of size rows x tokens outlives one block: the forward pass
keeps the log-sum-exp of each row, the backward pass computes the block's probabilities again.

Keys and values of all steps lie in one ``Keys`` and are read by many later steps; their gradients are summed
there as the backward pass comes by, and handed on once, by the step that made them. That order is safe because
step k+1 starts from the output of step k: when the backward pass reaches step k, all later steps are done.

Letters: T tokens of the pack, R rows, H heads, G key-value heads, P = H / G heads per group, K head
dim, X rows of one block, Y keys of one block, S TTT steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from eyas.drafter.pointwise import Rotation, add_and_rotate, add_and_rotate_backward
from eyas.drafter.precision import full_precision
from eyas.drafter.rows import Pack
from eyas.drafter.spans import AttentionPlan, Block


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
        self._grad_dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
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
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            self._grads[name] = torch.zeros_like(like, dtype=dtype)
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
        return add_and_rotate(hidden_RXK, embedded_TXK, places_R, rotation, num_turned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RXK: torch.Tensor) -> Any:  # type: ignore[override]
        embedded, name, places_R, rotation, num_turned, is_last = ctx.arguments
        like = embedded.q_UHK if name == "q" else embedded.kv_TCK
        grad_sum = embedded.grad(name, like)
        back_RXK = add_and_rotate_backward(grad_RXK, places_R, rotation, num_turned, grad_sum)
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
        keys.own[step - 1, :R] = add_and_rotate(hidden_RXK[:, H:], embedded.kv_TCK, places[1], rotation, G)
        return add_and_rotate(hidden_RXK[:, :H], embedded.q_UHK, places[0], rotation, H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q_RHK: torch.Tensor) -> Any:  # type: ignore[override]
        embedded, keys, step, places, rotation = ctx.arguments
        R, H = grad_q_RHK.shape[:2]
        G = keys.own.shape[2] // 2
        grad_kv_RCK = keys.grad_own[step - 1, :R]
        sums = embedded.grad("q", embedded.q_UHK), embedded.grad("kv", embedded.kv_TCK)
        back_q_RHK = add_and_rotate_backward(grad_q_RHK, places[0], rotation, H, sums[0])
        back_kv_RCK = add_and_rotate_backward(grad_kv_RCK, places[1], rotation, G, sums[1])
        return torch.cat([back_q_RHK, back_kv_RCK], 1), None, None, None, None, None


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
            mixed_RHK, lse_RH = _forward(q_RHK, shared_TCK, keys.own[:step], plan)
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
            grad_q_RHK = _backward(grad_RHK, saved, shared_TCK, keys.own[:step], sums, plan)
        if step:
            return grad_q_RHK, None, None, None, None
        grad_shared_TCK = sums[0].to(shared_TCK.dtype)
        keys.forget_gradients()
        return grad_q_RHK, grad_shared_TCK, None, None, None


# ── torch: block by block ─────────────────────────────────────────────────────────────────────


def _grouped(x_XHK: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[X,H,K] as [G, X*P, K], so that one product serves all heads of a group."""
    X, H, K = x_XHK.shape
    return x_XHK.view(X, num_groups, H // num_groups, K).transpose(0, 1).reshape(num_groups, -1, K)


def _ungrouped(x_GZK: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[G, X*P, K] back to [X,H,K]."""
    G, _, K = x_GZK.shape
    return x_GZK.view(G, num_rows, -1, K).transpose(0, 1).reshape(num_rows, -1, K)


def _scores(block: Block, q_GZK: torch.Tensor, keys_GYK: torch.Tensor) -> torch.Tensor:
    """Masked scores [G, X*P, Y] of one block; queries come scaled."""
    scores_GZY = torch.bmm(q_GZK, keys_GYK.transpose(1, 2))
    G, Z, Y = scores_GZY.shape
    X = block.hidden_XY.shape[0]
    scores_GZY.view(G, X, Z // X, Y).masked_fill_(block.hidden_XY[:, None], -torch.inf)
    return scores_GZY


@full_precision
def _forward(
    q_RHK: torch.Tensor, shared_TCK: torch.Tensor, own_SRCK: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    R, H, K = q_RHK.shape
    G = shared_TCK.shape[1] // 2
    keys_GTK, values_GTK = shared_TCK.transpose(0, 1).contiguous().chunk(2)
    q_RHK = q_RHK * K**-0.5
    q_RGPK = q_RHK.view(R, G, H // G, K)
    # [R,G,P] scores of each row with its own keys
    own_scores = [torch.einsum("rgpk,rgk->rgp", q_RGPK, own_RCK[:R, :G]) for own_RCK in own_SRCK]
    mixed_RHK, lse_RH = torch.empty_like(q_RHK), q_RHK.new_empty(R, H)
    for block in plan.blocks(H):
        rows_X, X = block.rows_X, len(block.rows_X)
        q_GZK = _grouped(q_RHK[rows_X], G)
        scores_GZY = _scores(block, q_GZK, keys_GTK[:, block.start : block.end])
        lse_GZ = scores_GZY.logsumexp(-1)
        if own_scores:
            own_GZS = torch.stack([_grouped(s[rows_X].view(X, H, 1), G)[..., 0] for s in own_scores], -1)
            lse_GZ = torch.logaddexp(lse_GZ, own_GZS.logsumexp(-1))
        shares_GZY = scores_GZY.sub_(lse_GZ[..., None]).exp_()
        mixed_GZK = torch.bmm(shares_GZY, values_GTK[:, block.start : block.end])
        mixed_RHK[rows_X] = _ungrouped(mixed_GZK, X)
        lse_RH[rows_X] = _ungrouped(lse_GZ[..., None], X)[..., 0]
    mixed_RGPK = mixed_RHK.view(R, G, H // G, K)
    for score_RGP, own_RCK in zip(own_scores, own_SRCK, strict=True):
        share_RGP = (score_RGP - lse_RH.view_as(score_RGP)).exp_()
        mixed_RGPK.addcmul_(share_RGP[..., None], own_RCK[:R, G:, None])
    return mixed_RHK, lse_RH


@full_precision
def _backward(
    grad_RHK: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shared_TCK: torch.Tensor,
    own_SRCK: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    plan: AttentionPlan,
) -> torch.Tensor:
    q_RHK, mixed_RHK, lse_RH = saved
    R, H, K = q_RHK.shape
    G, scale = shared_TCK.shape[1] // 2, K**-0.5
    q_RHK = q_RHK * scale
    keys_GTK, values_GTK = shared_TCK.transpose(0, 1).contiguous().chunk(2)
    delta_RH = torch.linalg.vecdot(grad_RHK, mixed_RHK)
    grad_q_RHK = torch.empty_like(q_RHK)
    grad_keys_GTK, grad_values_GTK = sums[0].transpose(0, 1).chunk(2)
    for block in plan.blocks(H):
        rows_X, X, keys = block.rows_X, len(block.rows_X), slice(block.start, block.end)
        q_GZK, grad_GZK = _grouped(q_RHK[rows_X], G), _grouped(grad_RHK[rows_X], G)
        lse_GZ1, delta_GZ1 = (_grouped(x_RH[rows_X].view(X, H, 1), G) for x_RH in (lse_RH, delta_RH))
        shares_GZY = _scores(block, q_GZK, keys_GTK[:, keys]).sub_(lse_GZ1).exp_()
        grad_values_GTK[:, keys] += torch.bmm(shares_GZY.transpose(1, 2), grad_GZK)
        grad_scores_GZY = torch.bmm(grad_GZK, values_GTK[:, keys].transpose(1, 2)).sub_(delta_GZ1).mul_(shares_GZY)
        grad_q_RHK[rows_X] = _ungrouped(torch.bmm(grad_scores_GZY, keys_GTK[:, keys]), X)
        grad_keys_GTK[:, keys] += torch.bmm(grad_scores_GZY.transpose(1, 2), q_GZK)
    q_RGPK, grad_RGPK = q_RHK.view(R, G, H // G, K), grad_RHK.reshape(R, G, H // G, K)
    lse_RGP, delta_RGP = lse_RH.view(R, G, H // G), delta_RH.view(R, G, H // G)
    grad_q_RGPK = grad_q_RHK.view(R, G, H // G, K)
    for own_RCK, grad_own_RCK in zip(own_SRCK, sums[1], strict=True):
        key_RGK, value_RGK = own_RCK[:R, :G], own_RCK[:R, G:]
        share_RGP = torch.einsum("rgpk,rgk->rgp", q_RGPK, key_RGK).sub_(lse_RGP).exp_()
        through_RGP = torch.einsum("rgpk,rgk->rgp", grad_RGPK, value_RGK)
        grad_score_RGP = share_RGP * (through_RGP - delta_RGP)
        grad_q_RGPK.addcmul_(grad_score_RGP[..., None], key_RGK[:, :, None])
        grad_own_RCK[:R, :G] += torch.einsum("rgp,rgpk->rgk", grad_score_RGP, q_RGPK)
        grad_own_RCK[:R, G:] += torch.einsum("rgp,rgpk->rgk", share_RGP, grad_RGPK)
    return grad_q_RHK.mul_(scale)
