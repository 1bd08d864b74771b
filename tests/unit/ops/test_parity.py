"""Parity judges each stream by transformers' own error in the same dtype; a wrong stream is not lost among right ones."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from eyas.config import Params
from eyas.engines.hf import HfEngine
from eyas.errors import ConfigError
from eyas.ops import parity
from fake_target import make_target

BOUNDARIES = (1, 2, 3)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository whose target is a tiny random Llama."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "target")
    target = dataclasses.replace(
        make_target(), vocab_size=320, hidden_size=32, num_layers=4, max_position_embeddings=256
    )
    params = Params()
    params.target.dtype = "bfloat16"
    monkeypatch.setattr(parity.config, "load", lambda path: params)
    monkeypatch.setattr(parity.fs, "read_record", lambda kind, path: target)
    monkeypatch.setattr(parity, "ensure", lambda *_: tmp_path / "target")
    monkeypatch.setattr(parity, "resolve_boundaries", lambda *_: BOUNDARIES)
    return tmp_path


class Peer:
    """An engine that is transformers too, its states passed through ``change``."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change
        self.open, self.close, self.announce, self.describe = inner.open, inner.close, inner.announce, inner.describe

    def capture(self, batch):
        for got in self.inner.capture(batch):
            yield self.change(got)


def with_peer(monkeypatch, change):
    def make(name, **given):
        inner = HfEngine(
            given["target"], given["folder"], given["boundaries"], dtype=given["dtype"], device=given["device"]
        )
        return inner if name == "hf" else Peer(inner, change)

    monkeypatch.setattr(parity, "make_engine", make)


def test_equal_engines_are_right_and_every_figure_is_kept(root, monkeypatch):
    with_peer(monkeypatch, lambda got: got)
    figures = parity.run_parity(root, ["sglang"], 6)
    assert figures["right"]
    assert json.loads((root / parity.REPORT).read_text()) == figures
    ours, theirs = (figures["engines"][name]["streams"] for name in ("sglang", "hf"))
    assert list(ours) == ["aux 1", "aux 2", "aux 3", "last"]
    num_rows = sum(
        len(sample.input_ids)
        for sample in parity.make_prompts(dataclasses.replace(make_target(), max_position_embeddings=256), 6)
    )
    for stream, facts in ours.items():
        assert facts["by_hf"] == pytest.approx(1, abs=0.02)
        assert 1e-4 < facts["mean_relative_error"] <= facts["worst_relative_error"] < 0.05
        assert facts["rows"] == theirs[stream]["rows"] == num_rows
    assert 0.9 < figures["engines"]["hf"]["top1_agreement"] <= 1
    assert "aux 3" in parity.parity_table(figures)


@pytest.mark.parametrize("stream", [0, 2])
def test_one_stream_that_is_a_little_off_is_named(root, monkeypatch, stream):
    def change(got):
        aux_TAD = got.aux_TAD.clone()
        aux_TAD[:, stream] *= 1.01
        return dataclasses.replace(got, aux_TAD=aux_TAD)

    with_peer(monkeypatch, change)
    figures = parity.run_parity(root, ["sglang"], 4)
    assert not figures["right"]
    wrong = [name for name, facts in figures["engines"]["sglang"]["streams"].items() if not facts["right"]]
    assert wrong == [f"aux {BOUNDARIES[stream]}"]


def test_an_engine_without_states_is_refused(root):
    with pytest.raises(ConfigError, match="parity of fake on 6 samples, expected hf, sglang, vllm"):
        parity.run_parity(root, ["fake"], 6)
