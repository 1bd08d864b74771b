"""Exports in the loaders of SGLang, vLLM and speculators themselves: every tensor arrives, the logits are the checkpoint's.

Each runs in its own interpreter with its own module of the drafter; attention alone is replaced by a plain one over
the rows of the call, because a KV pool needs a server. Parameters are NaN before they are loaded.

Letters: T rows, A streams, D hidden, W draft vocab, V target vocab.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_target import make_target

from eyas import fs
from eyas.config import ExportConfig
from eyas.contracts import CheckpointMeta, DrafterShape, TargetIdentity
from eyas.drafter.foreign import read_checkpoint
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.ttt import unroll
from eyas.engines.boundaries import SGLANG_AS_IS, boundaries_of, layer_ids
from eyas.engines.sglang import versions
from eyas.engines.vllm import preflight
from eyas.errors import EyasError
from eyas.export.compare import rebuild
from eyas.export.write import export
from eyas.target.load import read_ends
from eyas.train.checkpoint import load_drafter

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
SHIM = Path(versions.__file__).parent / "cpu_shim"
W, T = 128, 12
YARN = (("factor", 4.0), ("original_max_position_embeddings", 512), ("rope_type", "yarn"))
pytestmark = pytest.mark.timeout(900)


@dataclasses.dataclass(frozen=True)
class Case:
    """An export and what it is of."""

    folder: Path
    target_folder: Path
    embedding_VD: torch.Tensor
    dtype: str
    boundaries: tuple[int, ...]
    model_type: str


def make_drafter(shape: DrafterShape, embedding_VD: torch.Tensor) -> Drafter:
    torch.manual_seed(11)
    drafter = Drafter(shape)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    V, ids_W = shape.vocab_size, torch.arange(shape.draft_vocab_size)
    if shape.draft_vocab_size < V:
        ids_W = torch.randperm(V)[: shape.draft_vocab_size].sort().values
    t2d_V = torch.zeros(V, dtype=torch.bool).index_fill(0, ids_W, True)
    drafter.set_target(embedding_VD, ids_W - torch.arange(len(ids_W)), t2d_V)
    return drafter.eval()


def write_case(folder: Path, target_folder: Path, dtype: str, boundaries: tuple[int, ...], **switches: Any) -> Case:
    target = make_target(target_folder)
    embedding_VD = read_ends(target_folder).embedding_VD.bfloat16()
    V, D = embedding_VD.shape
    shape = dataclasses.replace(
        DrafterShape(
            target_hidden_size=D,
            hidden_size=D,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_aux=len(boundaries),
            vocab_size=V,
            draft_vocab_size=W,
            rms_norm_eps=1e-5,
            rope_theta=50000.0,
            max_position_embeddings=2048,
            fc_norm=False,
            norm_output=False,
        ),
        **switches,
    )
    export(
        make_drafter(shape, embedding_VD), _meta(shape, boundaries, target), target, ExportConfig(dtype=dtype), folder
    )
    return Case(folder, target_folder, embedding_VD, dtype, boundaries, target.model_type)


def _meta(shape: DrafterShape, boundaries: tuple[int, ...], target: TargetIdentity) -> CheckpointMeta:
    return CheckpointMeta(
        shape=shape,
        boundaries=boundaries,
        capture_identity="",
        target=target.digest,
        tokens="",
        num_steps=1,
        num_trained_rows=1,
        ttt_steps=3,
        seed=0,
        revision=1,
        files=(),
    )


@pytest.fixture(scope="module", params=["plain-bfloat16", "all-switches-float32", "whole-vocab", "trained"])
def case(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    """``trained``: this repository's own export of SmolLM2, once the pipeline has run."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "plain-bfloat16":
        return write_case(folder / "export", models["llama"], "bfloat16", (2, 3, 4))
    if request.param == "all-switches-float32":
        switches = {"fc_norm": True, "norm_output": True, "rope_scaling": YARN, "head_dim": 32}
        return write_case(folder / "export", models["llama"], "float32", (1, 2, 3, 5), **switches)
    if request.param == "whole-vocab":
        return write_case(folder / "export", models["llama"], "float32", (2, 4), draft_vocab_size=512)
    if not (ROOT / "models/drafter/checkpoint.json").exists() or "smollm2" not in models:
        pytest.skip("no models/drafter of SmolLM2 here: `make repro`")
    target = fs.read_record(TargetIdentity, ROOT / "models/target.json")
    drafter, meta = load_drafter(ROOT / "models/drafter", read_ends(models["smollm2"]).embedding_VD)
    export(drafter, meta, target, ExportConfig(dtype="float32"), folder / "export")
    embedding_VD: torch.Tensor = drafter.embed_tokens.weight  # type: ignore[assignment]
    return Case(folder / "export", models["smollm2"], embedding_VD, "float32", meta.boundaries, target.model_type)


def run(case: Case, python: Path, server: str, folder: Path, environment: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Put the case's folder for a server through a loader: (what the script said, its log)."""
    script = HERE / f"load_in_{server}.py"
    form = "sglang" if server == "sglang" else "vllm"
    paths = [
        case.target_folder,
        case.folder / form,
        case.dtype,
        folder / "case.safetensors",
        folder / "out.safetensors",
    ]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [python, script, *paths], capture_output=True, text=True, env=dict(os.environ) | environment | quiet, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stderr


def write_inputs(case: Case, folder: Path, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The call's inputs into ``case.safetensors``; gives rows [R] and the logits [R,W] that are due there."""
    shape = read_checkpoint(case.folder / form).shape
    torch.manual_seed(2)
    ids_T = torch.randint(0, shape.vocab_size, (T + 1,))
    aux_TAD = torch.randn(T + 1, shape.num_aux, shape.target_hidden_size)
    inputs = {"ids_T": ids_T[1:], "positions_T": torch.arange(T), "aux_TX": aux_TAD[:T].flatten(1)}
    save_file(inputs | {"embedding_VD": case.embedding_VD.float()}, folder / "case.safetensors")
    drafter = rebuild(form, shape, load_file(case.folder / form / "model.safetensors"), case.embedding_VD)
    pack = pack_documents([Document(ids_T, torch.ones_like(ids_T), aux_TAD, torch.zeros(T + 1, shape.hidden_size))], 1)
    with torch.no_grad():
        return pack.rows_R, drafter.logits(unroll(drafter, pack)[0])


def load(case: Case, python: Path, server: str, folder: Path, environment: dict[str, str]):
    """(what the loader said, what it holds, the file, logits that are due and where)."""
    form = "sglang" if server == "sglang" else "vllm"
    due = write_inputs(case, folder, form)
    said, _ = run(case, python, server, folder, environment)
    return said, load_file(folder / "out.safetensors"), load_file(case.folder / form / "model.safetensors"), due


def served(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The file's tensors as both servers hold them: q, k, v and gate, up in one."""
    found = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in named.items() if name not in ("d2t", "t2d")
    }
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    found[attention + "qkv_proj.weight"] = torch.cat([found.pop(f"{attention}{x}_proj.weight") for x in "qkv"])
    found[mlp + "gate_up_proj.weight"] = torch.cat([found.pop(f"{mlp}{x}_proj.weight") for x in ("gate", "up")])
    return {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in found.items()}


def assert_same_logits(found_TW: torch.Tensor, due: tuple[torch.Tensor, torch.Tensor], dtype: str) -> None:
    rows_R, logits_RW = due
    assert len(rows_R) >= T - 1
    rows_R = rows_R[rows_R < T]
    tolerance = 2e-5 if dtype == "float32" else 0.015  # bf16: rounding of the activations
    worst = (found_TW.float()[rows_R] - logits_RW[: len(rows_R)]).abs().max() / logits_RW.abs().max()
    assert worst < tolerance, float(worst)


def hot_ids(named: dict[str, torch.Tensor], num: int) -> torch.Tensor:
    return named["d2t"] + torch.arange(num) if "d2t" in named else torch.arange(num)


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """An interpreter with a release of SGLang whose form is written."""
    named = os.environ.get("EYAS_SGLANG_PYTHON")
    found = Path(named) if named else ROOT / ".venv-sglang/bin/python"
    if not found.exists():
        pytest.skip(f"{found} does not exist: `make setup-sglang`, or name an interpreter by EYAS_SGLANG_PYTHON")
    ask = "from importlib.metadata import version; print(version('sglang'))"
    asked = subprocess.run([found, "-c", ask], capture_output=True, text=True)
    if asked.stdout.strip() not in versions.SUPPORTED:
        pytest.skip(f"{found} has no sglang of {', '.join(versions.SUPPORTED)}: {asked.stdout or asked.stderr[-200:]}")
    return found


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """An interpreter with vLLM 0.32.0."""
    named = os.environ.get("EYAS_VLLM_PYTHON")
    found = Path(named) if named else ROOT / ".venv-vllm/bin/python"
    if not found.exists():
        pytest.skip(f"{found} does not exist: `make setup-vllm`, or name an interpreter by EYAS_VLLM_PYTHON")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EYAS_VLLM_PYTHON", str(found))
        try:
            preflight.check_versions()
        except EyasError as error:
            pytest.skip(error.message)
    return found


SGLANG_ENVIRONMENT = versions.cpu_environment(str(SHIM))


@pytest.mark.sglang
def test_sglang_loads_an_export(case: Case, sglang_python: Path, tmp_path: Path) -> None:
    said, found, named, due = load(case, sglang_python, "sglang", tmp_path, SGLANG_ENVIRONMENT)
    assert said["left"] == ["model.embed_tokens.weight"]  # the target's own takes its place
    assert boundaries_of(said["ids"], "sglang", model_type=case.model_type) == case.boundaries
    assert said["dtype"] == f"torch.{case.dtype}"
    for name, tensor in served(named).items():
        assert torch.equal(found[name], tensor), name
    num = len(named["lm_head.weight"])
    if "d2t" in named:
        assert torch.equal(found["hot_token_id"], hot_ids(named, num))
    assert_same_logits(found["logits_TW"], due, case.dtype)


@pytest.mark.sglang
def test_sglang_is_silent_where_the_check_speaks(models: dict[str, Path], sglang_python: Path, tmp_path: Path) -> None:
    """Case 78: a misnamed norm is skipped, its parameter stays as it was, and nothing is said."""
    case = write_case(tmp_path / "export", models["llama"], "float32", (2, 3, 4))
    write_inputs(case, tmp_path, "sglang")
    path = case.folder / "sglang/model.safetensors"
    named = load_file(path)
    named["final_norm.weight"] = named.pop("norm.weight")
    save_file(named, path)
    said, log = run(case, sglang_python, "sglang", tmp_path, SGLANG_ENVIRONMENT)
    assert said["left"] == ["model.embed_tokens.weight", "model.norm.weight"]
    assert "norm.weight" not in log


@pytest.mark.vllm
def test_vllm_loads_an_export(case: Case, vllm_python: Path, tmp_path: Path) -> None:
    """Four streams too: vLLM's Llama drafter builds ``fc`` for three unless the layer's config counts them."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    said, found, named, due = load(case, vllm_python, "vllm", tmp_path, environment)
    assert said["left"] == []
    assert tuple(said["ids"]) == case.boundaries
    assert said["dtype"] == f"torch.{case.dtype}"
    for name, tensor in served(named).items():
        assert torch.equal(found[name], tensor), name
    num = len(named["lm_head.weight"])
    if "d2t" in named:
        assert torch.equal(found["draft_id_to_target_id"], named["d2t"])
    ids_W = hot_ids(named, num)
    assert found["logits_TV"].isfinite().sum(-1).tolist() == [num] * T
    assert_same_logits(found["logits_TV"][:, ids_W], due, case.dtype)


@pytest.mark.slow
def test_speculators_loads_an_export(case: Case, tmp_path: Path) -> None:
    named_python = os.environ.get("EYAS_PEER_SPECULATORS", str(ROOT / ".eyas/bench/peers/speculators/bin/python"))
    if not Path(named_python).exists():
        pytest.skip(f"{named_python} does not exist: `make bench-train` makes it, or name one by EYAS_PEER_SPECULATORS")
    environment = {"PYTHONPATH": ""}
    python = Path(named_python)
    said, found, named, due = load(case, python, "speculators", tmp_path, environment)
    assert said["left"] == []
    assert tuple(said["ids"]) == case.boundaries
    for name, tensor in named.items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name
    assert_same_logits(found["logits_TW"], due, case.dtype)


FILES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "gpt_oss": "gpt_oss",
    "glm4_moe": "glm4_moe",
    "minimax_m2": "minimax_m2",
    "glm4_moe_lite": "glm4_moe_lite",
} | {name: "deepseek_v2" for name in SGLANG_AS_IS if name != "glm4_moe_lite"}
"""Model type -> SGLang's file with the rule; Kimi, GLM-5 and DeepSeek 3.2 are subclasses or wrappers of the second."""


@pytest.mark.sglang
@pytest.mark.parametrize("model_type", FILES)
def test_written_ids_name_the_boundaries_in_sglangs_own_source(sglang_python: Path, model_type: str) -> None:
    """Case 23: the function that SGLang calls with the list of the config, run as it stands in the installed release."""
    where = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    package = Path(subprocess.run([sglang_python, "-c", where], capture_output=True, text=True).stdout.strip())
    captured = capture_rule(package / f"srt/models/{FILES[model_type]}.py")
    for boundaries in ((2, 16, 29), (3, 7, 20), (5, 6, 7, 31)):
        ids = layer_ids(boundaries, "sglang", model_type=model_type, num_layers=32)
        assert captured(list(ids)) == list(boundaries)


def capture_rule(path: Path):
    """The outermost ``set_eagle3_layers_to_capture`` of a file, as a function from ids to captured layers."""
    found = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "set_eagle3_layers_to_capture"
    ]
    rule = max(found, key=lambda node: len(ast.dump(node)))
    for argument in rule.args.args:
        argument.annotation = None
    rule.returns = None
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([rule], []), str(path), "exec"), scope)

    def captured(ids: list[int]) -> list[int]:
        model = types.SimpleNamespace(layers=[types.SimpleNamespace() for _ in range(32)])
        model.set_eagle3_layers_to_capture = lambda layers: setattr(model, "layers_to_capture", layers)
        config = types.SimpleNamespace(num_hidden_layers=32)
        served = types.SimpleNamespace(model=model, config=config, pp_group=types.SimpleNamespace(is_last_rank=True))
        scope.update(get_parallel=lambda: served, get_pp_group=lambda: served.pp_group)
        scope["set_eagle3_layers_to_capture"](served, ids)
        return list(model.layers_to_capture)

    return captured
