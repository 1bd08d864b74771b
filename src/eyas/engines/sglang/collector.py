"""The collector: the socket to the plugin, pieces put together, states copied out of the arena.

Nothing that the plugin says is believed: rows must follow each other from 0 to the end, each once, their bytes must
give the checksum that they had when they were written, and the ids beside them must be those that were sent.

Letters: T tokens of the sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from eyas.contracts import TokenSample
from eyas.engines.base import CapturedSample
from eyas.engines.checks import check_ids
from eyas.engines.sglang import wire
from eyas.engines.sglang.arena import Arena
from eyas.errors import CaptureError, ServerError

ATTACH_S = 300.0
"""Mapping and pinning an arena of many GiB takes a while."""
RADIX = "the server reuses computed prompts: start it with --disable-radix-cache"


@dataclass(slots=True)
class Pieces:
    """The pieces of one request so far."""

    num_tokens: int
    num_rows: int = 0
    """Rows from 0 on that are there."""
    parts: list[wire.Piece] = field(default_factory=list)
    problem: str = ""
    """The first fault; pieces after it count no more."""

    @property
    def is_complete(self) -> bool:
        """Every row is there."""
        return not self.problem and self.num_rows == self.num_tokens

    def add(self, piece: wire.Piece) -> None:
        """Take the next piece."""
        end = piece.prefix + piece.rows
        if self.problem:
            return
        if piece.problem:
            self.problem = f"the server's plugin: {piece.problem}"
        elif piece.rows < 1 or piece.prefix < 0 or end > self.num_tokens:
            self.problem = f"rows {piece.prefix} to {end} came, expected rows of 0 to {self.num_tokens}"
        elif piece.prefix > self.num_rows:
            self.problem = f"rows {self.num_rows} to {piece.prefix} of {self.num_tokens} are missing"
        elif piece.prefix < self.num_rows:
            self.problem = f"rows {piece.prefix} to {min(end, self.num_rows)} came twice"
        else:
            self.num_rows = end
            self.parts.append(piece)

    def missing(self) -> str:
        """What is wrong with pieces of which no more will come."""
        return self.problem or f"rows {self.num_rows} to {self.num_tokens} of {self.num_tokens} never came"


def take(sample: TokenSample, slot: wire.Slot, pieces: Pieces, layout: wire.Layout, arena: Arena) -> CapturedSample:
    """Copy a complete sample out of its slot, in the server's dtype.

    Raises:
        CaptureError: Bytes are not those that were written, or ids not those that were sent.
    """
    for piece in pieces.parts:
        digest = xxhash.xxh3_64()
        for begin, end in layout.ranges(slot.offset, slot.num_tokens, piece.prefix, piece.rows):
            digest.update(arena.memory[begin:end])
        if digest.hexdigest() != piece.xxh3:
            raise CaptureError(
                f"sample {sample.sample_id}: rows {piece.prefix} to {piece.prefix + piece.rows} have checksum "
                f"{digest.hexdigest()}, {piece.xxh3} when they were written"
            )
    dtype, T = getattr(torch, layout.dtype), slot.num_tokens
    aux, last, ids = layout.ranges(slot.offset, T, 0, T)
    captured = CapturedSample(
        sample_id=sample.sample_id,
        input_ids_T=_copy(arena, ids, torch.int32),
        aux_TAD=_copy(arena, aux, dtype).view(T, layout.num_aux, layout.hidden_size),
        last_TD=_copy(arena, last, dtype).view(T, layout.hidden_size),
    )
    check_ids(f"sample {sample.sample_id}", captured.input_ids_T, sample)
    return captured


def _copy(arena: Arena, span: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    begin, end = span
    return torch.frombuffer(arena.memory, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin).clone()


@dataclass(frozen=True, slots=True)
class Closed:
    """The plugin's connection ended."""

    reason: str


class Link:
    """The connection to a plugin.

    Args:
        path: Its socket.
        heard: Called with every message after the attachment, from the link's own thread.
    """

    def __init__(self, path: Path, heard: Callable[[wire.Message | Closed], None]) -> None:
        self._path, self._heard = path, heard
        self._socket: socket.socket | None = None

    def connect(self) -> wire.Hello | None:
        """Connect and read who is there; None when nobody listens.

        Raises:
            ServerError: It is no plugin of ours, or of another version.
        """
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(ATTACH_S)
        try:
            found.connect(str(self._path))
        except OSError:
            found.close()
            return None
        self._socket = found
        self._lines = found.makefile("rb")
        hello = self._read()
        if isinstance(hello, wire.Refused):
            raise ServerError(f"the server does not capture: {hello.reason}")
        if not isinstance(hello, wire.Hello) or hello.protocol != wire.PROTOCOL:
            raise ServerError(
                f"{self._path}: {hello!r:.200}, expected a capture plugin of protocol {wire.PROTOCOL}",
                "start the server with this version of eyas",
            )
        return hello

    def attach(self, arena: Arena, nonce: str) -> None:
        """Show the plugin the arena, then listen.

        Raises:
            ServerError: The plugin refuses, or does not answer.
        """
        assert self._socket is not None
        self._socket.settimeout(ATTACH_S)
        self.send(wire.Attach(protocol=wire.PROTOCOL, arena=str(arena.path), arena_bytes=arena.num_bytes, nonce=nonce))
        answer = self._read()
        if not isinstance(answer, wire.Attached):
            reason = answer.reason if isinstance(answer, wire.Refused) else repr(answer)
            raise ServerError(f"the server's plugin refuses the arena: {reason}")
        self._socket.settimeout(None)
        threading.Thread(target=self._listen, name="sglang-link", daemon=True).start()

    def send(self, message: wire.Message) -> None:
        """Say something; a connection that is gone is told by ``heard``."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.sendall(wire.to_line(message))

    def close(self) -> None:
        """Hang up; safe to call twice."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _read(self) -> wire.Message:
        try:
            line = self._lines.readline()
            if not line:
                raise ServerError("the server's plugin hung up before the capture began")
            return wire.from_line(line)
        except (OSError, wire.WireError) as error:
            raise ServerError(f"the server's plugin at {self._path}: {error}") from error

    def _listen(self) -> None:
        reason = "it hung up"
        try:
            for line in self._lines:
                self._heard(wire.from_line(line))
        except (OSError, ValueError) as error:  # a WireError is a ValueError, and so is reading what is closed
            reason = str(error)
        self._heard(Closed(reason))


class Pulse:
    """Pings: whether the scheduler's process still answers, and whether all that it captured was handed over."""

    EVERY_S = 5.0
    LIMIT_S = 60.0

    def __init__(self, link: Link) -> None:
        self._link = link
        self._number, self._sent_s = 0, time.monotonic()
        self._answered = 0

    def beat(self, *, now: bool = False) -> None:
        """Send a ping when it is time, or now; never a second one while one is under way."""
        if self._answered == self._number and (now or time.monotonic() - self._sent_s > self.EVERY_S):
            self._number += 1
            self._sent_s = time.monotonic()
            self._link.send(wire.Ping(number=self._number))

    @property
    def next_number(self) -> int:
        """Of the next ping."""
        return self._number + 1

    def heard(self, pong: wire.Pong) -> None:
        """Take an answer."""
        self._answered = max(self._answered, pong.number)

    @property
    def silent_s(self) -> float:
        """How long the last ping waits for its answer."""
        return 0.0 if self._answered == self._number else time.monotonic() - self._sent_s
