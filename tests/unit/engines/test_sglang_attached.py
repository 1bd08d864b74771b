"""A server that somebody else started: its files and number formats beside the target's."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from eyas import fs
from eyas.engines.sglang import attached, wire
from eyas.errors import ServerError
from fake_target import make_target


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "target"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (made / "model.safetensors").write_bytes(b"weights" * 100)
    return made


@pytest.fixture
def target(folder):
    return dataclasses.replace(make_target(), dtype="bfloat16", files=fs.tree_digests(folder))


def hello(path, **arguments):
    return wire.Hello(
        protocol=wire.PROTOCOL, pid=1, sglang="0.5.23", torch="2", device="cpu", model_path=str(path),
        model_class="LlamaForCausalLM", hidden_size=16, num_layers=6, vocab_size=1000, dtype="bfloat16",
        boundaries=[1, 2, 3], server_args=arguments,
    )  # fmt: skip


def test_the_same_folder_or_the_same_files_elsewhere_are_taken(folder, target, tmp_path):
    attached.check(hello(folder, kv_cache_dtype="auto", quantization=None), target, folder)
    (tmp_path / "link").symlink_to(folder)
    attached.check(hello(tmp_path / "link"), target, folder)
    shutil.copytree(folder, tmp_path / "copy")
    attached.check(hello(tmp_path / "copy"), target, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: (path / "model.safetensors").write_bytes(b"w"),
            "has a model.safetensors of 1 bytes, expected 700",
        ),
        (lambda path: (path / "model.safetensors").write_bytes(b"WEIGHTS" * 100), "has a model.safetensors of SHA-256"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
    ],
)
def test_another_model_of_the_same_shape_is_refused(folder, target, tmp_path, change, message):
    shutil.copytree(folder, tmp_path / "other")
    change(tmp_path / "other")
    with pytest.raises(ServerError, match=message) as caught:
        attached.check(hello(tmp_path / "other"), target, folder)
    assert "sglang-command" in (caught.value.hint or "")


def test_files_that_are_not_seen_from_here_are_left_to_the_probe(folder, target, capsys):
    """In a container of its own, say."""
    attached.check(hello("/somewhere/else"), target, folder)
    assert "the probe alone tells" in capsys.readouterr().err


def test_weights_quantized_on_loading_are_refused_and_published_ones_taken(folder, target):
    with pytest.raises(ServerError, match="quantization = 'fp8', the target's weights are bfloat16"):
        attached.check(hello(folder, quantization="fp8"), target, folder)
    for settings in (
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
    ):
        (folder / "config.json").write_text(json.dumps(settings))
        attached.check(hello(folder, quantization="fp8"), target, folder)


def test_a_kv_cache_in_eight_bits_is_refused_but_where_the_model_has_it_so(folder, target):
    attached.check(hello(folder, kv_cache_dtype="bfloat16"), target, folder)
    with pytest.raises(ServerError, match="kv_cache_dtype = 'fp8_e4m3', expected 'auto'"):
        attached.check(hello(folder, kv_cache_dtype="fp8_e4m3"), target, folder)
    sparse = dataclasses.replace(target, model_type="deepseek_v32")
    attached.check(hello(folder, kv_cache_dtype="fp8_e4m3"), sparse, folder)
