"""Which parameters differ from those in ``dvc.lock``."""

from __future__ import annotations

import json

import pytest

from eyas import cli
from eyas.ops.changed import Changed, changed

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
    write(image=DIGEST)
    with pytest.raises(SystemExit) as ended:
        cli.main(["changed", "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)[0]["key"] == "extract.image"
