"""The EAGLE-3 drafter: ``fc`` over the aux streams, one Llama-type layer, own norm and head.

Parameters carry the names of the SGLang export. Weights are float32 masters; the dtype of matrix
products is chosen around a whole step by ``drafter.precision``. Attention is a function that the
caller passes in (``drafter.attention`` while training), because the layer itself knows rows only.

Letters: R rows (tokens at some step), A aux streams, D target hidden, E drafter hidden, H heads,
G key-value heads, K head dim, N = (H + 2 G) K, V target vocab, W draft vocab. E equals D: the
frozen embedding of the target is E wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from eyas.contracts import DrafterShape
from eyas.drafter.rope import Rope, rotate


class Qkv(NamedTuple):
    """Queries [R,H,K], keys and values [R,G,K], rotated."""

    q_RHK: torch.Tensor
    k_RGK: torch.Tensor
    v_RGK: torch.Tensor


class RmsNorm(nn.Module):
    """``weight * x / rms(x)`` in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_RE: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x_RE, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections of the attention; q, k, v read ``[embedding ; hidden]``, twice E wide."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        E, K = shape.hidden_size, shape.head_dim
        self.num_heads, self.num_key_value_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            K,
        )
        self.q_proj = nn.Linear(2 * E, self.num_heads * K, bias=False)
        self.k_proj = nn.Linear(2 * E, self.num_key_value_heads * K, bias=False)
        self.v_proj = nn.Linear(2 * E, self.num_key_value_heads * K, bias=False)
        self.o_proj = nn.Linear(self.num_heads * K, E, bias=False)

    def weights_NE(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k, v weights stacked, split into the embedding half and the hidden half."""
        both_NX = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        embedding_NE, hidden_NE = both_NX.chunk(2, dim=1)
        return embedding_NE, hidden_NE


class Mlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        E, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(E, inner, bias=False)
        self.up_proj = nn.Linear(E, inner, bias=False)
        self.down_proj = nn.Linear(inner, E, bias=False)

    def forward(self, x_RE: torch.Tensor) -> torch.Tensor:
        """The gated MLP, row by row."""
        return self.down_proj(F.silu(self.gate_proj(x_RE)) * self.up_proj(x_RE))


class MidLayer(nn.Module):
    """The one decoder layer; the residual is the raw hidden state, as SGLang computes it."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        E, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RmsNorm(E, eps)
        self.hidden_norm = RmsNorm(E, eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(E, eps)
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
            self.fc_norm = nn.ModuleList(RmsNorm(D, shape.rms_norm_eps) for _ in range(A))
        self.midlayer = MidLayer(shape)
        self.norm = RmsNorm(E, shape.rms_norm_eps)
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

    def fuse(self, aux_RAD: torch.Tensor) -> torch.Tensor:
        """Step 0's hidden state [R,E] from the aux streams (any float dtype)."""
        aux_RAD = aux_RAD.to(self.fc.weight.dtype)
        if self.shape.fc_norm:
            aux_RAD = torch.stack([norm(aux_RAD[:, a]) for a, norm in enumerate(self.fc_norm)], 1)
        return self.fc(aux_RAD.flatten(1))

    def embed(self, ids_R: torch.Tensor) -> torch.Tensor:
        """Normed embedding [R,E] of tokens, as q, k and v read it."""
        rows_RE = F.embedding(ids_R, self.embed_tokens.weight).to(self.fc.weight.dtype)  # type: ignore[arg-type]
        return self.midlayer.input_layernorm(rows_RE)

    def project_embeddings(self, ids_R: torch.Tensor, weight_NE: torch.Tensor | None = None) -> torch.Tensor:
        """The embedding half of q, k and v [R,N]; one token needs it once for all TTT steps.

        Args:
            ids_R: Tokens.
            weight_NE: ``weights_NE()[0]``, when the caller has it already.
        """
        return F.linear(self.embed(ids_R), self.midlayer.self_attn.weights_NE()[0] if weight_NE is None else weight_NE)

    def project(
        self,
        hidden_RE: torch.Tensor,
        embedded_RN: torch.Tensor,
        positions_R: torch.Tensor,
        weight_NE: torch.Tensor | None = None,
    ) -> Qkv:
        """Rotated queries, keys and values of rows.

        Args:
            hidden_RE: Raw hidden states (``fuse``'s, or the last step's output).
            embedded_RN: ``project_embeddings`` of the token each row reads.
            positions_R: Positions in the document, shifted by the TTT step.
            weight_NE: ``weights_NE()[1]``, when the caller has it already.
        """
        attention = self.midlayer.self_attn
        weight_NE = attention.weights_NE()[1] if weight_NE is None else weight_NE
        normed_RE = self.midlayer.hidden_norm(hidden_RE)
        both_RN = F.linear(normed_RE, weight_NE) + embedded_RN
        H, G, K = attention.num_heads, attention.num_key_value_heads, attention.head_dim
        both_RXK = both_RN.view(-1, H + 2 * G, K)
        turned_RXK = rotate(both_RXK[:, : H + G], self.rope(positions_R, both_RN.dtype))
        return Qkv(turned_RXK[:, :H], turned_RXK[:, H:], both_RXK[:, H + G :])

    def layer(self, hidden_RE: torch.Tensor, qkv: Qkv, attend: Callable[[Qkv], torch.Tensor]) -> torch.Tensor:
        """The decoder layer's raw output [R,E].

        Args:
            hidden_RE: The same rows that gave ``qkv``; the residual.
            qkv: From ``project``.
            attend: Mixes values: gives [R,H,K] for the rows' queries over all keys they may see.
        """
        layer = self.midlayer
        hidden_RE = hidden_RE + layer.self_attn.o_proj(attend(qkv).flatten(1))
        return hidden_RE + layer.mlp(layer.post_attention_layernorm(hidden_RE))

    def finish(self, output_RE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``lm_head`` reads, and the hidden state of the next step (raw, or normed in EAGLE-3.1)."""
        normed_RE = self.norm(output_RE)
        return normed_RE, normed_RE if self.shape.norm_output else output_RE

    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        """Draft-vocab logits [R,W]."""
        return self.lm_head(normed_RE)
