"""A written export is damaged in one way at a time; the check names what is wrong, in which server's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_write import SHAPE, D, V, W, make_drafter, make_meta, make_target, run

from eyas import fs
from eyas.errors import ExportError, StoreError
from eyas.export.verify import verify_export

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], None]
OTHER_IDS_W = torch.arange(W) * 2


def verify(folder: Path) -> None:
    verify_export(folder / "export", make_drafter(SHAPE), make_meta(SHAPE), make_target())


def tensors(edit: Callable[[Tensors], Any]) -> Damage:
    def damage(folder: Path) -> None:
        named = load_file(folder / "model.safetensors")
        edit(named)
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors")

    return damage


def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda named: named.update({name: how(named[name])}))


def rename(old: str, new: str) -> Damage:
    return tensors(lambda named: named.update({new: named.pop(old)}))


def config(key: str, value: Any) -> Damage:
    def damage(folder: Path) -> None:
        whole = json.loads((folder / "config.json").read_text())
        *parents, last = key.split(".")
        place = whole
        for parent in parents:
            place = place[parent]
        place[last] = value
        if value is KeyError:
            del place[last]
        (folder / "config.json").write_text(json.dumps(whole))

    return damage


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)).to(tensor.dtype)


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-7])


def other_vocab(named: Tensors) -> None:
    """A right pair of maps, of another draft vocab."""
    named["d2t"] = OTHER_IDS_W - torch.arange(W)
    named["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, OTHER_IDS_W, True)


def first_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = float("nan")
    return tensor


CORRUPTIONS: dict[str, tuple[str, Damage, str]] = {
    "dropped key": ("sglang", tensors(lambda t: t.pop("fc.weight")), "fc.weight: missing, it would keep random values"),
    "renamed key": ("vllm", rename("norm.weight", "final.weight"), "final.weight: the loader would skip it in silence"),
    "missing norm": (
        "sglang",
        tensors(lambda t: t.pop("midlayer.hidden_norm.weight")),
        "layers.0.hidden_norm.weight: missing",
    ),
    "shuffled d2t": ("sglang", change("d2t", lambda t: t.flip(0)), "d2t: target ids"),
    "stale t2d": ("vllm", change("t2d", lambda t: t.roll(1)), "t2d: does not mark the ids that d2t names"),
    "maps of another run": ("sglang", tensors(other_vocab), "d2t: other values: "),
    "ids instead of offsets": ("vllm", change("d2t", lambda t: t + torch.arange(W)), "d2t: target ids "),
    "wrong boundary ids": (
        "sglang",
        config("eagle_config.eagle_aux_hidden_state_layer_ids", [2, 6, 9]),
        "layer ids: the engine would use [2, 6, 9], expected [1, 5, 8]",
    ),
    "swapped aux order": (
        "vllm",
        config("eagle_aux_hidden_state_layer_ids", [6, 2, 9]),
        "layer ids: the engine would use [6, 2, 9], expected [2, 6, 9]",
    ),
    "swapped aux columns": (
        "sglang",
        change("fc.weight", lambda t: t.roll(D, dims=1)),
        "fc.weight: the checkpoint's values in another order",
    ),
    "transposed fc": ("vllm", change("fc.weight", lambda t: t.T), f"fc.weight [{3 * D}, {D}] expected [{D}, {3 * D}]"),
    "swapped projections": (
        "sglang",
        tensors(
            lambda t: t.update(
                {
                    "midlayer.self_attn.k_proj.weight": t["midlayer.self_attn.v_proj.weight"],
                    "midlayer.self_attn.v_proj.weight": t["midlayer.self_attn.k_proj.weight"].clone(),
                }
            )
        ),
        "midlayer.self_attn.k_proj.weight: other values",
    ),
    "wrong head size": (
        "vllm",
        change("lm_head.weight", lambda t: t[:-1]),
        f"lm_head.weight [{W - 1}, {D}] expected [{W}, {D}]",
    ),
    "fp16 weights": (
        "sglang",
        change("fc.weight", torch.Tensor.half),
        "fc.weight: torch.float16, expected torch.bfloat16",
    ),
    "fp16 config": ("vllm", config("dtype", "float16"), "dtype: 'float16', expected 'bfloat16' as trained"),
    "random embedding": (
        "vllm",
        change("embed_tokens.weight", random_like),
        "embed_tokens.weight: other values: 100.00% are not the target's embedding",
    ),
    "zeroed tensor": ("sglang", change("lm_head.weight", torch.zeros_like), "lm_head.weight: all zeros"),
    "NaN": ("vllm", change("layers.0.mlp.up_proj.weight", first_nan), "up_proj.weight: holds NaN"),
    "one bit flipped": (
        "sglang",
        tensors(lambda t: t["norm.weight"].view(torch.int16)[3:4].bitwise_xor_(1)),
        "norm.weight: other values: 6.25% are not the checkpoint's",
    ),
    "truncated file": ("vllm", cut, "vllm/model.safetensors: cannot be read whole"),
    "second weights file": (
        "sglang",
        lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x") and None,
        "pytorch_model.bin: a second file of weights",
    ),
    "tied": ("sglang", config("tie_word_embeddings", True), "tie_word_embeddings: True, expected False"),
    "wrong rope theta": ("sglang", config("rope_theta", 5e5), "rope_theta: 500000.0, expected 10000.0"),
    "wrong rope theta, new schema": (
        "vllm",
        config("transformer_layer_config.rope_parameters.rope_theta", 5e5),
        "transformer_layer_config.rope_parameters: ",
    ),
    "wrong vocab size": (
        "vllm",
        config("transformer_layer_config.vocab_size", V + 1),
        f"vocab_size: {V + 1}, expected {V}",
    ),
    "wrong draft vocab size": ("sglang", config("draft_vocab_size", W + 1), f"draft_vocab_size: {W + 1}, expected {W}"),
    "wrong target hidden size": (
        "sglang",
        config("target_hidden_size", 2 * D),
        "target_hidden_size: 32, expected no such",
    ),
    "wrong num heads": ("sglang", config("num_attention_heads", 8), "num_attention_heads: 8, expected 4"),
    "wrong norm eps": (
        "vllm",
        config("transformer_layer_config.rms_norm_eps", 1e-6),
        "rms_norm_eps: 1e-06, expected 1e-05",
    ),
    "more aux streams": (
        "sglang",
        config("num_aux_hidden_states", 4),
        "num_aux_hidden_states: 4, expected no such key",
    ),
    "three streams by default": (
        "vllm",
        config("transformer_layer_config.num_aux_hidden_states", KeyError),
        "num_aux_hidden_states: None, expected 3",
    ),
    "architectures of the target": ("sglang", config("architectures", ["LlamaForCausalLM"]), "architectures: ['Llama"),
    "norm lost": ("vllm", config("norm_before_fc", True), "norm_before_fc: True, expected False"),
    "normed residual": ("sglang", config("norm_before_residual", True), "norm_before_residual: True, expected no such"),
    "training path": (
        "vllm",
        config("speculators_config.verifier.name_or_path", "/data/target"),
        "name_or_path: '/data/target' is a path of this machine",
    ),
    "no config": ("sglang", lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A folder with a right export."""
    shutil.copytree(whole / "export", tmp_path / "export")
    return tmp_path


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_each_corruption_is_refused_by_name(copy: Path, what: str) -> None:
    """Cases 77 to 80 on a whole export; the other server's folder is not blamed."""
    server, damage, named = CORRUPTIONS[what]
    damage(copy / "export" / server)
    with pytest.raises(ExportError) as error:
        verify(copy)
    lines = [line for line in str(error.value).splitlines() if line.startswith("- ")]
    assert any(named in line for line in lines), str(error.value)
    assert all(line.startswith(f"- {server}: ") for line in lines)


def test_a_right_export_passes(tmp_path: Path) -> None:
    record = run(tmp_path)
    assert verify_export(tmp_path / "export", make_drafter(SHAPE), make_meta(SHAPE), make_target()) == record


def edit_record(key: str, value: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "export.json"
        fs.write_bytes(path, json.dumps(json.loads(path.read_text()) | {key: value}).encode())

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (edit_record("drafter", "0" * 64), "export.json: drafter 000"),
        (edit_record("boundaries", [2, 6, 10]), "export.json: boundaries (2, 6, 10), expected (2, 6, 9)"),
        (edit_record("capture_identity", "c" * 64), "export.json: capture_identity ccc"),
        (lambda folder: (folder / "notes.txt").write_text("x"), "notes.txt: not in export.json"),
        (lambda folder: (folder / "sglang/README.md").unlink(), "sglang/README.md: missing"),
        (lambda folder: (folder / "vllm/README.md").write_text("tau 6"), "vllm/README.md: not the bytes"),
    ],
)
def test_a_record_or_file_that_is_not_the_exports_is_named(copy: Path, damage: Damage, named: str) -> None:
    damage(copy / "export")
    with pytest.raises(ExportError) as error:
        verify(copy)
    assert [named in line for line in str(error.value).splitlines() if line.startswith("- ")] == [True]


def test_another_checkpoint_is_refused(copy: Path) -> None:
    """The weights of one training, the export of another."""
    other = make_drafter(SHAPE)
    with torch.no_grad():
        other.fc.weight[0, 0] += 1.0
    with pytest.raises(ExportError, match=r"sglang: fc\.weight: other values: 0\.13% are not the checkpoint's"):
        verify_export(copy / "export", other, make_meta(SHAPE), make_target())


def test_a_folder_without_a_record_is_refused(copy: Path) -> None:
    (copy / "export/export.json").unlink()
    with pytest.raises(StoreError, match=r"export\.json is missing"):
        verify(copy)
