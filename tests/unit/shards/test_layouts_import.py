"""Imports: round trips bit for bit, every fault listed with its reason, the norm state decided or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from layout_cases import LAYOUTS, QUICK_LAYOUTS, World, default_world
from layout_faults import (
    FAULTS,
    PATHS,
    edited,
    flipped,
    forget,
    pickled,
)
from safetensors.torch import load_file, save_file

from eyas.errors import DataError
from eyas.shards.calibration import Calibration, make_calibration
from eyas.shards.int8 import Int8Codec
from eyas.shards.verify import verify


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return default_world().copied(tmp_path, monkeypatch)


@pytest.mark.parametrize("codec", [pytest.param("raw", marks=pytest.mark.slow), "blosc2"])
@pytest.mark.parametrize(("layout", "version"), QUICK_LAYOUTS)
def test_round_trip(world: World, layout: str, version: str, codec: str) -> None:
    params = world.root / "params.yaml"
    params.write_text(params.read_text().replace("codec: blosc2", f"codec: {codec}"))
    result = world.export(layout, version)
    report = world.enter(layout)
    reader = world.imported()
    assert (report.num_files, report.num_imported, report.bad) == (6, 6, ())
    assert (report.boundaries, report.is_lossy) == ((1, 2, 3), False)
    assert (reader.manifest.capture.engine, reader.manifest.capture.codec) == ("import", codec)
    assert reader.manifest.identity == report.identity
    for stored in world.stored():
        again = reader.read(stored.sample.sample_id)
        assert again.sample == stored.sample
        assert torch.equal(again.input_ids_T, stored.input_ids_T)
        assert torch.equal(again.loss_mask_T, stored.loss_mask_T)
        assert torch.equal(again.aux_TAD, stored.aux_TAD)
        if result.record.facts.final_hidden == "post_norm":
            assert torch.equal(again.last_TD, stored.last_TD)
        else:
            # y -> bf16(y / w) -> bf16(norm): two roundings, and the rows' length out of rounded values.
            error = (again.last_TD.float() - stored.last_TD.float()).abs() / stored.last_TD.float().abs()
            assert float(error.max()) < 3 * 2**-8


def test_an_import_is_stored_with_codec_int8(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    params = world.root / "params.yaml"
    params.write_text(params.read_text().replace("codec: blosc2", "codec: int8"))
    world.copy_export("specforge")
    report = world.enter("specforge")
    assert report.is_lossy
    assert re.search(r"import: int8: 0\.\d+ of bf16; \d+ rows: KL", capsys.readouterr().err)
    reader = world.imported()
    assert verify(reader.folder, reader.manifest) == []
    scales_ND = make_calibration((s.aux_TAD, s.last_TD) for s in world.stored())
    assert reader.manifest.calibration == Calibration(scales_ND).digest, "six samples are all of the slice"
    codec = Int8Codec(scales_ND)
    for stored in world.stored():
        again = reader.read(stored.sample.sample_id)
        for stream, (found_TD, given_TD) in enumerate(
            zip((*again.aux_TAD.unbind(1), again.last_TD), (*stored.aux_TAD.unbind(1), stored.last_TD), strict=True)
        ):
            expected_TD = torch.empty_like(found_TD.contiguous())
            codec.decode(codec.encode(given_TD.contiguous(), stream), expected_TD, stream)
            assert torch.equal(found_TD, expected_TD)


@pytest.mark.parametrize(
    ("layout", "version"), [LAYOUTS[3], *(pytest.param(*it, marks=pytest.mark.slow) for it in LAYOUTS[:3])]
)
def test_lossy_states_come_back_as_the_set_gave_them_and_stay_marked(
    layout: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, codec="int8")
    world.export(layout, version)
    report = world.enter(layout)
    reader = world.imported()
    assert (report.is_lossy, reader.manifest.capture.codec, reader.manifest.calibration) == (True, "blosc2", "")
    for stored in world.stored():
        again = reader.read(stored.sample.sample_id)
        assert torch.equal(again.aux_TAD, stored.aux_TAD)
        if layout == "specforge":
            assert torch.equal(again.last_TD, stored.last_TD)


def test_the_pipeline_s_own_folder_is_not_written_over(world: World) -> None:
    world.export("specforge", "0.2.0")
    own = world.root / "own"
    (own / "tokens").mkdir(parents=True)
    index = own / "tokens/index.json"
    index.write_text('{"tokens_sha256": "of-another-set"}')
    with pytest.raises(
        DataError, match=r"holds tokens of another set: tokens_sha256 of-another-set.*nothing was written"
    ):
        world.enter("specforge", to="own")
    assert index.read_text() == '{"tokens_sha256": "of-another-set"}'
    assert sorted(path.name for path in own.rglob("*") if path.is_file()) == ["index.json"]


def test_a_foreign_folder_comes_in_under_its_own_names(world: World) -> None:
    world.copy_export("speculators")
    forget(world)
    with pytest.raises(DataError, match="do not say which layers"):
        world.enter("speculators")
    world.enter("speculators", boundaries=(1, 2, 3))
    samples = world.imported().samples
    assert {(s.source, s.variant) for s in samples} == {("speculators", "given")}
    # A tenth of six openings, rounded: one. Nobody else says what is held out.
    assert sorted(s.split for s in samples) == ["held_out", *["train"] * 5]
    assert {s.sample_id for s in samples} == set(world.tokens)


FAULTY = [
    # Each fault quickly in one layout, in turn; the others in the slow room.
    pytest.param(layout, fault, marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
    for i, layout in enumerate(PATHS)
    for j, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize(("layout", "fault"), FAULTY)
def test_a_bad_file_is_listed_and_the_account_closes(world: World, layout: str, fault: str) -> None:
    """Cases 28, 29, 30 and 31 of a foreign folder."""
    world.copy_export(layout, "0.4.0" if layout == "speculators_v1" else "")
    change, reason = FAULTS[fault]
    change(world.root / "out" / PATHS[layout])
    with pytest.raises(DataError, match=r"1 of 6 files .* are bad, at most 0 allowed"):
        world.enter(layout)
    assert not (world.root / "in/hidden_states.json").exists()
    report = world.enter(layout, max_failed=1)
    assert (report.num_files, report.num_imported) == (6, 5)
    (bad,) = report.bad
    assert bad.path == PATHS[layout]
    assert re.search(reason, bad.problem), bad.problem
    assert json.loads((world.root / "in/import.json").read_text())["bad"][0]["path"] == PATHS[layout]
    assert len(world.imported().samples) == 5


@pytest.mark.parametrize("layout", ["speculators_v1", pytest.param("specforge", marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_where_the_container_has_a_checksum(world: World, layout: str) -> None:
    """Case 29: the peers load these files mapped, without looking at the checksum."""
    world.copy_export(layout, "0.3.0" if layout == "speculators_v1" else "")
    path = world.root / "out" / PATHS[layout]
    flipped(path)
    torch.load(path, weights_only=True, mmap=True)
    report = world.enter(layout, max_failed=1)
    assert [file.path for file in report.bad] == [PATHS[layout]]
    assert "CRC-32" in report.bad[0].problem


def test_a_pickle_is_never_run(world: World) -> None:
    world.copy_export("speculators_v1", "0.3.0")
    pickled(world.root / "out/data_1.pt")
    report = world.enter("speculators_v1", max_failed=1)
    assert [file.path for file in report.bad] == ["data_1.pt"]


def test_three_streams_where_four_are_expected(world: World) -> None:
    """Case 32."""
    world.copy_export("speculators_v1", "0.4.0")
    edited(hidden_states=lambda v: v[1:])(world.root / "out/data_0.pt")
    report = world.enter("speculators_v1", max_failed=1)
    assert "aux: shape" in report.bad[0].problem
    assert "2, 16), expected" in report.bad[0].problem


def test_another_token_id_than_the_rows(world: World) -> None:
    """Case 33: the id at one place differs between file and row: an error with both ids."""
    world.copy_export("speculators")
    path = world.root / "out/hidden_states/hs_0.safetensors"
    value = load_file(path)
    was = int(value["token_ids"][3])
    value["token_ids"][3] = was - 1 if was else 1
    save_file(value, path)
    (world.root / "out/hidden_states/hs_1.safetensors").unlink()
    report = world.enter("speculators", max_failed=2)
    assert [file.problem for file in report.bad] == [
        f"token ids are not those of row 0: id {was - 1 if was else 1} at token 3, the row has {was}",
        "is missing",
    ]


def test_a_sample_that_comes_twice_is_listed(world: World) -> None:
    world.copy_export("speculators_v1", "0.3.0")
    (world.root / "out/data_6.pt").write_bytes((world.root / "out/data_4.pt").read_bytes())
    report = world.enter("speculators_v1", max_failed=1)
    assert [file.problem for file in report.bad] == ["the same ids and mask as data_4.pt"]
