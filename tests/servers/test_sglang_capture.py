"""Every row of real prompts out of a real SGLang 0.5.23, against transformers on the same weights."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.engines import boundaries
from eyas.engines.sglang import versions, wire
from sglang_harness import Collector, Server, capture_all, free_port, server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]
ARENA_BYTES = 512 << 20


class Case(NamedTuple):
    model: str
    model_type: str
    boundaries: tuple[int, ...]


CASES = [
    Case("llama", "llama", (2, 3, 5)),
    Case("deepseek", "deepseek_v3", (2, 3, 4)),  # one packed tensor of aux states, ids as they are
]
"""SmolLM2 is in ``test_sglang_quick.py``."""


class Running(NamedTuple):
    case: Case
    server: Server
    folder: Path


def options(folder: Path, tp_size: int = 1) -> versions.ServerOptions:
    return versions.ServerOptions(
        model_path=str(folder), port=free_port(), device="cpu", dtype="float32", chunked_prefill_size=512,
        max_running_requests=16, max_total_tokens=16384, tp_size=tp_size, further=("--mem-fraction-static", "0.9"),
    )  # fmt: skip


def layer_ids(case: Case, num_layers: int) -> tuple[int, ...]:
    return boundaries.layer_ids(case.boundaries, "sglang", model_type=case.model_type, num_layers=num_layers)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.model)
def running(
    request: pytest.FixtureRequest, python: Path, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(f"server-{case.model}")
    with server(python, folder, options(models[case.model]), layer_ids(case, 6)) as up:
        yield Running(case, up, models[case.model])


def prompts(num: int, vocab_size: int, longest: int = 1500, shortest: int = 10) -> list[list[int]]:
    """Lengths spread over the range's orders of magnitude; both ends are in."""
    draw = random.Random(0)
    lengths = [shortest, longest, *(round(shortest * (longest / shortest) ** draw.random()) for _ in range(num - 2))]
    draw.shuffle(lengths)
    return [[draw.randrange(20, vocab_size) for _ in range(length)] for length in lengths]


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance of each row relative to the expected row's length."""
    return (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)


def reference(folder: Path, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Hidden states by transformers, one [T,D] for each of 0 to L."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ids in prompts:
        with torch.no_grad():
            yield tuple(state[0] for state in model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states)


def test_every_row_of_64_prompts_equals_transformers(running: Running, arena_path: Path) -> None:
    """Cases 44, 45, 46, 47, 51 and 56: chunked, mixed, between health checks and other clients' requests."""
    collector = Collector(running.server.socket_path, arena_path, ARENA_BYTES)
    assert collector.hello.boundaries == list(running.case.boundaries)
    texts = prompts(64, collector.hello.vocab_size)
    stop = threading.Event()

    def others() -> None:
        while not stop.wait(0.5):
            running.server.post("/generate", {"input_ids": [5] * 30, "sampling_params": {"max_new_tokens": 4}})
            running.server.generate([7] * 20, f"someone-{random.random()}", 3)

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(others)
        slots = capture_all(running.server, collector, texts)
        stop.set()
        disturbing.result()
    assert not collector.foreign
    assert collector.hashes_hold()
    assert max(len(collector.samples[slot.rid].pieces) for slot in slots) >= 3  # 1,500 tokens in chunks of 512
    errors: dict[str, list[torch.Tensor]] = {}
    for ids, slot, states in zip(texts, slots, reference(running.folder, texts), strict=True):
        aux_TAD, last_TD, found = collector.states(slot)
        assert found.tolist() == ids
        for stream, boundary in enumerate(running.case.boundaries):
            errors.setdefault(f"aux {boundary}", []).append(row_errors(aux_TAD[:, stream], states[boundary]))
        errors.setdefault("last", []).append(row_errors(last_TD, states[-1]))
    collector.close()
    for name, rows in errors.items():
        every = torch.cat(rows)
        print(f"{running.case.model} {name}: {len(every)} rows, mean {every.mean():.2e}, worst {every.max():.2e}")
        assert every.mean() <= 1e-6
        assert every.max() <= 1e-4


def test_collectors_come_and_go_while_it_serves(running: Running, arena_path: Path) -> None:
    """Requests of a collector that is gone are served and captured by nobody; the next one starts afresh."""
    texts = prompts(8, 400, longest=200)
    for text in texts:
        assert running.server.generate(text, "")["meta_info"]["prompt_tokens"] == len(text)  # nobody is attached
    first = Collector(running.server.socket_path, arena_path, ARENA_BYTES, "1" * 16)
    second = Collector(running.server.socket_path, arena_path.with_suffix(".second"), 1 << 20, "2" * 16)
    assert isinstance(second.attached, wire.Refused)
    second.close()
    capture_all(running.server, first, texts)
    late = first.slot(len(texts[0]))
    first.close()
    assert running.server.generate(texts[0], late.rid)["meta_info"]["prompt_tokens"] == len(texts[0])
    third = Collector(running.server.socket_path, arena_path, ARENA_BYTES, "3" * 16)
    assert isinstance(third.attached, wire.Attached)
    third.send(wire.Ping(number=3))
    third.wait(lambda: third.pongs)
    assert third.pongs[0].num_pieces == 0
    capture_all(running.server, third, texts)
    assert third.hashes_hold()
    assert not third.foreign
    third.close()


def test_two_ranks_make_one_record(python: Path, models: dict[str, Path], tmp_path: Path, arena_path: Path) -> None:
    """Case 60."""
    case = CASES[0]
    texts = prompts(12, 512, longest=700)
    with server(python, tmp_path, options(models[case.model], tp_size=2), layer_ids(case, 6)) as up:
        collector = Collector(up.socket_path, arena_path, 64 << 20)
        assert collector.hello.server_args["tp_size"] == 2
        slots = capture_all(up, collector, texts)
        collector.wait(lambda: all(collector.samples[slot.rid].covered for slot in slots))
        up.generate(texts[0], "")  # whatever a second rank would have sent is here by now
        assert all(collector.samples[slot.rid].covered for slot in slots)  # each row once, not twice
        for slot, states in zip(slots, reference(models[case.model], texts), strict=True):
            assert row_errors(collector.states(slot)[1], states[-1]).max() <= 1e-4
        collector.close()


@pytest.mark.slow
def test_without_its_variable_the_server_serves_and_opens_no_socket(
    python: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    with server(python, tmp_path, options(models["llama"]), None, plugin=False) as up:
        assert up.generate([5, 6, 7], "x")["meta_info"]["prompt_tokens"] == 3
        assert not up.socket_path.exists()
        assert "eyas" not in up.log.read_text()
