"""The plugin against a stand-in for SGLang: only its names, its hook registry and a model runner."""

from __future__ import annotations

import itertools
import logging
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.engines.sglang import plugin, versions, wire
from eyas.errors import CaptureError
from sglang_harness import Collector

D = 8


class Model(torch.nn.Module):
    """Counts like SGLang's Llama: the state after layer i is boundary i + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers_to_capture = []  # type: ignore[assignment]

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.model.layers_to_capture = [layer + 1 for layer in layers]  # type: ignore[assignment]


def runner_of(model: torch.nn.Module, **other: Any) -> SimpleNamespace:
    config = SimpleNamespace(
        model_path="m", hidden_size=D, num_hidden_layers=6, vocab_size=100, dtype=torch.float32, context_len=64
    )
    arguments = SimpleNamespace(
        tp_size=2, disable_radix_cache=True, quantization=None, attention_backend="x",
        cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="disabled"), decode=SimpleNamespace(backend="full")),
    )  # fmt: skip
    plain: dict[str, Any] = {"is_draft_worker": False, "tp_rank": 0, "device": "cpu", "max_total_num_tokens": 4096}
    return SimpleNamespace(**(plain | {"model": model, "model_config": config, "server_args": arguments} | other))


class Registry:
    """Of SGLang's hooks."""

    def __init__(self) -> None:
        self.hooks: dict[str, tuple[Callable[..., Any], str]] = {}

    def register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        self.hooks[target] = (hook, kind)

    def load(self, runner: SimpleNamespace) -> None:
        hook, kind = self.hooks[versions.LOAD_MODEL]
        assert kind == "after"
        assert hook(None, runner) is None

    def logits(self, *given: Any, **named: Any) -> None:
        hook, kind = self.hooks[versions.LOGITS]
        assert kind == "before"
        assert hook(object(), *given, **named) is None  # anything else would replace the arguments


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eyas") as name:
        yield Path(name)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Registry:
    found = Registry()
    package, hooks = ModuleType("sglang"), ModuleType("sglang.srt.plugins.hook_registry")
    package.__version__ = "0.5.14"  # type: ignore[attr-defined]
    hooks.HookRegistry = found  # type: ignore[attr-defined]
    hooks.HookType = SimpleNamespace(AFTER="after", BEFORE="before")  # type: ignore[attr-defined]
    for name in ("sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang", package)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.setattr(plugin._Process, "tap", None)
    monkeypatch.setenv(wire.SOCKET_VARIABLE, str(folder / "s"))
    monkeypatch.setenv(wire.LAYERS_VARIABLE, "[1, 3]")
    plugin.register()
    return found


def first_word(folder: Path) -> wire.Message:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / "s"))
        return wire.from_line(connection.makefile("rb").readline())


def test_without_its_variable_it_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(wire.SOCKET_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # an import would fail
    plugin.register()


def test_hello_tells_what_the_model_will_copy(registry: Registry, folder: Path) -> None:
    registry.load(runner_of(Model()))
    found = first_word(folder)
    assert isinstance(found, wire.Hello)
    assert found.boundaries == [2, 4]
    assert (found.sglang, found.model_class, found.dtype, found.hidden_size) == ("0.5.14", "Model", "float32", D)
    assert set(versions.FACTS) < set(found.server_args)
    facts = {"tp_size": 2, "disable_radix_cache": True, "max_total_num_tokens": 4096, "context_len": 64}
    assert facts.items() <= found.server_args.items()
    assert found.server_args["cuda_graph_backend_prefill"] == "disabled"
    assert found.server_args["cuda_graph_backend_decode"] == "full"


def test_every_rank_keeps_the_states_and_rank_0_alone_hands_them_over(registry: Registry, folder: Path) -> None:
    """Case 60."""
    model = Model()
    registry.load(runner_of(model, tp_rank=1))
    assert plugin.boundaries(model) == [2, 4]
    assert not (folder / "s").exists()
    registry.logits(torch.zeros(1), torch.zeros(1, D), None, SimpleNamespace(rids=["x"]), None)


def test_a_draft_is_left_alone(registry: Registry, folder: Path) -> None:
    model = Model()
    registry.load(runner_of(model, is_draft_worker=True))
    assert plugin.boundaries(model) == []
    assert not (folder / "s").exists()


class Stubborn(Model):
    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        super().set_eagle3_layers_to_capture(layers[:1])


@pytest.mark.parametrize(
    ("layers", "model", "version", "reason"),
    [
        ("[1, 3]", torch.nn.Module, "0.5.14", "Module cannot keep hidden states"),
        ("[1, 3]", Stubborn, "0.5.14", "layers [1, 3] were asked for, and the model keeps boundaries [2]"),
        ("", Model, "0.5.14", "expected a JSON list"),
        ("[1, true]", Model, "0.5.14", "expected a JSON list"),
        ("[1,", Model, "0.5.14", "no capture"),
        ("[1, 3]", Model, "0.5.15", "sglang 0.5.15 is installed, expected one of 0.5.14, 0.5.23"),
    ],
)
def test_what_hinders_the_capture_is_told_to_who_connects(
    registry: Registry,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: str,
    model: Any,
    version: str,
    reason: str,
) -> None:
    """Cases 49 and 55: the server serves, nobody takes it for one that captures."""
    monkeypatch.setenv(wire.LAYERS_VARIABLE, layers)
    sys.modules["sglang"].__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setattr(versions, "tp_rank", lambda _version, runner: runner.tp_rank)
    registry.load(runner_of(model()))
    found = first_word(folder)
    assert isinstance(found, wire.Refused)
    assert reason in found.reason
    registry.logits(torch.zeros(1), torch.zeros(1, D), None, SimpleNamespace(rids=["x"]), None)


def test_a_socket_that_cannot_be_opened_is_logged(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(wire.SOCKET_VARIABLE, str(folder / ("long" * 40)))
    with caplog.at_level(logging.ERROR):
        registry.load(runner_of(Model()))
    assert "cannot be opened" in caplog.text


class Mode:
    def __init__(self, extend: bool) -> None:
        self.is_extend = lambda: extend


def batch_of(rid: str, rows: int, *, extend: bool = True, prefix: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        rids=[rid],
        forward_mode=Mode(extend),
        extend_seq_lens_cpu=[rows],
        extend_prefix_lens_cpu=[prefix],
    )


@pytest.mark.parametrize("by_name", [False, True])
def test_extend_batches_alone_reach_the_arena(registry: Registry, folder: Path, by_name: bool) -> None:
    """Decode steps, dummy runs without request ids and broken batches pass; arguments come by position or by name."""
    registry.load(runner_of(Model()))
    collector = Collector(folder / "s", folder / "arena", 1 << 16)
    slot, ids, last = collector.slot(5), torch.arange(5), torch.randn(5, D)
    aux = [torch.randn(5, D), torch.randn(5, D)]
    registry.logits(ids, last, None, batch_of(slot.rid, 5, extend=False), aux)
    registry.logits(
        ids, last, None, SimpleNamespace(rids=[slot.rid], forward_mode=Mode(True), extend_seq_lens_cpu=None), aux
    )
    registry.logits(ids, last, None, SimpleNamespace(rids=None), aux)
    registry.logits(ids, last, None, object(), aux)
    registry.logits(
        ids, last, None, SimpleNamespace(rids=[slot.rid], forward_mode=Mode(True), extend_seq_lens_cpu=[None]), aux
    )
    assert not collector.arena.any()
    if by_name:
        batch = batch_of(slot.rid, 5)
        registry.logits(input_ids=ids, hidden_states=last, lm_head=None, logits_metadata=batch, aux_hidden_states=aux)
    else:
        registry.logits(ids, last, None, batch_of(slot.rid, 5), aux, None)
    collector.wait(lambda: collector.samples[slot.rid].covered)
    assert len(collector.samples[slot.rid].pieces) == 1
    assert torch.equal(collector.states(slot)[0], torch.stack(aux, 1))
    collector.close()


def test_a_capture_server_is_started_without_what_takes_rows_away() -> None:
    options = versions.ServerOptions(
        model_path="m", port=1, device="cpu", dtype="float32", chunked_prefill_size=512, tp_size=2, further=["--x", "y"]
    )
    for version in versions.SUPPORTED:
        found = versions.server_arguments(version, options)
        assert {"--disable-radix-cache", "--skip-tokenizer-init"} <= set(found)
        assert "--allow-auto-truncate" not in found
        pairs = dict(itertools.pairwise(found))
        assert pairs["--cuda-graph-backend-prefill"] == pairs["--cuda-graph-backend-decode"] == "disabled"
        assert (pairs["--attention-backend"], pairs["--chunked-prefill-size"], pairs["--tp-size"]) == (
            "torch_native",
            "512",
            "2",
        )
        assert found[-2:] == ["--x", "y"]


def test_another_version_is_refused_by_name() -> None:
    """Case 55."""
    options = versions.ServerOptions(model_path="m", port=1, device="cpu", dtype="float32")
    with pytest.raises(CaptureError, match=r"sglang 0\.5\.24 is installed, expected one of 0\.5\.14, 0\.5\.23"):
        versions.server_arguments("0.5.24", options)
