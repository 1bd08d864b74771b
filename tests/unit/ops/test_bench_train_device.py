"""The step beside a peer's on a device: operations that are needed, turns, and what is kept."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from eyas.contracts import DrafterShape
from eyas.drafter.rows import Document, Pack, pack_documents
from eyas.errors import ConfigError
from eyas.ops.bench import run, train_device, train_step
from eyas.ops.bench.flops import DENSE_BFLOAT16, needed_flops, peak_flops

SMALL = {
    "hidden": 16, "inner": 24, "heads": 4, "kv_heads": 2, "vocab": 60, "draft_vocab": 40, "tokens": 60, "doc": 20,
}  # fmt: skip
SHAPE = DrafterShape(
    target_hidden_size=8, hidden_size=8, intermediate_size=10, num_attention_heads=3, num_key_value_heads=1, head_dim=4,
    num_aux=3, vocab_size=60, draft_vocab_size=20, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64,
    fc_norm=False, norm_output=False,
)  # fmt: skip


def pack_of(masks: list[list[int]], ttt_steps: int, multiple: int = 1) -> Pack:
    documents = [
        Document(
            torch.zeros(len(m), dtype=torch.int64), torch.tensor(m), torch.zeros(len(m), 3, 8), torch.zeros(len(m), 8)
        )
        for m in masks
    ]
    return pack_documents(documents, ttt_steps, multiple)


@pytest.mark.parametrize("multiple", [1, 16])
def test_operations_of_a_step_by_hand(multiple: int) -> None:
    """One document of 6, answers at 3 to 5: rows 2 and 3 train at step 0, row 2 at step 1; filling counts nothing.

    The halves of q, k and v that read an embedding are needed once a token: row 3 at step 0 and row 2 at step 1 share one.
    """
    products = {
        "fc": 2 * 6 * (24 * 8) * 2,  # forward, weight
        "keys and values": 2 * (6 + 6 + 1) * (8 * 8) * 3,  # of embeddings, of states, of row 2 at step 1
        "queries": 2 * (2 + 2 + 1) * (8 * 12) * 3,  # of tokens 3 and 4, of rows
        "output, mlp": 2 * (2 + 1) * (12 * 8 + 3 * 8 * 10) * 3,
        "head": 2 * (2 + 1) * (8 * 20) * 2,  # forward, input
        "teacher": 2 * 2 * (8 * 20),  # at 3 and 4
        # row 2 sees 3 keys and row 3 sees 4; then row 2 sees 3 and its own of step 1; scores and values, 12 wide
        "attention": 2 * (3 + 4 + 4) * 2 * 12 * 3,
    }
    assert needed_flops(SHAPE, pack_of([[0, 0, 0, 1, 1, 1]], 2, multiple)) == sum(products.values())


def test_documents_add_up_and_a_norm_of_the_states_needs_one_more_product() -> None:
    mask = [0, 1, 1, 1, 0, 1, 1]
    one, two = (needed_flops(SHAPE, pack_of([mask] * number, 3)) for number in (1, 2))
    assert two == 2 * one
    normed = needed_flops(dataclasses.replace(SHAPE, fc_norm=True), pack_of([mask], 3))
    assert normed - one == 2 * 7 * 24 * 8


def test_the_peak_is_the_data_sheets_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert peak_flops("cuda") == {"flops": DENSE_BFLOAT16["H200"], "from": "data sheet: H200, dense bfloat16"}
    found = peak_flops("cpu")
    assert 1e9 < found["flops"] < 1e14
    assert found["from"].startswith("measured")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_device, "SIZES", SMALL)
    monkeypatch.setattr(train_device, "STEPS_PER_ORDER", 3)
    monkeypatch.setattr(train_device, "TTT_STEPS", (2,))


def test_ours_alone_is_measured_on_every_pack(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EYAS_PEER_SPECULATORS", "/nowhere/python")
    recorded = []
    peers = ["speculators", "specforge"]
    found = train_device.measure(tmp_path / "s", tmp_path / "e", peers, 2, recorded.append, "cpu")
    assert "speculators is left out: EYAS_PEER_SPECULATORS is /nowhere/python" in capsys.readouterr().err
    assert recorded == [found]
    assert [(c["ttt_steps"], c["trained_share"]) for c in found["cases"]] == [(2, 0.75), (2, 0.3)]
    for case in found["cases"]:
        ours = case["trainers"]["eyas"]
        rates = [60 / ms * 1e3 for ms in ours["step_ms_of_rounds"]]
        assert min(rates) * 0.999 <= ours["tokens_s"] <= max(rates) * 1.001
        seconds_at_peak = case["needed_flops"] / found["peak"]["flops"]
        assert ours["mfu"] == pytest.approx(seconds_at_peak / ours["step_ms"] * 1e3)
        assert len(ours["losses"]) == 3
        assert ours["losses"][2] < ours["losses"][0]
        assert case["ratios"] == {}
    assert found["cases"][0]["needed_flops"] > found["cases"][1]["needed_flops"]
    assert "eyas" in train_device.table(found)


class Scripted:
    """A trainer whose orders take given seconds."""

    def __init__(self, name: str, wall_s: list[float], peaks: list[int]) -> None:
        self.name, self._wall_s, self._peaks = name, iter(wall_s), iter(peaks)

    def train(self, num_steps: int) -> dict[str, object]:
        wall_s = next(self._wall_s)
        return {
            "wall_s": wall_s, "cpu_s": 2 * wall_s, "num_tokens": 100, "losses": [None, wall_s],
            "device_peak_bytes": next(self._peaks),
        }  # fmt: skip


def test_figures_are_medians_of_the_rounds_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_device, "STEPS_PER_ORDER", 2)
    # two packs, a round that compiles and three that count
    trainer = Scripted("eyas", [90, 80, 1, 10, 2, 20, 4, 40], [999, 999, 5, 50, 6, 60, 5, 50])
    first, second = train_device._take_turns([trainer], 2, 3)["eyas"]  # type: ignore[list-item]
    found = train_device._figures("eyas", first, 0.5)
    assert found["step_ms"] == 1000
    assert found["tokens_s"] == 50
    assert found["tokens_cpu_s"] == 25
    assert found["peak_bytes"] == 6
    assert found["mfu"] == 0.5
    assert found["losses"] == [90, 1, 2, 4]
    assert train_device._figures("eyas", second, 0.5)["peak_bytes"] == 60


def test_without_a_device_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda, but torch"):
        train_device.measure(tmp_path, tmp_path, [], 1, print)
    with pytest.raises(ConfigError, match="--rounds 0"):
        train_device.measure(tmp_path, tmp_path, [], 0, print, "cpu")


def test_a_device_keeps_the_others_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.report_path(tmp_path, "train")
    path.parent.mkdir(parents=True)
    path.write_text('{"cpu": {"trainers": {}}, "cuda": {"old": 1}}')

    def measured(scratch, environments, peers, num_rounds, record):
        record({"cases": [], "half": True})
        assert json.loads(path.read_text()) == {"cpu": {"trainers": {}}, "cuda": {"cases": [], "half": True}}
        return {"cases": [], "num_rounds": num_rounds}

    monkeypatch.setattr(train_device, "measure", measured)
    run.run(tmp_path, "train", peers="none", num_rounds=4, device="cuda")
    assert json.loads(path.read_text()) == {"cpu": {"trainers": {}}, "cuda": {"cases": [], "num_rounds": 4}}


@pytest.mark.gpu
def test_ours_on_a_gpu(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_device, "SIZES", train_step.SIZES | {"vocab": 40_000, "tokens": 2048})
    found = train_device.measure(tmp_path / "s", tmp_path / "e", [], 2, lambda _: None)
    for case in found["cases"]:
        ours = case["trainers"]["eyas"]
        assert 0.05 < ours["mfu"] < 1, sys.version
        assert ours["peak_bytes"] > 4 * 293_000_000
