"""The shard file: a safetensors file whose header is canonical and guards itself (docs/formats/shards.md).

Everything here is layout; no file is opened. Bytes are a pure function of content: the header is
canonical JSON, and a parsed header is accepted only if packing it again gives the same bytes.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from eyas.canonical import canonical_json, from_plain
from eyas.contracts import CaptureIdentity, StoredSample
from eyas.errors import StoreError

FORMAT = "eyas-shard"
VERSION = "1"
CODEC = "raw"
LENGTH_BYTES = 8
ALIGNMENT_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors readers."""
NO_CHECKSUM = "0" * 16
DTYPES = {"BF16": torch.bfloat16, "I32": torch.int32, "U8": torch.uint8}
ITEM_BYTES = {"BF16": 2, "I32": 4, "U8": 1}

assert sys.byteorder == "little", "shards hold little-endian numbers as they lie in memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What is the same for all samples of a shard."""

    identity: str
    shard: str
    boundaries: tuple[int, ...]
    final_hidden: str
    hidden_size: int
    codec: str = CODEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One tensor's place: ``begin`` and ``end`` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """A parsed header. ``data_start`` is the file offset of the first block."""

    facts: ShardFacts
    samples: tuple[StoredSample, ...]
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
    )


def block_name(index: int, kind: str) -> str:
    """Tensor name of a sample's block; kind is input_ids, aux, last or loss_mask."""
    return f"{index:06d}.{kind}"


def lay_out(lengths: Sequence[int], num_aux: int, hidden_size: int) -> tuple[Block, ...]:
    """Blocks of a shard in file order, for samples of ``lengths`` tokens."""
    wanted: list[tuple[str, str, tuple[int, ...]]] = []
    wanted += [(block_name(i, "input_ids"), "I32", (n,)) for i, n in enumerate(lengths)]
    for i, n in enumerate(lengths):
        wanted.append((block_name(i, "aux"), "BF16", (n, num_aux, hidden_size)))
        wanted.append((block_name(i, "last"), "BF16", (n, hidden_size)))
    wanted += [(block_name(i, "loss_mask"), "U8", (n,)) for i, n in enumerate(lengths)]
    blocks, begin = [], 0
    for name, dtype, shape in wanted:
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        blocks.append(Block(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
        begin = end
    return tuple(blocks)


def pack_header(facts: ShardFacts, samples: Sequence[StoredSample], checksums: Mapping[str, str]) -> bytes:
    """Length and JSON header, padded: everything before the first block."""
    blocks = lay_out([sample.num_tokens for sample in samples], len(facts.boundaries), facts.hidden_size)
    tensors = {b.name: {"dtype": b.dtype, "shape": b.shape, "data_offsets": [b.begin, b.end]} for b in blocks}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "identity": facts.identity,
        "shard": facts.shard,
        "codec": facts.codec,
        "boundaries": canonical_json(facts.boundaries),
        "final_hidden": facts.final_hidden,
        "samples": canonical_json(list(samples)),
        "xxh3": canonical_json(dict(checksums)),
        "header_xxh3": NO_CHECKSUM,
    }
    unsigned = _pad(canonical_json({"__metadata__": metadata, **tensors}).encode())
    metadata["header_xxh3"] = checksum(unsigned)
    signed = _pad(canonical_json({"__metadata__": metadata, **tensors}).encode())
    assert len(signed) == len(unsigned) <= MAX_HEADER_BYTES
    return len(signed).to_bytes(LENGTH_BYTES, "little") + signed


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
        kind, version, codec = metadata["format"], metadata["version"], metadata["codec"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise damaged(where, "its header is no header of an eyas shard") from None
    if kind != FORMAT:
        raise damaged(where, f"format {kind!r}, expected {FORMAT!r}")
    if (version, codec) != (VERSION, CODEC):
        raise StoreError(
            f"{where}: format version {version!r} with codec {codec!r}, this eyas reads {VERSION!r} with {CODEC!r}",
            "use the eyas that wrote it, or extract again",
        )
    try:
        header = _rebuild(metadata, tensors, LENGTH_BYTES + len(raw))
        same = pack_header(header.facts, header.samples, header.checksums)[LENGTH_BYTES:] == raw
    except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError):
        raise damaged(where, "its header lists no samples, checksums or boundaries") from None
    if not same:
        raise damaged(where, "its header does not agree with its own checksum and layout")
    return header


def _rebuild(metadata: dict[str, Any], tensors: dict[str, Any], data_start: int) -> ShardHeader:
    samples = tuple(from_plain(StoredSample, item) for item in json.loads(metadata["samples"]))
    checksums = {str(name): str(value) for name, value in json.loads(metadata["xxh3"]).items()}
    facts = ShardFacts(
        identity=metadata["identity"],
        shard=metadata["shard"],
        boundaries=tuple(int(b) for b in json.loads(metadata["boundaries"])),
        final_hidden=metadata["final_hidden"],
        hidden_size=int(tensors[block_name(0, "last")]["shape"][1]),
    )
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("metadata values are strings")
    if min(len(facts.boundaries), facts.hidden_size, *(sample.num_tokens for sample in samples)) < 1:
        raise ValueError("sizes start at 1")
    blocks = lay_out([sample.num_tokens for sample in samples], len(facts.boundaries), facts.hidden_size)
    if checksums.keys() != {block.name for block in blocks}:
        raise ValueError("one checksum per block")
    return ShardHeader(
        facts=facts,
        samples=samples,
        blocks={block.name: block for block in blocks},
        checksums=checksums,
        data_start=data_start,
    )


def damaged(where: str, what: str) -> StoreError:
    """The error of a shard that cannot be trusted."""
    return StoreError(
        f"{where}: {what}", "`eyas verify` lists all damage; `dvc checkout --force` or a new extraction mends it"
    )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes as they lie in memory, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def checksum(data: bytes | memoryview) -> str:
    """XXH3-64 in 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)
