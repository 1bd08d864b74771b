"""Verifying shards: everything that can be wrong with stored states, by shard and sample.

``verify_file`` is what a resumed extraction trusts; ``check_set`` and ``check_shard`` are what ``eyas verify`` runs,
the first over all headers, the second in one thread per shard. A shard is read from the disk once, front to back:
a sample's bytes are hashed for the md5 and read again for checksum and values while they are still in memory.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from eyas.contracts import CapturePlan, ShardEntry, ShardManifest, TokenSample
from eyas.errors import StoreError
from eyas.shards.account import check_account
from eyas.shards.blosc import tensor_bytes
from eyas.shards.codecs import Codec
from eyas.shards.consistency import Score, incoherent, judge
from eyas.shards.format import CALIBRATION, KINDS, ShardHeader, block_name, checksum
from eyas.shards.opening import check_identity, open_entry, open_shard, read_header
from eyas.shards.reader import StoredStates, check_block, check_scales, read_sample, read_scales, shard_codec
from eyas.shards.values import row_faults
from eyas.shards.writer import stored_sample

CHUNK_BYTES = 4 << 20
OnBytes = Callable[[int], None]
"""Told of every chunk that was read: progress, rate limit, or an exception to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault. ``shard`` is empty for a fault of the set, ``sample_id`` empty for one of the file."""

    shard: str
    sample_id: str
    problem: str


@dataclass(frozen=True, slots=True)
class ShardCheck:
    """What reading one shard gave; ``scores`` by sample id, of whole samples alone."""

    findings: tuple[Finding, ...]
    scores: Mapping[str, Score] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What a shard's content is compared with; what is None is not compared.

    ``tokens`` is the token dataset by sample id, ``head_VD`` the target's head. ``judged`` is off for states that
    no target gave, such as the fake engine's.
    """

    tokens: Mapping[str, TokenSample] | None = None
    head_VD: torch.Tensor | None = None
    judged: bool = True


def verify_file(path: Path, entry: ShardEntry, identity: str) -> tuple[ShardHeader | None, list[Finding]]:
    """Check one shard file against its entry: size, md5, header, identity, every block's checksum.

    Returns:
        Its header, None when that is damaged, and findings: none when the file is what was written.
    """
    try:
        header, size_bytes = read_header(path, entry.path)
        check_identity(header, identity, entry.path)
    except StoreError as error:
        return None, [_of_file(entry.path, error.message)]
    if size_bytes != entry.size_bytes:
        return header, [_of_file(entry.path, f"{entry.path}: {size_bytes:,} bytes, expected {entry.size_bytes:,}")]
    with open_shard(path, entry.path) as fd:
        check = functools.partial(_damaged_blocks, fd.number, header)
        return header, list(_read_through(fd.number, entry, header, check, None))


def verify(
    folder: Path,
    manifest: ShardManifest,
    tokens: Mapping[str, TokenSample] | None = None,
    head_VD: torch.Tensor | None = None,
) -> list[Finding]:
    """Check a published set, one shard after another: account, files, values, tokens.

    Args:
        folder: The states folder.
        manifest: Its manifest.
        tokens: The token dataset by sample id; ids and masks are compared when it is given.
        head_VD: The target's head; states are judged against the next token when it is given.

    Returns:
        Findings, empty when the set is whole.
    """
    against = Against(tokens=tokens, head_VD=head_VD, judged=head_VD is not None)
    findings, readable = check_set(folder, manifest, tokens)
    scores: dict[str, Score] = {}
    places: dict[str, str] = {}
    for entry in readable:
        checked = check_shard(folder, entry, manifest, against)
        findings += checked.findings
        scores |= checked.scores
        places |= dict.fromkeys(checked.scores, entry.path)
    return findings + incoherent_findings(scores, places)


def check_set(
    folder: Path,
    manifest: ShardManifest,
    tokens: Mapping[str, TokenSample] | None = None,
    plan: CapturePlan | None = None,
) -> tuple[list[Finding], list[ShardEntry]]:
    """Check what needs no state: the account, unlisted files, every header, samples twice or missing.

    Returns:
        Findings, and the entries whose header is whole, so that their content can be read.
    """
    findings: list[Finding] = []
    try:
        check_account(manifest)
    except StoreError as error:
        findings.append(_of_file("", error.message))
    listed = {entry.path for entry in manifest.shards}
    for path in sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()):
        if path not in listed:
            findings.append(_of_file(path, f"{path} is not in the manifest"))
    headers: dict[str, ShardHeader] = {}
    for entry in manifest.shards:
        try:
            headers[entry.path] = open_entry(folder, entry, manifest)
        except StoreError as error:
            findings.append(_of_file(entry.path, error.message))
    findings += _twice(headers)
    findings += _other_scales(headers, set_scales(folder, manifest))
    if plan is not None and plan.identity == manifest.identity:
        findings += _unlike_plan(headers, plan, manifest)
    elif tokens is not None and len(headers) == len(manifest.shards):
        stored = {s.sample_id for header in headers.values() for s in header.samples}
        lost = tokens.keys() - stored - {sample.sample_id for sample in manifest.failed}
        findings += [
            _of_sample("", name, f"sample {name} is neither stored nor listed as failed") for name in sorted(lost)
        ]
    return findings, [entry for entry in manifest.shards if entry.path in headers]


def _twice(headers: Mapping[str, ShardHeader]) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for path, header in headers.items():
        for sample in header.samples:
            if sample.sample_id in seen:
                yield _of_sample(path, sample.sample_id, f"also stored in {seen[sample.sample_id]}")
            seen[sample.sample_id] = path


def set_scales(folder: Path, manifest: ShardManifest) -> torch.Tensor | None:
    """Channel scales [N, D] of a set, from the first shard that holds them as the manifest knows them.

    Returns:
        None when no shard does, or when the codec of the set has none.
    """
    for entry in manifest.shards if manifest.calibration else ():
        try:
            header = open_entry(folder, entry, manifest)
            with open_shard(folder / entry.path, entry.path) as fd:
                check_scales(fd.number, header, manifest)
                return read_scales(fd.number, header)
        except StoreError:
            continue
    return None


def _other_scales(headers: Mapping[str, ShardHeader], scales_ND: torch.Tensor | None) -> Iterator[Finding]:
    """Shards whose header lists other channel scales than the set's: their states are coded with those."""
    if scales_ND is None:
        return  # no codec with scales, or all are damaged, which reading each shard shows
    expected = checksum(tensor_bytes(scales_ND))
    for path, header in headers.items():
        found = header.checksums.get(CALIBRATION)
        if found != expected:
            yield _of_file(path, f"{path}: calibration: checksum {found}, the set's channel scales have {expected}")


def _unlike_plan(headers: Mapping[str, ShardHeader], plan: CapturePlan, manifest: ShardManifest) -> Iterator[Finding]:
    failed = {sample.sample_id for sample in manifest.failed}
    listed = {entry.path for entry in manifest.shards}
    for shard in plan.shards:
        expected = [s.sample_id for s in shard.samples if s.sample_id not in failed]
        if expected and shard.path not in listed:
            yield _of_file(
                shard.path, f"{shard.path} is planned with {len(expected)} samples, the manifest does not list it"
            )
        if shard.path not in headers:
            continue
        found = [sample.sample_id for sample in headers[shard.path].samples]
        for name in (name for name in expected if name not in set(found)):
            yield _of_sample(shard.path, name, "planned here and not stored")
        if sorted(found) == sorted(expected) and found != expected:
            yield _of_file(shard.path, f"{shard.path}: its samples are in another order than planned")


def check_shard(
    folder: Path, entry: ShardEntry, manifest: ShardManifest, against: Against, on_bytes: OnBytes | None = None
) -> ShardCheck:
    """Read one shard through and check all of it; independent of every other shard.

    Args:
        folder: The states folder.
        entry: The shard.
        manifest: Of the set.
        against: What its content is compared with.
        on_bytes: Called with the number of bytes after each chunk.
    """
    path, scores = folder / entry.path, {}
    try:
        header = open_entry(folder, entry, manifest)
        with open_shard(path, entry.path) as fd:
            scales = _scales_problem(fd.number, header, manifest)
            codec = None if scales else shard_codec(fd.number, header)

            def check(index: int) -> Iterator[Finding]:
                if codec is None:  # nothing can be decoded: checksums alone tell which samples are whole
                    return _damaged_blocks(fd.number, header, index)
                return _check_sample(fd.number, header, index, codec, against, scores)

            findings = (*scales, *_read_through(fd.number, entry, header, check, on_bytes))
    except StoreError as error:
        return ShardCheck((_of_file(entry.path, error.message),))
    return ShardCheck(findings, scores)


def _scales_problem(fd: int, header: ShardHeader, manifest: ShardManifest) -> tuple[Finding, ...]:
    try:
        check_scales(fd, header, manifest)
    except StoreError as error:
        return (_of_file(header.facts.shard, error.message),)
    return ()


def _read_through(
    fd: int,
    entry: ShardEntry,
    header: ShardHeader,
    check: Callable[[int], Iterator[Finding]],
    on_bytes: OnBytes | None,
) -> Iterator[Finding]:
    """Hash the file front to back, and check each sample as soon as its states were hashed."""
    md5 = hashlib.md5(usedforsecurity=False)
    buffer, done, is_readable = bytearray(min(CHUNK_BYTES, header.size_bytes)), 0, True
    ends = [header.data_start + header.blocks[block_name(i, "last")].end for i in range(len(header.samples))]
    for index, end in enumerate([*ends, header.size_bytes]):
        while is_readable and done < end:
            try:
                count = os.preadv(fd, [memoryview(buffer)[: min(len(buffer), end - done)]], done)
            except OSError as error:
                # A bad sector: the samples are still read one by one, so that repair knows which to capture.
                yield _of_file(entry.path, f"{entry.path}: cannot be read at byte {done:,}: {error.strerror}")
                is_readable = False
                break
            if count == 0:
                yield _of_file(entry.path, f"{entry.path}: the file ends {header.size_bytes - done:,} bytes early")
                return
            md5.update(memoryview(buffer)[:count])
            done += count
            if on_bytes is not None:
                on_bytes(count)
        if index < len(ends):
            yield from check(index)
    if is_readable and md5.hexdigest() != entry.md5:
        yield _of_file(entry.path, f"{entry.path}: md5 {md5.hexdigest()}, expected {entry.md5}")


def _damaged_blocks(fd: int, header: ShardHeader, index: int) -> Iterator[Finding]:
    for kind in KINDS:
        try:
            check_block(fd, header, index, kind)
        except StoreError as error:
            yield Finding(shard=header.facts.shard, sample_id=header.samples[index].sample_id, problem=error.message)


def _check_sample(
    fd: int, header: ShardHeader, index: int, codec: Codec, against: Against, scores: dict[str, Score]
) -> Iterator[Finding]:
    shard, sample = header.facts.shard, header.samples[index]
    try:
        stored = read_sample(fd, header, index, codec)
    except StoreError as error:
        findings = list(_damaged_blocks(fd, header, index))
        yield from findings or [Finding(shard=shard, sample_id=sample.sample_id, problem=error.message)]
        return
    problems = list(_bad_values(header.facts.boundaries, stored))
    if against.tokens is not None:
        problems += _unlike_tokens(stored, against.tokens)
    if against.judged and not problems:
        judged = judge(stored, header.facts.boundaries, against.head_VD)
        problems += judged.problems
        if not problems:
            scores[sample.sample_id] = judged.score
    yield from (_of_sample(shard, sample.sample_id, problem) for problem in problems)


def _bad_values(boundaries: tuple[int, ...], stored: StoredStates) -> Iterator[str]:
    """Values that are not finite and rows of zeros among the stored rows, by stream and token."""
    aux_rows, last_rows = torch.arange(stored.num_aux_rows), stored.has_last_T.nonzero().flatten()
    streams = [
        (f"aux boundary {b}", stored.aux_TAD[: stored.num_aux_rows, a], aux_rows) for a, b in enumerate(boundaries)
    ]
    last_LD = stored.last_TD if len(last_rows) == len(stored.last_TD) else stored.last_TD[last_rows]
    for name, states_TD, rows in (*streams, ("last", last_LD, last_rows)):
        broken_T, empty_T = row_faults(states_TD)
        if broken_T.any():
            bad = ~torch.isfinite(states_TD)
            row, channel = bad.nonzero()[0].tolist()
            value = float(states_TD[row, channel])
            yield f"{name}: {value} at token {rows[row]}, channel {channel} ({int(bad.sum()):,} values not finite)"
        empty = empty_T.nonzero().flatten()
        if len(empty):
            yield f"{name}: {len(empty):,} of {len(states_TD):,} rows are zero, the first is token {rows[empty[0]]}"


def _unlike_tokens(stored: StoredStates, tokens: Mapping[str, TokenSample]) -> Iterator[str]:
    sample = tokens.get(stored.sample.sample_id)
    if sample is None:
        yield "not in the token dataset"
        return
    if stored_sample(sample) != stored.sample:
        yield f"stored as {stored.sample}, the token dataset says {stored_sample(sample)}"
    for kind, found_T, values in (
        ("input_ids", stored.input_ids_T, sample.input_ids),
        ("loss_mask", stored.loss_mask_T, sample.loss_mask),
    ):
        if len(found_T) != len(values):
            continue  # named above as another number of tokens
        differing = (found_T != torch.tensor(values, dtype=found_T.dtype)).nonzero().flatten()
        if len(differing):
            t = int(differing[0])
            yield f"{kind} differs at token {t}: {int(found_T[t])}, the token dataset says {values[t]}"


def incoherent_findings(scores: Mapping[str, Score], places: Mapping[str, str]) -> list[Finding]:
    """Samples that do not fit the rest of their set, see ``consistency``; ``places`` gives the shard of each."""
    return [_of_sample(places[name], name, problem) for name, problem in incoherent(scores).items()]


def _of_file(shard: str, problem: str) -> Finding:
    return Finding(shard=shard, sample_id="", problem=problem)


def _of_sample(shard: str, sample_id: str, problem: str) -> Finding:
    where = f"{shard}: sample {sample_id}: " if shard else ""
    return Finding(shard=shard, sample_id=sample_id, problem=where + problem)
