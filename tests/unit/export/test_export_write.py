"""The written export: what a server would compute from it, atomicity, determinism, provenance."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from served_drafter import ServedDrafter

from eyas import fs
from eyas.canonical import digest
from eyas.config import ExportConfig
from eyas.contracts import CheckpointMeta, DrafterShape, ExportMeta, FinalNorm, TargetIdentity
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.ttt import draft_tokens, unroll
from eyas.errors import ExportError, EyasError
from eyas.export import compare, write
from eyas.export.tensors import read_tensors

V, W, D, A, S = 97, 31, 16, 3, 4
SHAPE = DrafterShape(
    target_hidden_size=D,
    hidden_size=D,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_aux=A,
    vocab_size=V,
    draft_vocab_size=W,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
    fc_norm=False,
    norm_output=False,
)


def make_drafter(shape: DrafterShape) -> Drafter:
    torch.manual_seed(7)
    drafter = Drafter(shape)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter))
    target_ids_W = torch.randperm(V)[: shape.draft_vocab_size].sort().values
    t2d_V = torch.zeros(V, dtype=torch.bool)
    t2d_V[target_ids_W] = True
    embedding_VD = torch.randn(V, D).bfloat16()
    drafter.set_target(embedding_VD, target_ids_W - torch.arange(len(target_ids_W)), t2d_V)
    return drafter.eval()


def make_target(model_type: str = "llama") -> TargetIdentity:
    return TargetIdentity(
        source="wheel:a-target==1.0",
        revision="0" * 64,
        files=(),
        architecture="LlamaForCausalLM",
        model_type=model_type,
        num_layers=12,
        hidden_size=D,
        vocab_size=V,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype="bfloat16",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(2,),
        tokenizer_sha256="1" * 64,
        chat_template_sha256="2" * 64,
    )


def make_meta(shape: DrafterShape, boundaries: tuple[int, ...] = (2, 6, 9)) -> CheckpointMeta:
    return CheckpointMeta(
        shape=shape,
        boundaries=boundaries,
        capture_identity="a" * 64,
        target=make_target().digest,
        tokens="b" * 64,
        num_steps=10,
        num_trained_rows=100,
        ttt_steps=3,
        seed=0,
        revision=1,
        files=(),
    )


def run(folder: Path, shape: DrafterShape = SHAPE, **config: object) -> ExportMeta:
    return write.export(make_drafter(shape), make_meta(shape), make_target(), ExportConfig(**config), folder / "export")


SWITCHES = [(False, False), (True, True)]


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize(("fc_norm", "norm_output"), SWITCHES)
def test_a_server_computes_the_trainers_logits(tmp_path: Path, server: str, fc_norm: bool, norm_output: bool) -> None:
    """Case 80: an independent reading of the folder gives the unroll's logits, weights rounded to bf16."""
    shape = dataclasses.replace(SHAPE, fc_norm=fc_norm, norm_output=norm_output)
    run(tmp_path, shape)
    folder, drafter = tmp_path / "export" / server, make_drafter(shape)
    config = json.loads((folder / "config.json").read_text())
    tensors = read_tensors(folder / "model.safetensors")
    layer = config if server == "sglang" else config["transformer_layer_config"]
    embedding_VD = tensors.get("embed_tokens.weight", drafter.embed_tokens.weight)
    served = ServedDrafter(layer, config, tensors, embedding_VD)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    ids_T, aux_TAD = torch.randint(0, V, (11,)), torch.randn(11, A, D)
    pack = pack_documents([Document(ids_T, torch.ones_like(ids_T), aux_TAD, torch.zeros(11, D))], S)
    with torch.no_grad():
        steps = [drafter.logits(normed) for normed in unroll(drafter, pack)]
    for place, row in enumerate(pack.rows_R.tolist()):
        reached = [k for k in range(S) if place < pack.num_rows[k]]
        served_SW = served.logits(aux_TAD, ids_T.tolist(), row, len(reached))
        trained_SW = torch.stack([steps[k][place] for k in reached])
        torch.testing.assert_close(served_SW, trained_SW, rtol=1e-4, atol=1e-4)
        hot_token_ids_W = tensors["d2t"] + torch.arange(W)
        served_ids = hot_token_ids_W[served_SW.argmax(-1)].tolist()
        assert served_ids == draft_tokens(drafter, pack)[place, : len(reached)].tolist()


def test_record_is_last_and_lists_every_file(tmp_path: Path) -> None:
    record = run(tmp_path)
    folder = tmp_path / "export"
    assert fs.read_record(ExportMeta, folder / "export.json") == record
    assert {f.path for f in record.files} == {
        "sglang/README.md",
        "sglang/config.json",
        "sglang/model.safetensors",
        "vllm/README.md",
        "vllm/config.json",
        "vllm/model.safetensors",
    }
    assert all(fs.hash_file(folder / f.path) == f.sha256 for f in record.files)
    assert record.layer_ids == {"sglang": (1, 5, 8), "vllm": (2, 6, 9)}
    assert record.drafter == digest(make_meta(SHAPE))
    assert 0 < record.max_logit_difference < 1


def test_two_exports_are_equal_to_the_byte_and_hold_no_local_path(tmp_path: Path) -> None:
    """Case 80."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    run(tmp_path / "one", target_name="org/a-target")
    run(tmp_path / "two", target_name="org/a-target")
    assert fs.tree_digests(tmp_path / "one") == fs.tree_digests(tmp_path / "two")
    for path in (tmp_path / "one" / "export").rglob("*"):
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes()


def test_float32_export_has_no_difference(tmp_path: Path) -> None:
    assert run(tmp_path, dtype="float32").max_logit_difference == 0.0


def test_whole_vocab_leaves_the_maps_out(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, draft_vocab_size=V)
    run(tmp_path, shape)
    for server in ("sglang", "vllm"):
        assert not {"d2t", "t2d"} & set(read_tensors(tmp_path / "export" / server / "model.safetensors"))


def test_one_server_only(tmp_path: Path) -> None:
    assert run(tmp_path, servers=["vllm"]).servers == ("vllm",)
    assert not (tmp_path / "export" / "sglang").exists()


def test_a_failing_check_publishes_nothing_and_keeps_the_old_export(tmp_path: Path, monkeypatch) -> None:
    run(tmp_path)
    before = fs.tree_digests(tmp_path)

    def swapped(drafter: Drafter):
        tensors = before_swap(drafter)
        weights = dict(tensors.weights)
        gate, up = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
        weights[gate], weights[up] = weights[up], weights[gate]
        return dataclasses.replace(tensors, weights=weights)

    before_swap = compare.drafter_tensors
    monkeypatch.setattr(compare, "drafter_tensors", swapped)
    with pytest.raises(ExportError, match="logits of step 0 differ"):
        run(tmp_path)
    assert fs.tree_digests(tmp_path) == before


def test_deepseek_targets_get_their_own_spelling_and_refuse_what_cannot_be_asked(tmp_path: Path) -> None:
    """Case 23, seen from the export."""
    target = make_target("deepseek_v3")
    drafter = make_drafter(SHAPE)
    record = write.export(drafter, make_meta(SHAPE, (2, 6, 9)), target, ExportConfig(), tmp_path / "a")
    assert record.layer_ids["sglang"] == (2, 6, 9)
    with pytest.raises(EyasError):
        write.export(drafter, make_meta(SHAPE, (1, 6, 9)), target, ExportConfig(), tmp_path / "b")
    assert not (tmp_path / "b").exists()
