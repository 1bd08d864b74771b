"""Hidden states out of a running server into the collector's arena; imported inside the server alone.

    scheduler thread: Tap.capture ── checks, copies (CUDA: queued on a stream of its own) ──▶ queue
    notifier thread:  waits for the copy, hashes, sends the line

The scheduler thread never waits for the device, the disk or the collector: the queue grows by what the collector asked
for and no more, since it sends a request only with a free slot. Whatever goes wrong becomes a line with a problem, or
nothing; it is never raised into serving and never written outside of a slot.

Letters: N rows of a batch (tokens of all its requests), A aux streams, D target hidden size.
"""

from __future__ import annotations

import mmap
import os
import queue
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from eyas.engines.sglang import wire

Send = Callable[[wire.Message], None]
_HOST_REGISTER_PORTABLE = 1


class Refusal(Exception):  # noqa: N818 - it is an answer, not an error
    """An attachment that cannot be; the text is for people."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One EXTEND batch as the logits processor gets it. Rows of its requests follow each other."""

    rids: Sequence[str]
    num_rows: Sequence[int]
    """Of each request in this batch."""
    prefixes: Sequence[int]
    """Rows of each request that earlier batches computed."""
    ids_N: torch.Tensor
    aux: Sequence[torch.Tensor] | torch.Tensor | None
    """[N,D] for each stream, or all of them in one [N,A*D]: SGLang does either, by model."""
    last_ND: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows ``begin`` to ``end`` of a batch, and the bytes of the arena that they go to."""

    piece: wire.Piece
    begin: int
    end: int
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Handed:
    """What the notifier gets: rows that lie in the arena once ``copied`` has happened."""

    rows: Sequence[_Rows]
    copied: torch.cuda.Event | None


class Arena:
    """The collector's shared memory, mapped here; pinned if the states come from a CUDA device.

    Raises:
        Refusal: No such file, too small, or not wholly allocated: a write into a hole of a full /dev/shm would kill
            the server.
    """

    def __init__(self, path: str, num_bytes: int, device: torch.device) -> None:
        self._map = _map_file(path, num_bytes)
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._device = device
        self.pinned = device.type == "cuda"
        if self.pinned:
            with torch.cuda.device(device):
                cudart: Any = torch.cuda.cudart()
                _cuda_check(cudart.cudaHostRegister(self.tensor.data_ptr(), num_bytes, _HOST_REGISTER_PORTABLE))

    def view(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Bytes of the arena as a flat tensor."""
        return self.tensor[begin:end].view(dtype)

    def xxh3(self, ranges: Sequence[tuple[int, int]]) -> str:
        """Of these bytes one after the other; other threads run meanwhile."""
        state = xxhash.xxh3_64()
        for begin, end in ranges:
            state.update(self.bytes[begin:end])
        return state.hexdigest()

    def close(self) -> None:
        """Unpin and unmap; no copy may be outstanding."""
        if self.pinned:
            with torch.cuda.device(self._device):
                cudart: Any = torch.cuda.cudart()
                _cuda_check(cudart.cudaHostUnregister(self.tensor.data_ptr()))
        # The mapping ends with its last reference.
        del self.tensor, self.bytes, self._map


def _map_file(path: str, num_bytes: int) -> mmap.mmap:
    try:
        with Path(path).open("r+b") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or num_bytes < 1 or found.st_size < num_bytes:
                raise Refusal(f"{path} has {found.st_size} bytes, expected a file of {num_bytes}")
            if found.st_blocks * 512 < num_bytes:
                raise Refusal(f"{path} has holes: only {found.st_blocks * 512} of {num_bytes} bytes are allocated")
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise Refusal(f"{path} cannot be mapped: {error.strerror}") from error


def _cuda_check(status: Any) -> None:
    if int(status) != 0:
        raise Refusal(
            f"the arena cannot be pinned: CUDA error {int(status)}; it has to lie in /dev/shm, and the container may limit "
            f"locked memory"
        )


class Attachment:
    """One collector: its arena, and the thread that tells it what lies there."""

    def __init__(self, arena: Arena, nonce: str, send: Send, stream: torch.cuda.Stream | None) -> None:
        self.arena = arena
        self.nonce = nonce
        self.num_pieces = 0
        self.num_told = 0
        self._send = send
        self._stream = stream
        self._handed: queue.SimpleQueue[_Handed | None] = queue.SimpleQueue()
        threading.Thread(target=self._notify, name="eyas-notifier", daemon=True).start()

    def hand(self, rows: Sequence[_Rows], copied: torch.cuda.Event | None = None) -> None:
        """Queue lines; returns at once."""
        self.num_pieces += len(rows)
        self._handed.put(_Handed(rows, copied))

    def close(self) -> None:
        """Let the notifier finish what is outstanding and unmap the arena; returns at once."""
        self._handed.put(None)

    def _notify(self) -> None:
        while (handed := self._handed.get()) is not None:
            if handed.copied is not None:
                handed.copied.synchronize()
            for rows in handed.rows:
                self._tell(rows)
                self.num_told += 1
        if self._stream is not None:  # a batch that failed half-way has no event
            self._stream.synchronize()
        self.arena.close()

    def _tell(self, rows: _Rows) -> None:
        piece = rows.piece
        if not piece.problem:
            xxh3 = self.arena.xxh3(rows.ranges)
            piece = wire.Piece(rid=piece.rid, prefix=piece.prefix, rows=piece.rows, xxh3=xxh3)
        try:
            self._send(piece)
        except OSError:
            return  # the collector is gone: its own thread sees that too, and closes this attachment


class Tap:
    """Copies the rows of the attached collector's requests into its arena."""

    def __init__(self, layout: wire.Layout, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._attachment: Attachment | None = None
        # Held while a batch is copied and while an attachment begins or ends, never across a wait.
        self._lock = threading.Lock()

    def attach(self, request: wire.Message, send: Send) -> Attachment:
        """Map a collector's arena.

        Raises:
            Refusal: Another collector is attached, the arena is unusable, or this is no request to attach.
        """
        if not isinstance(request, wire.Attach):
            raise Refusal(f"{type(request).__name__} before Attach")
        if request.protocol != wire.PROTOCOL:
            raise Refusal(
                f"the collector speaks protocol {request.protocol}, expected {wire.PROTOCOL}: two versions of eyas"
            )
        with self._lock:
            taken = self._attachment is not None
        if taken:
            raise Refusal("another collector is attached")
        arena = Arena(request.arena, request.arena_bytes, self._device)
        with self._lock:
            if self._attachment is None:
                self._attachment = Attachment(arena, request.nonce, send, self._stream)
                return self._attachment
        arena.close()
        raise Refusal("another collector is attached")

    def detach(self, attachment: Attachment) -> None:
        """Copy nothing more for this collector; its arena is unmapped once outstanding copies are done."""
        with self._lock:
            self._attachment = None
        attachment.close()

    def capture(self, batch: Prefill) -> None:
        """Copy the rows of own requests; returns before a CUDA device has done so."""
        with self._lock:
            attachment = self._attachment
            if attachment is None:
                return
            rows = self._own_rows(batch, attachment)
            if not rows:
                return
            problem = self._problem(batch)
            if problem:
                attachment.hand([_with_problem(each, problem) for each in rows])
                return
            sound = [each for each in rows if not each.piece.problem]
            try:
                copied = self._copy(batch, sound, attachment.arena)
            except RuntimeError as error:  # torch's: out of memory, a shape that no check foresaw
                attachment.hand([_with_problem(each, f"copy failed: {error}") for each in rows])
                return
            attachment.hand(rows, copied)

    def _own_rows(self, batch: Prefill, attachment: Attachment) -> list[_Rows]:
        found, begin = [], 0
        for rid, num_rows, prefix in zip(batch.rids, batch.num_rows, batch.prefixes, strict=False):
            end = begin + num_rows
            slot = wire.parse_rid(rid)
            if slot is not None and slot.nonce == attachment.nonce:
                found.append(self._placed(rid, slot, begin, end, prefix, len(attachment.arena.bytes)))
            begin = end
        return found

    def _placed(self, rid: str, slot: wire.Slot, begin: int, end: int, prefix: int, arena_bytes: int) -> _Rows:
        num_rows = end - begin
        problem = ""
        if slot.offset % wire.ALIGN or slot.offset + self.layout.slot_bytes(slot.num_tokens) > arena_bytes:
            problem = (
                f"slot at {slot.offset} of {slot.num_tokens} tokens is not inside the arena of {arena_bytes} bytes"
            )
        elif num_rows < 1 or prefix < 0 or prefix + num_rows > slot.num_tokens:
            problem = f"rows {prefix} to {prefix + num_rows} of a sample of {slot.num_tokens} tokens"
        piece = wire.Piece(rid=rid, prefix=prefix, rows=num_rows, problem=problem)
        ranges = () if problem else self.layout.ranges(slot.offset, slot.num_tokens, prefix, num_rows)
        return _Rows(piece, begin, end, ranges)

    def _problem(self, batch: Prefill) -> str:
        """Why no row of this batch can be trusted; empty if all is well."""
        num_rows, num_aux, hidden_size = sum(batch.num_rows), self.layout.num_aux, self.layout.hidden_size
        packed = isinstance(batch.aux, torch.Tensor)
        streams: list[torch.Tensor] = [batch.aux] if packed else list(batch.aux or ())  # pyright: ignore[reportAssignmentType]
        width = hidden_size * num_aux if packed else hidden_size
        if len(streams) != (1 if packed else num_aux):
            return f"{len(streams)} aux streams, expected {num_aux}"
        if not len(batch.rids) == len(batch.num_rows) == len(batch.prefixes):
            return f"{len(batch.rids)} requests, {len(batch.num_rows)} lengths, {len(batch.prefixes)} prefixes"
        expected = [(num_rows, width)] * len(streams) + [(num_rows, hidden_size), (num_rows,)]
        for tensor, shape in zip([*streams, batch.last_ND, batch.ids_N], expected, strict=True):
            if tuple(tensor.shape) != shape:
                return f"a tensor of {list(tensor.shape)}, expected {list(shape)}"
        dtypes = {str(tensor.dtype) for tensor in (*streams, batch.last_ND)}
        return "" if dtypes == {str(self._dtype)} else f"states of {sorted(dtypes)}, expected {self._dtype}"

    def _copy(self, batch: Prefill, rows: Sequence[_Rows], arena: Arena) -> torch.cuda.Event | None:
        if self._stream is None:
            self._copy_rows(batch, rows, arena)
            return None
        # Aux states belong to nobody else once the tap has them. The last state and the ids may lie in buffers that the
        # next batch overwrites: they are copied in the order of the computation.
        own = Prefill(
            batch.rids,
            batch.num_rows,
            batch.prefixes,
            batch.ids_N.to(torch.int32, copy=True),
            batch.aux,
            batch.last_ND.clone(),
        )
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            self._copy_rows(own, rows, arena)
            copied.record()
        streams = [own.aux] if isinstance(own.aux, torch.Tensor) else own.aux or ()
        for tensor in (*streams, own.last_ND, own.ids_N):
            tensor.record_stream(self._stream)
        return copied

    def _copy_rows(self, batch: Prefill, rows: Sequence[_Rows], arena: Arena) -> None:
        for each in rows:
            aux, last, ids = each.ranges
            span = slice(each.begin, each.end)
            shape = (each.end - each.begin, self.layout.num_aux, self.layout.hidden_size)
            aux_RAD = arena.view(*aux, self._dtype).view(shape)
            if isinstance(batch.aux, torch.Tensor):
                aux_RAD.copy_(batch.aux[span].view(shape), non_blocking=True)
            elif self._stream is None:
                torch.stack([stream_ND[span] for stream_ND in batch.aux or ()], dim=1, out=aux_RAD)
            else:  # allocated and freed on the side stream: one piece's bytes at a time, whatever the batch
                aux_RAD.copy_(torch.stack([stream_ND[span] for stream_ND in batch.aux or ()], dim=1), non_blocking=True)
            arena.view(*last, self._dtype).view(-1, shape[2]).copy_(batch.last_ND[span], non_blocking=True)
            arena.view(*ids, torch.int32).copy_(batch.ids_N[span], non_blocking=True)


def _with_problem(rows: _Rows, problem: str) -> _Rows:
    piece = rows.piece
    told = wire.Piece(rid=piece.rid, prefix=piece.prefix, rows=piece.rows, problem=piece.problem or problem)
    return _Rows(told, rows.begin, rows.end)
