"""Imports: the norm state, padding and layer ids by stated rules; interrupted and changed sources."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from layout_cases import World, default_world
from layout_faults import (
    PATHS,
    edited,
    forget,
    on_states,
)
from safetensors.torch import load_file, save_file

from eyas.errors import CaptureError, DataError
from eyas.ops.exchange import states as exchange
from eyas.ops.exchange.engine import ImportEngine
from eyas.shards.layouts.norms import NormReading


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return default_world().copied(tmp_path, monkeypatch)


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
