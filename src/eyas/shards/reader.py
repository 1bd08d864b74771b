"""Reading shards: manifest → headers → blocks of one sample, every block against its checksum.

Nothing is mapped or cached but headers: a read takes the sample's bytes with ``pread`` into fresh
memory and decodes them straight into the tensors it hands out, so a reader is safe in threads and costs
one sample of memory per read.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.contracts import ShardEntry, ShardManifest, StoredSample
from eyas.errors import StoreError
from eyas.rows import stored_rows
from eyas.shards.account import check_account
from eyas.shards.blosc import tensor_bytes
from eyas.shards.calibration import Calibration
from eyas.shards.codecs import Codec, RawCodec, decode_block, make_codec
from eyas.shards.format import (
    CALIBRATION,
    DTYPES,
    LENGTH_BYTES,
    STATE_KINDS,
    Block,
    ShardHeader,
    block_name,
    checksum,
    damaged,
    header_length,
    parse_header,
)


@dataclass(frozen=True, slots=True)
class StoredStates:
    """One sample as stored: input_ids_T int32, loss_mask_T uint8, aux_TAD bf16, last_TD bf16 post-norm.

    Under ``last_rows: trained`` not every row is there: rows of aux_TAD from ``num_aux_rows`` on are zeros,
    which nothing may depend on; rows of last_TD that ``has_last_T`` (bool) does not name are NaN, so that a
    wrong read is loud. aux_TAD is a view of [A, T, D] memory.
    """

    sample: StoredSample
    input_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    aux_TAD: torch.Tensor
    last_TD: torch.Tensor
    num_aux_rows: int
    has_last_T: torch.Tensor


class ShardReader:
    """Random access by sample to a published set of shards.

    Opening reads every header (kilobytes each) and checks sizes, identity and counts against the
    manifest. Folders are never listed: what the manifest does not name does not exist.

    Args:
        folder: The states folder.
        manifest: Its manifest.

    Raises:
        StoreError: A shard is missing, short, foreign, damaged or contradicts the manifest.
    """

    def __init__(self, folder: Path, manifest: ShardManifest) -> None:
        self.folder, self.manifest = Path(folder), manifest
        check_account(manifest)
        self._places: dict[str, tuple[ShardHeader, int]] = {}
        self._codecs: dict[str, Codec] = {}
        for entry in manifest.shards:
            header = open_entry(self.folder, entry, manifest)
            for index, sample in enumerate(header.samples):
                if sample.sample_id in self._places:
                    raise damaged(entry.path, f"sample {sample.sample_id} occurs twice in the set")
                self._places[sample.sample_id] = (header, index)

    @property
    def samples(self) -> tuple[StoredSample, ...]:
        """All stored samples in manifest order."""
        return tuple(header.samples[index] for header, index in self._places.values())

    def shard_of(self, sample_id: str) -> str:
        """Path of the shard that holds a sample.

        Raises:
            StoreError: The sample is not stored.
        """
        return self._place(sample_id)[0].facts.shard

    def read(self, sample_id: str) -> StoredStates:
        """One sample with its states, every block checked.

        Raises:
            StoreError: The sample is not stored, or a block of it is damaged.
        """
        header, index = self._place(sample_id)
        with open_shard(self.folder / header.facts.shard, header.facts.shard) as fd:
            return read_sample(fd.number, header, index, self._codec(fd.number, header))

    def read_tokens(self, sample_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Only ``input_ids_T`` int32 and ``loss_mask_T`` uint8 of a sample, checked; no states are read.

        Raises:
            StoreError: The sample is not stored, or a block of it is damaged.
        """
        header, index = self._place(sample_id)
        with open_shard(self.folder / header.facts.shard, header.facts.shard) as fd:
            return read_tokens(fd.number, header, index)

    def _place(self, sample_id: str) -> tuple[ShardHeader, int]:
        if sample_id not in self._places:
            raise StoreError(
                f"sample {sample_id} is not among the {len(self._places):,} stored samples",
                "`eyas verify` lists what is stored; failed samples are in data/hidden_states.json",
            )
        return self._places[sample_id]

    def _codec(self, fd: int, header: ShardHeader) -> Codec:
        # All shards of a set have one calibration; each is read once.
        shard = header.facts.shard if CALIBRATION in header.blocks else ""
        if shard not in self._codecs:
            check_scales(fd, header, self.manifest)
            self._codecs[shard] = shard_codec(fd, header)
        return self._codecs[shard]


class open_shard:  # noqa: N801 - used like the built-in open
    """An open file descriptor of a shard as a context; a missing file is a ``StoreError``."""

    def __init__(self, path: Path, where: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise damaged(where, f"cannot be opened: {error.strerror}") from None

    def __enter__(self) -> open_shard:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)


def read_header(path: Path, where: str) -> tuple[ShardHeader, int]:
    """Parsed header and size in bytes of a shard file.

    Raises:
        StoreError: The file is missing, or is no whole shard.
    """
    with open_shard(path, where) as fd:
        size_bytes = os.fstat(fd.number).st_size
        prefix = _pread(fd.number, min(LENGTH_BYTES, size_bytes), 0, where)
        length = header_length(bytes(prefix.numpy()), size_bytes, where)
        raw = bytes(_pread(fd.number, length, LENGTH_BYTES, where).numpy())
    header = parse_header(raw, where)
    if header.size_bytes != size_bytes:
        raise damaged(where, f"{size_bytes:,} bytes, its header describes {header.size_bytes:,}")
    return header, size_bytes


def open_entry(folder: Path, entry: ShardEntry, manifest: ShardManifest) -> ShardHeader:
    """Header of one published shard, checked against the manifest.

    Raises:
        StoreError: The shard is missing, short, foreign, in another's place, or its counts differ.
    """
    header, size_bytes = read_header(folder / entry.path, entry.path)
    check_identity(header, manifest.identity, entry.path)
    facts = header.facts
    counts = (size_bytes, len(header.samples), sum(sample.num_tokens for sample in header.samples))
    expected = (entry.size_bytes, entry.num_samples, entry.num_tokens)
    if counts != expected:
        raise damaged(entry.path, f"(bytes, samples, tokens) are {counts}, the manifest says {expected}")
    capture = manifest.capture
    shape = (facts.boundaries, facts.final_hidden, facts.hidden_size, facts.codec, facts.last_rows)
    planned = (manifest.boundaries, capture.final_hidden, manifest.hidden_size, capture.codec, capture.last_rows)
    if shape != planned:
        names = "(boundaries, norm, hidden size, codec, rows)"
        raise damaged(entry.path, f"{names} are {shape}, the manifest says {planned}")
    return header


def check_identity(header: ShardHeader, identity: str, path: str) -> None:
    """Refuse a shard of another capture and a shard in another's place.

    Raises:
        StoreError: Both identities or both paths are named.
    """
    if header.facts.identity != identity:
        raise StoreError(
            f"{path} belongs to another capture: identity {header.facts.identity}, expected {identity}",
            "move that file away; shards of two captures never mix",
        )
    if header.facts.shard != path:
        raise damaged(path, f"holds the shard {header.facts.shard}: files changed places")


def shard_codec(fd: int, header: ShardHeader) -> Codec:
    """The codec of a shard, with the channel scales that the shard itself holds.

    Raises:
        StoreError: They are damaged.
    """
    return make_codec(header.facts.codec, read_scales(fd, header))


def read_scales(fd: int, header: ShardHeader) -> torch.Tensor | None:
    """Channel scales [N, D] float32 of an open shard, checked; None when its codec has none.

    Raises:
        StoreError: They are damaged.
    """
    if CALIBRATION not in header.blocks:
        return None
    block = header.blocks[CALIBRATION]
    return _shaped(_read_checked(fd, header, block, f"{header.facts.shard}: {CALIBRATION}"), block)


def check_scales(fd: int, header: ShardHeader, manifest: ShardManifest) -> None:
    """Refuse an open shard whose channel scales are not those of the set.

    Raises:
        StoreError: Both digests are named.
    """
    scales_ND = read_scales(fd, header)
    found = "" if scales_ND is None else Calibration(scales_ND).digest
    if found != manifest.calibration:
        raise damaged(header.facts.shard, f"its calibration is {found!r}, the manifest says {manifest.calibration!r}")


def read_sample(fd: int, header: ShardHeader, index: int, codec: Codec) -> StoredStates:
    """One sample of an open shard, every block checked.

    Raises:
        StoreError: A block is damaged, or rows of the states are not those that its mask asks for.
    """
    sample, facts = header.samples[index], header.facts
    input_ids_T, loss_mask_T = read_tokens(fd, header, index)
    places_L = None if facts.last_rows == "all" else _places(header, index, loss_mask_T)
    aux_ATD, last_TD = _read_states(fd, header, index, codec)
    has_last_T = torch.ones(sample.num_tokens, dtype=torch.bool)
    if places_L is not None:
        has_last_T = torch.zeros_like(has_last_T).index_fill_(0, places_L, True)
        last_LD, last_TD = last_TD, last_TD.new_full((sample.num_tokens, facts.hidden_size), float("nan"))
        last_TD.index_copy_(0, places_L, last_LD)
    return StoredStates(
        sample=sample,
        input_ids_T=input_ids_T,
        loss_mask_T=loss_mask_T,
        aux_TAD=aux_ATD.transpose(0, 1),
        last_TD=last_TD,
        num_aux_rows=header.rows[index][0],
        has_last_T=has_last_T,
    )


def _places(header: ShardHeader, index: int, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """Which rows of last are stored, checked against the counts of the header."""
    rows = stored_rows(loss_mask_T.numpy(), "trained")
    if rows.counts != header.rows[index]:
        where = f"{header.facts.shard}: sample {header.samples[index].sample_id}"
        raise damaged(where, f"{header.rows[index]} rows of (aux, last), its loss mask gives {rows.counts}")
    return torch.from_numpy(rows.last_L)


def read_tokens(fd: int, header: ShardHeader, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids_T`` int32 and ``loss_mask_T`` uint8 of a sample of an open shard, checked.

    Raises:
        StoreError: A block is damaged.
    """
    input_ids_T, loss_mask_T = (_read_small(fd, header, index, kind) for kind in ("input_ids", "loss_mask"))
    return input_ids_T, loss_mask_T


def _read_small(fd: int, header: ShardHeader, index: int, kind: str) -> torch.Tensor:
    block, where = _block(header, index, kind), _where(header, index, kind)
    data = bytearray(block.end - block.begin)
    _pread_into(fd, memoryview(data), header.data_start + block.begin, where)
    _check(data, header, block, where)
    return torch.frombuffer(data, dtype=DTYPES[block.dtype])


def _read_states(fd: int, header: ShardHeader, index: int, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Aux as [A, T, D], zeros behind the stored rows, and the stored rows of last as [L, D]."""
    facts, (aux_rows, last_rows) = header.facts, header.rows[index]
    T, num_aux, D = header.samples[index].num_tokens, len(facts.boundaries), facts.hidden_size
    if isinstance(codec, RawCodec):
        aux, last = (
            _shaped(read_encoded(fd, header, index, kind), _block(header, index, kind)) for kind in STATE_KINDS
        )
        aux_AUD = aux.transpose(0, 1) if facts.version == "1" else aux
        return (aux_AUD if aux_rows == T else torch.cat([aux_AUD, aux.new_zeros(num_aux, T - aux_rows, D)], 1)), last
    # The two blocks of a sample lie side by side: one read, into memory that this thread keeps.
    places = {kind: _block(header, index, kind) for kind in STATE_KINDS}
    begin, size = places["aux"].begin, places["last"].end - places["aux"].begin
    data = _scratch(size)
    _pread_into(fd, data, header.data_start + begin, _where(header, index, "states"))
    try:
        aux_ATD = torch.empty((num_aux, T, D), dtype=torch.bfloat16)
        last_LD = torch.empty((last_rows, D), dtype=torch.bfloat16)
    except RuntimeError:  # torch's word for no memory; the sizes are the header's
        raise damaged(_where(header, index, "states"), f"[{num_aux}, {T}, {D}] states do not fit memory") from None
    if aux_rows < T:
        aux_ATD[:, aux_rows:] = 0
    outs = {"aux": (aux_ATD[:, :aux_rows], 0), "last": (last_LD[None], num_aux)}
    for kind, (out_NRD, first_stream) in outs.items():
        block, where = places[kind], _where(header, index, kind)
        encoded = data[block.begin - begin : block.end - begin]
        _check(encoded, header, block, where)
        try:
            decode_block(codec, encoded, out_NRD, first_stream)
        except ValueError as error:
            raise damaged(where, f"its bytes are no {facts.codec} block: {error}") from None
    return aux_ATD, last_LD


_LOCAL = threading.local()


def _scratch(num_bytes: int) -> memoryview:
    """This thread's buffer for encoded bytes: one sample large, its pages are touched once and not per read."""
    buffer: memoryview | None = getattr(_LOCAL, "buffer", None)
    if buffer is None or len(buffer) < num_bytes:
        buffer = _LOCAL.buffer = memoryview(bytearray(num_bytes))
    return buffer[:num_bytes]


def _block(header: ShardHeader, index: int, kind: str) -> Block:
    return header.blocks[block_name(index, kind)]


def _where(header: ShardHeader, index: int, kind: str) -> str:
    return f"{header.facts.shard}: sample {header.samples[index].sample_id}: {kind}"


def read_encoded(fd: int, header: ShardHeader, index: int, kind: str) -> torch.Tensor:
    """A block of one sample as it is stored, uint8, checked against its checksum.

    Raises:
        StoreError: The file ends early or the bytes differ from what was written.
    """
    return _read_checked(fd, header, _block(header, index, kind), _where(header, index, kind))


def _read_checked(fd: int, header: ShardHeader, block: Block, where: str) -> torch.Tensor:
    data = _pread(fd, block.end - block.begin, header.data_start + block.begin, where)
    _check(tensor_bytes(data), header, block, where)
    return data


def _check(data: memoryview | bytearray, header: ShardHeader, block: Block, where: str) -> None:
    found, expected = checksum(data), header.checksums[block.name]
    if found != expected:
        raise damaged(where, f"checksum {found}, expected {expected}")


def _shaped(data: torch.Tensor, block: Block) -> torch.Tensor:
    return data.view(DTYPES[block.dtype]).view(block.shape)


def _pread(fd: int, num_bytes: int, offset: int, where: str) -> torch.Tensor:
    data = torch.empty(num_bytes, dtype=torch.uint8)
    _pread_into(fd, tensor_bytes(data), offset, where)
    return data


def _pread_into(fd: int, data: memoryview, offset: int, where: str) -> None:
    done = 0
    while done < len(data):
        try:
            count = os.preadv(fd, [data[done:]], offset + done)
        except OSError as error:  # a bad sector, or a folder under a shard's name
            raise damaged(where, f"cannot be read: {error.strerror}") from None
        if count == 0:
            raise damaged(where, f"the file ends {len(data) - done:,} bytes early")
        done += count
