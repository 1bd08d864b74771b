"""Fixed-shape batched decoding: every forward has the same shapes, whatever the rows hold.

The keys and values of every row lie in preallocated buffers; a forward writes J new tokens per row at
that row's own position and attends over the same number of positions for all rows. So a row's result
depends on the row alone: not on its companions and not on its place in the batch. A row is rolled back by
writing again at an earlier start; what lies behind the start is masked and then overwritten.

In one shape [B, J] a token's logits do not depend on its place in the block either, which is what makes
speculative decoding comparable with plain decoding bit for bit (``docs/log.md`` has the measurement).

Letters: B rows, J tokens per row in one forward, P padded prompt length, L attended positions, H heads,
K head dim, A aux streams, D target hidden size, V target vocab.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.engines.taps import Taps, text_model
from eyas.errors import CaptureError

ATTENTION = "eyas_block"
CACHE_NAMES = ("cache", "past_key_values")
"""Since transformers 5.24, and before: SGLang and vLLM pin older ones."""


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What one forward gives for its J tokens per row, in the model's dtype."""

    logits_BJV: torch.Tensor
    last_BJD: torch.Tensor
    """After the final norm."""
    aux_BJAD: torch.Tensor | None
    """None when the decoder was made without boundaries."""


@dataclass(frozen=True, slots=True)
class BlockTree:
    """How the tokens of a block hang together; the first is the root and follows what was written before."""

    depth_BJ: torch.Tensor
    """Steps below the root: a token's position is the root's plus this."""
    seen_BJJ: torch.Tensor
    """Bool: the second token is the first or an ancestor of it."""


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """What a prefill gives for R rows; positions at and after a prompt's end hold padding."""

    logits_RV: torch.Tensor
    """At each prompt's last token."""
    last_RPD: torch.Tensor
    aux_RPAD: torch.Tensor | None


class BlockDecoder:
    """Decodes up to ``batch_size`` rows side by side in shapes that never change.

    Args:
        model: A causal LM of transformers with full attention and plain layers.
        batch_size: B, rows of every forward.
        max_length: Positions per row, prompt and answer together.
        boundaries: Aux boundaries to return with every forward.

    Raises:
        CaptureError: ``max_length`` is beyond the model's context, or the model takes no cache.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int, boundaries: Sequence[int] = ()) -> None:
        context = model.config.get_text_config().max_position_embeddings
        if max_length > context:
            raise CaptureError(f"{max_length} positions are asked for, the target's context has {context}")
        self.batch_size, self.max_length = batch_size, max_length
        self._model, self._base, self._head = model, text_model(model), model.get_output_embeddings()
        self._config = self._base.config
        self._device = next(model.parameters()).device
        self._taps = Taps(self._base, tuple(boundaries)) if boundaries else None
        self._cache = _BlockCache(len(self._base.layers), batch_size, max_length)
        self._cache_name = _cache_name(self._base)
        self._position_L = torch.arange(max_length, device=self._device)

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int] | None = None, length: int | None = None
    ) -> PrefillOutput:
        """Fill rows from position 0 with prompts, padded on the right.

        Args:
            prompts: Token ids per row.
            rows: Rows to fill, by default 0, 1, …; a row may be named twice with the same prompt.
            length: P, by default the longest prompt's length. Same P and number of prompts, same numerics.

        Raises:
            CaptureError: A prompt is empty or longer than ``length`` or ``max_length``.
        """
        rows = range(len(prompts)) if rows is None else rows
        lengths = [len(prompt) for prompt in prompts]
        length = length or max(lengths)
        if min(lengths) < 1 or max(lengths) > length or length > self.max_length:
            raise CaptureError(f"prompts of {min(lengths)} to {max(lengths)} tokens, expected 1 to {self.max_length}")
        ids_RP = torch.zeros(len(prompts), length, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids_RP[row, : len(prompt)] = torch.tensor(prompt)
        position_RP = self._position_L[: ids_RP.shape[1]].expand(ids_RP.shape)
        self._cache.aim(torch.tensor(list(rows), device=self._device), position_RP, attended=0)
        end_R = torch.tensor(lengths, device=self._device) - 1
        with self._steady():
            last_RPD, aux_RPAD = self._run(ids_RP.to(self._device), position_RP, None)
            logits_RV = self._head(last_RPD[torch.arange(len(prompts), device=self._device), end_R])
        return PrefillOutput(logits_RV, last_RPD, aux_RPAD)

    @torch.no_grad()
    def forward(
        self,
        ids_BJ: torch.Tensor,
        start_B: torch.Tensor,
        attended: int | None = None,
        tree: BlockTree | None = None,
    ) -> BlockOutput:
        """Run J tokens per row at positions ``start_B`` and after.

        Args:
            ids_BJ: Token ids, int64.
            start_B: Position of each row's first token; all before it must have been written.
            attended: Positions every row attends over, by default ``max_length``. Results are comparable
                bit for bit between forwards of the same B, J and ``attended``.
            tree: The tokens are no sequence but a tree below the first of them; ``keep`` what is accepted of it.
        """
        attended = self.max_length if attended is None else attended
        ids_BJ, start_B = ids_BJ.to(self._device), start_B.to(self._device)
        position_BJ = start_B[:, None] + self._position_L[: ids_BJ.shape[1]]
        assert ids_BJ.shape[0] == self.batch_size
        assert int(position_BJ.max()) < attended <= self.max_length
        depth_BJ = self._position_L[: ids_BJ.shape[1]] if tree is None else tree.depth_BJ.to(self._device)
        hidden_BJL = self._position_L[:attended] > position_BJ[:, :, None]
        if tree is not None:
            at_BJJ = position_BJ[:, None, :].expand_as(tree.seen_BJJ)
            hidden_BJL.scatter_(2, at_BJJ, ~tree.seen_BJJ.to(self._device))
        mask_B1JL = torch.zeros(hidden_BJL.shape, dtype=self._model.dtype, device=self._device)
        mask_B1JL = mask_B1JL.masked_fill_(hidden_BJL, float("-inf"))[:, None]
        self._cache.aim(torch.arange(self.batch_size, device=self._device), position_BJ, attended)
        with self._steady():
            last_BJD, aux_BJAD = self._run(ids_BJ, start_B[:, None] + depth_BJ, mask_B1JL)
            return BlockOutput(self._head(last_BJD), last_BJD, aux_BJAD)

    @torch.no_grad()
    def keep(self, start_B: torch.Tensor, place_BA: torch.Tensor) -> None:
        """Move accepted tokens of the last block to the positions behind its first token.

        Args:
            start_B: Of that block.
            place_BA: Places in the block, rising along a row and at least 1, 2, …; what is not accepted is filled
                up with its own place and is written over by the next block.
        """
        start_B1, place_BA = start_B.to(self._device)[:, None], place_BA.to(self._device)
        to_BA = start_B1 + 1 + torch.arange(place_BA.shape[1], device=self._device)
        self._cache.move(start_B1 + place_BA, to_BA)

    @contextlib.contextmanager
    def _steady(self) -> Iterator[None]:
        """Where threads share rows of a float32 product, MKL on AMD gives a row other last bits by its place: one thread."""
        threads = torch.get_num_threads()
        is_shared = self._device.type == "cpu" and self._model.dtype == torch.float32 and threads > 1
        if is_shared:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if is_shared:
                torch.set_num_threads(threads)

    def settle(self) -> None:
        """Wait until the device has done what it was asked: what a clock needs."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _run(
        self, ids_BJ: torch.Tensor, position_BJ: torch.Tensor, mask_B1JL: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        taps = self._taps.listening() if self._taps else contextlib.nullcontext()
        with _attention(self._config, ATTENTION), taps:
            output = self._base(
                input_ids=ids_BJ,
                position_ids=position_BJ,
                attention_mask=mask_B1JL,
                use_cache=True,
                **{self._cache_name: self._cache},
            )
        return output.last_hidden_state, self._taps.take() if self._taps else None


class _BlockCache(Cache):
    """Preallocated keys and values of all layers; ``aim`` says where the next forward writes."""

    def __init__(self, num_layers: int, batch_size: int, max_length: int) -> None:
        self._blocks = [_BlockLayer(batch_size, max_length) for _ in range(num_layers)]
        super().__init__(layers=list(self._blocks))

    def aim(self, row_R: torch.Tensor, position_RJ: torch.Tensor, attended: int) -> None:
        """Set rows and positions to write, and how many positions are attended (0: only the new ones)."""
        for layer in self._blocks:
            layer.row_R1, layer.position_RJ, layer.attended = row_R[:, None], position_RJ, attended

    def move(self, from_BA: torch.Tensor, to_BA: torch.Tensor) -> None:
        """Copy keys and values of all rows between positions."""
        for layer in self._blocks:
            layer.move(from_BA, to_BA)


class _BlockLayer(CacheLayerMixin):
    def __init__(self, batch_size: int, max_length: int) -> None:
        super().__init__()
        self.batch_size, self.max_length = batch_size, max_length
        self.row_R1 = self.position_RJ = torch.empty(0, dtype=torch.long)
        self.attended = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def buffer(states: torch.Tensor) -> torch.Tensor:
            return states.new_zeros(self.batch_size, states.shape[1], self.max_length, states.shape[3])

        self.keys, self.values, self.is_initialized = buffer(key_states), buffer(value_states), True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys[self.row_R1, :, self.position_RJ] = key_states.transpose(1, 2)
        self.values[self.row_R1, :, self.position_RJ] = value_states.transpose(1, 2)
        if not self.attended:
            return key_states, value_states
        return self.keys[:, :, : self.attended], self.values[:, :, : self.attended]

    def move(self, from_BA: torch.Tensor, to_BA: torch.Tensor) -> None:
        row_B1 = torch.arange(len(from_BA), device=from_BA.device)[:, None]
        for states in (self.keys, self.values):
            assert states is not None
            states[row_B1, :, to_BA] = states[row_B1, :, from_BA]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.attended or query_length, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given

    def get_max_length(self) -> int:
        return self.max_length

    get_max_cache_shape = get_max_length  # its name in older releases


def _cache_name(base: Any) -> str:
    """What the model's forward calls its cache: a name that it does not know would be passed over without a word."""
    known = inspect.signature(base.forward).parameters
    found = next((name for name in CACHE_NAMES if name in known), None)
    if found is None:
        raise CaptureError(
            f"{type(base).__name__}.forward takes {', '.join(known)}: no cache, expected one of {', '.join(CACHE_NAMES)}",
            "answers and measurements need one; `extract` of given answers does not",
        )
    return found


def _block_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that runs query heads sharing a key head as further rows, so that no key is copied."""
    B, H, J, K = query.shape
    groups = H // key.shape[1]
    if attention_mask is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2), None
    packed = query.reshape(B, key.shape[1], groups * J, K)
    mask = attention_mask.repeat(1, 1, groups, 1)
    out = functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(B, H, J, value.shape[3]).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _block_attention)


@contextlib.contextmanager
def _attention(config: Any, name: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
