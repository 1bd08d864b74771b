"""The shard file: a safetensors file whose header is canonical and guards itself (docs/formats/shards.md).

Everything here is layout; no file is opened. Bytes are a pure function of content: the header is
canonical JSON, and a parsed header is accepted only if packing it again gives the same bytes.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from eyas.canonical import canonical_json, from_plain, plain_json
from eyas.contracts import CaptureIdentity, StoredSample
from eyas.errors import StoreError
from eyas.shards.codecs import CODECS

FORMAT = "eyas-shard"
VERSION = "2"
READABLE = ("1", "2")
"""Version 1 knew the raw codec alone, stored every row, and aux token by token: [T, A, D]."""
CALIBRATION = "calibration"
CALIBRATED_CODECS = ("int8",)
KINDS = ("input_ids", "aux", "last", "loss_mask")
STATE_KINDS = ("aux", "last")
LENGTH_BYTES = 8
ALIGNMENT_BYTES = 8
MAX_HIDDEN_SIZE = 1 << 29
"""Rows of up to 1 GiB: codecs count the bytes of a piece in 31 bits."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors readers."""
IDENTITY = re.compile(r"[0-9a-f]{64}", re.ASCII)
SHARD_PATH = re.compile(r"\d{3,}/shard-\d{5,}\.safetensors", re.ASCII)
"""Both become names of files, and a header may come from anywhere."""
NO_CHECKSUM = "0" * 16
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "U8": torch.uint8}
ITEM_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "U8": 1}

assert sys.byteorder == "little", "shards hold little-endian numbers as they lie in memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What is the same for all samples of a shard."""

    identity: str
    shard: str
    boundaries: tuple[int, ...]
    final_hidden: str
    hidden_size: int
    codec: str
    last_rows: str
    version: str = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One tensor's place: ``begin`` and ``end`` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


Rows = tuple[int, int]
"""Stored rows of one sample: of aux, of last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """What a header says of the blocks: samples, their rows, and the bytes of encoded blocks by name."""

    samples: tuple[StoredSample, ...]
    rows: tuple[Rows, ...]
    encoded_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """A parsed header. ``data_start`` is the file offset of the first block."""

    facts: ShardFacts
    samples: tuple[StoredSample, ...]
    rows: tuple[Rows, ...]
    blocks: Mapping[str, Block]
    checksums: Mapping[str, str]
    data_start: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + max(block.end for block in self.blocks.values())


def shard_facts(capture: CaptureIdentity, shard: str, hidden_size: int) -> ShardFacts:
    """Facts of a shard of one capture."""
    return ShardFacts(
        identity=capture.digest,
        shard=shard,
        boundaries=capture.boundaries,
        final_hidden=capture.final_hidden,
        hidden_size=hidden_size,
        codec=capture.codec,
        last_rows=capture.last_rows,
    )


def block_name(index: int, kind: str) -> str:
    """Tensor name of a sample's block; kind is one of ``KINDS``."""
    return f"{index:06d}.{kind}"


def lay_out(facts: ShardFacts, content: ShardContent) -> tuple[Block, ...]:
    """Blocks of a shard in file order."""
    num_aux, hidden_size = len(facts.boundaries), facts.hidden_size
    wanted: list[tuple[str, str, tuple[int, ...]]] = []
    if facts.codec in CALIBRATED_CODECS:
        wanted.append((CALIBRATION, "F32", (num_aux + 1, hidden_size)))
    wanted += [(block_name(i, "input_ids"), "I32", (s.num_tokens,)) for i, s in enumerate(content.samples)]
    for i, (aux_rows, last_rows) in enumerate(content.rows):
        aux, last = block_name(i, "aux"), block_name(i, "last")
        if facts.codec != "raw":
            wanted += [(name, "U8", (content.encoded_bytes[name],)) for name in (aux, last)]
            continue
        is_first = facts.version == "1"
        wanted.append((aux, "BF16", (aux_rows, num_aux, hidden_size) if is_first else (num_aux, aux_rows, hidden_size)))
        wanted.append((last, "BF16", (last_rows, hidden_size)))
    wanted += [(block_name(i, "loss_mask"), "U8", (s.num_tokens,)) for i, s in enumerate(content.samples)]
    blocks, begin = [], 0
    for name, dtype, shape in wanted:
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        blocks.append(Block(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
        begin = end
    return tuple(blocks)


def pack_header(facts: ShardFacts, content: ShardContent, checksums: Mapping[str, str]) -> bytes:
    """Length and JSON header, padded: everything before the first block."""
    return _pack(facts, content, lay_out(facts, content), checksums)


def _pack(facts: ShardFacts, content: ShardContent, blocks: Sequence[Block], checksums: Mapping[str, str]) -> bytes:
    tensors: dict[str, Any] = {
        b.name: {"dtype": b.dtype, "shape": b.shape, "data_offsets": (b.begin, b.end)} for b in blocks
    }
    metadata = {
        "format": FORMAT,
        "version": facts.version,
        "identity": facts.identity,
        "shard": facts.shard,
        "codec": facts.codec,
        "boundaries": plain_json(facts.boundaries),
        "final_hidden": facts.final_hidden,
        "samples": canonical_json(content.samples),
        "xxh3": plain_json(dict(checksums)),
        "header_xxh3": NO_CHECKSUM,
    }
    if facts.version != "1":
        metadata |= {
            "hidden_size": str(facts.hidden_size),
            "last_rows": facts.last_rows,
            "rows": plain_json(content.rows),
        }
    tensors["__metadata__"] = metadata
    unsigned = _pad(plain_json(tensors).encode())
    # Quotes inside values are escaped, so this stands in the text once; the signature is as long as its place.
    signed = unsigned.replace(_signature(NO_CHECKSUM), _signature(checksum(unsigned)), 1)
    assert len(signed) <= MAX_HEADER_BYTES
    return len(signed).to_bytes(LENGTH_BYTES, "little") + signed


def _signature(digest: str) -> bytes:
    return f'"header_xxh3":"{digest}"'.encode()


def _pad(text: bytes) -> bytes:
    return text + b" " * (-len(text) % ALIGNMENT_BYTES)


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Bytes of the JSON header from the first eight bytes of a file.

    Raises:
        StoreError: The file ends before its header does.
    """
    length = int.from_bytes(prefix, "little") if len(prefix) == LENGTH_BYTES else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise damaged(where, f"{file_bytes:,} bytes that hold no whole header")
    return length


def parse_header(raw: bytes, where: str) -> ShardHeader:
    """Parse and check the JSON header.

    Args:
        raw: The JSON header without its length.
        where: Name of the shard for messages.

    Raises:
        StoreError: It is no shard of this version, or any byte differs from the canonical header.
    """
    try:
        tensors = json.loads(raw)
        metadata = tensors["__metadata__"]
        _check_version(metadata, where)
    except (ValueError, RecursionError, KeyError, TypeError):
        raise _no_header(where) from None
    try:
        header = _rebuild(metadata, tensors, LENGTH_BYTES + len(raw))
        content = ShardContent(samples=header.samples, rows=header.rows, encoded_bytes={})
        same = _pack(header.facts, content, [*header.blocks.values()], header.checksums)[LENGTH_BYTES:] == raw
    except (ValueError, OverflowError, RecursionError, KeyError, TypeError, IndexError, AttributeError):
        raise damaged(where, "its header lists no samples, checksums or boundaries") from None
    if not same:
        raise _disagrees(where)
    return header


def parse_samples(raw: bytes, where: str) -> tuple[ShardFacts, tuple[StoredSample, ...]]:
    """Facts and samples alone, a fifth of the work: the header's checksum is checked, its layout is not looked at.

    Raises:
        StoreError: It is no header of a shard, or not the one that was written.
    """
    begin = raw.find(_METADATA)
    try:
        metadata = json.JSONDecoder().raw_decode(raw[begin + len(_METADATA) :].decode())[0] if begin >= 0 else {}
        _check_version(metadata, where)
        if metadata["version"] == "1":  # its sizes stand in its layout alone
            header = parse_header(raw, where)
            return header.facts, header.samples
        unsigned = raw.replace(_signature(metadata["header_xxh3"]), _signature(NO_CHECKSUM), 1)
        if metadata["header_xxh3"] != checksum(unsigned):
            raise _disagrees(where)
        return _facts(metadata, int(metadata["hidden_size"])), _samples(metadata)
    except (ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError):
        raise _no_header(where) from None


_METADATA = b'"__metadata__":'


def _check_version(metadata: Mapping[str, Any], where: str) -> None:
    kind, version, codec = metadata["format"], metadata["version"], metadata["codec"]
    if kind != FORMAT:
        raise damaged(where, f"format {kind!r}, expected {FORMAT!r}")
    if version not in READABLE or codec not in (CODECS if version == VERSION else ("raw",)):
        raise StoreError(
            f"{where}: format version {version!r} with codec {codec!r}, this eyas reads versions "
            f"{' and '.join(READABLE)} with {', '.join(CODECS)}",
            "use the eyas that wrote it, or extract again",
        )


def _no_header(where: str) -> StoreError:
    return damaged(where, "its header is no header of an eyas shard")


def _disagrees(where: str) -> StoreError:
    return damaged(where, "its header does not agree with its own checksum and layout")


def _rebuild(metadata: dict[str, Any], tensors: dict[str, Any], data_start: int) -> ShardHeader:
    samples, is_first = _samples(metadata), metadata["version"] == "1"
    checksums = {str(name): str(value) for name, value in json.loads(metadata["xxh3"]).items()}
    size = tensors[block_name(0, "last")]["shape"][1] if is_first else metadata["hidden_size"]
    facts = _facts(metadata, int(size))
    rows = tuple((s.num_tokens, s.num_tokens) for s in samples)
    if not is_first:
        rows = tuple((int(aux), int(last)) for aux, last in json.loads(metadata["rows"]))
    if not _rows_fit(rows, samples, facts.last_rows):
        raise ValueError("rows of each sample, at most its tokens")
    content = ShardContent(samples=samples, rows=rows, encoded_bytes=_encoded_bytes(tensors))
    blocks = lay_out(facts, content)
    if checksums.keys() != {block.name for block in blocks}:
        raise ValueError("one checksum per block")
    return ShardHeader(
        facts=facts,
        samples=samples,
        rows=rows,
        blocks={block.name: block for block in blocks},
        checksums=checksums,
        data_start=data_start,
    )


def _facts(metadata: Mapping[str, str], hidden_size: int) -> ShardFacts:
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("metadata values are strings")
    if not IDENTITY.fullmatch(metadata["identity"]) or not SHARD_PATH.fullmatch(metadata["shard"]):
        raise ValueError("an identity has 64 hex digits, a shard lies in a numbered folder")
    facts = ShardFacts(
        identity=metadata["identity"],
        shard=metadata["shard"],
        boundaries=tuple(int(b) for b in json.loads(metadata["boundaries"])),
        final_hidden=metadata["final_hidden"],
        hidden_size=hidden_size,
        codec=metadata["codec"],
        last_rows=metadata["last_rows"] if metadata["version"] != "1" else "all",
        version=metadata["version"],
    )
    if min(len(facts.boundaries), hidden_size) < 1:
        raise ValueError("sizes start at 1")
    if hidden_size > MAX_HIDDEN_SIZE:
        raise ValueError("a row is coded as one piece")
    return facts


def _samples(metadata: Mapping[str, str]) -> tuple[StoredSample, ...]:
    samples = tuple(from_plain(StoredSample, item) for item in json.loads(metadata["samples"]))
    if min((sample.num_tokens for sample in samples), default=0) < 1:
        raise ValueError("sizes start at 1")
    return samples


def _rows_fit(rows: Sequence[Rows], samples: Sequence[StoredSample], last_rows: str) -> bool:
    if len(rows) != len(samples) or last_rows not in ("all", "trained"):
        return False
    if last_rows == "all":
        return all(row == (s.num_tokens, s.num_tokens) for row, s in zip(rows, samples, strict=True))
    return all(0 <= min(row) <= max(row) <= s.num_tokens for row, s in zip(rows, samples, strict=True))


def _encoded_bytes(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of blocks of bytes; a negative or absurd one fails the comparison with the packed header."""
    found = {name: tensor["shape"][0] for name, tensor in tensors.items() if tensor.get("dtype") == "U8"}
    if not all(isinstance(size, int) and size >= 0 for size in found.values()):
        raise ValueError("sizes start at 0")
    return found


def damaged(where: str, what: str) -> StoreError:
    """The error of a shard that cannot be trusted."""
    return StoreError(
        f"{where}: {what}", "`make verify` lists all damage; `dvc checkout --force` or a new extraction mends it"
    )


def checksum(data: bytes | bytearray | memoryview) -> str:
    """XXH3-64 in 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)
