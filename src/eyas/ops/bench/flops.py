"""Floating point operations that a training step needs, and what a device could do: their quotient is the MFU.

Counted is what the result needs, whoever computes it: rows that train at no later step need no products, a matrix
whose gradient nobody uses needs none. A multiplication and an addition are two operations. Norms, softmax, the
optimizer and whatever is computed twice count nothing.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from eyas.contracts import DrafterShape
from eyas.drafter.rows import Pack, steps_to_run_T

DENSE_BFLOAT16 = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Operations per second of matrix products without sparsity, by the vendor's data sheet."""
FORWARD, WITH_WEIGHTS, WITH_INPUTS = 1, 2, 3
"""A product alone; with its weight's gradient, or its input's; with both."""
BEST_OF = 5


def needed_flops(shape: DrafterShape, pack: Pack) -> int:
    """Operations of one step on a pack: frozen head, its padding not counted.

    Args:
        shape: Of the drafter.
        pack: Its rows.
    """
    D, E, A = shape.target_hidden_size, shape.hidden_size, shape.num_aux
    Q, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    num_tokens = sum(span.end - span.start for span in pack.documents)
    steps_R = steps_to_run_T(pack.trains_RS)
    num_rows = [int((steps_R > k).sum()) for k in range(len(pack.num_rows))]
    # the states need no gradient, but their norms' gains do
    fc = 2 * num_tokens * A * D * E * (WITH_INPUTS if shape.fc_norm else WITH_WEIGHTS)
    # every token gives keys and values at step 0, then each row its own; the embedding's halves are the tokens' at any step
    keys_values = 2 * (num_tokens + num_tokens + sum(num_rows[1:])) * E * 2 * kv_width * WITH_INPUTS
    queries = 2 * (_num_asked(pack, steps_R) + sum(num_rows)) * E * Q * WITH_INPUTS
    layer = 2 * sum(num_rows) * (Q * E + 3 * E * shape.intermediate_size) * WITH_INPUTS
    head = 2 * sum(pack.num_trained) * E * shape.draft_vocab_size * WITH_WEIGHTS
    teacher = 2 * len(pack.teachers_U) * D * shape.draft_vocab_size * FORWARD
    return fc + keys_values + queries + layer + head + teacher + _attention(pack, steps_R, num_rows, Q)


def _num_asked(pack: Pack, steps_R: torch.Tensor) -> int:
    """Tokens that some row reads at some step."""
    read = [pack.rows_R[steps_R > k] + k + 1 for k in range(len(pack.num_rows))]
    return len(torch.cat(read).unique())


def _attention(pack: Pack, steps_R: torch.Tensor, num_rows: list[int], width: int) -> int:
    """Scores and sums of values of every pair of a row and a key it sees, and the four products back."""
    num_keys = 0
    for k, count in enumerate(num_rows):
        places = pack.rows_R[steps_R > k]
        num_keys += int((pack.positions_T[places] + 1).sum()) + k * count  # up to itself, then one of each step
    return 2 * num_keys * 2 * width * WITH_INPUTS


def peak_flops(device: str) -> dict[str, Any]:
    """bfloat16 operations per second of a device, or of one thread of this CPU, and where the number is from."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        for known, value in DENSE_BFLOAT16.items():
            if known in name:
                return {"flops": value, "from": f"data sheet: {known}, dense bfloat16"}
    size = 8192 if device == "cuda" else 2048
    a_XY = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.mm(a_XY, a_XY)
        seconds = min(_seconds(a_XY) for _ in range(BEST_OF))
    finally:
        torch.set_num_threads(before)
    return {"flops": 2 * size**3 / seconds, "from": f"measured: bfloat16 product of {size} x {size}"}


def _seconds(a_XY: torch.Tensor) -> float:
    """Processor seconds of a product on a CPU, seconds on a GPU."""
    if not a_XY.is_cuda:
        begin_s = time.process_time()
        torch.mm(a_XY, a_XY)
        return time.process_time() - begin_s
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    torch.mm(a_XY, a_XY)
    torch.cuda.synchronize()
    return time.perf_counter() - begin_s
