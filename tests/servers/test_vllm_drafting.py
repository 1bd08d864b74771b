"""EAGLE-3 decoding in a real vLLM on this CPU with our export: plain greedy text, in the rounds that the walk takes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from saved_target import make_target
from transformers import AutoModelForCausalLM, LlamaConfig

from eyas.config import ExportConfig
from eyas.contracts import CheckpointMeta
from eyas.engines.vllm import preflight
from eyas.errors import EyasError
from eyas.export.write import export
from eyas.ops.serve.offline import Judge, Written, as_served, walk_written
from eyas.plan.interpreter import vllm_python
from eyas.target.load import load_model, read_ends
from learned_drafter import STEPS, learn, prompts, shape_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
HERE, BOUNDARIES, MAX_NEW_TOKENS = Path(__file__).parent, (1, 2, 3), 40


@pytest.fixture(scope="module")
def python() -> str:
    try:
        preflight.check_versions()
        return vllm_python()
    except EyasError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny target, a drafter that has learned some of its texts, its export for vLLM."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    target = make_target(folder)
    drafter = learn(folder, target, BOUNDARIES)
    meta = CheckpointMeta(
        shape=shape_of(target, 4), boundaries=BOUNDARIES, capture_identity="0" * 64, target=target.digest, tokens="0" * 64,
        num_steps=1, num_trained_rows=1, ttt_steps=STEPS, seed=0, revision=1, files=(),
    )  # fmt: skip
    export(drafter, meta, target, ExportConfig(servers=["vllm"], dtype="float32"), folder / "export")
    return folder, as_served(drafter, "float32")


def generate(python: str, folder: Path, asked: list[list[int]], *drafting: str) -> dict:
    case, out = folder / "case.json", folder / "out.json"
    case.write_text(json.dumps({"prompts": asked, "max_new_tokens": MAX_NEW_TOKENS, "eos_ids": [2]}))
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet
    command = [python, HERE / "draft_in_vllm.py", folder, case, out, *drafting]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_text_is_plain_greedy_text_and_rounds_are_the_walks(world, python):
    folder, drafter = world
    asked = prompts(6, 512) + prompts(2, 512, seed=9)
    plain = generate(python, folder, asked)
    drafted = generate(python, folder, asked, str(folder / "export/vllm"), str(STEPS))
    assert drafted["answers"] == plain["answers"]
    model = load_model(folder, "float32")
    written = [
        Written(prompt_id=str(i), source="s", prompt_ids=tuple(ids), answer_ids=tuple(answer))
        for i, (ids, answer) in enumerate(zip(asked, drafted["answers"], strict=True))
    ]
    judge = Judge(model, (2,), MAX_NEW_TOKENS)
    assert not [judge(one).fault for one in written if judge(one).fault]
    walked = walk_written(drafter, model, BOUNDARIES, read_ends(folder).head_VD.float(), written, STEPS)
    num_rounds = sum(len(document.rounds) for document in walked)
    assert drafted["num_verifications"] == num_rounds
    tau = sum(document.num_emitted for document in walked) / num_rounds
    assert 1.3 < tau < STEPS + 1  # a drafter that never or always hits would show little
