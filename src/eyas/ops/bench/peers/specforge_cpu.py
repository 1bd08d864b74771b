"""Imported before SpecForge: on a machine without a GPU its imports of triton and its CUDA calls are answered.

The fused loss is then the plain function of the peer's own module. On a GPU this does nothing.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types

import torch
import torch.nn.attention.flex_attention  # before the stand-in, which it must not see


def _loss_without_triton() -> None:
    """An empty triton while the peer's loss is imported."""
    stub, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    for module in (stub, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    vars(stub).update(jit=lambda function: function, language=language, __path__=[], __version__="0.0.0")
    vars(language)["constexpr"] = int
    sys.modules["triton"], sys.modules["triton.language"] = stub, language
    import specforge.core.loss as loss  # pyright: ignore[reportMissingImports]

    del sys.modules["triton"], sys.modules["triton.language"]
    loss.LogSoftmaxLoss = types.SimpleNamespace(apply=loss._compute_loss)


if not torch.cuda.is_available():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.cuda.empty_cache = lambda: None  # the peer calls it in every step
    _loss_without_triton()
