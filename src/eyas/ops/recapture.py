"""Capturing the damaged samples of a shard again, and writing it with the intact ones as they are stored.

Letters: T tokens, A aux streams, D target hidden size, N streams with ``last``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from eyas import console
from eyas.contracts import CapturePlan, PlannedShard, ShardEntry, ShardManifest, TokenSample
from eyas.engines.base import Engine
from eyas.engines.calibrate import calibrate
from eyas.engines.checks import check_captured
from eyas.errors import CaptureError, StoreError
from eyas.rows import stored_rows
from eyas.shards.blosc import tensor_bytes
from eyas.shards.calibration import FILE_NAME, read_calibration
from eyas.shards.codecs import make_codec
from eyas.shards.encode import EncodedSample, Encoder
from eyas.shards.format import (
    CALIBRATED_CODECS,
    CALIBRATION,
    KINDS,
    STATE_KINDS,
    ShardHeader,
    block_name,
    shard_facts,
)
from eyas.shards.opening import open_entry, open_shard
from eyas.shards.reader import read_encoded
from eyas.shards.spool import Spool
from eyas.shards.verify import Finding, set_scales
from eyas.shards.writer import check_tokens, stored_sample, token_blocks, write_shard


class Recapture:
    """Writes damaged shards anew below a staging folder.

    Args:
        states: The states folder with the damaged files.
        home: The working folder, ``.eyas``.
        staging: Where the new ones go, under the same paths.
        manifest: Of the set.
        plan: Of the set; None when it is not at hand, which the first shard refuses.
        tokens: The token dataset by sample id.
        open_engine: Gives the open engine; called when there is something to capture.
    """

    def __init__(
        self,
        states: Path,
        home: Path,
        staging: Path,
        manifest: ShardManifest,
        plan: CapturePlan | None,
        tokens: Mapping[str, TokenSample],
        open_engine: Callable[[], Engine],
    ) -> None:
        self._states, self._home, self._staging = states, home, staging
        self._manifest, self._plan = manifest, plan
        self._tokens, self._open_engine = tokens, open_engine
        self._failed = {sample.sample_id for sample in manifest.failed}

    def shard(self, entry: ShardEntry, damage: Sequence[Finding]) -> tuple[ShardEntry, int]:
        """Write one shard; gives its entry and the number of samples that were captured.

        When keeping the samples that no finding names does not give the manifest's hash, all are captured.

        Raises:
            StoreError: The shard cannot be captured again here.
            CaptureError: The engine gave no usable states of a sample.
        """
        planned = self._planned(entry)
        stored = [s.sample_id for s in planned.samples if s.sample_id not in self._failed]
        named = {finding.sample_id for finding in damage if finding.sample_id} & set(stored)
        header = self._usable_header(entry, stored)
        # A whole header and no sample named: what is wrong lies outside the samples, and their blocks will do.
        bad = named if header is not None else set(stored)
        written = self._write(planned, header, bad)
        if written.md5 != entry.md5 and len(bad) < len(stored):
            console.log(f"repair: {entry.path}: samples that were not named differ too; all are captured again")
            bad = set(stored)
            written = self._write(planned, None, bad)
        return written, len(bad)

    def _planned(self, entry: ShardEntry) -> PlannedShard:
        if self._manifest.schema_version == 1:
            raise StoreError(
                f"{entry.path} is of format version 1, which is read and no longer written",
                "`dvc fetch` and `make repair` when a remote has it; otherwise extract anew",
            )
        if self._plan is None:
            raise StoreError(
                f"data/plan.json is not the plan of the states {self._manifest.identity}: the batches of {entry.path} "
                "are unknown",
                "`dvc checkout data/plan.json` at the commit that extracted them",
            )
        planned = next((shard for shard in self._plan.shards if shard.path == entry.path), None)
        if planned is None:
            raise StoreError(
                f"{entry.path} is in the manifest and not in the plan of the same states: one of them was edited",
                "`dvc checkout --force data/hidden_states.json data/plan.json`",
            )
        found = ((s.sample_id, self._tokens.get(s.sample_id)) for s in planned.samples)
        check_tokens(planned, {name: len(sample.input_ids) for name, sample in found if sample is not None})
        return planned

    def _usable_header(self, entry: ShardEntry, stored: Sequence[str]) -> ShardHeader | None:
        """The damaged file's header, when it is whole and lists what was planned."""
        try:
            header = open_entry(self._states, entry, self._manifest)
        except StoreError:
            return None
        return header if [sample.sample_id for sample in header.samples] == list(stored) else None

    def _write(self, planned: PlannedShard, header: ShardHeader | None, bad: set[str]) -> ShardEntry:
        capture = self._manifest.capture
        samples = [self._tokens[s.sample_id] for s in planned.samples if s.sample_id not in self._failed]
        calibration_ND = self._scales_ND
        blocks: dict[str, Sequence[memoryview]] = {}
        if calibration_ND is not None:
            blocks[CALIBRATION] = [tensor_bytes(calibration_ND)]
        rows = []
        with Encoder(make_codec(capture.codec, calibration_ND)) as encoder:
            captured = self._capture(planned, bad, encoder)
            for i, sample in enumerate(samples):
                if sample.sample_id in captured:
                    encoded = captured[sample.sample_id]
                    found = token_blocks(sample) | {kind: encoded.block(kind) for kind in STATE_KINDS}
                    rows.append(encoded.rows.counts)
                else:
                    assert header is not None
                    found = self._stored_blocks(header, i)
                    rows.append(header.rows[i])
                blocks |= {block_name(i, kind): pieces for kind, pieces in found.items()}
        facts = shard_facts(capture, planned.path, self._manifest.hidden_size)
        return write_shard(self._staging, facts, [stored_sample(s) for s in samples], rows, blocks)

    def _stored_blocks(self, header: ShardHeader, index: int) -> dict[str, list[memoryview]]:
        """An intact sample's blocks, byte by byte as they are stored."""
        shard = header.facts.shard
        with open_shard(self._states / shard, shard) as fd:
            return {kind: [tensor_bytes(read_encoded(fd.number, header, index, kind))] for kind in KINDS}

    def _capture(self, planned: PlannedShard, bad: set[str], encoder: Encoder) -> dict[str, EncodedSample]:
        """Run the planned batches that hold damaged samples, whole, so that the numerics are those of before."""
        capture = self._manifest.capture
        encoded: dict[str, EncodedSample] = {}
        for batch in planned.batches:
            if not bad & {sample.sample_id for sample in batch}:
                continue
            samples = [self._tokens[sample.sample_id] for sample in batch]
            for captured in self._open_engine().capture(samples):
                if captured.sample_id not in bad:
                    continue
                sample = self._tokens[captured.sample_id]
                check_captured(captured, sample, len(capture.boundaries), self._manifest.hidden_size)
                rows = stored_rows(sample.loss_mask, capture.last_rows)
                encoded[captured.sample_id] = encoder.encode(captured.aux_TAD, captured.last_TD, rows)
        lost = sorted(bad - encoded.keys())
        if lost:
            raise CaptureError(
                f"{planned.path}: the engine gave no states of sample {lost[0]} ({len(lost)} such)",
                "the messages above say why; the damaged file is still in place",
            )
        return encoded

    @functools.cached_property
    def _scales_ND(self) -> torch.Tensor | None:
        """The set's channel scales [N, D]: a shard's, the spool's, or made again; None for a codec without.

        Raises:
            StoreError: They do not come out as they were.
        """
        manifest = self._manifest
        if manifest.capture.codec not in CALIBRATED_CODECS:
            return None
        scales_ND = set_scales(self._states, manifest)
        if scales_ND is None:
            scales_ND = self._spooled_scales()
        return self._scales_made_again() if scales_ND is None else scales_ND

    def _spooled_scales(self) -> torch.Tensor | None:
        """Scales in the spool that an extraction did not get to remove."""
        manifest = self._manifest
        path = Spool(self._home, manifest.capture).folder / FILE_NAME
        try:
            found = read_calibration(path, manifest.identity, (len(manifest.boundaries) + 1, manifest.hidden_size))
        except StoreError:
            return None
        return found.scales_ND if found.digest == manifest.calibration else None

    def _scales_made_again(self) -> torch.Tensor:
        plan = self._plan
        assert plan is not None, "without a plan no shard gets here"
        console.log("repair: no shard holds the set's channel scales whole: they are made again from the plan's slice")
        spool = Spool(self._staging, self._manifest.capture)
        calibration = calibrate(plan, self._tokens, self._open_engine(), spool, None)
        assert calibration is not None
        if calibration.digest != self._manifest.calibration:
            raise StoreError(
                f"no shard holds the set's channel scales whole, and made again they are {calibration.digest}, "
                f"the manifest says {self._manifest.calibration}; the damaged files are still in place",
                "`dvc fetch` and `make repair` when a remote has them; otherwise extract anew",
            )
        return calibration.scales_ND
