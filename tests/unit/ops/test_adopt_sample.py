"""What an adoption finds out about a folder: layouts written by our exporters, damage, another target."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from adopt_cases import contents, eyas, is_clean, make_repository

sys.path.append(str(Path(__file__).parents[1] / "shards"))

from layout_cases import QUICK_LAYOUTS, World

from eyas import fs
from eyas.errors import DataError
from eyas.ops.adopt import sample as adopt_sample
from eyas.ops.adopt.folder import Adopted, AdoptRequest, adopt
from eyas.ops.adopt.sample import detect, sample_folder
from eyas.ops.adopt.source import find_files

LENGTHS = [5, 7, 4, 30, 12, 9]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A published set in a DVC repository, its target's weights at hand."""
    world = World(make_repository(tmp_path / "repository"), monkeypatch, LENGTHS)
    monkeypatch.setattr(adopt_sample.store, "damage", lambda *_: None)
    monkeypatch.setattr(adopt_sample.store, "target_dir", lambda *_: world.folder)
    return world


def exported(world: World, tmp_path: Path, layout: str, version: str, *, keep_record: bool = False) -> Path:
    """As a peer would have written it: without the notes that eyas leaves."""
    world.export(layout, version, "../peer")
    folder = tmp_path / "peer"
    for path in () if keep_record else folder.glob("eyas-export*"):
        path.unlink()
    return folder


def adopt_it(world: World, folder: Path, layout: str = "") -> Adopted:
    return adopt(world.root, AdoptRequest(folder=folder, engine="vllm", layout=layout))


@pytest.mark.parametrize(("layout", "version"), QUICK_LAYOUTS)
def test_layout_and_facts_are_found(world: World, tmp_path: Path, layout: str, version: str) -> None:
    folder = exported(world, tmp_path, layout, version)
    done = adopt_it(world, folder)
    facts = done.sampled
    assert (done.layout, facts["num_samples"]) == (layout, len(LENGTHS))
    if facts["tokens_from"] == "counted":
        assert facts["num_tokens"] == sum(LENGTHS)
    else:
        assert layout == "specforge"
        assert 0.5 * sum(LENGTHS) < facts["num_tokens"] <= sum(LENGTHS)
    assert (facts["dtype"], facts["num_aux"], facts["hidden_size"]) == ("bfloat16", 3, world.target.hidden_size)
    expected = "pre_norm" if layout == "speculators" or version == "0.4.0" else "post_norm"
    assert facts["final_hidden"] == expected
    assert "rows: top-1 is the next token" in facts["norm_reading"]
    assert facts["problems"] == []
    assert facts["boundaries"] == ([1, 2, 3] if layout == "speculators_v1" else [])
    meta = yaml.safe_load((world.root / "adopted/peer.dvc").read_text())["meta"]["eyas"]["adopted"]
    assert (meta["engine"], meta["layout"], meta["num_tokens"]) == ("vllm", layout, facts["num_tokens"])
    assert is_clean(world.root, "adopted/peer.dvc")


@pytest.mark.slow
def test_an_export_of_ours_says_more(world: World, tmp_path: Path) -> None:
    done = adopt_it(world, exported(world, tmp_path, "speculators", "", keep_record=True))
    assert done.sampled["boundaries"] == [1, 2, 3]


def test_damaged_and_short_files_are_findings_not_obstacles(world: World, tmp_path: Path) -> None:
    folder = exported(world, tmp_path, "speculators", "")
    first, second = (folder / f"hidden_states/hs_{i}.safetensors" for i in (0, 1))
    first.write_bytes(first.read_bytes()[:-100])
    second.write_bytes(second.read_bytes()[:-64] + b"\xff" * 64)
    (folder / "hidden_states/hs_5.safetensors").unlink()
    before = contents(folder)
    problems = adopt_it(world, folder).sampled["problems"]
    assert [problem.split(":")[0] for problem in problems[:2]] == [f"hidden_states/hs_{i}.safetensors" for i in (0, 1)]
    assert "no whole safetensors file" in problems[0]
    assert "not finite" in problems[1]
    assert "1 files are missing" in problems[2]
    assert contents(folder) == before


@pytest.mark.slow
def test_a_folder_of_damage_alone_is_refused_unless_it_is_other(world: World, tmp_path: Path) -> None:
    folder = exported(world, tmp_path, "specforge", "")
    for path in folder.rglob("data_*.ckpt"):
        path.write_bytes(b"PK" + bytes(50))
    with pytest.raises(DataError, match="none of 6 files can be read as specforge") as raised:
        adopt_it(world, folder)
    assert "FORMAT=other" in str(raised.value.hint)
    assert adopt_it(world, folder, "other").sampled == {}


@pytest.mark.slow
def test_states_of_another_target_are_adopted_with_a_finding(world: World, tmp_path: Path) -> None:
    folder = exported(world, tmp_path, "speculators_v1", "0.3.0")
    path = folder / "data_config.json"
    config = fs.read_json(path)
    config["hidden_states"]["layer_ids"][-1] += 7
    fs.write_record(path, config)
    assert "another target?" in adopt_it(world, folder).sampled["problems"][0]


def test_without_a_target_nothing_is_compared(world: World, tmp_path: Path) -> None:
    folder = exported(world, tmp_path, "speculators_v1", "0.4.0")
    (world.root / "models/target.json").unlink()
    sampled = sample_folder(world.root, find_files(world.root, folder), "speculators_v1")
    assert (sampled.norm_reading, sampled.final_hidden, sampled.problems) == ("", None, ())
    assert sampled.boundaries == (1, 2, 3)


def test_two_layouts_in_one_folder_are_told(world: World, tmp_path: Path) -> None:
    folder = exported(world, tmp_path, "speculators_v1", "0.4.0")
    (folder / "rows_0-2000").mkdir()
    (folder / "rows_0-2000/data_0.ckpt").write_bytes(b"")
    with pytest.raises(DataError, match="files of speculators_v1 and specforge"):
        detect(find_files(world.root, folder))


@pytest.mark.slow
def test_nothing_of_torch_is_loaded_for_other_files(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/x").write_bytes(b"x")
    code = (
        "import sys; from eyas.cli import main\n"
        f"try: main(['adopt','--dir',{str(tmp_path / 'old')!r},'--engine','x','--format','other'])\n"
        "except SystemExit as e: assert e.code == 0, e.code\nassert 'torch' not in sys.modules"
    )
    from adopt_cases import ok

    ok(root, sys.executable, "-c", code)
    assert eyas(root, "retire", "old").returncode == 0
