"""Public EAGLE-3 checkpoints as drafters of ours: what comes back out is what went in, to the byte."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_export_write import SHAPE, A, D, V, W, make_drafter, make_meta, make_target

from eyas import cli, fs
from eyas.config import ExportConfig
from eyas.contracts import CheckpointMeta, DrafterShape, ExportMeta
from eyas.drafter.foreign import read_checkpoint
from eyas.errors import TrainError
from eyas.export import compare
from eyas.export.write import export
from eyas.ops import import_drafter as door
from eyas.target.load import TargetEnds
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.checkpoint import load_drafter

ROOT = Path(__file__).parents[3]
PEER = ROOT / "tests/golden/eagle3_speculators"
ROPES = [
    None,
    (("factor", 2.0), ("rope_type", "linear")),
    (("factor", 4.0), ("original_max_position_embeddings", 64), ("rope_type", "yarn")),
]


def make_ends(shape: DrafterShape = SHAPE) -> TargetEnds:
    embedding_VD: torch.Tensor = make_drafter(shape).embed_tokens.weight  # type: ignore[assignment]
    return TargetEnds(embedding_VD=embedding_VD, head_VD=embedding_VD, final_norm_D=torch.ones(D))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a target's identity; its weights are at hand."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    fs.write_record(Path("models/target.json"), make_target())
    for module in ("import_drafter", "check_export"):
        monkeypatch.setattr(f"eyas.ops.{module}.locate.ensure", lambda identity, config: tmp_path)
        monkeypatch.setattr(f"eyas.ops.{module}.read_ends", lambda folder: make_ends())
    return tmp_path


def write(folder: Path, shape: DrafterShape = SHAPE, **config: Any) -> ExportMeta:
    return export(make_drafter(shape), make_meta(shape), make_target(), ExportConfig(**config), folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Everything but the cards and the record, which say where the drafter came from."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.name in ("config.json", "model.safetensors")
    }


@settings(max_examples=8)
@given(
    server=st.sampled_from(["sglang", "vllm"]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    rope_scaling=st.sampled_from(ROPES),
    draft_vocab_size=st.sampled_from([1, W, V]),
    num_aux=st.sampled_from([2, A, 4]),
    head_dim=st.sampled_from([4, 8]),
    switches=st.tuples(st.booleans(), st.booleans()),
    sizes=st.sampled_from([(1e-5, 1e4, 256), (1e-6, 5e5, 8192)]),
)
def test_export_import_export_gives_identical_bytes(
    server: str, dtype: str, rope_scaling: Any, draft_vocab_size: int, num_aux: int, head_dim: int, switches, sizes
) -> None:
    eps, theta, positions = sizes
    shape = dataclasses.replace(
        SHAPE,
        rope_scaling=rope_scaling,
        draft_vocab_size=draft_vocab_size,
        num_aux=num_aux,
        head_dim=head_dim,
        fc_norm=switches[0],
        norm_output=switches[1],
        rms_norm_eps=eps,
        rope_theta=theta,
        max_position_embeddings=positions,
    )
    meta = make_meta(shape, (2, 6, 9, 10)[:num_aux])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(make_drafter(shape), meta, make_target(), ExportConfig(dtype=dtype), folder / "one")
        checkpoint = read_checkpoint(folder / "one" / server)
        assert checkpoint.shape == shape
        again = door.to_drafter(checkpoint, make_target(), make_ends(shape))
        export(again, meta, make_target(), ExportConfig(dtype=dtype), folder / "two")
        assert contents(folder / "one") == contents(folder / "two")


@pytest.mark.parametrize("server", ["sglang", "vllm"])
def test_the_command_writes_a_drafter_its_vocab_and_every_export(repository: Path, server: str, capsys) -> None:
    write(repository / "public")
    with pytest.raises(SystemExit) as ended:
        cli.main(["import-drafter", "--from", f"public/{server}", "--to", "models/public"])
    assert ended.value.code == 0
    assert "boundaries   2, 6, 9" in capsys.readouterr().out
    assert contents(repository / "models/public/export") == contents(repository / "public")
    drafter, meta = load_drafter(Path("models/public/drafter"), make_ends().embedding_VD)
    assert (meta.boundaries, meta.num_steps, meta.target) == ((2, 6, 9), 0, make_target().digest)
    assert torch.equal(DraftVocab.read(Path("models/public/draft_vocab")).d2t_W, drafter.d2t)
    for found, expected in zip(
        compare.sample_logits(drafter), compare.sample_logits(rounded(make_drafter(SHAPE))), strict=True
    ):
        assert torch.equal(found, expected)
    card = Path("models/public/export/sglang/README.md").read_text()
    assert f"| imported from | content {meta.warm_start} |" in card
    with pytest.raises(SystemExit) as ended:
        cli.main(["check-export", "models/public/export", "--drafter", "models/public/drafter"])
    assert ended.value.code == 0


def test_check_export_ends_with_2_and_names_the_fault(repository: Path, capsys) -> None:
    write(repository / "public")
    with pytest.raises(SystemExit):
        cli.main(["import-drafter", "--from", "public/sglang", "--to", "models/public"])
    path = Path("models/public/export/vllm/config.json")
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 0.1'))
    with pytest.raises(SystemExit) as ended:
        cli.main(["check-export", "models/public/export", "--drafter", "models/public/drafter"])
    assert ended.value.code == 2
    assert "vllm: transformer_layer_config.rms_norm_eps: 0.1, expected 1e-05" in capsys.readouterr().err


def rounded(drafter):
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    return drafter


def renamed(public: Path, names: dict[str, str]) -> None:
    path = public / "model.safetensors"
    named = load_file(path)
    for name in list(named):
        new = name
        for old, other in names.items():
            new = new.replace(old, other)
        named[new] = named.pop(name)
    save_file(named, path)


def test_names_of_other_writers_reach_the_same_tensors(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``layers.0`` in SGLang's form, and the norms' names of the first drafters that had them."""
    shape = dataclasses.replace(SHAPE, fc_norm=True)
    monkeypatch.setattr("eyas.ops.import_drafter.read_ends", lambda folder: make_ends(shape))
    write(repository / "public", shape)
    whole = contents(repository / "public")
    old = {"midlayer.": "model.layers.0.", "fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid"}
    renamed(repository / "public/sglang", old | {"fc_norm.2": "aux_norm_high"})
    done = door.import_drafter(Path(), Path("public/sglang"), Path("models/public"))
    assert done.form == "sglang"
    assert contents(repository / "models/public/export") == whole


def test_draft_ids_in_any_order_come_out_rising(repository: Path) -> None:
    """The same target ids with the same logits, whatever the order of the file."""
    write(repository / "public", dtype="float32")
    path = repository / "public/sglang/model.safetensors"
    named = load_file(path)
    order_W = torch.randperm(W, generator=torch.Generator().manual_seed(5))
    ids_W = (named["d2t"] + torch.arange(W))[order_W]
    named |= {"d2t": ids_W - torch.arange(W), "lm_head.weight": named["lm_head.weight"][order_W]}
    save_file(named, path)
    door.import_drafter(Path(), Path("public/sglang"), Path("models/public"))
    found = load_file(repository / "models/public/export/sglang/model.safetensors")
    expected = rounded(make_drafter(SHAPE))
    assert torch.equal(found["d2t"], expected.d2t)
    assert torch.equal(found["lm_head.weight"].float(), expected.lm_head.weight)


def test_a_head_left_to_the_target_becomes_the_targets_rows(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPE, draft_vocab_size=V)
    write(repository / "public", shape)
    folder = repository / "public/sglang"
    edit(folder, draft_vocab_size=None)
    named = load_file(folder / "model.safetensors")
    del named["lm_head.weight"]
    save_file(named, folder / "model.safetensors")
    door.import_drafter(Path(), Path("public/sglang"), Path("models/public"))
    head_VD = load_file(repository / "models/public/export/sglang/model.safetensors")["lm_head.weight"]
    assert torch.equal(head_VD, make_ends().head_VD)


def test_a_peers_own_file_keeps_its_tensors(tmp_path: Path) -> None:
    """Written by speculators 0.9.0 itself."""
    checkpoint = read_checkpoint(PEER)
    target = dataclasses.replace(make_target(), vocab_size=60, hidden_size=16, num_layers=6)
    assert checkpoint.embedding_VE is not None
    embedding_VE = checkpoint.embedding_VE
    ends = TargetEnds(embedding_VD=embedding_VE.bfloat16(), head_VD=embedding_VE, final_norm_D=torch.ones(16))
    drafter = door.to_drafter(checkpoint, target, ends)
    meta = dataclasses.replace(make_meta(drafter.shape, (1, 2, 3)), target=target.digest)
    export(drafter, meta, target, ExportConfig(servers=["vllm"], dtype="float32"), tmp_path / "export")
    found, theirs = load_file(tmp_path / "export/vllm/model.safetensors"), load_file(PEER / "model.safetensors")
    assert set(theirs) <= set(found)
    for name, tensor in theirs.items():
        expected = tensor.bfloat16().float() if name == "embed_tokens.weight" else tensor
        assert torch.equal(found[name].to(expected.dtype), expected), name


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def trained_embedding(public: Path) -> None:
    named = load_file(public / "vllm/model.safetensors")
    named["embed_tokens.weight"][0] += 1.0
    save_file(named, public / "vllm/model.safetensors")


@pytest.mark.parametrize(
    ("damage", "server", "named"),
    [
        (trained_embedding, "vllm", r"embed_tokens\.weight: 1\.03% of it is not the target's"),
        (lambda public: edit(public / "sglang", hidden_size=32), "sglang", r"fc\.weight: \[16, 48\], its config says"),
        (lambda public: edit(public / "sglang", num_hidden_layers=2), "sglang", "num_hidden_layers: 2, expected 1"),
    ],
)
def test_what_cannot_be_held_is_refused_and_nothing_is_written(
    repository: Path, damage: Callable[[Path], None], server: str, named: str
) -> None:
    write(repository / "public")
    damage(repository / "public")
    with pytest.raises(TrainError, match=named):
        door.import_drafter(Path(), Path("public") / server, Path("models/public"))
    assert not Path("models/public").exists()


def test_a_drafter_of_another_vocab_is_refused(repository: Path) -> None:
    write(repository / "public")
    fs.write_record(Path("models/target.json"), dataclasses.replace(make_target(), vocab_size=V + 3, hidden_size=D))
    with pytest.raises(TrainError, match="vocab_size: 97, the target has 100"):
        door.import_drafter(Path(), Path("public/sglang"), Path("models/public"))


def test_a_normed_residual_is_written_for_vllm_alone(repository: Path) -> None:
    """Case 77."""
    shape = dataclasses.replace(SHAPE, norm_before_residual=True)
    write(repository / "public", shape, servers=["vllm"])
    done = door.import_drafter(Path(), Path("public/vllm"), Path("models/public"))
    assert done.export.servers == ("vllm",)
    record = fs.read_record(CheckpointMeta, Path("models/public/drafter/checkpoint.json"))
    assert record.shape.norm_before_residual
