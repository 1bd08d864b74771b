"""``eyas params`` writes a complete file, atomically, and says what changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eyas import cli, config
from eyas.errors import ConfigError
from eyas.ops.params import parse_choices, write_params

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return tmp_path


def test_first_write_then_unchanged_then_changed(tree: Path) -> None:
    assert len(write_params(tree, [])) > 50
    assert write_params(tree, []) == []
    changes = {change.key: (change.old, change.new) for change in write_params(tree, ["TARGET=kimi_k2_5"])}
    assert changes["target.shape.hidden_size"] == (576, 7168)
    assert changes["extract.boundaries"] == ([], [3, 31, 59])
    assert "train.lr" not in changes
    assert config.load(tree / "params.yaml").target.name == "kimi_k2_5"


def test_a_group_left_out_takes_its_default(tree: Path) -> None:
    write_params(tree, ["DRAFTER=smoke", "TARGET=qwen3_8b"])
    write_params(tree, ["TARGET=qwen3_8b"])
    assert config.load(tree / "params.yaml") == config.compose_presets(tree / "conf", {"target": "qwen3_8b"})


def test_a_damaged_file_is_replaced(tree: Path) -> None:
    (tree / "params.yaml").write_text("train: [")
    write_params(tree, [])
    config.load(tree / "params.yaml")


@pytest.mark.parametrize("choices", [["TARGET"], ["TARGET="], ["COLOUR=red"], ["TARGET=a", "target=b"], ["qwen3_8b"]])
def test_other_choices_are_refused(choices: list[str]) -> None:
    with pytest.raises(ConfigError, match="TARGET=PRESET"):
        parse_choices(choices)


def test_nothing_is_written_on_an_unknown_preset(tree: Path) -> None:
    write_params(tree, [])
    before = (tree / "params.yaml").read_bytes()
    with pytest.raises(ConfigError, match="MACHINE: 'abacus', expected one of cpu"):
        write_params(tree, ["MACHINE=abacus"])
    assert (tree / "params.yaml").read_bytes() == before


def test_command_prints_json(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tree)
    write_params(tree, [])
    with pytest.raises(SystemExit) as ended:
        cli.main(["params", "MACHINE=h200", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["train.device"] == ["cpu", "cuda"]


def test_mistake_ends_with_2_and_a_hint(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tree)
    with pytest.raises(SystemExit) as ended:
        cli.main(["params", "TARGET=gpt"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "TARGET: 'gpt', expected one of" in captured.err
    assert "hint: " in captured.err
