"""Imports: round trips bit for bit, every fault listed with its reason, the norm state decided or refused."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from layout_cases import LAYOUTS, QUICK_LAYOUTS, World, default_world
from safetensors.torch import load_file, save_file

from eyas.errors import CaptureError, DataError
from eyas.ops import exchange
from eyas.ops.import_engine import ImportEngine
from eyas.shards.calibration import Calibration, make_calibration
from eyas.shards.int8 import Int8Codec
from eyas.shards.layouts.norms import NormReading
from eyas.shards.verify import verify

Change = Callable[[Path], object]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return default_world().copied(tmp_path, monkeypatch)


def forget(world: World, name: str = "out") -> Path:
    """Make an export look like the peer's own folder."""
    (world.root / name / "eyas-export.json").unlink()
    return world.root / name


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
    assert {(s.source, s.split, s.variant) for s in samples} == {("speculators", "train", "given")}
    assert {s.sample_id for s in samples} == set(world.tokens)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"input_ids": Path("x")}))


def edited(**changes: Callable) -> Change:
    """Change one entry of a file of any layout and write it back as the peer would."""

    def change(path: Path) -> None:
        if path.suffix == ".safetensors":
            value = load_file(path)
            value |= {key: edit(value[key]).contiguous() for key, edit in changes.items() if key in value}
            save_file(value, path)
        else:
            value = torch.load(path, weights_only=True)
            value |= {key: edit(value[key]) for key, edit in changes.items() if key in value}
            torch.save(value, path)

    return change


def on_states(edit: Callable) -> Change:
    """Change states [T, ...] of any layout."""
    return edited(
        hidden_states=lambda v: [edit(entry) for entry in v] if isinstance(v, list) else edit(v),
        aux_hidden_state=lambda v: edit(v[0])[None],
        hidden_state=lambda v: edit(v[0])[None],
    )


def with_value(value: float) -> Callable:
    def edit(states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[1, ..., 2] = value
        return states

    return edit


def zeroed(states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    states[2] = 0
    return states


FAULTS: dict[str, tuple[Change, str]] = {
    "case 28: cut in half": (truncated, "no whole|cannot be loaded"),
    "case 28: 0 byte": (emptied, "no whole|cannot be loaded"),
    "case 30: NaN": (on_states(with_value(float("nan"))), "1 rows are not finite, the first is row 1"),
    "case 30: Inf": (on_states(with_value(float("inf"))), "1 rows are not finite, the first is row 1"),
    "case 29: a row of zeros": (on_states(zeroed), "1 rows are all zero, the first is row 2"),
    "case 31: states shorter than the ids": (on_states(lambda s: s[:-1]), r"shape|aux rows"),
    "id outside the vocab": (
        edited(input_ids=lambda v: v.index_fill(0, torch.tensor([0]), 1000), token_ids=lambda v: v + 1000),
        "token ids|token ids are not",
    ),
}
PATHS = {
    "speculators_v1": "data_2.pt",
    "speculators": "hidden_states/hs_2.safetensors",
    "specforge": "rows_0-2000/data_2.ckpt",
}


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


@pytest.mark.parametrize(("version", "expected"), [("0.3.0", "post_norm"), ("0.4.0", "pre_norm")])
def test_v1_norm_state_is_read_from_the_states(world: World, version: str, expected: str) -> None:
    """Case 41: no file says it; the target's head and the length after the norm do."""
    world.copy_export("speculators_v1", version)
    forget(world)
    report = world.enter("speculators_v1")
    assert (report.final_hidden, report.boundaries) == (expected, (1, 2, 3))
    assert "top-1 is the next token in" in report.norm_reading
    other = "pre_norm" if expected == "post_norm" else "post_norm"
    insisted = world.enter("speculators_v1", to="other", final_hidden=other)
    assert insisted.final_hidden == other


def test_states_that_contradict_the_layout_are_refused(world: World) -> None:
    """Case 41: post-norm states in a place for pre-norm ones."""
    world.copy_export("speculators")
    forget(world)
    for index, stored in enumerate(world.stored()):
        path = world.root / f"out/hidden_states/hs_{index}.safetensors"
        value = load_file(path)
        value["hidden_states"][:, -1] = stored.last_TD
        save_file(value, path)
    with pytest.raises(CaptureError, match=r"last should be pre_norm .* but the states are post_norm"):
        world.enter("speculators", boundaries=(1, 2, 3))
    world.enter("speculators", boundaries=(1, 2, 3), final_hidden="post_norm")
    for stored in world.stored():
        assert torch.equal(world.imported().read(stored.sample.sample_id).last_TD, stored.last_TD)


@pytest.mark.parametrize(
    ("as_post", "as_pre", "unit_error", "expected"),
    [
        (0.97, 0.20, 0.0005, "post_norm"),
        (0.09, 0.97, 0.39, "pre_norm"),
        (0.97, 0.97, 0.0005, "post_norm"),  # a scale of ones: norming again changes nothing
        (0.50, 0.50, 0.39, None),
        (0.97, 0.20, 0.39, None),
        (0.09, 0.97, 0.0005, None),
    ],
)
def test_the_verdict_needs_both_signs(as_post: float, as_pre: float, unit_error: float, expected: str | None) -> None:
    reading = NormReading(num_rows=100, top1_as_post=as_post, top1_as_pre=as_pre, unit_error=unit_error)
    assert reading.verdict == expected


def test_v1_whose_states_do_not_tell_must_be_given(world: World) -> None:
    world.copy_export("speculators_v1", "0.4.0")
    folder = forget(world)
    for path in folder.glob("*.pt"):
        noise = torch.Generator().manual_seed(len(path.read_bytes()))
        edited(hidden_states=lambda v, g=noise: [*v[:-1], torch.randn(v[-1].shape, generator=g).bfloat16()])(path)
    with pytest.raises(CaptureError, match="do not say whether last is before or after"):
        world.enter("speculators_v1")
    assert world.enter("speculators_v1", final_hidden="pre_norm").decided_by.startswith("given")


@pytest.mark.parametrize("packed", [False, True])
def test_specforge_padding_is_cut(world: World, packed: bool) -> None:
    """Padding that was captured has ids and mask of zero but real states."""
    world.copy_export("specforge")
    folder = forget(world)
    for path in sorted(folder.rglob("*.ckpt")):
        value = torch.load(path, weights_only=True)
        value["input_ids"] = torch.nn.functional.pad(value["input_ids"], (0, 5))
        value["loss_mask"] = torch.nn.functional.pad(value["loss_mask"], (0, 5))
        for key in ("aux_hidden_state", "hidden_state"):
            value[key] = torch.cat([value[key], torch.ones(1, 5, value[key].shape[2]).bfloat16()], dim=1)
        torch.save(value, path)
        if packed:
            path.with_suffix(".ckpt.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    report = world.enter("specforge", boundaries=(1, 2, 3))
    assert report.num_imported == 6
    for stored in world.stored():
        again = world.imported().read(stored.sample.sample_id)
        assert torch.equal(again.aux_TAD, stored.aux_TAD)
        assert torch.equal(again.last_TD, stored.last_TD)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([0, 1, 2, 4], "end with 5"), ([0, 2, 1, 5], "rising"), ([5], "rising"), (["a", 5], "list of numbers")],
)
def test_v1_layer_ids_of_another_last_layer_are_refused(world: World, ids: list, message: str) -> None:
    """Case 57 of a foreign folder: the last state one layer early."""
    world.copy_export("speculators_v1", "0.4.0")
    config = world.root / "out/data_config.json"
    config.write_text(json.dumps({"hidden_states": {"layer_ids": ids}}))
    with pytest.raises(DataError, match=message):
        world.enter("speculators_v1")


def test_boundaries_that_contradict_are_refused(world: World) -> None:
    world.copy_export("speculators_v1", "0.4.0")
    with pytest.raises(DataError, match=r"contradict each other: given: \[1, 2, 4\], the layout: \[1, 2, 3\]"):
        world.enter("speculators_v1", boundaries=(1, 2, 4))


@pytest.mark.parametrize("layout", PATHS)
def test_a_folder_without_such_files_is_refused(world: World, layout: str) -> None:
    (world.root / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no"):
        world.enter(layout, name="empty")
    with pytest.raises(DataError, match="nothing is no folder"):
        world.enter(layout, name="nothing")


def test_a_file_that_changes_after_the_scan_is_not_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.copy_export("specforge")
    real = exchange._judge

    def change_then_judge(*arguments):
        reading = real(*arguments)
        on_states(lambda s: s + 1)(world.root / "out" / PATHS["specforge"])
        return reading

    monkeypatch.setattr(exchange, "_judge", change_then_judge)
    with pytest.raises(CaptureError, match=r"data_2.ckpt changed since it was scanned"):
        world.enter("specforge")
    assert not (world.root / "in/hidden_states.json").exists()


def test_an_interrupted_import_ends_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    params = world.root / "params.yaml"
    params.write_text(params.read_text().replace("shard_bytes: 67108864", "shard_bytes: 2048"))
    world.copy_export("speculators")
    whole = world.enter("speculators", to="whole")
    real, asked = ImportEngine.capture, []

    def interrupted(self: ImportEngine, batch):
        asked.append(len(batch))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return real(self, batch)

    monkeypatch.setattr(ImportEngine, "capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.enter("speculators")
    monkeypatch.setattr(ImportEngine, "capture", real)
    assert world.enter("speculators") == whole
    names = ("hidden_states.json", "import.json")
    assert [(world.root / "in" / n).read_bytes() == (world.root / "whole" / n).read_bytes() for n in names] == [
        True
    ] * 2


def test_other_states_under_the_same_ids_are_another_identity(world: World) -> None:
    world.copy_export("specforge")
    first = world.enter("specforge", to="a")
    on_states(lambda s: s * 2)(world.root / "out" / PATHS["specforge"])
    assert world.enter("specforge", to="b").identity != first.identity
