"""Reading shards: manifest → headers → blocks of one sample, every block against its checksum.

Nothing is mapped or cached but headers: a read takes the sample's bytes with ``pread`` into fresh
memory and decodes them straight into the tensors it hands out, so a reader is safe in threads and costs
one sample of memory per read.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
    STATE_KINDS,
    Block,
    ShardHeader,
    block_name,
    checksum,
    damaged,
)
from eyas.shards.opening import entry_header, entry_samples, far_entry_samples, open_shard, pread_into
from eyas.shards.shard_cache import ShardCache

Found = TypeVar("Found")
FAR_THREADS = 32
"""Headers asked of a remote at a time."""
HELD_HEADERS = 256
"""A training reads from 32 shards at a time (``batches.order``), its validation from a few more."""


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
    manifest. Folders are never listed: what the manifest does not name does not exist. Of the headers only the
    samples stay in memory, half a GB a million; where their blocks lie is read when a sample of the shard is, and
    kept for the last ``HELD_HEADERS`` shards.

    Args:
        folder: The states folder.
        manifest: Its manifest.
        cache: Where shards come from that do not lie in the folder.

    Raises:
        StoreError: A shard is missing, short, foreign, damaged or contradicts the manifest.
    """

    def __init__(self, folder: Path, manifest: ShardManifest, cache: ShardCache | None = None) -> None:
        self.folder, self.manifest, self._cache = Path(folder), manifest, cache
        check_account(manifest)
        self._held = functools.lru_cache(HELD_HEADERS)(self._open)
        self._codecs: dict[str, Codec] = {}
        self._starts: list[int] = []
        samples: list[StoredSample] = []
        for listed in self._listed():
            self._starts.append(len(samples))
            samples += listed
        self._samples = tuple(samples)
        self._places = {sample.sample_id: place for place, sample in enumerate(samples)}
        if len(self._places) != len(samples):
            self._refuse_twice()

    @property
    def samples(self) -> tuple[StoredSample, ...]:
        """All stored samples in manifest order."""
        return self._samples

    def shard_of(self, sample_id: str) -> str:
        """Path of the shard that holds a sample.

        Raises:
            StoreError: The sample is not stored.
        """
        return self.manifest.shards[self._place(sample_id)[0]].path

    def read(self, sample_id: str) -> StoredStates:
        """One sample with its states, every block checked.

        Raises:
            StoreError: The sample is not stored, or a block of it is damaged.
        """

        def read(fd: int, header: ShardHeader, index: int) -> StoredStates:
            return read_sample(fd, header, index, self._codec(fd, header))

        return self._read(sample_id, read)

    def read_tokens(self, sample_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Only ``input_ids_T`` int32 and ``loss_mask_T`` uint8 of a sample, checked; no states are read.

        Raises:
            StoreError: The sample is not stored, or a block of it is damaged.
        """
        return self._read(sample_id, read_tokens)

    def expect(self, sample_ids: Sequence[str]) -> None:
        """These samples will be read soon: shards that are far away set out."""
        for sample_id in sample_ids if self._cache is not None else ():
            entry = self.manifest.shards[self._place(sample_id)[0]]
            if self._cache is not None and not self._is_here(entry):
                self._cache.expect(entry)

    def _read(self, sample_id: str, read: Callable[[int, ShardHeader, int], Found]) -> Found:
        shard, index = self._place(sample_id)
        entry = self.manifest.shards[shard]
        try:
            with self._file(entry) as fd:
                return read(fd.number, self._held(shard), index)
        except StoreError:
            if self._cache is None or self._is_here(entry):
                raise
        self._cache.drop(entry)  # damaged on this disk: what the remote holds was checked when it arrived
        with self._file(entry) as fd:
            return read(fd.number, self._held(shard), index)

    def _listed(self) -> Iterator[tuple[StoredSample, ...]]:
        """Samples of each shard, in order."""
        if self._cache is None:
            yield from (entry_samples(self.folder, entry, self.manifest) for entry in self.manifest.shards)
            return
        cache = self._cache

        def samples_of(entry: ShardEntry) -> tuple[StoredSample, ...]:
            if self._is_here(entry):
                return entry_samples(self.folder, entry, self.manifest)
            return far_entry_samples(functools.partial(cache.read, entry), entry, self.manifest)

        with ThreadPoolExecutor(FAR_THREADS, "far-headers") as pool:
            yield from pool.map(samples_of, self.manifest.shards)

    def _is_here(self, entry: ShardEntry) -> bool:
        return (self.folder / entry.path).exists()

    def _file(self, entry: ShardEntry) -> open_shard:
        if self._cache is None or self._is_here(entry):
            return open_shard(self.folder / entry.path, entry.path)
        return self._cache.open(entry)

    def _open(self, shard: int) -> ShardHeader:
        entry = self.manifest.shards[shard]
        with self._file(entry) as fd:
            return entry_header(fd.number, entry, self.manifest)

    def _refuse_twice(self) -> None:
        for place, sample in enumerate(self._samples):
            if self._places[sample.sample_id] != place:  # the last one's place stands there
                shard = self.manifest.shards[bisect.bisect_right(self._starts, self._places[sample.sample_id]) - 1]
                raise damaged(shard.path, f"sample {sample.sample_id} occurs twice in the set")

    def _place(self, sample_id: str) -> tuple[int, int]:
        """Number of the shard and of the sample in it."""
        if sample_id not in self._places:
            raise StoreError(
                f"sample {sample_id} is not among the {len(self._places):,} stored samples",
                "`make verify` lists what is stored; failed samples are in data/hidden_states.json",
            )
        place = self._places[sample_id]
        shard = bisect.bisect_right(self._starts, place) - 1
        return shard, place - self._starts[shard]

    def _codec(self, fd: int, header: ShardHeader) -> Codec:
        # All shards of a set have one calibration; each is read once.
        shard = header.facts.shard if CALIBRATION in header.blocks else ""
        if shard not in self._codecs:
            check_scales(fd, header, self.manifest)
            self._codecs[shard] = shard_codec(fd, header)
        return self._codecs[shard]


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
    pread_into(fd, memoryview(data), header.data_start + block.begin, where)
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
    pread_into(fd, data, header.data_start + begin, _where(header, index, "states"))
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


def check_block(fd: int, header: ShardHeader, index: int, kind: str) -> None:
    """Check a block of one sample against its checksum.

    Raises:
        StoreError: The file ends early or the bytes differ from what was written.
    """
    block, where = _block(header, index, kind), _where(header, index, kind)
    data = _scratch(block.end - block.begin)
    pread_into(fd, data, header.data_start + block.begin, where)
    _check(data, header, block, where)


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
    pread_into(fd, tensor_bytes(data), offset, where)
    return data
