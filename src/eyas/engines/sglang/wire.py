"""What the plugin inside a server and the collector beside it say to each other; standard library only.

    collector ── connects ──▶ Unix socket of the plugin (scheduler process, TP rank 0)
    plugin    ── Hello ─────▶ what runs there
    collector ── Attach ────▶ the arena: a file in shared memory, laid out in slots by the collector
    plugin    ── Attached or Refused
    collector ── HTTP ──────▶ server: a request whose rid names its slot
    plugin    ── Piece ─────▶ rows that lie in the slot now, with their checksum; one for each prefill chunk
    collector ── Ping ──────▶ plugin ── Pong ──▶ : is the scheduler's process alive

One JSON object a line, both ways. The rid is all that the plugin knows of a request, so it keeps no state: it writes
where the rid says, inside the arena, or nothing at all. The collector alone gives out slots, and sends no request
before it has one: memory is bounded by admission, and the plugin never waits.

Letters: T tokens of the sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = 1
SOCKET_VARIABLE = "EYAS_CAPTURE_SOCKET"
"""Path of the plugin's socket; without it the plugin does nothing."""
LAYERS_VARIABLE = "EYAS_CAPTURE_LAYERS"
"""JSON list of layer ids in SGLang's own spelling, see ``engines.boundaries``."""
ALIGN = 4096
VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """How the states of one sample lie in a slot: aux [T,A,D], then last [T,D], then ids [T] int32."""

    num_aux: int
    hidden_size: int
    dtype: str

    @property
    def aux_row_bytes(self) -> int:
        """Of one token's aux states."""
        return self.num_aux * self.last_row_bytes

    @property
    def last_row_bytes(self) -> int:
        """Of one token's last state."""
        return self.hidden_size * VALUE_BYTES[self.dtype]

    def slot_bytes(self, num_tokens: int) -> int:
        """Of a whole sample, a multiple of ``ALIGN``."""
        used = num_tokens * (self.aux_row_bytes + self.last_row_bytes + ID_BYTES)
        return -(-used // ALIGN) * ALIGN

    def ranges(self, offset: int, num_tokens: int, prefix: int, rows: int) -> tuple[tuple[int, int], ...]:
        """(begin, end) bytes in the arena of a piece's aux, last and ids."""
        aux, last = offset, offset + num_tokens * self.aux_row_bytes
        ids = last + num_tokens * self.last_row_bytes
        parts = ((aux, self.aux_row_bytes), (last, self.last_row_bytes), (ids, ID_BYTES))
        return tuple((at + prefix * width, at + (prefix + rows) * width) for at, width in parts)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one attempt at one sample goes; its ``rid`` is what the server is given."""

    nonce: str
    """Of this attachment: 16 hex digits."""
    offset: int
    num_tokens: int
    attempt: int
    """Counts up within an attachment, so that no two requests share a rid."""

    @property
    def rid(self) -> str:
        """The request id."""
        return f"eyas-{self.nonce}-{self.offset:x}-{self.num_tokens:x}-{self.attempt:x}"


_RID = re.compile(r"eyas-([0-9a-f]{16})-([0-9a-f]{1,15})-([0-9a-f]{1,8})-([0-9a-f]{1,8})")


def parse_rid(rid: object) -> Slot | None:
    """The slot that a request id names; None for everybody else's requests (warm-up, health checks, other clients)."""
    found = _RID.fullmatch(rid) if isinstance(rid, str) else None
    return None if found is None else Slot(found[1], int(found[2], 16), int(found[3], 16), int(found[4], 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First line of the plugin: what runs there."""

    protocol: int
    pid: int
    sglang: str
    torch: str
    device: str
    model_path: str
    model_class: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: str
    boundaries: list[int]
    """Read back from the model: what it will really copy."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Those that preflight looks at, by SGLang's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """First line of the collector."""

    protocol: int
    arena: str
    """Path of the shared memory file."""
    arena_bytes: int
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The arena is mapped (and pinned, on a GPU): requests may be sent."""

    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No attachment; the reason is for people. The plugin closes the connection."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows ``prefix`` to ``prefix + rows`` of a request; they lie in the arena, or ``problem`` says why not."""

    rid: str
    prefix: int
    rows: int
    xxh3: str = ""
    """Of the bytes of the piece's aux, last and ids, in this order, 16 hex digits."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Are you alive?"""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Yes; ``num_pieces`` were captured in all and ``num_waiting`` of them are not handed over yet."""

    number: int
    num_pieces: int
    num_waiting: int


Message = Hello | Attach | Attached | Refused | Piece | Ping | Pong
_KINDS = {kind.__name__.lower(): kind for kind in (Hello, Attach, Attached, Refused, Piece, Ping, Pong)}


class WireError(ValueError):
    """A line that is none of ours: another version of eyas, or another program."""


def to_line(message: Message) -> bytes:
    """One line with its newline."""
    plain = {"kind": type(message).__name__.lower(), **dataclasses.asdict(message)}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """The message of a line.

    Raises:
        WireError: It is no message of this protocol.
    """
    try:
        plain = json.loads(line)
        return _KINDS[plain.pop("kind")](**plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"{line[:200]!r} is no message of eyas' capture plugin") from error
