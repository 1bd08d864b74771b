"""Extractions with the codec int8: one calibration per capture, whatever happens in between."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from extract_cases import HIDDEN_SIZE, Case, EditedEngine, fake_engine, with_nan

from eyas import fs
from eyas.contracts import ShardManifest
from eyas.engines.loop import ExtractLimits, extract
from eyas.errors import CaptureError, StoreError
from eyas.shards.calibration import Calibration, calibration_samples, write_calibration
from eyas.shards.int8 import Int8Codec
from eyas.shards.opening import read_header
from eyas.shards.reader import ShardReader
from eyas.shards.verify import verify

FILE = "calibration.safetensors"


@pytest.fixture
def case(tmp_path) -> Case:
    return Case(tmp_path / "run", codec="int8")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Case:
    case = Case(tmp_path_factory.mktemp("unbroken"), codec="int8")
    case.extract()
    return case


class StoppedError(Exception):
    """What ends a run in these tests."""


def stopping_engine(num_batches: int) -> EditedEngine:
    """Ends after the slice's samples and some batches."""
    engine = EditedEngine()
    inner = engine.capture

    def capture(batch):
        if len(engine.asked) == num_batches:
            raise StoppedError
        return inner(batch)

    engine.capture = capture  # type: ignore[method-assign]
    return engine


def expected_scales(case: Case) -> torch.Tensor:
    """Mean magnitudes from the fake engine's integers, exact in float64."""
    chosen = [case.tokens[s.sample_id] for s in calibration_samples(case.plan)]
    states = [torch.cat([c.aux_TAD, c.last_TD[:, None]], 1).double() for c in fake_engine().capture(chosen)]
    return torch.cat(states).abs().mean(0).float()


def test_a_whole_run_stores_states_within_a_step_and_its_scales(case):
    result = case.extract()
    scales_ND = expected_scales(case)
    assert result.manifest.calibration == Calibration(scales_ND).digest
    assert result.effect is None, "no head, nothing to judge by"
    assert verify(case.out, result.manifest, case.tokens) == []
    assert not case.spool.exists()
    reader = ShardReader(case.out, fs.read_record(ShardManifest, case.manifest_path))
    codec = Int8Codec(scales_ND)
    for captured in fake_engine().capture(list(case.tokens.values())):
        found = reader.read(captured.sample_id)
        given = torch.cat([captured.aux_TAD, captured.last_TD[:, None]], 1)
        stored = torch.cat([found.aux_TAD, found.last_TD[:, None]], 1)
        for stream in range(4):
            rows_TD = given[:, stream].contiguous()
            expected_TD = torch.empty_like(rows_TD)
            codec.decode(codec.encode(rows_TD, stream), expected_TD, stream)
            assert torch.equal(stored[:, stream], expected_TD)
        # a step is a 127th of the largest magnitude over its scale, 125 over about 63 here
        assert (stored - given).abs().max() <= 2.0


def test_any_safetensors_reader_finds_the_scales_in_every_shard(case):
    from safetensors.torch import load_file

    result = case.extract()
    assert len(result.manifest.shards) > 1
    for entry in result.manifest.shards:
        assert torch.equal(load_file(case.out / entry.path)["calibration"], expected_scales(case))


def test_scales_that_are_not_the_manifest_s_are_refused(case):
    manifest = dataclasses.replace(case.extract().manifest, calibration="f" * 64)
    reader = ShardReader(case.out, manifest)
    with pytest.raises(
        StoreError, match=f"{Calibration(expected_scales(case)).digest}', the manifest says '{'f' * 64}"
    ):
        reader.read(reader.samples[0].sample_id)
    found = verify(case.out, manifest, case.tokens)
    assert {(f.shard, f.sample_id) for f in found} == {(entry.path, "") for entry in manifest.shards}
    assert all(manifest.calibration in f.problem for f in found)


def test_a_flipped_bit_in_the_scales_is_found_by_whoever_reads(case):
    manifest = case.extract().manifest
    path = case.out / manifest.shards[0].path
    header, _ = read_header(path, manifest.shards[0].path)
    data = bytearray(path.read_bytes())
    data[header.data_start + header.blocks["calibration"].begin + 5] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    reader = ShardReader(case.out, manifest)
    with pytest.raises(StoreError, match="calibration: checksum"):
        reader.read(header.samples[0].sample_id)
    found = verify(case.out, manifest, case.tokens)
    assert {(f.shard, f.sample_id) for f in found} == {(manifest.shards[0].path, "")}
    assert [what for what in ("calibration: checksum", ": md5") if any(what in f.problem for f in found)] == [
        "calibration: checksum",
        ": md5",
    ]


@pytest.mark.parametrize("num_calls", [0, 1, 39, 40, 41, 45, 50])
def test_a_stopped_run_goes_on_with_the_very_same_scales(case, unbroken, num_calls):
    """40 samples are all of the slice, so calls up to 40 end within the calibration."""
    with pytest.raises(StoppedError):
        case.extract(stopping_engine(num_calls))
    assert (case.spool / FILE).exists() == (num_calls >= 40)
    engine = EditedEngine()
    case.extract(engine)
    assert case.hashes() == unbroken.hashes()
    num_asked = sum(map(len, engine.asked))
    assert num_asked <= 40 if num_calls >= 40 else num_asked == 80, "calibrated once"


def test_scales_of_another_capture_are_refused(case, tmp_path):
    with pytest.raises(StoppedError):
        case.extract(stopping_engine(45))
    other = Case(tmp_path / "other", codec="int8", revision=2)
    with pytest.raises(StoppedError):
        other.extract(stopping_engine(41))
    shutil.copy(other.spool / FILE, case.spool / FILE)
    with pytest.raises(StoreError, match=f"identity {other.plan.identity}, expected {case.plan.identity}"):
        case.extract()


def test_scales_that_finished_shards_do_not_have_are_refused(case):
    with pytest.raises(StoppedError):
        case.extract(stopping_engine(50))
    write_calibration(case.spool / FILE, Calibration(expected_scales(case) * 2), case.plan.identity)
    with pytest.raises(StoreError, match="other channel scales"):
        case.extract()


def test_without_the_file_the_scales_come_from_a_finished_shard(case, unbroken):
    with pytest.raises(StoppedError):
        case.extract(stopping_engine(50))
    (case.spool / FILE).unlink()
    engine = EditedEngine()
    case.extract(engine)
    assert case.hashes() == unbroken.hashes()
    assert sum(map(len, engine.asked)) < 40, "neither calibrated nor captured from the beginning"


def test_a_finished_set_is_published_again_without_the_engine(case, unbroken):
    case.extract()
    engine = EditedEngine()
    case.extract(engine)
    assert (engine.asked, case.hashes()) == ([], unbroken.hashes())


def test_a_damaged_file_is_refused_with_the_way_on(case, unbroken):
    with pytest.raises(StoppedError):
        case.extract(stopping_engine(50))
    (case.spool / FILE).write_bytes(b"no")
    with pytest.raises(StoreError, match="remove the file"):
        case.extract()
    (case.spool / FILE).unlink()
    case.extract()
    assert case.hashes() == unbroken.hashes()


def test_a_sample_that_fails_once_is_calibrated_on(case, unbroken):
    seen = set()

    def edit(answers):
        for captured in answers:
            first = captured.sample_id not in seen
            seen.add(captured.sample_id)
            yield with_nan(captured) if first else captured

    case.extract(EditedEngine(edit))
    assert case.hashes() == unbroken.hashes()


def test_no_sample_to_calibrate_on_is_an_error(case):
    with pytest.raises(CaptureError, match="no states to calibrate"):
        case.extract(EditedEngine(lambda answers: map(with_nan, answers)))
    assert not (case.spool / FILE).exists()


def test_the_effect_is_measured_with_a_head_and_kept_for_a_resumed_run(case, unbroken):
    head_VD = torch.randn(200, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)) / 100

    def run(engine):
        return extract(
            case.plan,
            case.tokens,
            engine,
            ExtractLimits(reserve_bytes=0, max_failed_samples=0),
            out=case.out,
            manifest_path=case.manifest_path,
            home=case.home,
            head=lambda: head_VD,
        )

    with pytest.raises(StoppedError):
        run(stopping_engine(45))
    effect = run(fake_engine()).effect
    assert effect is not None
    assert (len(effect.relative_error), effect.ratio) == (4, (HIDDEN_SIZE + 2) / (HIDDEN_SIZE * 2))
    assert 0 < effect.kl < 0.01
    assert effect.top1 > 0.9
    assert "KL" in str(effect)
    assert case.hashes() == unbroken.hashes(), "judging changes no byte"


def test_lossless_captures_calibrate_nothing(tmp_path):
    case = Case(tmp_path)
    engine = EditedEngine()
    manifest = case.extract(engine).manifest
    assert manifest.calibration == ""
    assert sum(map(len, engine.asked)) == case.plan.num_samples
