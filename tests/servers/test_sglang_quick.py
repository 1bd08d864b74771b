"""The shortest run that shows a real SGLang captures every row, through a crash: one server, killed once, SmolLM2 in it.

``make test-sglang-quick``; without SmolLM2 (``make fetch``) a tiny random Llama takes its place.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from saved_target import make_target

from eyas.engines.sglang.engine import SglangEngine
from eyas.ops.parity import RowErrors, exact_streams, make_prompts, streams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
BOUNDARIES = {"smollm2": (2, 15, 27), "llama": (2, 3, 5)}
NUM_PROMPTS, CHUNK, BATCH, KILLED_AFTER = 64, 512, 8, 20


def test_every_row_equals_transformers_though_the_scheduler_is_killed(
    python: Path, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 prompts of 10 to 1,500 tokens, mixed batches, chunks of 512, float32; cases 44, 45, 46, 47 and 54."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", str(python))
    name = "smollm2" if "smollm2" in models else "llama"
    folder, boundaries = models[name], BOUNDARIES[name]
    target = make_target(folder)
    samples = make_prompts(target, NUM_PROMPTS)
    engine = SglangEngine(target, folder, boundaries, dtype="float32", chunked_prefill_size=CHUNK)
    threads = torch.get_num_threads()
    engine.announce(samples[: NUM_PROMPTS // 2])  # computed ahead; the others want a server after the kill
    engine.open()
    try:
        found: dict[str, torch.Tensor] = {}
        for begin in range(0, len(samples), BATCH):
            for got in engine.capture_raw(samples[begin : begin + BATCH]):
                found[got.sample_id] = streams(got)
                if len(found) == KILLED_AFTER:
                    assert engine.keeper.session.hello is not None
                    os.kill(engine.keeper.session.hello.pid, signal.SIGKILL)
        assert engine.keeper.num_restarts == 1
        assert torch.get_num_threads() == 1  # it only copies: each copy would start a thread a core
    finally:
        engine.close()
    assert torch.get_num_threads() == threads
    errors = [RowErrors() for _ in (*boundaries, "last")]
    for sample_id, exact_TND in exact_streams(folder, boundaries, samples, "cpu", False):
        assert found[sample_id].shape == exact_TND.shape  # every row of it
        for index, stream in enumerate(errors):
            stream.add(sample_id, found[sample_id][:, index], exact_TND[:, index])
    for stream in errors:
        figures = stream.figures()
        print(f"{name}: {figures}")
        assert figures["rows"] == sum(len(sample.input_ids) for sample in samples)
        assert figures["mean_relative_error"] <= 1e-6
        assert figures["worst_relative_error"] <= 1e-4


GREEDY = """
import sys, torch, transformers
from eyas.engines.decode import BlockDecoder
from eyas.target.load import load_model
model, prompts = load_model(sys.argv[1], "float32"), [[5, 9, 4, 7], [11, 6, 8, 3]]
decoder, rows = BlockDecoder(model, 2, 24), [[], []]
logits_BV = decoder.prefill(prompts).logits_RV
for step in range(12):
    ids_B = logits_BV.argmax(-1)
    for row, token in zip(rows, ids_B.tolist()):
        row.append(token)
    logits_BV = decoder.forward(ids_B[:, None], torch.tensor([4 + step] * 2)).logits_BJV[:, 0]
theirs = model.generate(torch.tensor(prompts), max_new_tokens=12, min_new_tokens=12, do_sample=False)
assert rows == theirs[:, 4:].tolist(), (rows, theirs)
print(transformers.__version__)
"""


def test_sglangs_own_transformers_decodes_as_it_does_itself(python: Path, models: dict[str, Path]) -> None:
    """The cuda image holds one set of packages: eyas answers and measures with the release that SGLang pins."""
    source = Path(__file__).parents[2] / "src"
    command = [str(python), "-c", GREEDY, str(models["llama"])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(source)})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("5."), done.stdout
