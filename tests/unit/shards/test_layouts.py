"""Exports: what lies in the files, which norm, what is refused, what a rerun does."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import QUICK_LAYOUTS, VOCAB, World, default_world, layout_tokens, tree
from safetensors.torch import load_file

from eyas import fs
from eyas.contracts import FinalNorm
from eyas.engines.boundaries import layer_ids
from eyas.errors import ConfigError, DiskError, StoreError
from eyas.shards.layouts import export as export_module
from eyas.shards.layouts.norms import final_scale, to_post_norm, to_pre_norm

HALF_STEP = 2**-8
"""Largest relative error of one rounding to bf16 (8 significant bits), doubled for the product of two."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return default_world().copied(tmp_path, monkeypatch)


def load(path: Path):
    return torch.load(path, weights_only=True)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_v1_tree_holds_nothing_else_that_ends_in_pt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 40: lengths 5, 7, 4 and a stray file."""
    world = World(tmp_path, monkeypatch, [5, 7, 4])
    out = tmp_path / "out"
    out.mkdir()
    (out / "opt").write_bytes(b"optimizer")
    with pytest.raises(StoreError, match=r"out/opt is no file of this export"):
        world.export("speculators_v1", "0.4.0")
    assert files(out) == ["opt"]
    (out / "opt").unlink()
    world.export("speculators_v1", "0.4.0")
    assert [name for name in files(out) if name.endswith("pt")] == ["data_0.pt", "data_1.pt", "data_2.pt"]
    lengths = json.loads((out / "sample_lengths.json").read_text())
    assert lengths == {str(i): len(load(out / f"data_{i}.pt")["input_ids"]) for i in range(3)}
    assert sorted(lengths.values()) == [4, 5, 7]


def test_v1_files_hold_plain_tensors_of_the_sample(world: World) -> None:
    world.export("speculators_v1", "0.3.0")
    for index, stored in enumerate(world.stored()):
        value = load(world.root / f"out/data_{index}.pt")
        assert value.keys() == {"input_ids", "loss_mask", "hidden_states"}
        assert value["input_ids"].dtype == value["loss_mask"].dtype == torch.int64
        assert torch.equal(value["input_ids"], stored.input_ids_T.long())
        assert torch.equal(value["loss_mask"], stored.loss_mask_T.long())
        streams = [*stored.aux_TAD.unbind(1), stored.last_TD]
        assert [torch.equal(a, b) for a, b in zip(value["hidden_states"], streams, strict=True)] == [True] * 4
    config = json.loads((world.root / "out/data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == [0, 1, 2, 5]
    assert (config["version"], config["format"]["data_format_version"]) == ("2.0", 1)


def test_trainer_version_decides_the_norm_state(world: World) -> None:
    """Case 41: post-norm for 0.3.0; for 0.4.0 states whose RMSNorm, by another implementation, is the stored one."""
    world.export("speculators_v1", "0.3.0", "old")
    world.export("speculators_v1", "0.4.0", "new")
    for index, stored in enumerate(world.stored()):
        assert torch.equal(load(world.root / f"old/data_{index}.pt")["hidden_states"][-1], stored.last_TD)
        pre_TD = load(world.root / f"new/data_{index}.pt")["hidden_states"][-1]
        assert pre_TD.dtype == torch.bfloat16
        assert not torch.equal(pre_TD, stored.last_TD)
        again_TD = torch.rms_norm(pre_TD.float(), (len(world.scale_D),), world.scale_D.float(), 1e-5)
        error = (again_TD - stored.last_TD.float()).abs() / stored.last_TD.float().abs().clamp_min(1e-3)
        assert float(error.max()) < 2 * HALF_STEP


def torch_norm(weight_D: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x_TD: torch.rms_norm(x_TD, (len(weight_D),), 1 + weight_D, 1e-6)


def gemma_norm(weight_D: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm = GemmaRMSNorm(len(weight_D), eps=1e-6)
    norm.weight.data = weight_D
    return norm


@pytest.mark.parametrize("make_norm", [torch_norm, pytest.param(gemma_norm, marks=pytest.mark.slow)])
def test_offset_norms_divide_by_one_plus_w(make_norm: Callable) -> None:
    """Case 41: a (1 + w) norm."""
    generator = torch.Generator().manual_seed(0)
    weight_D = torch.randn(64, generator=generator) * 0.3
    norm = make_norm(weight_D)
    with torch.no_grad():
        last_TD = norm(torch.randn(20, 64, generator=generator) * 7).bfloat16()
    final = final_scale(FinalNorm(kind="rms_norm", eps=1e-6, weight_offset=1.0, num_zero_scales=0), weight_D)
    with torch.no_grad():
        again_TD = norm(to_pre_norm(last_TD, final).float())
    assert torch.allclose(again_TD, last_TD.float(), rtol=2 * HALF_STEP, atol=1e-3)
    ours_TD = to_post_norm(to_pre_norm(last_TD, final), final)
    assert torch.equal(ours_TD, again_TD.bfloat16())


@pytest.mark.parametrize("channel", [0, 15])
def test_a_zero_scale_refuses_pre_norm_alone(channel: int) -> None:
    """Case 41: w with a zero."""
    scale_D = torch.linspace(0.5, 2, 16)
    scale_D[channel] = 0
    last_TD = torch.ones(3, 16).bfloat16()
    facts = FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=0.0, num_zero_scales=1)
    with pytest.raises(StoreError, match=rf"1 zero scales, the first in channel {channel}"):
        to_pre_norm(last_TD, final_scale(facts, scale_D))
    # -1 is the zero of a (1 + w) norm, 0 is none.
    offset = dataclasses.replace(facts, weight_offset=1.0)
    to_pre_norm(last_TD, final_scale(offset, scale_D))
    with pytest.raises(StoreError, match="zero scales"):
        to_pre_norm(last_TD, final_scale(offset, scale_D - 1))


def test_a_norm_that_is_no_rms_norm_is_refused() -> None:
    """Case 41: unknown norm state."""
    facts = FinalNorm(kind="layer_norm", eps=1e-5, weight_offset=0.0, num_zero_scales=0)
    with pytest.raises(StoreError, match="'layer_norm'"):
        final_scale(facts, torch.ones(4))


@pytest.mark.parametrize(
    ("layout", "version", "message"),
    [
        ("speculators_v1", "", "needs a trainer version"),
        ("speculators_v1", "0.5.0", "'0.5.0' does not read speculators_v1, expected 0.3 or 0.4"),
        ("speculators", "0.4.1", "'0.4.1' does not read speculators, expected 0.5 or later"),
        ("speculators", "new", "'new' does not read"),
        ("eagle", "", "'eagle', expected one of speculators_v1, speculators, specforge"),
    ],
)
def test_unknown_layout_or_trainer_is_refused(world: World, layout: str, version: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world.export(layout, version)
    assert not (world.root / "out").exists()


def test_layer_ids_in_each_spelling() -> None:
    """The Kimi row of the table in docs/formats/layouts.md: boundaries 3, 31, 59 and the last layer's, 61."""
    streams = (3, 31, 59, 61)
    assert layer_ids(streams, "output_of_layer", model_type="kimi_k2", num_layers=61) == (2, 30, 58, 60)
    assert layer_ids(streams, "vllm", model_type="kimi_k2", num_layers=61) == streams


def test_speculators_rows_are_file_indices(world: World) -> None:
    import datasets

    result = world.export("speculators")
    out = world.root / "out"
    rows = datasets.load_from_disk(str(out))
    stored = world.stored()
    assert result.record.facts.layer_ids == (1, 2, 3, 6)
    assert len(rows) == len(stored)
    counts: Counter[int] = Counter()
    for index, sample in enumerate(stored):
        row, tensors = rows[index], load_file(out / f"hidden_states/hs_{index}.safetensors")
        assert torch.equal(tensors["token_ids"], sample.input_ids_T.long())
        assert torch.equal(tensors["hidden_states"][:, :-1], sample.aux_TAD)
        assert row["input_ids"].tolist() == sample.input_ids_T.tolist()
        assert row["loss_mask"].tolist() == sample.loss_mask_T.tolist()
        assert int(row["seq_len"]) == sample.sample.num_tokens
        counts.update(i for i, m in zip(sample.input_ids_T.tolist(), sample.loss_mask_T.tolist(), strict=True) if m)
    assert load(out / "token_freq.pt") == dict(counts)
    d2t_W, t2d_V = np.load(out / "d2t.npy"), np.load(out / "t2d.npy")
    assert (d2t_W.dtype, t2d_V.dtype, t2d_V.shape) == (np.int64, np.bool_, (VOCAB,))
    assert t2d_V[np.arange(len(d2t_W)) + d2t_W].all()
    assert t2d_V.sum() == len(d2t_W) == 100
    splits = [sample.sample.split for sample in stored]
    assert splits == ["train"] * result.record.num_train_samples + ["held_out"] * splits.count("held_out")


def test_specforge_files(world: World) -> None:
    world.export("specforge")
    for index, stored in enumerate(world.stored()):
        value = load(world.root / f"out/rows_0-2000/data_{index}.ckpt")
        num_tokens = stored.sample.num_tokens
        assert value["aux_hidden_state"].shape == (1, num_tokens, 48)
        assert torch.equal(value["aux_hidden_state"][0, :, 16:32], stored.aux_TAD[:, 1])
        assert torch.equal(value["hidden_state"][0], stored.last_TD)
        assert torch.equal(value["input_ids"], stored.input_ids_T.long())
    mapping = load(world.root / "out/vocab_mapping/vocab_mapping.pt")
    assert int(mapping["t2d"].sum()) == len(mapping["d2t"]) == 100


def test_specforge_folders_hold_two_thousand() -> None:
    from eyas.shards.layouts.specforge import SpecForgeWriter

    paths = [SpecForgeWriter().path(i) for i in (0, 1999, 2000, 4001)]
    assert paths == [
        "rows_0-2000/data_0.ckpt",
        "rows_0-2000/data_1999.ckpt",
        "rows_2000-4000/data_2000.ckpt",
        "rows_4000-6000/data_4001.ckpt",
    ]


@pytest.mark.parametrize("boundaries", [(1, 3), (0, 1, 2, 3)])
def test_specforge_refuses_other_than_three_streams(
    boundaries: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boundaries = tuple(b + 1 for b in boundaries)
    world = World(tmp_path, monkeypatch, boundaries=boundaries)
    with pytest.raises(StoreError, match=f"{len(boundaries)} aux streams .* specforge reads exactly 3"):
        world.export("specforge")


@pytest.mark.parametrize(("layout", "version"), QUICK_LAYOUTS)
def test_equal_sets_give_equal_bytes_and_the_estimate_holds(
    world: World, layout: str, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = world.export(layout, version, "one")
    world.export(layout, version, "two")
    assert tree(world.root / "one") == tree(world.root / "two")
    written = sum(path.stat().st_size for path in (world.root / "one").rglob("*") if path.is_file())
    assert written == result.num_bytes + (world.root / "one/eyas-export.json").stat().st_size
    said = re.search(r"6 of 6 samples need ([\d.]+) kB", capsys.readouterr().err)
    assert said is not None
    in_sample_files = sum(file.size_bytes for file in result.record.files if file.sample_id)
    assert in_sample_files < float(said[1]) * 1000 < in_sample_files + 6 * 10_000
    assert {file.path for file in result.record.files} == set(tree(world.root / "one")) - {"eyas-export.json"}


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("layout", "version"), QUICK_LAYOUTS)
def test_a_killed_export_goes_on_and_ends_the_same(
    world: World, layout: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.export(layout, version, "whole")
    real, written = export_module._write_sample, []

    def kill_at_the_fourth(*arguments):
        if len(written) == 3:
            raise Killed
        written.append(real(*arguments))
        return written[-1]

    monkeypatch.setattr(export_module, "_write_sample", kill_at_the_fourth)
    with pytest.raises(Killed):
        world.export(layout, version)
    assert not (world.root / "out/eyas-export.json").exists()
    half = world.root / "out" / (written[0].path + ".part")
    half.write_bytes(b"half")
    damaged = world.root / "out" / written[1].path
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    monkeypatch.setattr(export_module, "_write_sample", real)
    result = world.export(layout, version)
    assert result.num_resumed == 2
    assert tree(world.root / "out") == tree(world.root / "whole")
    assert world.export(layout, version).num_resumed == len(world.tokens)
    assert tree(world.root / "out") == tree(world.root / "whole")


def test_an_export_of_lossy_states_decodes_them_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = World(tmp_path / "a", monkeypatch, codec="int8")
    record = lossy.export("specforge").record
    assert record.facts.is_lossy
    assert "the set's codec int8 is lossy" in capsys.readouterr().err
    assert json.loads((lossy.root / "out/eyas-export.json").read_text())["facts"]["is_lossy"] is True
    lossless = World(tmp_path / "b", monkeypatch)
    assert not lossless.export("specforge").record.facts.is_lossy
    assert "lossy" not in capsys.readouterr().err
    for index, (stored, exact) in enumerate(zip(lossy.stored(), lossless.stored(), strict=True)):
        value = load(lossy.root / f"out/rows_0-2000/data_{index}.ckpt")
        assert torch.equal(value["aux_hidden_state"][0], stored.aux_TAD.flatten(1))
        assert torch.equal(value["hidden_state"][0], stored.last_TD)
        assert not torch.equal(stored.last_TD, exact.last_TD)
        # A row of 16 channels is one group: half a step is a 254th of its largest value over the channel's scale.
        assert (stored.aux_TAD - exact.aux_TAD).abs().max() < exact.aux_TAD.abs().max() / 100


def test_an_export_of_something_else_is_refused(world: World) -> None:
    world.export("speculators_v1", "0.3.0")
    before = tree(world.root / "out")
    with pytest.raises(StoreError, match="holds another export"):
        world.export("speculators_v1", "0.4.0")
    with pytest.raises(StoreError, match="is no file of this export"):
        world.export("specforge")
    assert tree(world.root / "out") == before


def test_disk_is_checked_before_the_first_byte(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    params = world.root / "params.yaml"
    params.write_text(params.read_text().replace("reserve_bytes: 1000000000", "reserve_bytes: 1000"))
    num_tokens = sum(len(sample.input_ids) for sample in world.tokens.values())
    payload = num_tokens * (4 * 16 * 2 + 16)
    monkeypatch.setattr(fs, "free_bytes", lambda _: payload)
    with pytest.raises(DiskError, match=r"6 of 6 samples need .* does not fit"):
        world.export("speculators_v1", "0.4.0")
    assert files(world.root / "out") == []


@pytest.mark.parametrize(("layout", "version"), QUICK_LAYOUTS)
def test_a_set_of_trained_rows_is_refused_unless_it_holds_what_the_peer_reads(
    layout: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = layout_tokens([6, 8])
    first = next(iter(tokens.values()))
    world = World(tmp_path / "a", monkeypatch, tokens=tokens, last_rows="trained")
    with pytest.raises(StoreError, match=r"of them are not stored.*last_rows: trained"):
        world.export(layout, version)
    # One that no peer trains on is read nowhere: its missing rows are zeros, never NaN.
    from eyas.tokens.dataset import make_sample

    silent = make_sample(
        first.input_ids, [0] * len(first.input_ids), conversation_id="c", source="s", split="train", variant="given"
    )
    quiet = World(tmp_path / "b", monkeypatch, tokens={silent.sample_id: silent}, last_rows="trained")
    result = quiet.export(layout, version)
    for file in result.record.files:
        if file.path.endswith((".pt", ".ckpt")) and file.sample_id:
            value = load(tmp_path / "b/out" / file.path)
            last_TD = value["hidden_states"][-1] if "hidden_states" in value else value["hidden_state"][0]
        elif file.sample_id:
            last_TD = load_file(tmp_path / "b/out" / file.path)["hidden_states"][:, -1]
        else:
            continue
        assert not last_TD.any()
        assert torch.isfinite(last_TD).all()


def test_commands_print_what_happened(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eyas import cli

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        return int(ended.value.code or 0), capsys.readouterr().out

    monkeypatch.chdir(world.root)
    code, out = run(
        "export-states", "--format", "speculators_v1", "--trainer-version", "0.3.0", "--to", "out", "--json"
    )
    assert code == 0
    assert json.loads(out)["last"] == "post_norm"
    (world.root / "out/eyas-export.json").unlink()
    code, out = run("import-states", "--format", "speculators_v1", "--from", "out", "--to", "in", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((world.root / "in/import.json").read_text())
    assert run("import-states", "--format", "speculators_v1", "--from", "nothing", "--to", "in")[0] == 2
    assert run("export-states", "--format", "speculators_v1", "--to", "out")[0] == 2
    assert run("import-states", "--format", "specforge", "--from", "out", "--to", "in", "--boundaries", "2,x")[0] == 2
