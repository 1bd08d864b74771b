"""What must hold before a server captures: attention for a GPU, compilers, what a server says of itself."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.config.engine_options import check_engine_options
from eyas.engines.sglang import launch, preflight, versions, wire
from eyas.errors import CaptureError, ConfigError, EyasError, PlanError, ServerError
from eyas.ops import doctor
from eyas.plan import interpreter
from fake_target import make_target

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("backend", "capability", "model_type", "expected"),
    [
        (None, 9.0, "llama", None),
        (None, 12.0, "llama", "flashinfer"),
        (None, 12.0, "kimi_k25", "triton"),
        (None, 12.1, "deepseek_v3", "triton"),
        ("fa3", 9.0, "llama", "fa3"),
        ("trtllm_mla", 10.0, "deepseek_v3", "trtllm_mla"),
        ("triton", 12.0, "llama", "triton"),
        ("fa3", 0.0, "llama", "fa3"),
    ],
)
def test_attention_is_chosen_by_what_the_gpu_has_kernels_for(backend, capability, model_type, expected):
    """Case 26; 0: the command is printed where no GPU can be asked."""
    assert preflight.check_attention(backend, capability, model_type) == expected


@pytest.mark.parametrize(
    ("backend", "capability"),
    [("fa3", 12.0), ("flashmla", 12.0), ("trtllm_mla", 12.0), ("cutlass_mla", 12.1), ("fa3", 8.9), ("flashmla", 10.0)],
)
def test_attention_without_kernels_is_refused_with_one_that_has_some(backend, capability):
    with pytest.raises(ServerError, match=f"'{backend}' has no kernels for compute capability {capability}") as caught:
        preflight.check_attention(backend, capability, "deepseek_v3")
    assert "attention_backend=triton" in (caught.value.hint or "")


def programs(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def gpu_machine(tmp_path, monkeypatch):
    """Two Blackwell cards, an interpreter with SGLang, and no program but those that a test makes."""
    card = "NVIDIA RTX PRO 6000, 12.0, 580.1, 97887"
    smi = f'echo "{card}, GPU-aa11"; echo "{card}, GPU-bb22"\n'
    programs(tmp_path / "bin", "nvidia-smi", "python")
    (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{smi}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", str(tmp_path / "bin/python"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "TOOLKIT", str(tmp_path / "cuda"))
    return tmp_path / "bin"


def test_missing_gpus_and_compilers_are_named_one_by_one(gpu_machine):
    assert [gpu.capability for gpu in preflight.gpus()] == [12.0, 12.0]
    with pytest.raises(ServerError, match="2 NVIDIA devices here, expected 4"):
        preflight.check_machine("cuda", 4)
    for missing, made in (("nvcc", "nvcc"), ("ninja", "ninja"), (r"c\+\+", "g++")):
        with pytest.raises(ServerError, match=f"{missing} is not found"):
            preflight.check_machine("cuda", 2)
        programs(gpu_machine, made)
    assert preflight.check_machine("cuda", 2) == 12.0
    assert preflight.check_machine("cpu", 8) == 0.0


@pytest.mark.parametrize(
    ("visible", "num_gpus"),
    [("0,1", 2), ("1", 1), ("", 0), ("-1", 0), ("1, 7, 0", 1), ("GPU-bb", 1), ("GPU-", 0), ("MIG-x", 2), ("0,0", 2)],
)
def test_gpus_that_this_process_may_not_use_are_not_counted(gpu_machine, monkeypatch, visible, num_gpus):
    """As CUDA reads it: numbers or beginnings of UUIDs, up to the first that names none or several."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(preflight.gpus()) == num_gpus
    programs(gpu_machine, "nvcc", "ninja", "g++")
    if num_gpus < 2:
        with pytest.raises(ServerError, match=f"{num_gpus} NVIDIA devices here, expected 2"):
            preflight.check_machine("cuda", 2)


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.gpus() == []
    with pytest.raises(ServerError, match="0 NVIDIA devices here, expected 1"):
        preflight.check_machine("cuda", 1)


HELLO = wire.Hello(
    protocol=wire.PROTOCOL, pid=1, sglang="0.5.23", torch="2", device="cpu", model_path="", model_class="Llama",
    hidden_size=16, num_layers=6, vocab_size=1000, dtype="bfloat16", boundaries=[1, 2, 3],
    server_args={"disable_radix_cache": True, "tp_size": 2, "chunked_prefill_size": 512, "context_len": 128},
)  # fmt: skip
EXPECTED = preflight.Expected(
    target=make_target(), boundaries=(1, 2, 3), dtype="bfloat16", version="0.5.23", options={"tp_size": 2}
)


def test_a_server_as_planned_is_taken():
    preflight.check_hello(HELLO, EXPECTED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sglang": "0.5.20"}, "sglang 0.5.20 is installed, expected one of 0.5.14, 0.5.23"),
        ({"sglang": "0.5.14"}, "runs sglang 0.5.14, the plan was made for 0.5.23"),
        ({"hidden_size": 32}, "hidden size 32, the plan expects 16"),
        ({"num_layers": 7}, "layers 7, the plan expects 6"),
        ({"vocab_size": 999}, "vocab size 999, the plan expects 1000"),
        ({"dtype": "float16"}, "dtype float16, the plan expects bfloat16"),
        ({"boundaries": [2, 3, 4]}, r"boundaries \[2, 3, 4\], the plan expects \[1, 2, 3\]"),
    ],
)
def test_a_server_of_another_model_version_or_setting_is_refused(changes, message):
    with pytest.raises(EyasError, match=message):
        preflight.check_hello(dataclasses.replace(HELLO, **changes), EXPECTED)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("disable_radix_cache", False, "--disable-radix-cache"),
        ("cuda_graph_backend_prefill", "full", "--cuda-graph-backend-prefill disabled"),
        ("speculative_algorithm", "EAGLE3", "--speculative-algorithm"),
        ("speculative_draft_model_path", "x", "--speculative-draft-model-path"),
        ("pp_size", 2, "--pp-size 1"),
        ("dp_size", 2, "--dp-size 1"),
        ("attn_cp_size", 2, "context parallelism"),
        ("enable_dp_attention", True, "--enable-dp-attention"),
        ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("enable_lora", True, "--enable-lora"),
        ("allow_auto_truncate", True, "--allow-auto-truncate"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
        ("tp_size", 1, "--tp-size 2"),
    ],
)
def test_an_argument_that_takes_rows_away_is_refused_with_the_flag_to_change(name, value, hint):
    """Cases 43, 48 and their like; the last one is an engine option."""
    hello = dataclasses.replace(HELLO, server_args=HELLO.server_args | {name: value})
    with pytest.raises(ServerError, match=f"the server has {name} = {value!r}") as caught:
        preflight.check_hello(hello, EXPECTED)
    assert hint in (caught.value.hint or "")


def test_every_argument_that_is_judged_is_told_by_the_server():
    """A name that ``Hello`` does not carry would never be refused."""
    told = {*versions.FACTS, "cuda_graph_backend_prefill", "cuda_graph_backend_decode"}
    assert set(preflight.FLAGS) <= told


@pytest.mark.parametrize(("pool", "limit"), [(None, 121), (4096, 121), (100, 93)])
def test_the_longest_sample_fits_into_context_and_pool(pool, limit):
    arguments = {"context_len": 128, "max_total_num_tokens": pool}
    preflight.check_longest(limit, arguments, 4096)
    with pytest.raises(ServerError, match=f"longest sample has {limit + 1} tokens, the server takes {limit}"):
        preflight.check_longest(limit + 1, arguments, 4096)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 1}, "engine_options.chunk: unknown to engine sglang, expected one of attention_backend, chunked"),
        ({"tp_size": 0}, "tp_size: 0, expected a number from 1"),
        ({"tp_size": True}, "tp_size: True, expected a number from 1"),
        ({"tp_size": "2"}, "tp_size: '2', expected a number"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size: 0, expected a number from -1, not 0"),
        ({"max_running_requests": 1.0}, "max_running_requests: 1.0, expected a number"),
        ({"attention_backend": "fa9"}, "attention_backend: 'fa9', expected fa3 or flashinfer"),
    ],
)
def test_engine_options_are_checked_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        check_engine_options("sglang", options)
    check_engine_options("sglang", {"chunked_prefill_size": -1, "tp_size": 8, "attention_backend": "triton"})


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nonsense/python", r"EYAS_SGLANG_PYTHON: '/nonsense/python' is no program"),
        ("/bin/true", r"/bin/true cannot say what is installed there"),
        (sys.executable, r"has no sglang\n\nhint: .* -m pip install sglang, or another EYAS_SGLANG_PYTHON"),
    ],
)
def test_an_interpreter_without_sglang_is_refused(python, message, monkeypatch):
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", python)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(interpreter, "SCRIPT", interpreter.SCRIPT.replace("sys.argv[1:]", '["no-such-package"]'))
    interpreter.installed_versions.cache_clear()
    with pytest.raises(PlanError, match=message):
        interpreter.sglang_versions()


def test_doctor_shows_what_sglang_needs_only_where_it_is_asked_for(tmp_path, monkeypatch):
    def rows():
        return {found.name: found for found in doctor.examine(tmp_path) if found.name in ("sglang", "/dev/shm")}

    text = (ROOT / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text)
    assert not rows()
    engine = text.index("engine: hf", text.index("\nextract:"))
    (tmp_path / "params.yaml").write_text(f"{text[:engine]}engine: sglang{text[engine + len('engine: hf') :]}")
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", "/nonsense")
    found = rows()
    assert found["sglang"].state == "problem"
    assert "'/nonsense' is no program" in found["sglang"].value
    assert found["/dev/shm"].value.endswith(" free")
    double = ROOT / "tests/sglang_double"
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{double}{os.pathsep}{ROOT / 'src'}")
    monkeypatch.setattr(preflight, "free_shm_bytes", lambda: 64 << 20)
    interpreter.installed_versions.cache_clear()
    found = rows()
    interpreter.installed_versions.cache_clear()
    assert found["sglang"].state == "found"
    assert "sglang 0.5.23" in found["sglang"].value
    assert found["/dev/shm"].state == "problem"
    assert "--shm-size" in found["/dev/shm"].hint


def test_doctor_names_each_gpu_and_what_is_missing(gpu_machine):
    rows = {name: (state, value) for name, state, value, _ in preflight.findings("cuda", 2)}
    assert rows["GPU 1"] == ("found", "NVIDIA RTX PRO 6000, capability 12.0, driver 580.1")
    assert rows["GPUs and compilers for sglang"][0] == "problem"
    assert rows["GPUs and compilers for sglang"][1].startswith("nvcc is not found")


def test_the_printed_command_is_one_a_shell_takes(tmp_path, monkeypatch):
    """Paths with spaces and quotes come out as they went in; on Blackwell attention is chosen."""
    wanted = launch.Wanted(
        target=make_target(), folder=tmp_path / "a model's", boundaries=(1, 2, 3), dtype="bfloat16", device="cuda",
        version="0.5.23", options={"tp_size": 2, "chunked_prefill_size": 4096},
    )  # fmt: skip
    monkeypatch.setattr(preflight, "gpus", lambda: [preflight.Gpu("x", 12.0, "1", 1)])
    text = launch.attach_command(wanted, "echo", str(tmp_path / "a b.sock"), 30000)
    script = f"set -e; f() {{ env; }}; {text.replace('make extract', 'env').replace('echo -m pip', 'true')}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("-m sglang.launch_server"))
    for part in (f"--model-path {(tmp_path / 'a model').resolve()}'s", "--tp-size 2", "--chunked-prefill-size 4096",
                 "--attention-backend flashinfer", "--disable-radix-cache", "--port 30000"):  # fmt: skip
        assert part in line
    assert f"EYAS_CAPTURE_SOCKET={tmp_path}/a b.sock" in done.stdout.splitlines()
    assert "EYAS_SGLANG_URL=http://127.0.0.1:30000" in done.stdout.splitlines()
    assert shlex.quote(str(tmp_path / "a b.sock")) in text


def test_another_version_is_named_with_those_that_are_known():
    with pytest.raises(CaptureError, match=r"sglang 0.6.0 is installed, expected one of 0.5.14, 0.5.23"):
        versions.check_supported("0.6.0")
