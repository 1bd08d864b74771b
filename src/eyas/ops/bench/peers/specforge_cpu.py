"""Imported before SpecForge: on a machine without a GPU its imports of triton and its CUDA calls are answered.

The fused loss is then the plain function of the peer's own module. On a GPU this does nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types

import torch
import torch._dynamo  # these three before the stand-in, which they must not see
import torch._inductor.config
import torch.nn.attention.flex_attention


def _stand_in() -> dict[str, types.ModuleType]:
    """An empty triton, as far as the import of the peer's loss goes."""
    stub, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    for module in (stub, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    vars(stub).update(jit=lambda function: function, language=language, __path__=[], __version__="0.0.0")
    vars(language)["constexpr"] = int
    return {"triton": stub, "triton.language": language}


def _plain_loss() -> None:
    """The fused loss replaced by the plain function of its own module."""
    stand_in = {} if importlib.util.find_spec("triton") else _stand_in()
    sys.modules.update(stand_in)
    import specforge.core.loss as loss  # pyright: ignore[reportMissingImports]

    for name in stand_in:
        del sys.modules[name]
    loss.LogSoftmaxLoss = types.SimpleNamespace(apply=loss._compute_loss)


if not torch.cuda.is_available():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.cuda.empty_cache = lambda: None  # the peer calls it in every step
    _plain_loss()
