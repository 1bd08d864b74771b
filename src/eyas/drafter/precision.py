"""The dtype of matrix products, chosen around a whole optimizer step.

Weights, activations, softmax and loss stay float32. ``bfloat16`` means that products of float32 tensors
take reduced-precision inputs and keep float32 sums and results: oneDNN's bf16 on CPUs that have it (three
times faster), TF32 on CUDA. A process-wide switch of torch, so nothing in the model has to know. Only the
widest gradient product asks for ``reduced_dtype`` and takes bf16 tensors as they are.

oneDNN compiles a kernel for every new size of a product, 6 ms and 1 to 6 MB each, more than the product of a
CPU-sized batch itself. So packs are filled up to few sizes (``rows.pack_documents``), and attention, whose
sizes follow the documents, runs under ``full_precision``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_active: torch.dtype | None = None


def reduced_dtype() -> torch.dtype | None:
    """bf16 inside ``matmul_dtype("bfloat16")``, None elsewhere."""
    return _active


@contextlib.contextmanager
def matmul_dtype(dtype: str) -> Iterator[None]:
    """Run float32 products in ``dtype`` ("bfloat16" or "float32") inside the block."""
    global _active  # noqa: PLW0603 - stands beside torch's own process-wide switches
    cpu, cuda = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = cpu.fp32_precision, cuda.fp32_precision, _active
    reduced = dtype == "bfloat16"
    cpu.fp32_precision, cuda.fp32_precision = ("bf16", "tf32") if reduced else ("ieee", "ieee")
    _active = torch.bfloat16 if reduced else None
    try:
        yield
    finally:
        cpu.fp32_precision, cuda.fp32_precision, _active = before


def full_precision(function: Function) -> Function:
    """Decorate a function whose float32 products stay float32 whatever ``matmul_dtype`` says."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = cpu.fp32_precision
        cpu.fp32_precision = "ieee"
        try:
            return function(*args, **kwargs)
        finally:
            cpu.fp32_precision = before

    return cast(Function, wrapped)
