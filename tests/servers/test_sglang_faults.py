"""A real SGLang fails under a running capture; every sample survives, to the byte (``max_running_requests: 1``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.contracts import FinalNorm, TargetIdentity
from eyas.engines.check_start import check_start
from eyas.engines.sglang import engine as engines
from eyas.engines.sglang import preflight, session
from eyas.engines.sglang.engine import SglangEngine
from eyas.engines.sglang.flight import Flight
from eyas.errors import ServerError
from eyas.ops.bench import faults

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
BOUNDARIES = (2, 3, 4)
WATCHDOG_S = faults.WATCHDOG_S


@pytest.fixture
def target():
    return TargetIdentity(
        source="directory:",
        revision="0",
        files=(),
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=6,
        hidden_size=64,
        vocab_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="float32",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-6, weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(2,),
        tokenizer_sha256="",
        chat_template_sha256="",
    )


@pytest.fixture
def make(python, models, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", str(python))
    opened = []

    def start(**options) -> SglangEngine:
        engine = SglangEngine(target, models["llama"], BOUNDARIES, dtype="bfloat16", **options)
        engine.keeper.watchdog_s = WATCHDOG_S
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()


def test_every_fault_ends_in_the_bytes_of_the_undisturbed_run(make, models, target, monkeypatch):
    """Also the start-up probe: transformers and the server agree on this model. One server, started again by each kill."""
    engine = make(max_running_requests=1, chunked_prefill_size=512)
    samples = faults.make_samples(512, 16)
    engine.announce(samples)
    engine.open()
    check_start(engine, samples[:3], target, models["llama"], BOUNDARIES, dtype="bfloat16")
    undisturbed, problems = faults._capture(engine, samples)
    assert not problems
    found = {name: fault(engine, samples, undisturbed) for name, fault in faults.FAULTS.items()}
    wrong = {name: told for name, told in found.items() if not told["identical"]}
    assert not wrong
    assert found["beyond"]["refused"] == 2
    for name in ("kill_http", "kill_scheduler", "poison", "stop_scheduler"):
        assert found[name]["restarts"] == 1
        assert found[name]["seconds_to_detect"] < WATCHDOG_S + 10
    monkeypatch.setattr(Flight, "_unfit", lambda self, sample: "")
    refused_prompts_leave_no_row(engine, samples, undisturbed)
    requests_that_the_server_refuses(engine)


def refused_prompts_leave_no_row(engine, samples, undisturbed):
    """Past our own checks: too long by a little, a prompt is refused, but one row with id 0 comes under its name."""
    beyond = [faults._sample(f"beyond-{length}", (30,) * length) for length in (2042, 2047, 2048, 3000)]
    got, problems = faults._capture(engine, [*samples[:3], *beyond, *samples[3:8]])
    assert {sample.sample_id for sample in samples[:8]} == got.keys()
    assert all(faults._equal(got[name], undisturbed[name]) for name in got)
    for sample in beyond:
        assert [p for p in problems if p.startswith(f"sample {sample.sample_id}: the server refused it")], problems
    assert engine.keeper.num_restarts == 4


def requests_that_the_server_refuses(engine):
    """A name that is in flight is this request's own fault; what no server takes would meet every request alike."""
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    bodies = [
        *({"input_ids": [30] * 2000, "rid": "the-same", "sampling_params": sampling} for _ in range(2)),
        {"input_ids": [], "rid": "empty", "sampling_params": sampling},
        {"input_ids": ["a"], "rid": "words", "sampling_params": sampling},
        {"input_ids": [30] * 5, "rid": "no-token", "sampling_params": sampling | {"max_new_tokens": 0}},
    ]
    replies = {}
    for number, body in enumerate(bodies):
        engine.keeper.session.client.send((1 << 40) + number, body)
    while len(replies) < len(bodies):
        assert not engine.keeper.fault(is_busy=True)
        for event in engine.keeper.next_events():
            if isinstance(event, session.Answered):
                replies[event.number - (1 << 40)] = event.reply
    print(replies)
    assert sorted(replies[number].kind for number in (0, 1)) == ["done", "refused"]
    assert [replies[number].kind for number in (2, 3, 4)] == ["unusable", "unusable", "done"]


def test_a_server_with_its_radix_cache_on_is_refused(make, target, monkeypatch):
    """Case 43: refused before the first request; where nobody refuses, no sample is believed."""
    whole = session.command

    def without_the_flag(*arguments):
        return [part for part in whole(*arguments) if part != "--disable-radix-cache"]

    monkeypatch.setattr(session, "command", without_the_flag)
    engine = make(max_running_requests=1)
    samples = faults.make_samples(512, 4)
    with monkeypatch.context() as patch:
        patch.setitem(preflight.FLAGS, "disable_radix_cache", ((True, False), ""))
        engine.open()
    wanted = engine.keeper.wanted
    expected = preflight.Expected(
        target=target, boundaries=BOUNDARIES, dtype="bfloat16", version=wanted.version, options=wanted.options
    )
    with pytest.raises(ServerError, match="disable_radix_cache = False"):
        preflight.check_hello(engine.keeper.session.hello, expected)
    got, problems = faults._capture(engine, [*samples, *faults._duplicates(samples)])
    # Each request has a key of its own, so even then nothing is shared.
    assert not problems
    assert all(len(got[sample.sample_id].last_TD) == len(sample.input_ids) for sample in samples)
    assert torch.equal(got["d0-s000"].last_TD, got["s000"].last_TD)
    # Without it prompts are shared, and each row that was not computed is missed.
    whole_body = engines.capture_body
    monkeypatch.setattr(engines, "capture_body", lambda *given: whole_body(*given) | {"extra_key": None})
    got, problems = faults._capture(engine, [*samples, *faults._duplicates(samples)])
    assert problems
    assert all("were not computed: the server reuses" in problem for problem in problems)
    assert all(len(got[name].last_TD) == len(got[name].input_ids_T) for name in got)
    prompts = [tuple(captured.input_ids_T.tolist()) for captured in got.values()]
    assert len(set(prompts)) == len(prompts), "of those with one prompt the first to arrive alone is computed whole"
    assert Path(".eyas/sglang").is_dir()
