"""Weights as the fused products read them, and where the trainer collects their gradients.

    Drafter's parameters (export names) → LayerWeights: q, k, v side by side, gate and up side by side

``plain_weights`` leaves gradients to autograd (``parameter.grad``). ``FlatWeights`` is the trainer's: all
masters in one flat float32 tensor, all gradients in another, so that an optimizer, a clip, a checkpoint and a
sum over processes are one operation each; products read a copy in their own dtype. Backward passes add into
the flat gradient directly (``Weight.sink``): no weight gradient of a single TTT step ever exists as a tensor.

Letters: E drafter hidden, N = (H + 2 G) K as in ``model``, P all trained values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from eyas.drafter.model import Drafter

ALIGN = 64
"""Every parameter starts at a multiple of this many values: 128 bytes in bf16, what products load at a time."""


class Weight(NamedTuple):
    """A weight and the tensor that its gradient is added to; without one, autograd returns the gradient."""

    value: torch.Tensor
    sink: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Everything that one unroll multiplies with. Halves: q, k and v read ``[embedding ; hidden]``."""

    fc: Weight
    fc_norms: tuple[Weight, ...]
    embedding_norm: Weight
    hidden_norm: Weight
    q_embedding: Weight
    kv_embedding: Weight
    q_hidden: Weight
    kv_hidden: Weight
    qkv_hidden: Weight
    o: Weight
    mlp_norm: Weight
    gate_up: Weight
    down: Weight
    norm: Weight
    head: Weight


def _assemble(drafter: Drafter, get: dict[str, Weight], qkv: Weight, gate_up: Weight) -> LayerWeights:
    E, q_rows = drafter.shape.hidden_size, drafter.shape.num_attention_heads * drafter.shape.head_dim

    def part(rows: slice, columns: slice) -> Weight:
        value = qkv.value[rows, columns]
        if value.device.type == "cpu":
            value = value.contiguous()  # oneDNN takes no strided operand at full speed
        return Weight(value, None if qkv.sink is None else qkv.sink[rows, columns])

    every, q, kv, embedding, hidden = slice(None), slice(q_rows), slice(q_rows, None), slice(E), slice(E, None)
    layer = "midlayer."
    return LayerWeights(
        fc=get["fc.weight"],
        fc_norms=tuple(
            get[f"fc_norm.{a}.weight"] for a in range(drafter.shape.num_aux if drafter.shape.fc_norm else 0)
        ),
        embedding_norm=get[layer + "input_layernorm.weight"],
        hidden_norm=get[layer + "hidden_norm.weight"],
        q_embedding=part(q, embedding),
        kv_embedding=part(kv, embedding),
        q_hidden=part(q, hidden),
        kv_hidden=part(kv, hidden),
        qkv_hidden=part(every, hidden),
        o=get[layer + "self_attn.o_proj.weight"],
        mlp_norm=get[layer + "post_attention_layernorm.weight"],
        gate_up=gate_up,
        down=get[layer + "mlp.down_proj.weight"],
        norm=get["norm.weight"],
        head=get["lm_head.weight"],
    )


QKV = tuple(f"midlayer.self_attn.{name}_proj.weight" for name in "qkv")
GATE_UP = tuple(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up"))


def plain_weights(drafter: Drafter) -> LayerWeights:
    """The parameters themselves; fused ones are joined here and autograd takes their gradients apart."""
    named = dict(drafter.named_parameters())
    get = {name: Weight(parameter) for name, parameter in named.items()}
    qkv, gate_up = (torch.cat([named[name] for name in names]) for names in (QKV, GATE_UP))
    return _assemble(drafter, get, Weight(qkv), Weight(gate_up))


class FlatWeights:
    """All trained parameters of a drafter in one flat tensor, and their gradients in another.

    The drafter's trained parameters become views of ``master_P``: what trains here is what the drafter holds. Its
    frozen ones, embedding and maps stay where they are, in host memory when training runs on a GPU.

    Args:
        drafter: Which parameters train is read off ``requires_grad``.
        dtype: Of products; the masters' own dtype, or bfloat16 beside float32 masters.
        device: Where training runs; where the parameters are by default.
    """

    def __init__(self, drafter: Drafter, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        matrices = [name for name, p in named.items() if p.ndim > 1]
        gains = [name for name, p in named.items() if p.ndim == 1]
        # q, k, v and gate, up are registered one after the other, so that they lie side by side
        places, size = {}, 0
        for name in [*matrices, *gains]:
            places[name] = (size, size + named[name].numel())
            fused = name in (*QKV[:-1], *GATE_UP[:-1])
            size = places[name][1] if fused else -(-places[name][1] // ALIGN) * ALIGN
            if name == matrices[-1]:
                self.num_matrix_values = size
        some = named[matrices[0]]
        device = some.device if device is None else device
        self.master_P = torch.zeros(size, dtype=some.dtype, device=device)
        self.grad_P = torch.zeros_like(self.master_P)
        self._products_P = self.master_P if dtype == some.dtype else torch.zeros_like(self.master_P, dtype=dtype)
        self._drafter, self._places, self._named = drafter, places, named
        self.views = {name: self._view(self.master_P, name) for name in places}
        self.grad_views = {name: self._view(self.grad_P, name) for name in places}
        """Names and shapes of the drafter's own parameters."""
        with torch.no_grad():
            for name, parameter in named.items():
                self.views[name].copy_(parameter)
                parameter.data = self.views[name]
        self._frozen = {
            name: Weight(p.detach().to(device, dtype)) for name, p in drafter.named_parameters() if not p.requires_grad
        }
        self.layer = self._layer()
        self.refresh()

    def _view(self, flat_P: torch.Tensor, name: str) -> torch.Tensor:
        first, last = self._places[name]
        return flat_P[first:last].view(self._named[name].shape)

    def _layer(self) -> LayerWeights:
        def trained(flat_P: torch.Tensor, first: int, last: int, columns: int) -> Weight:
            value = flat_P[first:last].view(-1, columns) if columns else flat_P[first:last]
            grad = self.grad_P[first:last].view_as(value)
            return Weight(value.detach().requires_grad_(), grad)

        get = dict(self._frozen)
        for name, (first, last) in self._places.items():
            columns = self._named[name].shape[1] if self._named[name].ndim > 1 else 0
            # gains multiply in float32, beside the float32 norm
            get[name] = trained(self._products_P if columns else self.master_P, first, last, columns)
        fused = [
            trained(
                self._products_P, self._places[names[0]][0], self._places[names[-1]][1], self._named[names[0]].shape[1]
            )
            for names in (QKV, GATE_UP)
        ]
        return _assemble(self._drafter, get, *fused)

    def products(self) -> LayerWeights:
        """What an unroll multiplies with now."""
        if self.master_P.device.type == "cpu":
            self.layer = self._layer()  # contiguous halves are copies, see ``_assemble``
        return self.layer

    @torch.no_grad()
    def refresh(self) -> None:
        """Renew the products' copy after the masters changed."""
        if self._products_P is not self.master_P:
            self._products_P.copy_(self.master_P)

    @property
    def products_P(self) -> torch.Tensor | None:
        """The copy that products read; None where they read the masters themselves."""
        return None if self._products_P is self.master_P else self._products_P

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.grad_P.zero_()
