"""A training whose states a real SGLang captures while it goes on, in a ring smaller than the set, by the stages' own commands."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas import fs
from eyas.tokens.dataset import make_sample, write_tokens
from eyas.tokens.draft_vocab import build_draft_vocab

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
VOCAB, RING_BYTES = 512, 6_000_000
STATES = ["data/hidden_states", "data/hidden_states.json"]
STAGES = {
    "fetch": ["models/target.json"],
    "plan": ["models/target.json", "data/tokens", "data/plan.json"],
    "extract": ["models/target.json", "data/tokens", "data/plan.json", *STATES],
    "train": ["models/target.json", "data/draft_vocab", *STATES, "models/drafter", "reports/train"],
}


def make_folder(model: Path, folder: Path) -> None:
    """The model with a tokenizer of bytes beside it."""
    shutil.copytree(model, folder)
    names = ["<pad>", "<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(folder)


def make_project(root: Path, target: Path, source: str) -> None:
    """Parameters, tokens and draft vocab; 220 samples of 60 to 300 tokens are 20 MB of states."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    shape = {"num_layers": 6, "hidden_size": 64, "vocab_size": VOCAB}
    params["target"] |= {
        "name": "tiny", "source": "directory", "location": str(target), "revision": "", "member": "", "shape": shape,
    }  # fmt: skip
    params["extract"] |= {
        "engine": "sglang", "boundaries": [2, 3, 4], "codec": "raw", "shard_bytes": 600_000, "batch_tokens": 1024,
        "engine_options": {"chunked_prefill_size": 256, "max_running_requests": 1}, "reserve_bytes": 1000,
    }  # fmt: skip
    params["train"] |= {
        "source": source, "num_steps": 60, "packs_per_step": 2, "batch_tokens": 600, "shuffle_shards": 3,
        "checkpoint_every": 20, "ttt_steps": 2, "curriculum": [],
    }  # fmt: skip
    root.mkdir()
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    dice, samples = random.Random(3), []
    for index in range(220):
        T = dice.randrange(60, 300)
        ids, mask = [dice.randrange(3, VOCAB) for _ in range(T)], [0] * 20 + [1] * (T - 20)
        split = "held_out" if index % 20 == 19 else "train"
        samples.append(make_sample(ids, mask, conversation_id=f"c{index}", source="s", split=split, variant="greedy"))
    write_tokens(root / "data/tokens", samples)
    counts_V = np.bincount([i for sample in samples for i in sample.input_ids], minlength=VOCAB)
    build_draft_vocab(counts_V, 256, [2]).write(root / "data/draft_vocab")


def run(root: Path, *stages: str, **environment: str) -> None:
    for stage in stages:
        command = [sys.executable, "-m", f"eyas.stages.{stage}", *STAGES[stage]]
        done = subprocess.run(
            command,
            cwd=root,
            env=os.environ | {"PYTHONPATH": f"{ROOT}/src"} | environment,
            capture_output=True,
            text=True,
        )
        print(f"── {root.name} {stage}\n{done.stderr[-4000:]}")
        assert done.returncode == 0, done.stderr[-4000:]


def test_a_stream_of_a_real_sglang_ends_in_the_drafter_of_the_store(python, models, tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", str(python))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    make_folder(models["llama"], tmp_path / "target")
    for source in ("store", "stream"):
        make_project(tmp_path / source, tmp_path / "target", source)
        run(tmp_path / source, *STAGES, EYAS_RING_BYTES=str(RING_BYTES))
    store, stream = tmp_path / "store", tmp_path / "stream"
    told = fs.read_json(stream / "reports/runs/train.json")["facts"]["stream"]
    print(told)
    set_bytes = fs.read_json(store / "data/hidden_states.json")["stored_bytes"]
    assert 0 < told["peak_bytes"] <= RING_BYTES < set_bytes / 2
    assert told["epochs"][0]["captured"] == told["epochs"][0]["planned"]
    assert told["epochs"][1]["captured"][0] > 0, "what the ring let go is captured again"
    drafters = [(place / "models/drafter/drafter.safetensors").read_bytes() for place in (store, stream)]
    assert drafters[0] == drafters[1]
