"""The dtype of matrix products: what weights and activations are kept in, and how float32 ones multiply.

Masters, norms, softmax and loss are float32. ``bfloat16`` means bf16 weights and activations where the device
multiplies bf16 (CUDA; CPUs with AVX-512 BF16, where a product of bf16 tensors takes half the time of one that
converts its float32 inputs first). Other CPUs keep float32 tensors and let oneDNN choose.

What is left of float32 products (attention's tiles) follows a process-wide switch of torch, ``matmul_dtype``, set
around a whole optimizer step: reduced-precision inputs, float32 sums and results.

oneDNN compiles a kernel for every new size of a product, 6 ms and 1 to 6 MB each, more than the product of a
CPU-sized batch itself. So packs are filled up to few sizes (``rows.pack_documents``), and attention is cut into
tiles of one size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_active: torch.dtype | None = None


def product_dtype(device: torch.device, dtype: str) -> torch.dtype:
    """Dtype of weights and activations for ``train.dtype`` on a device."""
    multiplies = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if dtype == "bfloat16" and multiplies else torch.float32


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums, softmax and loss are taken in beside products of ``dtype``: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the wide dtype of its own; itself when it has it."""
    return x.to(wide_dtype(x.dtype))


def wide_product(x_RD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """``x W^T`` [R,V] of factors of one dtype, in the wide dtype of theirs: sums are not rounded to bfloat16."""
    wide = wide_dtype(weight_VD.dtype)
    if weight_VD.dtype != wide and weight_VD.is_cuda:  # torch has it on CUDA alone
        return torch.mm(x_RD, weight_VD.t(), out_dtype=wide)
    return torch.mm(widened(x_RD), widened(weight_VD).t())


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
