"""Verifying shards: everything that can be wrong with stored states, by shard and sample.

``verify_file`` is what a resumed extraction trusts and what ``eyas verify`` runs per shard; it reads
every byte once for the md5 and once per block.

Letters: T tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas import fs
from eyas.contracts import ShardEntry, ShardManifest, TokenSample
from eyas.errors import StoreError
from eyas.shards.format import KINDS, ShardHeader
from eyas.shards.reader import (
    check_account,
    check_identity,
    open_entry,
    open_shard,
    read_encoded,
    read_header,
    read_sample,
    read_tokens,
    shard_codec,
)
from eyas.shards.writer import stored_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault. ``shard`` is empty for a fault of the set, ``sample_id`` empty for one of the file."""

    shard: str
    sample_id: str
    problem: str


def verify_file(path: Path, entry: ShardEntry, identity: str) -> list[Finding]:
    """Check one shard file against its entry: size, md5, header, identity, every block's checksum.

    Returns:
        Findings, empty when the file is what was written.
    """
    try:
        header, size_bytes = read_header(path, entry.path)
        check_identity(header, identity, entry.path)
    except StoreError as error:
        return [Finding(shard=entry.path, sample_id="", problem=error.message)]
    findings = []
    if size_bytes != entry.size_bytes:
        findings.append(_of_file(entry, f"{size_bytes:,} bytes, expected {entry.size_bytes:,}"))
    md5 = fs.hash_file(path, "md5")
    if md5 != entry.md5:
        findings.append(_of_file(entry, f"md5 {md5}, expected {entry.md5}"))
    with open_shard(path, entry.path) as fd:
        for index, sample in enumerate(header.samples):
            for kind in KINDS:
                try:
                    read_encoded(fd.number, header, index, kind)
                except StoreError as error:
                    findings.append(Finding(shard=entry.path, sample_id=sample.sample_id, problem=error.message))
    return findings


def verify(folder: Path, manifest: ShardManifest, tokens: Mapping[str, TokenSample] | None = None) -> list[Finding]:
    """Check a published set: the manifest's account, every file, every value.

    Args:
        folder: The states folder.
        manifest: Its manifest.
        tokens: The token dataset by sample id; ids and masks are compared when it is given.

    Returns:
        Findings in manifest order; empty when the set is whole.
    """
    return list(iter_findings(folder, manifest, tokens))


def iter_findings(
    folder: Path, manifest: ShardManifest, tokens: Mapping[str, TokenSample] | None = None
) -> Iterator[Finding]:
    """Like ``verify``, each finding as soon as it is known."""
    try:
        check_account(manifest)
    except StoreError as error:
        yield Finding(shard="", sample_id="", problem=error.message)
    listed = {entry.path for entry in manifest.shards}
    for path in sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()):
        if path not in listed:
            yield Finding(shard=path, sample_id="", problem=f"{path} is not in the manifest")
    seen: dict[str, str] = {}
    for entry in manifest.shards:
        findings = verify_file(folder / entry.path, entry, manifest.identity)
        yield from findings
        if findings:
            continue
        try:
            header = open_entry(folder, entry, manifest)
        except StoreError as error:
            yield _of_file(entry, error.message)
            continue
        yield from _samples(folder / entry.path, entry, header, tokens, seen)


def _samples(
    path: Path,
    entry: ShardEntry,
    header: ShardHeader,
    tokens: Mapping[str, TokenSample] | None,
    seen: dict[str, str],
) -> Iterator[Finding]:
    with open_shard(path, entry.path) as fd:
        for index, sample in enumerate(header.samples):
            problems = list(_values(fd.number, header, index))
            if tokens is not None:
                problems += _against_tokens(fd.number, header, index, tokens)
            if sample.sample_id in seen:
                problems.append(f"also stored in {seen[sample.sample_id]}")
            seen[sample.sample_id] = entry.path
            for problem in problems:
                yield Finding(
                    shard=entry.path,
                    sample_id=sample.sample_id,
                    problem=f"{entry.path}: sample {sample.sample_id}: {problem}",
                )


def _values(fd: int, header: ShardHeader, index: int) -> Iterator[str]:
    stored = read_sample(fd, header, index, shard_codec(fd, header))
    aux_UAD, last_LD = stored.aux_TAD[: stored.num_aux_rows], stored.last_TD[stored.has_last_T]
    streams = [(f"aux boundary {b}", aux_UAD[:, a]) for a, b in enumerate(header.facts.boundaries)]
    for name, states_TD in (*streams, ("last", last_LD)):
        bad = ~torch.isfinite(states_TD)
        if bad.any():
            row, channel = bad.nonzero()[0].tolist()
            value = float(states_TD[row, channel])
            yield f"{name}: {value} at token {row}, channel {channel} ({int(bad.sum()):,} values not finite)"
        if len(states_TD) and not states_TD.any():
            yield f"{name}: all {states_TD.shape[0]:,} rows are zero"


def _against_tokens(fd: int, header: ShardHeader, index: int, tokens: Mapping[str, TokenSample]) -> Iterator[str]:
    stored = header.samples[index]
    sample = tokens.get(stored.sample_id)
    if sample is None:
        yield "not in the token dataset"
        return
    if stored_sample(sample) != stored:
        yield f"stored as {stored}, the token dataset says {stored_sample(sample)}"
    expected = {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask}
    for (kind, values), stored_T in zip(expected.items(), read_tokens(fd, header, index), strict=True):
        found = stored_T.tolist()
        differing = [t for t, (a, b) in enumerate(zip(found, values, strict=False)) if a != b]
        if differing:
            t = differing[0]
            yield f"{kind} differs at token {t}: {found[t]}, the token dataset says {values[t]}"


def _of_file(entry: ShardEntry, problem: str) -> Finding:
    return Finding(shard=entry.path, sample_id="", problem=f"{entry.path}: {problem}")
