"""Codecs: how rows of hidden states become bytes and come back.

States are coded as [N, R, D]: N streams one after another, R rows each. A stream is cut into pieces of
whole rows, about ``PIECE_BYTES`` each; a piece is coded alone, so pieces run on all cores, a long sample
needs no second buffer of its size, and a block is nothing but its pieces one after another.

Letters: N streams, R rows, D target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from eyas.errors import StoreError
from eyas.shards.blosc import ITEM_BYTES, Blosc2Codec, tensor_bytes
from eyas.shards.int8 import Int8Codec

PIECE_BYTES = 1 << 20
CODECS = ("raw", "blosc2", "int8")


class Codec(Protocol):
    """Codes the rows of one stream. Streams count the aux boundaries from 0, then ``last``."""

    name: str

    def encode(self, rows_RD: torch.Tensor, stream: int) -> memoryview:
        """Bytes of bf16 rows of any strides, in memory of their own."""
        ...

    def decode(self, data: memoryview, rows_RD: torch.Tensor, stream: int) -> int:
        """Fill contiguous bf16 rows from the beginning of ``data``; gives the number of bytes taken.

        Raises:
            ValueError: The bytes are no such piece.
        """
        ...


def make_codec(name: str, calibration_ND: torch.Tensor | None = None) -> Codec:
    """The codec of a capture.

    Args:
        name: ``raw``, ``blosc2`` or ``int8``.
        calibration_ND: Channel scales of ``int8``, one row per stream.

    Raises:
        StoreError: The codec is unknown, or its scales are none.
    """
    if name == "raw":
        return RawCodec()
    if name == "blosc2":
        return Blosc2Codec()
    if name == "int8":
        if calibration_ND is None:
            raise StoreError("codec int8 without its channel scales", "report it: they come with the capture")
        return Int8Codec(calibration_ND)
    raise StoreError(f"codec {name!r}, expected one of {', '.join(CODECS)}", "set extract.codec in params.yaml")


def pieces(num_streams: int, num_rows: int, hidden_size: int) -> Iterator[tuple[int, int, int]]:
    """(stream, first row, row after the last) of every piece in stored order."""
    rows_per_piece = max(1, PIECE_BYTES // (ITEM_BYTES * hidden_size))
    for stream in range(num_streams):
        for first in range(0, num_rows, rows_per_piece):
            yield stream, first, min(first + rows_per_piece, num_rows)


def decode_block(codec: Codec, data: memoryview, out_NRD: torch.Tensor, first_stream: int) -> None:
    """Fill ``out_NRD`` from a whole block.

    Args:
        codec: Of the shard.
        data: The block.
        out_NRD: bf16, each stream's rows contiguous.
        first_stream: Which stream ``out_NRD[0]`` is.

    Raises:
        ValueError: The block is too short, too long or no block of this codec.
    """
    done = 0
    for stream, first, last in pieces(*out_NRD.shape):
        done += codec.decode(data[done:], out_NRD[stream, first:last], first_stream + stream)
    if done != len(data):
        raise ValueError(f"{len(data):,} bytes, its pieces take {done:,}")


class RawCodec:
    """bf16 as it lies in memory: the reference that every other codec is compared with."""

    name = "raw"

    def encode(self, rows_RD: torch.Tensor, stream: int) -> memoryview:
        """The rows' bytes; copied when they are a view of something larger."""
        is_whole = rows_RD.untyped_storage().nbytes() == rows_RD.nbytes
        return tensor_bytes(rows_RD if is_whole else rows_RD.clone(memory_format=torch.contiguous_format))

    def decode(self, data: memoryview, rows_RD: torch.Tensor, stream: int) -> int:
        """Copy the rows out."""
        num_bytes = rows_RD.nbytes
        tensor_bytes(rows_RD)[:] = data[:num_bytes]
        return num_bytes
