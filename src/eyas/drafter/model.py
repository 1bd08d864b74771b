"""The EAGLE-3 drafter's parameters: ``fc`` over the aux streams, one Llama-type layer, own norm and head.

Parameters carry the names of the SGLang export. Weights are float32 masters; what is multiplied with them,
and in which dtype, is ``weights``; the layer's arithmetic is ``layer``, the unroll over TTT steps ``ttt``.

Letters: A aux streams, D target hidden, E drafter hidden, H heads, G key-value heads, K head dim, V target
vocab, W draft vocab, R rows. E equals D: the frozen embedding of the target is E wide.
"""

from __future__ import annotations

import torch
from torch import nn

from eyas.contracts import DrafterShape
from eyas.drafter.rope import Rope


class RmsNorm(nn.Module):
    """Gain of ``weight * x / rms(x)``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    """Projections of the attention; q, k, v read ``[embedding ; hidden]``, twice E wide."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        E, K = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(2 * E, shape.num_attention_heads * K, bias=False)
        self.k_proj = nn.Linear(2 * E, shape.num_key_value_heads * K, bias=False)
        self.v_proj = nn.Linear(2 * E, shape.num_key_value_heads * K, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * K, E, bias=False)


class Mlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        E, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(E, inner, bias=False)
        self.up_proj = nn.Linear(E, inner, bias=False)
        self.down_proj = nn.Linear(inner, E, bias=False)


class MidLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        E = shape.hidden_size
        self.input_layernorm = RmsNorm(E)
        self.hidden_norm = RmsNorm(E)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(E)
        self.mlp = Mlp(shape)


class Drafter(nn.Module):
    """EAGLE-3 drafter of a given shape; weights uninitialised beyond torch's defaults.

    ``embed_tokens.weight`` [V,E] (bf16, frozen), ``d2t`` [W] int64 offsets and ``t2d`` [V] bool are
    buffers: set them with ``set_target`` before use.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        if shape.hidden_size != shape.target_hidden_size:
            # contracts allow both sizes; the frozen target embedding leaves no choice
            raise ValueError(f"drafter hidden {shape.hidden_size} differs from target's {shape.target_hidden_size}")
        A, D, E = shape.num_aux, shape.target_hidden_size, shape.hidden_size
        self.shape = shape
        self.fc = nn.Linear(A * D, E, bias=False)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(D) for _ in range(A))
        self.midlayer = MidLayer(shape)
        self.norm = RmsNorm(E)
        self.lm_head = nn.Linear(E, shape.draft_vocab_size, bias=False)
        self.rope = Rope(shape)
        self.embed_tokens = nn.Module()
        self.embed_tokens.register_buffer("weight", torch.zeros(0, E, dtype=torch.bfloat16), persistent=False)
        self.d2t: torch.Tensor
        self.t2d: torch.Tensor
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))

    def set_target(self, embedding_VE: torch.Tensor, d2t_W: torch.Tensor, t2d_V: torch.Tensor) -> None:
        """Give the frozen embedding and the draft vocab."""
        self.embed_tokens.register_buffer("weight", embedding_VE.detach(), persistent=False)
        self.d2t, self.t2d = d2t_W.to(torch.int64), t2d_V.to(torch.bool)

    def target_ids(self, draft_ids_R: torch.Tensor) -> torch.Tensor:
        """Draft ids as ids of the target's vocab."""
        return draft_ids_R + self.d2t[draft_ids_R]

    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        """Draft-vocab logits [R,W]."""
        return self.lm_head(normed_RE)
