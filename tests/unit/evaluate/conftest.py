"""One evaluation of a tiny target for all tests of the room."""

from __future__ import annotations

from typing import Any

import pytest
from evaluate_world import make_drafter, make_model, run, store
from transformers import LlamaForCausalLM

from eyas.contracts import AcceptanceReport
from eyas.drafter.model import Drafter
from eyas.shards.reader import ShardReader


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def reader(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    return store(model, tmp_path_factory.mktemp("states"), "raw", "all")


@pytest.fixture(scope="session")
def drafters(reader: ShardReader, model: LlamaForCausalLM) -> tuple[Drafter, Drafter]:
    return make_drafter(reader, model, num_steps=40), make_drafter(reader, model, num_steps=0)


@pytest.fixture(scope="session")
def judged(
    reader: ShardReader, model: LlamaForCausalLM, drafters: tuple[Drafter, Drafter]
) -> tuple[AcceptanceReport, dict[str, Any]]:
    return run(reader, model, drafters)
