"""Checkpoints of others whose config, index or weights are not what their names promise: told by name, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_write import run

from eyas import fs
from eyas.drafter.foreign import read_checkpoint
from eyas.errors import StoreError, TrainError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run(tmp_path)
    return tmp_path / "export" / "sglang"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intermediate_size", -1),
        ("intermediate_size", 10**30),
        ("num_attention_heads", True),
        ("num_key_value_heads", "x"),
        ("num_key_value_heads", 3),
        ("draft_vocab_size", 10**6),
        ("max_position_embeddings", "x"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1),
        ("rope_theta", "x"),
        ("rope_parameters", {"rope_theta": "x"}),
        ("rope_parameters", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", [1]),
        ("eagle_config", "x"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, "x"]}),
        ("architectures", 3),
        ("fc_norm", "false"),
        ("norm_output", 1),
        ("norm_before_residual", "no"),
        ("norm_before_fc", 0),
        ("use_aux_norm", [True]),
        ("eagle_config", {"use_aux_hidden_state": "false"}),
        ("tie_word_embeddings", 0),
        ("num_hidden_layers", True),
    ],
)
def test_values_of_another_kind_are_refused_by_their_key(folder: Path, key: str, value: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(fs.read_json(path) | {key: value}))
    said = next(iter(value)) if isinstance(value, dict) and key == "eagle_config" else key
    with pytest.raises(TrainError, match=said):
        read_checkpoint(folder)


@pytest.mark.parametrize("file", ["/etc/passwd", "../a.safetensors", ".", "x/../../a.safetensors", 3, "a.py"])
def test_an_index_stays_within_its_folder(folder: Path, file: Any) -> None:
    (folder / "model.safetensors").rename(folder.parent / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": file}}))
    with pytest.raises(StoreError, match="expected files of its folder"):
        read_checkpoint(folder)


def test_values_that_float32_does_not_hold_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    named = load_file(path)
    save_file(named | {"fc.weight": named["fc.weight"].double() * 1e300}, path)
    with pytest.raises(TrainError, match=r"fc\.weight: .* not finite"):
        read_checkpoint(folder)


def test_weights_of_eight_bits_are_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    eight = load_file(path)["fc.weight"].to(torch.float8_e4m3fn)
    save_file(load_file(path) | {"fc.weight": eight}, path)
    assert torch.equal(read_checkpoint(folder).weights["fc.weight"], eight.float())


def test_a_pickle_of_junk_is_a_damaged_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(StoreError, match="is no file of tensors alone"):
        read_checkpoint(folder)
