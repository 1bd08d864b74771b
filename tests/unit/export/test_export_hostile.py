"""Exports that somebody else packed: what the folder or its record claims is never a traceback and never believed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_export_write import SHAPE, make_drafter, make_meta, make_target, run

from eyas import fs
from eyas.errors import ExportError, StoreError
from eyas.export.verify import verify_export

VERIFY = """
import sys
from pathlib import Path
from test_export_hostile import ExportError, verify
try:
    verify(Path(sys.argv[1]))
except ExportError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run(tmp_path)
    return tmp_path / "export"


def verify(folder: Path) -> None:
    verify_export(folder, make_drafter(SHAPE), make_meta(SHAPE), make_target())


def seal(folder: Path) -> None:
    """Let the record name the files as they are."""
    record = fs.read_json(folder / "export.json")
    files = [file for file in fs.tree_digests(folder) if file.path != "export.json"]
    record["files"] = [dataclasses.asdict(file) for file in files]
    fs.write_text(folder / "export.json", json.dumps(record))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("servers", ["../export/sglang"], "export.servers"),
        ("servers", ["nope"], "export.servers"),
        ("servers", ["/etc"], "export.servers"),
        ("dtype", "nope", "export.dtype"),
        ("schema_version", 2, "schema_version 2, expected 1"),
        ("schema_version", 0, "schema_version 0, expected 1"),
        ("dtype", "load", "export.dtype"),
        ("max_logit_difference", 0.0, "max_logit_difference 0, measured 0.0"),
        ("max_logit_difference", 99.0, "max_logit_difference 99, measured 0.0"),
    ],
)
def test_a_record_that_claims_another_thing_is_refused(folder: Path, key: str, value: Any, said: str) -> None:
    path = folder / "export.json"
    fs.write_text(path, json.dumps(fs.read_json(path) | {key: value}))
    with pytest.raises(ExportError, match=said):
        verify(folder)


@pytest.mark.parametrize("value", ["x", 3, True, [None], [], None])
@pytest.mark.parametrize(("server", "key"), [("sglang", "eagle_config"), ("vllm", "speculators_config")])
def test_sections_that_are_no_objects_are_named(folder: Path, server: str, key: str, value: Any) -> None:
    """An empty list is no section either: vLLM would take the folder for a plain model."""
    path = folder / server / "config.json"
    fs.write_text(path, json.dumps(fs.read_json(path) | {key: value}))
    with pytest.raises(ExportError, match=f"{server}: {key}: .* expected an object"):
        verify(folder)


@pytest.mark.parametrize(
    "add",
    [
        lambda path: path.symlink_to(path.parent),
        lambda path: path.symlink_to("/nonexistent"),
        os.mkfifo,
        Path.mkdir,
        lambda path: path.write_text("{}"),
    ],
    ids=["loop", "dangling", "pipe", "folder", "file"],
)
def test_whatever_lies_beside_the_three_files_is_named(folder: Path, add: Callable[[Path], Any]) -> None:
    """An index would send the loader to other files, a module of code would be run."""
    add(folder / "sglang" / "model.safetensors.index.json")
    with pytest.raises(ExportError, match=r"sglang: model\.safetensors\.index\.json: no file of an export"):
        verify(folder)


def test_a_record_may_not_name_more_files_of_a_server(folder: Path) -> None:
    fs.write_text(folder / "sglang" / "modeling.py", "raise SystemExit")
    seal(folder)
    with pytest.raises(ExportError, match=r"modeling\.py: no file of an export"):
        verify(folder)


@pytest.mark.parametrize("instead", [None, "a file"])
def test_a_server_without_a_folder_is_named(folder: Path, instead: str | None) -> None:
    shutil.rmtree(folder / "vllm")
    if instead:
        (folder / "vllm").write_text(instead)
    with pytest.raises(ExportError, match="vllm: no folder of this server"):
        verify(folder)


@pytest.mark.parametrize(
    ("server", "key", "value"),
    [
        ("sglang", "hidden_size", 16.0),
        ("sglang", "num_hidden_layers", True),
        ("sglang", "tie_word_embeddings", 0),
        ("sglang", "draft_vocab_size", 31.0),
        ("sglang", "eagle_config.eagle_aux_hidden_state_layer_ids", [True, 5, 8]),
        ("vllm", "transformer_layer_config.vocab_size", 97.0),
        ("vllm", "eagle_aux_hidden_state_layer_ids", [2.0, 6, 9]),
        ("vllm", "speculators_config.verifier.name_or_path", 3),
        ("vllm", "speculators_config.verifier.architectures", "Llama"),
    ],
)
def test_values_that_only_python_calls_equal_are_refused(folder: Path, server: str, key: str, value: Any) -> None:
    """1.0 == 1 == True here; a server builds a tensor by it, or refuses the folder. The record was made to fit."""
    path = folder / server / "config.json"
    whole = place = fs.read_json(path)
    *parents, last = key.split(".")
    for parent in parents:
        place = place[parent]
    place[last] = value
    fs.write_text(path, json.dumps(whole))
    seal(folder)
    said = "layer ids" if last.endswith("layer_ids") else key
    with pytest.raises(ExportError, match=f"- {server}: {said}"):
        verify(folder)


def test_a_number_written_without_its_point_is_the_same(folder: Path) -> None:
    path = folder / "sglang" / "config.json"
    fs.write_text(path, path.read_text().replace("10000.0", "10000"))
    seal(folder)
    verify(folder)


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(folder: Path, server: str, name: str) -> None:
    """In a process of its own: whoever opens the pipe waits where no signal of Python's comes through."""
    (folder / server / name).unlink()
    os.mkfifo(folder / server / name)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", VERIFY, folder], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert f"- {server}: {name}: no regular file" in done.stdout


def test_a_record_that_is_a_pipe_is_named(folder: Path) -> None:
    (folder / "export.json").unlink()
    os.mkfifo(folder / "export.json")
    with pytest.raises(StoreError, match=r"export\.json is no regular file"):
        verify(folder)


@pytest.mark.parametrize(("server", "name"), [("sglang", "layers.0.mlp.up_proj.weight"), ("vllm", "model.d2t")])
def test_a_second_tensor_for_a_parameter_is_listed_with_all_faults(folder: Path, server: str, name: str) -> None:
    """Which of two names a server loads last is its own affair."""
    path = folder / server / "model.safetensors"
    named = load_file(path)
    again = {"layers.0.mlp.up_proj.weight": "midlayer.mlp.up_proj.weight", "model.d2t": "d2t"}[name]
    save_file(named | {name: named[again].clone()}, path)
    other = "vllm" if server == "sglang" else "sglang"
    (folder / other / "config.json").write_text("{}")
    with pytest.raises(ExportError) as error:
        verify(folder)
    assert f"- {server}: {name}: not a name of this export" in str(error.value)
    assert f"- {other}: " in str(error.value)
