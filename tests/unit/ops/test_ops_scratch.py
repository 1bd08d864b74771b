"""Scratch copies leave the user's tree alone; two runs are compared by content."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import EyasError, StoreError
from eyas.ops import scratch
from eyas.ops.reproduce import ARTIFACTS, compare, content_digest
from eyas.ops.scratch import copy_tree, environment, run_small


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name, text in {
        ".gitignore": "ignored\n",
        "kept.py": "1",
        "deep/kept.py": "2",
        "ignored": "3",
        "data/raw/big.jsonl": "4",
        "data/raw/README.md": "about",
        "dvc.lock": "5",
        "removed": "6",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "kept.py", "removed"], cwd=root, check=True)
    (root / "removed").unlink()
    (root / "kept.py").write_text("changed")
    return root


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_copy_holds_the_work_tree_as_it_is(repository: Path, tmp_path: Path) -> None:
    before = names(repository)
    copy_tree(repository, tmp_path / "copy")
    kept = {".gitignore", "kept.py", "deep/kept.py", "data/raw/README.md"}
    assert names(tmp_path / "copy") == kept | {".dvc/config.local", ".eyas-scratch"}
    assert (tmp_path / "copy/kept.py").read_text() == "changed"
    assert names(repository) == before


@pytest.mark.parametrize("harmless", [True, False])
def test_a_pipeline_that_is_out_of_date_once_it_ran_is_refused(repository, tmp_path, monkeypatch, harmless) -> None:
    """The real dvc: the second stage adds to what the first one wrote."""
    command = "cat x > y" if harmless else "cat x > y && rm x && cp y x && echo more >> x"
    stages = f"stages:\n  a: {{cmd: echo 1 > x, outs: [x]}}\n  b: {{cmd: {command}, deps: [x], outs: [y]}}\n"
    (repository / "dvc.yaml").write_text(stages)
    monkeypatch.setattr(scratch, "write_params", lambda *_: None)
    if harmless:
        run_small(repository, tmp_path / "copy")
    else:
        with pytest.raises(EyasError, match="something is out of date right after `dvc repro`"):
            run_small(repository, tmp_path / "copy")


def test_copy_is_made_anew(repository: Path, tmp_path: Path) -> None:
    copy_tree(repository, tmp_path / "copy")
    (tmp_path / "copy/left-over").write_text("x")
    copy_tree(repository, tmp_path / "copy")
    assert "left-over" not in names(tmp_path / "copy")


def test_a_folder_with_other_things_is_never_replaced(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/precious").write_text("x")
    with pytest.raises(EyasError, match="is no scratch copy"):
        copy_tree(repository, tmp_path / "mine")
    assert (tmp_path / "mine/precious").read_text() == "x"


def test_without_git_the_hint_says_how(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(EyasError, match="git init"):
        copy_tree(tmp_path / "plain", tmp_path / "copy")


def test_targets_are_shared_and_code_is_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EYAS_WHEELS", raising=False)
    monkeypatch.setenv("EYAS_TARGETS_DIR", "/elsewhere")
    values = environment(tmp_path, tmp_path / "copy")
    assert values["EYAS_TARGETS_DIR"] == "/elsewhere"
    assert values["EYAS_WHEELS"] == str(tmp_path / ".eyas/wheels")
    assert values["PYTHONPATH"] == str(tmp_path / "copy/src")


def test_servers_set_up_in_the_original_run_in_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EYAS_SGLANG_PYTHON", "EYAS_VLLM_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / ".venv-vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)  # as in a virtual environment
    values = environment(tmp_path, tmp_path / "copy")
    assert values["EYAS_VLLM_PYTHON"] == str(python)
    assert "EYAS_SGLANG_PYTHON" not in values
    monkeypatch.setenv("EYAS_VLLM_PYTHON", "/other/python")
    assert environment(tmp_path, tmp_path / "copy")["EYAS_VLLM_PYTHON"] == "/other/python"


def finished(folder: Path) -> Path:
    for name in ARTIFACTS:
        path = folder / name if "." in Path(name).name else folder / name / "file"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def test_equal_runs_are_equal_and_one_byte_is_seen(tmp_path: Path) -> None:
    first, second = finished(tmp_path / "a"), finished(tmp_path / "b")
    assert all(comparison.equal for comparison in compare(first, second))
    (second / "models/drafter/file").write_text("models/drafteR")
    assert [c.artifact for c in compare(first, second) if not c.equal] == ["models/drafter"]


def test_a_renamed_file_is_seen(tmp_path: Path) -> None:
    first, second = finished(tmp_path / "a"), finished(tmp_path / "b")
    (second / "data/tokens/file").rename(second / "data/tokens/other")
    assert [c.artifact for c in compare(first, second) if not c.equal] == ["data/tokens"]


def test_a_missing_artifact_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(StoreError, match="missing or empty"):
            content_digest(path)
