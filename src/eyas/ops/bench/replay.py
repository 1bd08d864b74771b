"""Real states played back: what the benches of the store feed it with, at the speed of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from eyas import fs
from eyas.contracts import CapturePlan, EngineFacts, ShardEntry, ShardManifest, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.base import CapturedSample
from eyas.errors import StoreError
from eyas.plan.build import build_plan
from eyas.shards.reader import ShardReader, StoredStates

NEEDED = "run `make extract` first; the benches of the store replay real states"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """States in memory as an engine hands them over, their tokens, and a plan for them."""

    states: dict[str, CapturedSample]
    tokens: dict[str, TokenSample]
    plan: CapturePlan

    def planned_as(self, **changes: object) -> Source:
        """The same states under another plan: codec, shard size and so on."""
        capture = dataclasses.replace(self.plan.capture, **changes)
        lengths = [(sample_id, len(sample.input_ids)) for sample_id, sample in self.tokens.items()]
        return Source(self.states, self.tokens, build_plan(lengths, capture, self.plan.hidden_size))

    def joined(self, num_tokens: int) -> Source:
        """Neighbouring samples put together until each has ``num_tokens``: real rows, in samples of another length."""
        states, tokens = {}, {}
        for group in self._groups(num_tokens):
            parts = [self.states[sample_id] for sample_id in group]
            sample = dataclasses.replace(
                self.tokens[group[0]],
                input_ids=tuple(i for sample_id in group for i in self.tokens[sample_id].input_ids),
                loss_mask=tuple(i for sample_id in group for i in self.tokens[sample_id].loss_mask),
            )
            tokens[group[0]] = sample
            states[group[0]] = CapturedSample(
                group[0],
                torch.cat([part.input_ids_T for part in parts]),
                torch.cat([part.aux_TAD for part in parts]),
                torch.cat([part.last_TD for part in parts]),
            )
        return Source(states, tokens, self.plan).planned_as()

    def _groups(self, num_tokens: int) -> Iterator[list[str]]:
        group: list[str] = []
        for sample_id in self.states:
            group.append(sample_id)
            if sum(len(self.tokens[member].input_ids) for member in group) >= num_tokens:
                yield group
                group = []
        if group:
            yield group


def manifest(root: Path) -> ShardManifest:
    """The manifest of a repository's states, which must be there, lossless and complete.

    Raises:
        StoreError: They are not.
    """
    path = root / "data/hidden_states.json"
    if not path.exists():
        raise StoreError(f"{path} is missing: nothing to replay", NEEDED)
    found = fs.read_record(ShardManifest, path)
    kept = (found.capture.codec != "int8", found.capture.last_rows)
    if kept != (True, "all"):
        raise StoreError(
            f"the states are stored as {found.capture.codec}, rows {found.capture.last_rows}, expected every row, lossless",
            NEEDED,
        )
    return found


def load(root: Path, num_samples: int | None = None) -> Source:
    """The published states of a repository, or the first samples of each length range of them.

    Raises:
        StoreError: There are none, they are damaged, or rows are missing.
    """
    reader = ShardReader(root / "data/hidden_states", manifest(root))
    every = max(1, len(reader.samples) // (num_samples or len(reader.samples)))
    states, tokens = {}, {}
    for sample in reader.samples[::every][:num_samples]:
        stored = reader.read(sample.sample_id)
        tokens[sample.sample_id] = _token_sample(stored)
        states[sample.sample_id] = CapturedSample(
            sample.sample_id, stored.input_ids_T, stored.aux_TAD.contiguous(), stored.last_TD
        )
    capture = dataclasses.replace(reader.manifest.capture, engine="replay", engine_version="1", codec="blosc2")
    lengths = [(sample_id, len(sample.input_ids)) for sample_id, sample in tokens.items()]
    return Source(states, tokens, build_plan(lengths, capture, reader.manifest.hidden_size))


def _token_sample(stored: StoredStates) -> TokenSample:
    sample = stored.sample
    return TokenSample(
        sample_id=sample.sample_id,
        conversation_id=sample.conversation_id,
        source=sample.source,
        split=sample.split,
        variant=sample.variant,
        input_ids=tuple(stored.input_ids_T.tolist()),
        loss_mask=tuple(stored.loss_mask_T.tolist()),
    )


class ReplayEngine:
    """An engine whose target has run already."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """Nothing is computed ahead."""

    def open(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to give back."""

    def describe(self) -> EngineFacts:
        """As the source's plan names it."""
        capture = self._source.plan.capture
        return EngineFacts(name=capture.engine, version=capture.engine_version, options={}, deterministic=True)

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """The states of every sample of a batch."""
        for sample in batch:
            yield self._source.states[sample.sample_id]

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """Not possible without the target."""
        raise StoreError(f"{len(requests)} prompts to continue, but states are only played back", NEEDED)


def manifest_of(plan: CapturePlan, entries: Sequence[ShardEntry]) -> ShardManifest:
    """The manifest of shards that were written without an extraction."""
    capture = plan.capture
    return ShardManifest(
        identity=plan.identity,
        capture=capture,
        engine=EngineFacts(name=capture.engine, version=capture.engine_version, options={}, deterministic=True),
        hidden_size=plan.hidden_size,
        num_planned_samples=plan.num_samples,
        num_planned_tokens=plan.num_tokens,
        num_stored_samples=plan.num_samples,
        num_stored_tokens=plan.num_tokens,
        stored_bytes=sum(entry.size_bytes for entry in entries),
        shards=tuple(entries),
    )
