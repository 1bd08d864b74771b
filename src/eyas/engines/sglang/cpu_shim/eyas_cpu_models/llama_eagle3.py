"""EAGLE-3 drafters of Llama's kind, and plain torch attention for what speculative decoding asks of it.

SGLang drafts and verifies with its kernels' attention alone. Plain torch attention can do both once it is told how many
tokens a request has: a verification extends each by its drafts, and draft step i sees i + 1 tokens more than are known.
"""

from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import (  # pyright: ignore[reportMissingImports]
    TorchNativeAttnBackend,
)
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3  # pyright: ignore[reportMissingImports]
from sglang.srt.speculative.draft_utils import DraftBackendFactory  # pyright: ignore[reportMissingImports]

READ = ("out_cache_loc", "req_pool_indices", "encoder_lens")
"""Of a batch, by plain torch attention, beside the lengths."""

_extend = TorchNativeAttnBackend.forward_extend
_make = DraftBackendFactory._create_backend


def _forward_extend(
    self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **further: Any
) -> Any:
    """As SGLang's, for a verification too."""
    batch = forward_batch
    if batch.forward_mode.is_target_verify():
        num_tokens = batch.spec_info.draft_token_num
        lengths = {
            "seq_lens": batch.seq_lens + num_tokens,
            "extend_prefix_lens": batch.seq_lens,
            "extend_seq_lens": batch.seq_lens.new_full(batch.seq_lens.shape, num_tokens),
        }
        batch = SimpleNamespace(**{name: getattr(batch, name) for name in READ}, **lengths)
    return _extend(self, q, k, v, layer, batch, save_kv_cache, **further)


class _Step(TorchNativeAttnBackend):
    """Attention of one draft step."""

    def __init__(self, runner: Any, step: int) -> None:
        super().__init__(runner)
        self._num_drafts = step + 1

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **further: Any
    ) -> Any:
        """As SGLang's, over the drafts so far as well."""
        read = {name: getattr(forward_batch, name) for name in READ}
        batch = SimpleNamespace(**read, seq_lens=forward_batch.seq_lens + self._num_drafts)
        return super().forward_decode(q, k, v, layer, batch, save_kv_cache, **further)


class _Steps:
    """One backend for each draft step but the last, whose state nobody needs."""

    def __init__(self, runner: Any, num_steps: int) -> None:
        self.attn_backends = [_Step(runner, step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of every step."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _create_backend(
    self: Any, backend_name: str, backend_map: dict[str, Any], error_template: str, stamps_children: bool = False
) -> Any:
    def torch_native() -> tuple[str, Any]:
        runner = self.draft_model_runner
        made = _Steps(runner, self.speculative_num_steps) if stamps_children else TorchNativeAttnBackend(runner)
        return "torch_native", made

    return _make(self, backend_name, backend_map | {"torch_native": torch_native}, error_template, stamps_children)


TorchNativeAttnBackend.forward_extend = _forward_extend
DraftBackendFactory._create_backend = _create_backend
EntryClass = LlamaForCausalLMEagle3
