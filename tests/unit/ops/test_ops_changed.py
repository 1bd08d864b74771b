"""Which parameters differ from those in ``dvc.lock``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eyas import cli
from eyas.ops.changed import Changed, changed

ROOT = Path(__file__).parents[3]
DIGEST = "eyas@sha256:" + "a" * 64
LOCK = """\
schema: '2.0'
stages:
  plan:
    cmd: plan
    params:
      params.yaml:
        extract: {image: '', engine: hf, boundaries: [], engine_options: {}}
  tokenize:
    cmd: tokenize
    params:
      params.yaml:
        extract.boundaries: []
        tokenize: {max_tokens: 2048}
"""
PARAMS = (
    "extract: {{image: {image!r}, engine: hf, boundaries: [], engine_options: {options}}}\ntokenize: {{{tokenize}}}\n"
)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def put(image="", options="{}", tokenize="max_tokens: 2048"):
        (tmp_path / "dvc.lock").write_text(LOCK)
        (tmp_path / "params.yaml").write_text(PARAMS.format(image=image, options=options, tokenize=tokenize))
        return tmp_path

    return put


def test_nothing_changed(write):
    assert changed(write()) == []


def test_another_pin_shows_as_exactly_that(write):
    assert changed(write(image=DIGEST)) == [Changed("plan", "extract.image", "''", repr(DIGEST))]


def test_keys_that_came_and_went(write):
    root = write(options="{tp_size: 2}", tokenize="min_tokens: 1")
    assert changed(root) == [
        Changed("plan", "extract.engine_options", "{}", "absent"),
        Changed("plan", "extract.engine_options.tp_size", "absent", "2"),
        Changed("tokenize", "tokenize.max_tokens", "2048", "absent"),
        Changed("tokenize", "tokenize.min_tokens", "absent", "1"),
    ]


def test_before_the_first_run_nothing_is_said(tmp_path):
    (tmp_path / "params.yaml").write_text("extract: {}\n")
    assert changed(tmp_path) == []


def test_the_command(write, capsys):
    """Values out of range are told after what differs, by the message of `make params`."""
    root = write()
    text = (ROOT / "params.yaml").read_text().replace("  image: ''\n  max_failed", f"  image: {DIGEST}\n  max_failed")
    (root / "params.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli.main(["changed", "--json"])
    assert not ended.value.code
    keys = [entry["key"] for entry in json.loads(capsys.readouterr().out)]
    assert "extract.image" in keys
    (root / "params.yaml").write_text(text.replace("  lr: 0.002", "  lr: -1"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["changed", "--json"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert [entry["key"] for entry in json.loads(said.out)] == keys
    assert "error: train.lr: -1" in said.err


STAGE = "stages: {%s: {cmd: 'true', params: [train.lr], outs: [%s]}}\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with an imported and an adopted set; real dvc, real make."""
    root = tmp_path_factory.mktemp("status")
    for name in ("Makefile", "params.yaml"):
        shutil.copy(ROOT / name, root)
    (root / "dvc.yaml").write_text(STAGE % ("fetch", "models"))
    (root / "imports/other").mkdir(parents=True)
    (root / "imports/other/dvc.yaml").write_text(
        STAGE.replace("{cmd", "{wdir: ../.., cmd") % ("import", "imports/other/x")
    )
    (root / "adopted").mkdir()
    (root / "adopted/old.dvc").write_text("outs: [{md5: 764efa883dda1e11db47671c4a3bbd9e, hash: md5, path: old}]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment |= {
        "EYAS_IMAGE": "x",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}/src",
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)

    assert run("dvc", "init", "-q", "--no-scm").returncode == 0
    return root, run


def test_status_lists_sets_that_were_brought_in_apart_from_the_pipeline(project):
    _, run = project
    done = run("make", "status")
    assert done.returncode == 0, done.stderr
    own, _, others = done.stdout.partition("\nBrought in beside the pipeline:\n")
    assert "\nfetch:" in own
    assert "imports/" not in own
    assert "adopted/" not in own
    assert "\nimports/other/dvc.yaml:import:" in f"\n{others}"
    assert "\nadopted/old.dvc:" in f"\n{others}"


def test_status_shows_the_state_and_then_what_is_wrong_in_params(project):
    root, run = project
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(text.replace("  lr: 0.002", "  lr: -1"))
    done = run("make", "status")
    (root / "params.yaml").write_text(text)
    assert done.returncode == 2
    assert "fetch:" in done.stdout
    assert "error: train.lr: -1.0, expected more than 0" in done.stderr
