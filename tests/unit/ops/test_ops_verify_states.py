"""Verifying a volume: goes on where it was stopped, reads a share, keeps to a rate, leaves its findings."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repair_cases import MANIFEST, STATES, flip, make_repository, manifest_of

from eyas import fs
from eyas.errors import ConfigError, EyasError
from eyas.ops import verify_states as module
from eyas.ops.verify_journal import Journal
from eyas.ops.verify_states import Extent, make_extent, verify_states


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


def journal_of(root: Path) -> Path:
    return root / ".eyas/verify" / f"{manifest_of(root).identity}.jsonl"


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Interrupt when ``count`` shards are in the journal; gives the shards that are read."""
    read: list[str] = []
    check = module.check_shard

    def counting(folder, entry, *rest):
        read.append(entry.path)
        return check(folder, entry, *rest)

    append = Journal.append

    def stopping(self, shard):
        append(self, shard)
        if len(self._whole_lines()) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "check_shard", counting)
    monkeypatch.setattr(Journal, "append", stopping)
    return read


def test_a_whole_set_leaves_nothing_behind(root: Path) -> None:
    report = verify_states(root)
    manifest = manifest_of(root)
    assert report.findings == ()
    assert (report.num_read_shards, report.num_samples) == (len(manifest.shards), manifest.num_stored_samples)
    assert report.num_read_bytes == manifest.stored_bytes
    assert sorted(p.name for p in (root / ".eyas/verify").iterdir()) == ["lock"]


def test_an_interrupted_run_goes_on_and_finds_what_it_had_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = manifest_of(root).shards
    for entry in shards:
        flip(root / STATES / entry.path, entry.size_bytes // 2)
    expected = {f.problem for f in verify_states(root).findings}
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            verify_states(root)
    done = [json.loads(line)["shard"]["path"] for line in journal_of(root).read_text().splitlines()]
    with journal_of(root).open("a") as handle:
        handle.write('{"shard": torn')
    read = stop_after(monkeypatch, -1)
    report = verify_states(root)
    assert report.num_resumed_shards == len(done) >= 1
    assert sorted(read) == sorted({entry.path for entry in shards} - set(done))
    assert {f.problem for f in report.findings} == expected
    assert not journal_of(root).exists()


def test_a_file_that_changed_since_it_was_read_is_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            verify_states(root)
    (done, *_) = [json.loads(line)["shard"]["path"] for line in journal_of(root).read_text().splitlines()]
    flip(root / STATES / done, 5000)
    assert {f.shard for f in verify_states(root).findings} == {done}


def test_a_share_is_the_same_shards_every_time_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = stop_after(monkeypatch, -1)
    first = verify_states(root, Extent(share=0.4))
    chosen = list(read)
    verify_states(root, Extent(share=0.4))
    assert sorted(read) == sorted([*chosen, *chosen])
    num_shards = len(manifest_of(root).shards)
    assert first.num_read_shards == len(chosen) < num_shards
    assert any(f"{len(chosen)} of {num_shards} shards were read" in note for note in first.notes)
    (root / STATES / manifest_of(root).shards[-1].path).unlink()
    (root / STATES / manifest_of(root).shards[0].path).unlink()
    assert len(verify_states(root, Extent(share=0.4)).findings) == 2, "headers are read of all shards"


def test_findings_of_shards_that_a_share_did_not_read_are_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in manifest_of(root).shards:
        flip(root / STATES / entry.path, entry.size_bytes // 2)
    everything = {f.shard for f in verify_states(root).findings}
    verify_states(root, Extent(share=0.01))
    assert {f.shard for f in Journal(root, manifest_of(root).identity).findings()} == everything


def test_the_rate_is_kept(root: Path) -> None:
    megabytes = manifest_of(root).stored_bytes / 1e6
    start_s = time.monotonic()
    verify_states(root, Extent(max_mb_per_s=megabytes / 0.8))
    assert time.monotonic() - start_s >= 0.6


@pytest.mark.parametrize(("share", "rate"), [(0.0, 0.0), (1.1, 0.0), (float("nan"), 0.0), (1.0, -1.0)])
def test_numbers_out_of_range_are_refused(share: float, rate: float) -> None:
    with pytest.raises(ConfigError, match="expected"):
        make_extent(share, rate)


def test_two_verifications_do_not_run_at_once(root: Path) -> None:
    with fs.volume_lock(root / ".eyas/verify/lock", "verify"), pytest.raises(EyasError, match="is locked by verify"):
        verify_states(root)


def test_a_manifest_of_another_hash_than_the_file_is_found(root: Path) -> None:
    """Case 85: a wrong md5 was handed over."""
    text = (root / MANIFEST).read_text()
    md5 = manifest_of(root).shards[1].md5
    fs.write_text(root / MANIFEST, text.replace(md5, "0" * 32))
    (finding,) = verify_states(root).findings
    assert finding.problem == f"{manifest_of(root).shards[1].path}: md5 {md5}, expected {'0' * 32}"


def test_the_command_ends_with_1_and_names_sample_and_repair(root: Path) -> None:
    entry = manifest_of(root).shards[0]
    flip(root / STATES / entry.path, entry.size_bytes // 2)
    done = subprocess.run(
        [sys.executable, "-m", "eyas.cli", "verify"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "make repair" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "eyas.cli", "verify", "--json"], cwd=root, capture_output=True, text=True, check=False
    )
    findings = json.loads(done.stdout)["states"]["findings"]
    assert {f["shard"] for f in findings} == {entry.path}
    assert any(f["sample_id"] for f in findings)
