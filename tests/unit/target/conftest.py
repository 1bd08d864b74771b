"""Fixtures of the target room: every test has its own wheels and targets folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_targets import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    SHAPE,
    VOCAB,
    write_tiny_gguf,
    write_tokenizer,
    write_wheel,
)

from eyas.config import TargetConfig


@pytest.fixture(autouse=True)
def rooms(tmp_path, monkeypatch):
    """Every test has its own wheels and targets folder."""
    monkeypatch.setenv("EYAS_WHEELS", str(tmp_path / "wheels"))
    monkeypatch.setenv("EYAS_TARGETS_DIR", str(tmp_path / "targets"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory) -> tuple[bytes, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    weights = write_tiny_gguf(path)
    return path.read_bytes(), weights


@pytest.fixture
def wheel_config(tiny_gguf, tmp_path) -> TargetConfig:
    """A target in a wheel that is already in the wheels folder."""
    _, sha256 = write_wheel(tmp_path / "wheels", "tiny_llm-1.0", {"tiny_llm/tiny.gguf": tiny_gguf[0], "x.py": b""})
    return TargetConfig(
        name="tiny", source="wheel", location="tiny-llm==1.0", revision=sha256, member="tiny_llm/tiny.gguf", shape=SHAPE
    )


@pytest.fixture(scope="session")
def _model_folder(tmp_path_factory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def model_folder(_model_folder, tmp_path) -> Path:
    """A private copy of a small Llama in transformers' layout."""
    return Path(shutil.copytree(_model_folder, tmp_path / "model"))


@pytest.fixture
def directory_config(model_folder) -> TargetConfig:
    return TargetConfig(name="tiny", source="directory", location=str(model_folder), shape=dataclasses.replace(SHAPE))
