"""Writing one shard: samples arrive in any order, bytes come out in the order of the plan.

Held in memory: the states of the one shard in the making. Checksums and md5 are taken from the very
buffers that are written; the file appears whole under its name or not at all.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas import fs
from eyas.contracts import CaptureIdentity, FailedSample, PlannedShard, ShardEntry, StoredSample, TokenSample
from eyas.errors import CaptureError, StoreError
from eyas.shards.format import block_name, checksum, lay_out, pack_header, shard_facts, tensor_bytes


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
    """

    def __init__(
        self, planned: PlannedShard, capture: CaptureIdentity, hidden_size: int, tokens: Mapping[str, TokenSample]
    ) -> None:
        self._planned, self._capture, self._hidden_size = planned, capture, hidden_size
        self._tokens = tokens
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        self._failed: dict[str, FailedSample] = {}

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of planned samples that neither arrived nor failed, in stored order."""
        return tuple(
            s.sample_id
            for s in self._planned.samples
            if s.sample_id not in self._states and s.sample_id not in self._failed
        )

    @property
    def failed(self) -> tuple[FailedSample, ...]:
        """Failed samples in stored order."""
        return tuple(self._failed[s.sample_id] for s in self._planned.samples if s.sample_id in self._failed)

    def add(self, sample_id: str, input_ids_T: torch.Tensor, aux_TAD: torch.Tensor, last_TD: torch.Tensor) -> None:
        """Take one sample's states: ids int32, states bf16, one row per token.

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
        loss_mask_T = torch.tensor(sample.loss_mask, dtype=torch.uint8)
        self._states[sample_id] = {kind: _owned(t) for kind, t in (*given.items(), ("loss_mask", loss_mask_T))}

    def fail(self, sample_id: str, reason: str) -> None:
        """List an awaited sample as failed; it will not be stored."""
        assert sample_id in self.missing, sample_id
        num_tokens = len(self._tokens[sample_id].input_ids)
        self._failed[sample_id] = FailedSample(sample_id=sample_id, num_tokens=num_tokens, reason=reason)

    def write(self, folder: Path) -> FinishedShard:
        """Write the shard below ``folder`` and give back the states' memory.

        Raises:
            DiskError: The volume is full; nothing appears under the shard's name.
        """
        assert not self.missing, self.missing
        samples = [
            stored_sample(self._tokens[s.sample_id]) for s in self._planned.samples if s.sample_id in self._states
        ]
        entry = self._write_file(folder, samples) if samples else None
        self._states.clear()
        return FinishedShard(path=self._planned.path, entry=entry, failed=self.failed)

    def _write_file(self, folder: Path, samples: list[StoredSample]) -> ShardEntry:
        buffers = {
            block_name(i, kind): tensor_bytes(tensor)
            for i, sample in enumerate(samples)
            for kind, tensor in self._states[sample.sample_id].items()
        }
        facts = shard_facts(self._capture, self._planned.path, self._hidden_size)
        header = pack_header(facts, samples, {name: checksum(data) for name, data in buffers.items()})
        order = lay_out([s.num_tokens for s in samples], len(facts.boundaries), self._hidden_size)
        md5, size_bytes = hashlib.md5(usedforsecurity=False), 0
        with fs.atomic_writer(folder / self._planned.path) as handle:
            for data in (header, *(buffers[block.name] for block in order)):
                handle.write(data)
                md5.update(data)
                size_bytes += len(data)
        return ShardEntry(
            path=self._planned.path,
            size_bytes=size_bytes,
            md5=md5.hexdigest(),
            num_samples=len(samples),
            num_tokens=sum(sample.num_tokens for sample in samples),
        )


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


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and not a view that keeps a whole padded batch in memory."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def check_tokens(planned: PlannedShard, tokens: Mapping[str, TokenSample]) -> None:
    """Check that the dataset holds every sample of a planned shard at its planned length.

    Raises:
        StoreError: A sample is absent or has another length.
    """
    for sample in planned.samples:
        found = tokens.get(sample.sample_id)
        if found is None or len(found.input_ids) != sample.num_tokens:
            what = "not in the token dataset" if found is None else f"{len(found.input_ids)} tokens there"
            raise StoreError(
                f"{planned.path}: sample {sample.sample_id} of {sample.num_tokens} tokens is {what}",
                "the plan is of other tokens: run `make plan`",
            )
