"""How much of deliberate damage is found: by ``verify``, and by a reader that reads the touched samples.

Small sets are written from a repository's own states, one per codec and choice of rows: shards of a few samples, so
that each trial reads a megabyte or two. Two kinds of damage carry new checksums, a new md5 and a manifest that agrees
with them (``..._rewritten``): to a reader such a set is whole, so that only the values can betray it; its count is 0.

Letters: T tokens, A aux streams, D target hidden size, V target vocab.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from eyas import fs
from eyas.contracts import CaptureIdentity, LastRows, ShardEntry, ShardManifest, StoredSample, TokenSample
from eyas.errors import DataError, StoreError
from eyas.ops.verify_states import MANIFEST, STATES, make_against
from eyas.plan.build import build_plan
from eyas.rows import stored_rows
from eyas.shards.calibration import Calibration, make_calibration
from eyas.shards.codecs import make_codec
from eyas.shards.consistency import Score
from eyas.shards.encode import Encoder
from eyas.shards.format import (
    CALIBRATED_CODECS,
    STATE_KINDS,
    ShardContent,
    ShardHeader,
    block_name,
    checksum,
    lay_out,
    pack_header,
)
from eyas.shards.opening import open_entry, open_shard
from eyas.shards.reader import ShardReader, StoredStates
from eyas.shards.verify import Against, check_set, check_shard, incoherent_findings
from eyas.shards.writer import ShardAssembly

SETS: tuple[tuple[str, LastRows], ...] = (("raw", "all"), ("blosc2", "all"), ("blosc2", "trained"), ("int8", "all"))
NUM_SHARDS = 6
PAIRS_PER_SHARD = 2
TRUNCATE_EVERY_BYTES = 4096
Counts = dict[str, dict[str, int]]
Edit = Callable[[StoredStates], StoredStates]


def measure(folder: Path, seed: int, flips: int = 1000) -> Counts:
    """Damage small sets in every way and count what is found.

    Args:
        folder: A repository with states, tokens and its target's files; the sets are written below its ``.eyas``.
        seed: Chooses samples and bits.
        flips: Single-bit flips, shared among the sets.

    Returns:
        Per kind of damage ``tried``, ``found_by_verify`` and ``found_by_reader``.

    Raises:
        DataError: The states hold too few samples of equal length.
    """
    manifest = fs.read_record(ShardManifest, folder / MANIFEST)
    against = make_against(folder, manifest, [])
    assert against.tokens is not None
    states = _choose(ShardReader(folder / STATES, manifest), seed)
    counts: Counts = {}
    work = folder / ".eyas/bench/corruption"
    shutil.rmtree(work, ignore_errors=True)
    for number, (codec, last_rows) in enumerate(SETS):
        capture = dataclasses.replace(manifest.capture, codec=codec, last_rows=last_rows)
        trial = _Trial(work / f"{codec}-{last_rows}", capture, manifest, states, against)
        rng = np.random.default_rng([seed, number])
        share = flips // len(SETS) + (number < flips % len(SETS))
        _add(counts, "flipped_bits", trial.flips(rng, share))
        _add(counts, "truncations", trial.truncations())
        _add(counts, "swapped_shards", trial.swapped_shards())
        for is_rewritten in (False, True):
            suffix = "_rewritten" if is_rewritten else ""
            _add(counts, f"swapped_samples{suffix}", trial.swapped_samples(is_rewritten))
            _add(counts, f"shifted_rows{suffix}", trial.shifted_rows(is_rewritten))
    shutil.rmtree(work)
    return counts


def _add(counts: Counts, kind: str, found: Iterator[tuple[bool, bool]]) -> None:
    into = counts.setdefault(kind, {"tried": 0, "found_by_verify": 0, "found_by_reader": 0})
    for by_verify, by_reader in found:
        into["tried"] += 1
        into["found_by_verify"] += by_verify
        into["found_by_reader"] += by_reader


def _choose(reader: ShardReader, seed: int) -> list[StoredStates]:
    """Pairs of samples of equal length, all rows stored."""
    by_length: dict[int, list[StoredSample]] = {}
    for sample in reader.samples:
        by_length.setdefault(sample.num_tokens, []).append(sample)
    pairs = [pair for same in by_length.values() for pair in zip(same[::2], same[1::2], strict=False)]
    wanted = NUM_SHARDS * PAIRS_PER_SHARD
    if len(pairs) < wanted:
        raise DataError(f"{len(pairs)} pairs of samples of one length are stored, expected {wanted} or more")
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:wanted]
    return [reader.read(sample.sample_id) for number in chosen for sample in pairs[number]]


class _Trial:
    """One small set, and the kinds of damage; after each trial the set is whole again."""

    def __init__(
        self,
        folder: Path,
        capture: CaptureIdentity,
        source: ShardManifest,
        states: Sequence[StoredStates],
        against: Against,
    ) -> None:
        tokens = against.tokens or {}
        self.tokens: Mapping[str, TokenSample] = {s.sample.sample_id: tokens[s.sample.sample_id] for s in states}
        self.against = dataclasses.replace(against, tokens=self.tokens)
        self.checksums_only = dataclasses.replace(self.against, judged=False)
        self.folder, self.scales_ND = folder, None
        if capture.codec in CALIBRATED_CODECS:
            self.scales_ND = make_calibration((s.aux_TAD, s.last_TD) for s in states)
        self.codec = make_codec(capture.codec, self.scales_ND)
        self.manifest = self._write(capture, source, states)
        self.whole = {entry.path: (folder / entry.path).read_bytes() for entry in self.manifest.shards}
        self.scores = self._scores()

    def _write(self, capture: CaptureIdentity, source: ShardManifest, states: Sequence[StoredStates]) -> ShardManifest:
        per_shard = [states[i : i + 2 * PAIRS_PER_SHARD] for i in range(0, len(states), 2 * PAIRS_PER_SHARD)]
        entries = []
        with Encoder(self.codec) as encoder:
            for number, group in enumerate(per_shard):
                lengths = [(s.sample.sample_id, s.sample.num_tokens) for s in group]
                huge = dataclasses.replace(capture, shard_bytes=1 << 62)
                (planned,) = build_plan(lengths, huge, source.hidden_size).shards
                planned = dataclasses.replace(planned, path=f"000/shard-{number:05d}.safetensors")
                assembly = ShardAssembly(planned, capture, source.hidden_size, self.tokens, encoder, self.scales_ND)
                for s in group:
                    assembly.add(s.sample.sample_id, s.input_ids_T, s.aux_TAD.contiguous(), s.last_TD)
                entry = assembly.write(self.folder).entry
                assert entry is not None
                entries.append(entry)
        scales = "" if self.scales_ND is None else Calibration(self.scales_ND).digest
        return dataclasses.replace(_manifest_of(source, capture, entries), calibration=scales)

    def _scores(self) -> dict[str, dict[str, Score]]:
        scores = {}
        for entry in self.manifest.shards:
            checked = check_shard(self.folder, entry, self.manifest, self.against)
            if checked.findings:
                raise DataError(
                    f"the states are damaged before the trial: {checked.findings[0].problem}", "make verify"
                )
            scores[entry.path] = dict(checked.scores)
        return scores

    def flips(self, rng: np.random.Generator, count: int) -> Iterator[tuple[bool, bool]]:
        """Single bits anywhere in a file, header and padding included."""
        for _ in range(count):
            entry = self.manifest.shards[rng.integers(len(self.manifest.shards))]
            bit = int(rng.integers(8 * entry.size_bytes))
            offset, original = bit // 8, self.whole[entry.path][bit // 8]
            with (self.folder / entry.path).open("r+b") as handle:
                os.pwrite(handle.fileno(), bytes([original ^ 1 << bit % 8]), offset)
                yield self._found(entry, self.manifest, self.checksums_only)
                os.pwrite(handle.fileno(), bytes([original]), offset)

    def truncations(self) -> Iterator[tuple[bool, bool]]:
        """The smallest shard cut at every 4 KiB, from its end down to nothing."""
        entry = min(self.manifest.shards, key=lambda entry: entry.size_bytes)
        last = (entry.size_bytes - 1) // TRUNCATE_EVERY_BYTES * TRUNCATE_EVERY_BYTES
        for size in range(last, -1, -TRUNCATE_EVERY_BYTES):
            os.truncate(self.folder / entry.path, size)
            yield self._found(entry, self.manifest, self.checksums_only)
        self._restore(entry)

    def swapped_shards(self) -> Iterator[tuple[bool, bool]]:
        """Two whole files that changed names."""
        for one, other in itertools.combinations(self.manifest.shards, 2):
            for entry, content in ((one, other), (other, one)):
                (self.folder / entry.path).write_bytes(self.whole[content.path])
            by_verify = {finding.shard for finding in check_set(self.folder, self.manifest)[0]} >= {
                one.path,
                other.path,
            }
            yield by_verify, self._reader_refuses(one, self.manifest) and self._reader_refuses(other, self.manifest)
            self._restore(one)
            self._restore(other)

    def swapped_samples(self, is_rewritten: bool) -> Iterator[tuple[bool, bool]]:
        """States of two samples of one length in each other's place: all of them, aux alone, last alone."""
        for entry in self.manifest.shards:
            header = open_entry(self.folder, entry, self.manifest)
            stored = self._blocks(entry, header)
            for pair, kinds in itertools.product(range(PAIRS_PER_SHARD), (STATE_KINDS, ("aux",), ("last",))):
                one, other = self._pair(header, pair)
                changed = dict(stored)
                for kind in kinds:
                    names = block_name(one, kind), block_name(other, kind)
                    changed[names[0]], changed[names[1]] = stored[names[1]], stored[names[0]]
                if header.rows[one] == header.rows[other]:
                    yield self._with_blocks(entry, header, changed, is_rewritten)

    def _pair(self, header: ShardHeader, pair: int) -> tuple[int, int]:
        """Places of the pair's samples; the plan sorts a shard's samples in its own order."""
        by_length: dict[int, list[int]] = {}
        for index, sample in enumerate(header.samples):
            by_length.setdefault(sample.num_tokens, []).append(index)
        pairs = [p for same in by_length.values() for p in zip(same[::2], same[1::2], strict=True)]
        return pairs[pair]

    def shifted_rows(self, is_rewritten: bool) -> Iterator[tuple[bool, bool]]:
        """A sample's stored rows one late or one early: all streams, aux alone, last alone."""
        reader = ShardReader(self.folder, self.manifest)
        for entry in self.manifest.shards:
            header = open_entry(self.folder, entry, self.manifest)
            stored = self._blocks(entry, header)
            for index, way, kinds in itertools.product((0, 1), (1, -1), (STATE_KINDS, ("aux",), ("last",))):
                states = reader.read(header.samples[index].sample_id)
                shifted = self._shifted_blocks(states, way)
                changed = stored | {block_name(index, kind): shifted[kind] for kind in kinds}
                if all(changed[name] == stored[name] for name in changed):
                    continue  # a sample without a stored row
                yield self._with_blocks(entry, header, changed, is_rewritten)

    def _shifted_blocks(self, states: StoredStates, way: int) -> dict[str, bytes]:
        aux_TAD, last_TD = states.aux_TAD.clone(), states.last_TD.clone()
        num_aux, rows = states.num_aux_rows, states.has_last_T.nonzero().flatten()
        aux_TAD[:num_aux] = aux_TAD[_moved(torch.arange(num_aux), way)]
        last_TD[rows] = last_TD[_moved(rows, way)]
        facts = stored_rows(states.loss_mask_T.numpy(), self.manifest.capture.last_rows)
        with Encoder(self.codec) as encoder:
            encoded = encoder.encode(aux_TAD, last_TD, facts)
            return {kind: b"".join(bytes(piece) for piece in encoded.block(kind)) for kind in STATE_KINDS}

    def _blocks(self, entry: ShardEntry, header: ShardHeader) -> dict[str, bytes]:
        with open_shard(self.folder / entry.path, entry.path) as fd:
            return {
                block.name: os.pread(fd.number, block.end - block.begin, header.data_start + block.begin)
                for block in header.blocks.values()
            }

    def _with_blocks(
        self, entry: ShardEntry, header: ShardHeader, blocks: Mapping[str, bytes], is_rewritten: bool
    ) -> tuple[bool, bool]:
        """One trial with other blocks: under the old checksums, or everything rewritten to agree."""
        content = ShardContent(
            samples=header.samples, rows=header.rows, encoded_bytes={name: len(data) for name, data in blocks.items()}
        )
        checksums = {name: checksum(data) for name, data in blocks.items()} if is_rewritten else header.checksums
        order = lay_out(header.facts, content)
        data = pack_header(header.facts, content, checksums) + b"".join(blocks[block.name] for block in order)
        (self.folder / entry.path).write_bytes(data)
        manifest, changed = self.manifest, entry
        if is_rewritten:
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            changed = dataclasses.replace(entry, size_bytes=len(data), md5=md5)
            entries = [changed if e is entry else e for e in manifest.shards]
            manifest = _manifest_of(manifest, manifest.capture, entries)
        found = self._found(changed, manifest, self.against if is_rewritten else self.checksums_only)
        self._restore(entry)
        return found

    def _found(self, entry: ShardEntry, manifest: ShardManifest, against: Against) -> tuple[bool, bool]:
        checked = check_shard(self.folder, entry, manifest, against)
        by_verify = bool(checked.findings)
        if not by_verify and against.judged:
            scores = {k: v for path, known in self.scores.items() if path != entry.path for k, v in known.items()}
            places = dict.fromkeys([*scores, *checked.scores], entry.path)
            by_verify = bool(incoherent_findings(scores | dict(checked.scores), places))
        return by_verify, self._reader_refuses(entry, manifest)

    def _reader_refuses(self, entry: ShardEntry, manifest: ShardManifest) -> bool:
        """Whether reading the shard's samples fails, as a training would read them."""
        try:
            reader = ShardReader(self.folder, _manifest_of(manifest, manifest.capture, [entry]))
            for sample in reader.samples:
                reader.read(sample.sample_id)
        except StoreError:
            return True
        return False

    def _restore(self, entry: ShardEntry) -> None:
        (self.folder / entry.path).write_bytes(self.whole[entry.path])


def _moved(rows: torch.Tensor, way: int) -> torch.Tensor:
    """Row numbers one place on; the end that has no neighbour keeps its own."""
    places = (torch.arange(len(rows)) - way).clamp(0, max(len(rows) - 1, 0))
    return rows[places]


def _manifest_of(source: ShardManifest, capture: CaptureIdentity, entries: Sequence[ShardEntry]) -> ShardManifest:
    """A manifest whose account closes over some shards."""
    num_samples, num_tokens = sum(e.num_samples for e in entries), sum(e.num_tokens for e in entries)
    return dataclasses.replace(
        source,
        identity=capture.digest,
        capture=capture,
        num_planned_samples=num_samples,
        num_planned_tokens=num_tokens,
        num_stored_samples=num_samples,
        num_stored_tokens=num_tokens,
        stored_bytes=sum(entry.size_bytes for entry in entries),
        shards=tuple(entries),
        failed=(),
        schema_version=2,
    )
