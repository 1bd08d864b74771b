"""Writing one shard: samples arrive in any order, bytes come out in the order of the plan.

Held in memory: the encoded blocks of the one shard in the making. Checksums and md5 are taken from the
very buffers that are written; the file appears whole under its name or not at all.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from eyas import fs
from eyas.contracts import CaptureIdentity, FailedSample, PlannedShard, ShardEntry, StoredSample, TokenSample
from eyas.errors import CaptureError, StoreError
from eyas.rows import stored_rows
from eyas.shards.codecs import tensor_bytes
from eyas.shards.encode import EncodedSample, Encoder
from eyas.shards.format import (
    CALIBRATION,
    STATE_KINDS,
    Rows,
    ShardContent,
    ShardFacts,
    block_name,
    lay_out,
    pack_header,
    shard_facts,
)

Blocks = Mapping[str, Sequence[memoryview]]
"""Pieces of every block by tensor name, in stored order."""
Room = Callable[[int], None]
"""Told how many bytes are still to be written, before the first one and then after every few MiB; raises to stop."""
LOOK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """A planned shard that is done: its file (None when every sample failed) and its failures."""

    path: str
    entry: ShardEntry | None
    failed: tuple[FailedSample, ...] = ()


class ShardAssembly:
    """Collects the states of one planned shard and writes it.

    Args:
        planned: The shard's samples and path.
        capture: Identity of the capture.
        hidden_size: D.
        tokens: The token dataset by sample id; must hold every planned sample.
        encoder: Encodes samples as they arrive.
        calibration_ND: Channel scales that a lossy codec stores with every shard.
    """

    def __init__(
        self,
        planned: PlannedShard,
        capture: CaptureIdentity,
        hidden_size: int,
        tokens: Mapping[str, TokenSample],
        encoder: Encoder,
        calibration_ND: torch.Tensor | None = None,
    ) -> None:
        self._planned, self._capture, self._hidden_size = planned, capture, hidden_size
        self._tokens, self._encoder, self._calibration_ND = tokens, encoder, calibration_ND
        self._encoded: dict[str, EncodedSample] = {}
        self._failed: dict[str, FailedSample] = {}

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of planned samples that neither arrived nor failed, in stored order."""
        return tuple(
            s.sample_id
            for s in self._planned.samples
            if s.sample_id not in self._encoded and s.sample_id not in self._failed
        )

    @property
    def failed(self) -> tuple[FailedSample, ...]:
        """Failed samples in stored order."""
        return tuple(self._failed[s.sample_id] for s in self._planned.samples if s.sample_id in self._failed)

    def add(self, sample_id: str, input_ids_T: torch.Tensor, aux_TAD: torch.Tensor, last_TD: torch.Tensor) -> None:
        """Take one sample's states: ids int32, states bf16, one row per token.

        Returns when there is room in memory; the states are encoded meanwhile and must not be changed.

        Raises:
            CaptureError: The sample is not awaited here, or its ids or shapes are not those of the plan.
        """
        if sample_id not in self.missing:
            raise CaptureError(
                f"sample {sample_id} arrived for {self._planned.path}, which does not await it",
                "the engine answered with a foreign sample or twice: report it",
            )
        sample = self._tokens[sample_id]
        num_tokens, num_aux = len(sample.input_ids), len(self._capture.boundaries)
        expected = {
            "input_ids": (torch.int32, (num_tokens,)),
            "aux": (torch.bfloat16, (num_tokens, num_aux, self._hidden_size)),
            "last": (torch.bfloat16, (num_tokens, self._hidden_size)),
        }
        given = {"input_ids": input_ids_T, "aux": aux_TAD, "last": last_TD}
        for kind, tensor in given.items():
            found = (tensor.dtype, tuple(tensor.shape))
            if found != expected[kind]:
                raise CaptureError(f"sample {sample_id}: {kind} is {found}, expected {expected[kind]}")
        if input_ids_T.tolist() != list(sample.input_ids):
            raise CaptureError(f"sample {sample_id}: the engine ran other tokens than the dataset holds")
        rows = stored_rows(sample.loss_mask, self._capture.last_rows)
        self._encoded[sample_id] = self._encoder.encode(aux_TAD, last_TD, rows)

    def fail(self, sample_id: str, reason: str) -> None:
        """List an awaited sample as failed; it will not be stored."""
        assert sample_id in self.missing, sample_id
        num_tokens = len(self._tokens[sample_id].input_ids)
        self._failed[sample_id] = FailedSample(sample_id=sample_id, num_tokens=num_tokens, reason=reason)

    def write(self, folder: Path, room: Room | None = None) -> FinishedShard:
        """Write the shard below ``folder`` and give back the blocks' memory.

        Raises:
            DiskError: The volume is full, or ``room`` says so; nothing appears under the shard's name.
        """
        assert not self.missing, self.missing
        samples = [self._tokens[s.sample_id] for s in self._planned.samples if s.sample_id in self._encoded]
        entry = None
        if samples:
            facts = shard_facts(self._capture, self._planned.path, self._hidden_size)
            rows = [self._encoded[sample.sample_id].rows.counts for sample in samples]
            entry = write_shard(folder, facts, [stored_sample(s) for s in samples], rows, self._blocks(samples), room)
        self._encoded.clear()
        return FinishedShard(path=self._planned.path, entry=entry, failed=self.failed)

    def _blocks(self, samples: Sequence[TokenSample]) -> Blocks:
        blocks: dict[str, Sequence[memoryview]] = {}
        if self._calibration_ND is not None:
            blocks[CALIBRATION] = [tensor_bytes(self._calibration_ND)]
        for i, sample in enumerate(samples):
            blocks |= {block_name(i, kind): pieces for kind, pieces in token_blocks(sample).items()}
            blocks |= {block_name(i, kind): self._encoded[sample.sample_id].block(kind) for kind in STATE_KINDS}
        return blocks


def token_blocks(sample: TokenSample) -> dict[str, list[memoryview]]:
    """Blocks of a sample's ids and mask, by kind."""
    return {
        "input_ids": [tensor_bytes(torch.tensor(sample.input_ids, dtype=torch.int32))],
        "loss_mask": [tensor_bytes(torch.tensor(sample.loss_mask, dtype=torch.uint8))],
    }


def write_shard(
    folder: Path,
    facts: ShardFacts,
    samples: Sequence[StoredSample],
    rows: Sequence[Rows],
    blocks: Blocks,
    room: Room | None = None,
) -> ShardEntry:
    """Write a shard from blocks that are encoded already.

    Args:
        folder: States folder; ``facts.shard`` is the path below it.
        facts: Of the shard.
        samples: In stored order.
        rows: Stored rows of each sample.
        blocks: Every block of the layout.
        room: Looks whether the volume has room; nobody looks when None.

    Raises:
        DiskError: The volume is full, or ``room`` says so; nothing appears under the shard's name.
    """
    sizes = {name: sum(piece.nbytes for piece in pieces) for name, pieces in blocks.items()}
    content = ShardContent(samples=tuple(samples), rows=tuple(rows), encoded_bytes=sizes)
    order = lay_out(facts, content)
    wrong = [block.name for block in order if sizes[block.name] != block.end - block.begin]
    assert not wrong, wrong
    header = pack_header(facts, content, {name: _checksum(pieces) for name, pieces in blocks.items()})
    buffers = [memoryview(header), *(piece for block in order for piece in blocks[block.name])]
    # md5 and the disk take turns for no reason: both let go of the interpreter, so they run side by side.
    with ThreadPoolExecutor(1, "shard-md5") as hasher, fs.atomic_writer(folder / facts.shard) as handle:
        md5 = hasher.submit(_md5, buffers)
        fs.write_all(handle, buffers if room is None else _looking(buffers, room))
        digest = md5.result()
    return ShardEntry(
        path=facts.shard,
        size_bytes=sum(buffer.nbytes for buffer in buffers),
        md5=digest,
        num_samples=len(samples),
        num_tokens=sum(sample.num_tokens for sample in samples),
    )


def _looking(buffers: Sequence[memoryview], room: Room) -> Iterator[memoryview]:
    """The buffers as they are written, with a look at the volume now and then."""
    left_bytes = look_at = sum(buffer.nbytes for buffer in buffers)
    for buffer in buffers:
        if left_bytes <= look_at:
            room(left_bytes)
            look_at = left_bytes - LOOK_BYTES
        yield buffer
        left_bytes -= buffer.nbytes


def _checksum(pieces: Sequence[memoryview]) -> str:
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _md5(buffers: Sequence[memoryview]) -> str:
    md5 = hashlib.md5(usedforsecurity=False)
    for buffer in buffers:
        md5.update(buffer)
    return md5.hexdigest()


def stored_sample(sample: TokenSample) -> StoredSample:
    """A token sample as a shard's header lists it."""
    return StoredSample(
        sample_id=sample.sample_id,
        num_tokens=len(sample.input_ids),
        conversation_id=sample.conversation_id,
        source=sample.source,
        split=sample.split,
        variant=sample.variant,
    )


def check_tokens(planned: PlannedShard, lengths: Mapping[str, int]) -> None:
    """Check that the dataset holds every sample of a planned shard at its planned length.

    Args:
        planned: The shard.
        lengths: Number of tokens by sample id, of the dataset.

    Raises:
        StoreError: A sample is absent or has another length.
    """
    for sample in planned.samples:
        found = lengths.get(sample.sample_id)
        if found != sample.num_tokens:
            what = "not in the token dataset" if found is None else f"{found} tokens there"
            raise StoreError(
                f"{planned.path}: sample {sample.sample_id} of {sample.num_tokens} tokens is {what}",
                "the plan is of other tokens: run `make plan`",
            )
