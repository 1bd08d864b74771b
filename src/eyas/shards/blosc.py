"""Lossless pieces: one blosc2 chunk of one block, the two bytes of each value apart, zstd in each half.

The chunks are written here and read by any blosc2. Its own writer offers zstd's levels alone, and each of them looks for
repetitions, which states do not have: most of its time goes into finding short matches that make the result larger. What
compresses is the exponents' distribution. So zstd is told to look nowhere (a table of 64 places, matches from 7 bytes) and
codes literals; a half that a probe shows to be noise is stored as it is. Than level 1 that takes two to three times fewer
cycles and gives 1 to 2 % fewer bytes.

Layout (blosc2's own): header, where the block begins, then for each half its size and its bytes, raw where the size is
the half's own.
"""

from __future__ import annotations

import functools
import struct
import threading
from typing import Any

import numpy as np
import torch

ITEM_BYTES = 2
HEADER_BYTES = 32
SIZES, SIZES_AT = struct.Struct("<3i"), 4
"""In a chunk's header: bytes of its content, of a block, of the chunk itself."""
INT32 = struct.Struct("<i")
SMALL_BYTES = 4096
"""Of so little blosc2 writes the chunk itself: it has ways of its own for that."""
PROBE_BYTES, NOISE = 16 << 10, 0.98
"""A half of at least four probes, the first of which zstd cannot bring below this share, is noise."""


class Blosc2Codec:
    """Lossless: sign and exponent of each value coded by their distribution, the mantissa's half mostly as it is."""

    name = "blosc2"

    def encode(self, rows_RD: torch.Tensor, stream: int) -> memoryview:
        """One chunk; at most 32 bytes longer than the rows."""
        num_bytes = rows_RD.nbytes
        if num_bytes <= SMALL_BYTES:
            return memoryview(_blosc2().compress2(_whole(rows_RD), **_settings(num_bytes)))
        # numpy, not torch: in threads of ours a copy by torch would start as many more as there are cores
        items_RD = rows_RD.view(torch.int16).numpy().view("<u2")
        low, high = _coded(_half(items_RD)), _coded(_half(items_RD >> np.uint16(8)))
        size = HEADER_BYTES + 3 * INT32.size + len(low) + len(high)
        if size > num_bytes + HEADER_BYTES:
            return memoryview(_blosc2().compress2(_whole(rows_RD), **_settings(num_bytes) | {"clevel": 0}))
        before, after = _header()
        block_at = INT32.pack(HEADER_BYTES + INT32.size)
        head = before + SIZES.pack(num_bytes, num_bytes, size) + after + block_at
        return memoryview(b"".join((head, INT32.pack(len(low)), low, INT32.pack(len(high)), high)))

    def decode(self, data: memoryview, rows_RD: torch.Tensor, stream: int) -> int:
        """Decompress straight into the rows."""
        if len(data) < HEADER_BYTES:
            raise ValueError(f"{len(data)} bytes are no blosc2 chunk")
        num_bytes, _, size = SIZES.unpack_from(data, SIZES_AT)
        out = rows_RD.view(torch.int16).numpy()
        if not HEADER_BYTES <= size <= len(data) or num_bytes != out.nbytes:
            raise ValueError(f"a chunk of {size:,} bytes for {num_bytes:,}, expected {out.nbytes:,}")
        try:
            _blosc2().decompress2(data[:size], dst=out, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"blosc2: {error}") from None
        return size


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes as they lie in memory, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _whole(rows_RD: torch.Tensor) -> memoryview:
    """The rows' bytes, one row after another."""
    return tensor_bytes(rows_RD.contiguous())


def _half(items_RD: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The low bytes, one row after another."""
    return items_RD.astype(np.uint8, order="C").reshape(-1)


def _coded(half: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes | memoryview:
    """A zstd frame, or the half itself if that is no longer."""
    compress = _zstd().compress
    is_noise = len(half) >= 4 * PROBE_BYTES and len(compress(half[:PROBE_BYTES])) > NOISE * PROBE_BYTES
    frame = half.data if is_noise else compress(half)
    return frame if len(frame) < len(half) else half.data


_of_thread = threading.local()


def _zstd() -> Any:
    """This thread's compressor: one is not to be shared."""
    if not hasattr(_of_thread, "zstd"):
        import zstandard

        _of_thread.zstd = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                window_log=20, chain_log=6, hash_log=6, search_log=1, min_match=7, target_length=0,
                strategy=zstandard.STRATEGY_FAST,
            )
        )  # fmt: skip
    return _of_thread.zstd


@functools.cache
def _blosc2() -> Any:
    import blosc2

    blosc2.set_releasegil(True)  # pieces run in threads of ours, each chunk in one of them
    return blosc2


def _settings(num_bytes: int) -> dict[str, Any]:
    blosc2 = _blosc2()
    return {
        "codec": blosc2.Codec.ZSTD,
        "clevel": 1,
        "filters": [blosc2.Filter.SHUFFLE],
        "filters_meta": [0],
        "splitmode": blosc2.SplitMode.ALWAYS_SPLIT,
        "typesize": ITEM_BYTES,
        "nthreads": 1,
        "blocksize": max(num_bytes, 1),
    }


@functools.cache
def _header() -> tuple[bytes, bytes]:
    """What blosc2 itself writes before and after the sizes in the header of such a chunk."""
    chunk = bytes(_blosc2().compress2(bytes(range(64)) * (SMALL_BYTES // 64), **_settings(SMALL_BYTES)))
    return chunk[:SIZES_AT], chunk[SIZES_AT + SIZES.size : HEADER_BYTES]
