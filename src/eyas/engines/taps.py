"""Reading boundaries out of a transformers model with hooks, keeping only those that are wanted.

``output_hidden_states`` would keep every layer's states (61 x [B, T, 7168] on a Kimi); a hook keeps A.
Boundary b is the input of decoder layer b; boundary L is the last layer's output before the final norm.

Letters: B rows, T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from eyas.errors import CaptureError

TEXT_MODEL_PATHS = ("model", "model.language_model", "language_model.model")
"""Where causal and multi-modal classes keep the decoder that ends in the final norm."""


def text_model(model: Any) -> Any:
    """The decoder of a causal LM: embedding, layers, final norm, without the head.

    Raises:
        CaptureError: It is not where any known model class keeps it.
    """
    for path in TEXT_MODEL_PATHS:
        found = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if all(hasattr(found, name) for name in ("embed_tokens", "layers", "norm")):
            return found
    raise CaptureError(
        f"{type(model).__name__} has no decoder with embed_tokens, layers and norm at {', '.join(TEXT_MODEL_PATHS)}",
        "only Llama-style decoders are known to the hf engine",
    )


class Taps:
    """Hooks on the chosen boundaries of one decoder.

    Args:
        base: The decoder, see ``text_model``.
        boundaries: Boundaries in the order in which they are returned.

    Raises:
        CaptureError: A boundary does not exist on this decoder.
    """

    def __init__(self, base: Any, boundaries: tuple[int, ...]) -> None:
        num_layers = len(base.layers)
        beyond = [b for b in boundaries if not 0 <= b <= num_layers]
        if beyond:
            raise CaptureError(f"boundaries {beyond} do not exist: the target has {num_layers} layers, expected 0 to L")
        self._base, self._boundaries = base, boundaries
        self._states: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks are in place inside the block."""
        self._states.clear()
        handles = []
        for boundary in self._boundaries:
            module = self._base.norm if boundary == len(self._base.layers) else self._base.layers[boundary]
            handles.append(module.register_forward_pre_hook(self._hook(boundary), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> torch.Tensor:
        """Streams of the last forward, [B, T, A, D]; forgets them."""
        missing = [b for b in self._boundaries if b not in self._states]
        if missing:
            raise CaptureError(f"no state came from boundaries {missing}: the layers' forward was bypassed")
        stacked = torch.stack([self._states[b] for b in self._boundaries], dim=2)
        self._states.clear()
        return stacked

    def _hook(self, boundary: int) -> Any:
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[boundary] = args[0] if args else kwargs["hidden_states"]

        return keep
