"""Encoding samples on all cores: states → pieces, with a bound on what waits in memory.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from eyas import config
from eyas.rows import StoredRows
from eyas.shards.codecs import Codec, pieces

TASK_BYTES = 4 << 20
"""Pieces are handed to threads in groups of about this many bytes of states."""
WAITING_BYTES = 256 << 20
"""States that wait to be encoded; a producer that is ahead of this waits."""

Piece = tuple[torch.Tensor, int]
"""Rows of one stream (a view) and the stream's number."""


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample's state blocks, by kind, as pieces that are ready or in the making."""

    rows: StoredRows
    blocks: dict[str, list[Future[list[memoryview]]]]

    def block(self, kind: str) -> list[memoryview]:
        """Pieces of one block in stored order; waits for them."""
        return [piece for group in self.blocks[kind] for piece in group.result()]


class Encoder:
    """Encodes samples in threads. Memory: ``WAITING_BYTES`` of states, or one sample if that is larger.

    Threads: ``EYAS_ENCODE_THREADS``, by default five of eight cores: the engine's own processes, md5 and the disk want
    the others.

    Args:
        codec: Of the capture.

    Use as a context manager: leaving it ends the threads.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        num_threads = config.knob("EYAS_ENCODE_THREADS", max(1, config.cores() * 5 // 8))
        self._pool = ThreadPoolExecutor(num_threads, "shard-encoder")
        self._waiting_bytes = 0
        self._room = threading.Condition()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def encode(self, aux_TAD: torch.Tensor, last_TD: torch.Tensor, rows: StoredRows) -> EncodedSample:
        """Start to encode the stored rows of one sample; waits while too much is waiting."""
        aux_AUD = aux_TAD[: rows.num_aux].transpose(0, 1)
        is_whole = len(rows.last_L) == len(last_TD)
        last_LD = last_TD if is_whole else last_TD[torch.from_numpy(rows.last_L)]
        blocks = {
            "aux": self._submit(_pieces(aux_AUD, 0)),
            "last": self._submit(_pieces(last_LD[None], len(aux_AUD))),
        }
        return EncodedSample(rows, blocks)

    def _submit(self, block: Sequence[Piece]) -> list[Future[list[memoryview]]]:
        return [self._submit_group(group) for group in _groups(block)]

    def _submit_group(self, group: Sequence[Piece]) -> Future[list[memoryview]]:
        num_bytes = sum(rows_RD.nbytes for rows_RD, _ in group)
        with self._room:
            self._room.wait_for(lambda: not self._waiting_bytes or self._waiting_bytes + num_bytes <= WAITING_BYTES)
            self._waiting_bytes += num_bytes
        future = self._pool.submit(lambda: [self.codec.encode(rows, stream) for rows, stream in group])
        future.add_done_callback(lambda _: self._release(num_bytes))
        return future

    def _release(self, num_bytes: int) -> None:
        with self._room:
            self._waiting_bytes -= num_bytes
            self._room.notify_all()


def _pieces(states_NRD: torch.Tensor, first_stream: int) -> list[Piece]:
    N, R, D = states_NRD.shape
    return [(states_NRD[n, first:last], first_stream + n) for n, first, last in pieces(N, R, D)]


def _groups(block: Sequence[Piece]) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    num_bytes = TASK_BYTES
    for piece in block:
        if num_bytes >= TASK_BYTES:
            groups.append([])
            num_bytes = 0
        groups[-1].append(piece)
        num_bytes += piece[0].nbytes
    return groups
