"""Exports that somebody else packed: what the folder or its record claims is never a traceback and never believed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_export_write import SHAPE, make_drafter, make_meta, make_target, run

from eyas import fs
from eyas.errors import ExportError
from eyas.export.verify import verify_export


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run(tmp_path)
    return tmp_path / "export"


def verify(folder: Path) -> None:
    verify_export(folder, make_drafter(SHAPE), make_meta(SHAPE), make_target())


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
    record = fs.read_json(folder / "export.json")
    files = [fs.file_digest(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    record["files"] = [
        {"path": f.path, "size_bytes": f.size_bytes, "sha256": f.sha256} for f in files if f.path != "export.json"
    ]
    fs.write_text(folder / "export.json", json.dumps(record))
    with pytest.raises(ExportError, match=r"modeling\.py: no file of an export"):
        verify(folder)


@pytest.mark.parametrize("instead", [None, "a file"])
def test_a_server_without_a_folder_is_named(folder: Path, instead: str | None) -> None:
    shutil.rmtree(folder / "vllm")
    if instead:
        (folder / "vllm").write_text(instead)
    with pytest.raises(ExportError, match="vllm: no folder of this server"):
        verify(folder)
