"""A drafter as a server runs it, written from the formats' description and from nothing of eyas.

One sequence, fp32, no cache: step 0 runs every row causally; each later step of a row attends over the
step-0 keys up to that row and over its own later keys.
"""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x_HK: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = x_HK.shape[-1] // 2
    angle = position / theta ** (torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().float().repeat(2), angle.sin().float().repeat(2)
    turned = torch.cat([-x_HK[..., half:], x_HK[..., :half]], dim=-1)
    return x_HK * cos + turned * sin


class ServedDrafter:
    """Runs tensors named ``layers.0.*`` (vLLM) or ``midlayer.*`` (SGLang)."""

    def __init__(
        self, layer: dict[str, Any], switches: dict[str, Any], tensors: Tensors, embedding: Tensors | torch.Tensor
    ):
        self.c, self.s = layer, switches
        self.t = {
            n.replace("midlayer.", "layers.0."): t.float() if t.is_floating_point() else t for n, t in tensors.items()
        }
        self.embedding = embedding.float()

    def fuse(self, aux_AD: torch.Tensor) -> torch.Tensor:
        chunks = list(aux_AD.float())
        if self.s.get("fc_norm"):
            chunks = [rms_norm(c, self.t[f"fc_norm.{i}.weight"], self.c["rms_norm_eps"]) for i, c in enumerate(chunks)]
        return self.t["fc.weight"] @ torch.cat(chunks)

    def project(self, hidden: torch.Tensor, token: int, position: int) -> tuple[torch.Tensor, ...]:
        eps, K = self.c["rms_norm_eps"], self.c["head_dim"]
        x = torch.cat(
            [
                rms_norm(self.embedding[token], self.t["layers.0.input_layernorm.weight"], eps),
                rms_norm(hidden, self.t["layers.0.hidden_norm.weight"], eps),
            ]
        )
        q, k, v = (self.t[f"layers.0.self_attn.{n}_proj.weight"] @ x for n in "qkv")
        theta = self.c["rope_parameters"]["rope_theta"]
        return rope(q.view(-1, K), position, theta), rope(k.view(-1, K), position, theta), v.view(-1, K)

    def finish(
        self, hidden: torch.Tensor, q: torch.Tensor, keys: list, values: list
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps, K = self.c["rms_norm_eps"], self.c["head_dim"]
        groups = self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        heads = []
        for h in range(q.shape[0]):
            scores = torch.stack([q[h] @ k[h // groups] for k in keys]) / K**0.5
            heads.append(sum(p * v[h // groups] for p, v in zip(scores.softmax(0), values, strict=True)))
        x = hidden + self.t["layers.0.self_attn.o_proj.weight"] @ torch.cat(heads)
        y = rms_norm(x, self.t["layers.0.post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(self.t["layers.0.mlp.gate_proj.weight"] @ y)
        x = x + self.t["layers.0.mlp.down_proj.weight"] @ (gate * (self.t["layers.0.mlp.up_proj.weight"] @ y))
        normed = rms_norm(x, self.t["norm.weight"], eps)
        return self.t["lm_head.weight"] @ normed, normed if self.s.get("norm_output") else x

    def logits(self, aux_TAD: torch.Tensor, ids: list[int], row: int, num_steps: int) -> torch.Tensor:
        """[S, W]: the chain from ``row``, fed with the given tokens (teacher-forced)."""
        keys, values, hidden, q = [], [], torch.empty(0), torch.empty(0)
        for t in range(row + 1):
            hidden = self.fuse(aux_TAD[t])
            q, k, v = self.project(hidden, ids[t + 1], t)
            keys.append(k)
            values.append(v)
        out = []
        for step in range(num_steps):
            if step:
                q, k, v = self.project(hidden, ids[row + 1 + step], row + step)
                keys.append(k)
                values.append(v)
            logits_W, hidden = self.finish(hidden, q, keys, values)
            out.append(logits_W)
        return torch.stack(out)
