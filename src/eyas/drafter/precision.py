"""The dtype of matrix products, chosen around a whole optimizer step.

Weights, activations, softmax and loss stay float32. ``bfloat16`` means that products of float32 tensors
take reduced-precision inputs and keep float32 sums and results: oneDNN's bf16 on CPUs that have it (three
times faster), TF32 on CUDA. A process-wide switch of torch, so nothing in the model has to know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def matmul_dtype(dtype: str) -> Iterator[None]:
    """Run float32 products in ``dtype`` ("bfloat16" or "float32") inside the block."""
    cpu, cuda = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = cpu.fp32_precision, cuda.fp32_precision
    reduced = dtype == "bfloat16"
    cpu.fp32_precision, cuda.fp32_precision = ("bf16", "tf32") if reduced else ("ieee", "ieee")
    try:
        yield
    finally:
        cpu.fp32_precision, cuda.fp32_precision = before
