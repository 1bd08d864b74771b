"""The codec ``int8``: 8 bits per value, one scale per channel of the set and one per 64 channels of a row. Lossy.

    bf16 row → over the calibration's channel scale → groups of 64 channels → over the group's scale → int8

A piece is R rows of one stream. Its bytes, without gaps, little-endian:

    int8  [R, D]   values -127..127, row after row
    bf16  [R, G]   scales of the groups, row after row; G = ceil(D / 64), the last group holds what is left of D

A writer multiplies with the float32 reciprocal of the channel scale, takes ``largest magnitude / 127`` of each group as
bf16 scale (which has the range of float32), multiplies with its reciprocal and rounds half to even. The scale is at most
1/256 too small and 127 * (1 + 1/256) < 127.5, so no value is ever clamped. ``value * scale * channel`` in float32, in
this order, rounded to bf16, is what a reader gets. Each step is one IEEE operation per value: bytes and states are the
same on every processor. 0.516 of bf16 at D = 576.

Letters: N streams (aux streams, then last), R rows, D target hidden size, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from eyas.errors import StoreError

GROUP_CHANNELS = 64
MAX_VALUE = 127
MIN_SCALE = 2.0**-80
"""Scale of a group of zeros. Nothing here ever becomes subnormal, which processors may flush to zero."""
MAX_SCALE = 2.0**90
MIN_CHANNEL, MAX_CHANNEL = 2.0**-30, 2.0**30
"""Channel scales lie between these, so that no product leaves the range of float32."""
CHUNK_VALUES = 1 << 17
"""Values worked on at a time: what lies in between stays in the processor's cache."""


class Int8Codec:
    """Encodes and decodes pieces of rows; safe in threads.

    Args:
        calibration_ND: Channel scales, float32.

    Raises:
        StoreError: They are no channel scales.
    """

    name = "int8"

    def __init__(self, calibration_ND: torch.Tensor) -> None:
        if calibration_ND.dtype != torch.float32 or calibration_ND.dim() != 2 or not calibration_ND.numel():
            raise StoreError(
                f"calibration is {calibration_ND.dtype} of shape {tuple(calibration_ND.shape)}, expected float32 [N, D]"
            )
        bad_ND = ~((calibration_ND >= MIN_CHANNEL) & (calibration_ND <= MAX_CHANNEL))
        if bad_ND.any():
            stream, channel = bad_ND.nonzero()[0].tolist()
            raise StoreError(
                f"calibration: scale {float(calibration_ND[stream, channel])} of channel {channel} of stream {stream}, "
                f"expected {MIN_CHANNEL:.3g} to {MAX_CHANNEL:.3g}",
                "the shard's calibration is damaged: `make verify` lists all damage",
            )
        self._channels_ND = calibration_ND.contiguous()
        self._inverse_ND = self._channels_ND.reciprocal()

    def encode(self, rows_RD: torch.Tensor, stream: int) -> memoryview:
        """Bytes of one piece.

        Args:
            rows_RD: bf16, finite.
            stream: Which channel scales hold: 0 to A - 1 for the aux streams, A for last.

        Raises:
            StoreError: A value is not finite, or so large that it would not be on the way back.
        """
        R, D = rows_RD.shape
        inverse_D = self._inverse_ND[stream]
        data = torch.empty(piece_bytes(R, D), dtype=torch.uint8)
        values_RD = data[: R * D].view(torch.int8).view(R, D)
        scales_RG = torch.empty(R, num_groups(D), dtype=torch.bfloat16)
        step = max(1, CHUNK_VALUES // D)
        scaled_RD, magnitudes_RD = torch.empty(min(step, R), D), torch.empty(min(step, R), D)
        for begin in range(0, R, step):
            chunk = slice(begin, min(begin + step, R))
            x_RD, abs_RD = scaled_RD[: chunk.stop - begin], magnitudes_RD[: chunk.stop - begin]
            x_RD.copy_(rows_RD[chunk]).mul_(inverse_D)
            torch.abs(x_RD, out=abs_RD)
            for groups, x_RGC, abs_RGC in zip(_group_slices(D), _groups(x_RD), _groups(abs_RD), strict=True):
                rounded_RG = abs_RGC.amax(-1).div_(MAX_VALUE).clamp_(min=MIN_SCALE).bfloat16()
                scales_RG[chunk, groups] = rounded_RG
                x_RGC.mul_(rounded_RG.float().reciprocal_().unsqueeze(-1))
            values_RD[chunk].copy_(x_RD.round_())
        largest = float(scales_RG.max())
        if not largest <= MAX_SCALE:
            raise StoreError(
                f"states of stream {stream} are too large for codec int8: a group's scale is {largest:.3g}, "
                f"expected at most {MAX_SCALE:.3g}",
                "look at the target and its dtype, or set extract.codec to blosc2 in params.yaml",
            )
        data[R * D :].copy_(scales_RG.view(-1).view(torch.uint8))
        return data.numpy().data

    def decode(self, data: memoryview, rows_RD: torch.Tensor, stream: int) -> int:
        """Fill the rows of one piece.

        Args:
            data: Begins with the piece.
            rows_RD: Contiguous bf16 that the states are written to.
            stream: As in ``encode``.

        Returns:
            Bytes of the piece.

        Raises:
            ValueError: There are fewer bytes than the rows need.
        """
        R, D = rows_RD.shape
        num_bytes, channels_D = piece_bytes(R, D), self._channels_ND[stream]
        if len(data) < num_bytes:
            raise ValueError(f"a piece of {R} rows of {D} takes {num_bytes:,} bytes, {len(data):,} are left")
        piece = torch.frombuffer(_writable(data[:num_bytes]), dtype=torch.uint8)
        values_RD = piece[: R * D].view(torch.int8).view(R, D)
        scales_RG = piece[R * D :].clone().view(torch.bfloat16).view(R, num_groups(D)).float()
        step = max(1, CHUNK_VALUES // D)
        scaled_RD = torch.empty(min(step, R), D)
        for begin in range(0, R, step):
            chunk = slice(begin, min(begin + step, R))
            x_RD = scaled_RD[: chunk.stop - begin].copy_(values_RD[chunk])
            for groups, x_RGC in zip(_group_slices(D), _groups(x_RD), strict=True):
                x_RGC.mul_(scales_RG[chunk, groups].unsqueeze(-1))
            rows_RD[chunk].copy_(x_RD.mul_(channels_D))
        return num_bytes


def num_groups(hidden_size: int) -> int:
    """Groups of a row; the last one may be shorter."""
    return -(-hidden_size // GROUP_CHANNELS)


def piece_bytes(num_rows: int, hidden_size: int) -> int:
    """Encoded bytes of rows of one stream."""
    return num_rows * (hidden_size + 2 * num_groups(hidden_size))


def _group_slices(hidden_size: int) -> Iterator[slice]:
    """Which groups are whole, then the shorter last one."""
    whole = hidden_size // GROUP_CHANNELS
    if whole:
        yield slice(0, whole)
    if hidden_size % GROUP_CHANNELS:
        yield slice(whole, whole + 1)


def _groups(x_RD: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views [R, G, channels of a group] of the whole groups, then of the shorter last one."""
    D = x_RD.shape[1]
    whole = D - D % GROUP_CHANNELS
    if whole:
        yield x_RD[:, :whole].unflatten(1, (-1, GROUP_CHANNELS))
    if whole < D:
        yield x_RD[:, whole:].unsqueeze(1)


def _writable(data: memoryview) -> memoryview | bytearray:
    """Torch takes only writable memory as it lies; what a reader read is writable."""
    return bytearray(data) if data.readonly else data
