"""The speed bench: the same sequences for all, orders and answers, and peers that cannot run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_bench_quality import in_root, root  # noqa: F401 - fixtures

from eyas.errors import ConfigError
from eyas.ops.bench import train, train_data, trainers
from eyas.ops.bench.train_data import prepare
from eyas.ops.bench.trainers import PeerError, peer_python, started
from eyas.shards.layouts.registry import open_source

TOKENS = 24
DRIVER = """
from protocol import serve

def make(job):
    print("a line of the trainer")
    def step(number):
        if number == job["breaks_at"]:
            raise SystemExit("out of luck")
        return 10, number / 2 if number % 2 else None
    return step

serve(make)
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_data, "SEQUENCE_TOKENS", TOKENS)
    monkeypatch.setattr(train_data, "NUM_SEQUENCES", 2)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of drivers with one toy trainer beside the real protocol."""
    peers = tmp_path / "peers"
    peers.mkdir()
    (peers / "protocol.py").write_text((Path(trainers.__file__).parent / "peers/protocol.py").read_text())
    (peers / "run_toy.py").write_text(DRIVER)
    monkeypatch.setattr(trainers, "__file__", str(tmp_path / "trainers.py"))
    return tmp_path


def test_a_trainer_answers_orders_with_tokens_losses_time_and_memory(toy: Path) -> None:
    with started("toy", Path(sys.executable), {"breaks_at": -1}, toy / "jobs") as running:
        assert running.train(2) | {"cpu_s": 0, "wall_s": 0} == {
            "cpu_s": 0, "wall_s": 0, "num_tokens": 20, "losses": [None, 0.5],
        }  # fmt: skip
        assert running.train(2)["losses"] == [None, 1.5], "steps are counted on"
        assert 4 << 20 < running.finish() < 1 << 30


def test_what_a_trainer_died_of_is_said(toy: Path) -> None:
    with started("toy", Path(sys.executable), {"breaks_at": 1}, toy / "jobs") as running:
        running.train(1)
        with pytest.raises(PeerError, match="process of toy ended: out of luck"):
            running.train(1)


def test_every_trainer_reads_the_same_sequences(
    in_root: Path,  # noqa: F811
    tmp_path: Path,
    small: None,
) -> None:
    shared = prepare(in_root, tmp_path)
    assert len(shared["sample_ids"]) == 2
    ours = [train_ours_stored(shared, sample_id) for sample_id in shared["sample_ids"]]
    for layout in ("speculators", "specforge"):
        source = open_source(layout, Path(shared["data"][layout]), 4)
        assert len(source.paths) == 2
        for stored, path in zip(ours, source.paths, strict=True):
            theirs = source.read(path)
            assert len(theirs.input_ids_T) == TOKENS
            assert torch.equal(theirs.input_ids_T, stored.input_ids_T.long())
            assert torch.equal(theirs.loss_mask_T, stored.loss_mask_T.long())
            assert torch.equal(theirs.aux_TAD, stored.aux_TAD)
            if layout == "specforge":
                assert torch.equal(theirs.last_TD, stored.last_TD)


def train_ours_stored(shared, sample_id):
    from eyas import fs
    from eyas.contracts import ShardManifest
    from eyas.shards.reader import ShardReader

    folder = Path(shared["data"]["eyas"])
    return ShardReader(folder / "shards", fs.read_record(ShardManifest, folder / "manifest.json")).read(sample_id)


def test_ours_alone_is_measured_and_a_peer_that_is_not_there_left_out(
    in_root: Path,  # noqa: F811
    tmp_path: Path,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EYAS_PEER_SPECULATORS", "/nowhere/python")
    figures = train.measure(in_root, tmp_path, tmp_path / "environments", ["speculators"], 5)
    assert "speculators is left out: EYAS_PEER_SPECULATORS is /nowhere/python" in capsys.readouterr().err
    assert list(figures["trainers"]) == ["eyas"]
    assert figures["ratios"] == {}
    ours = figures["trainers"]["eyas"]
    assert ours["tokens_cpu_s"] > 0
    assert ours["peak_bytes"] > 64 << 20
    assert list(ours["losses"]) == ["9"], "12 steps; the tenth is measured"
    assert 0 < figures["trained_share"] < 1
    assert "eyas" in train.table(figures)


class Scripted:
    """A trainer whose rounds and losses are given."""

    def __init__(self, name: str, cpu_s: list[float], losses: list[float | None], peak_bytes: int) -> None:
        self.name, self._cpu_s, self._losses, self._peak_bytes = name, iter(cpu_s), iter(losses), peak_bytes

    def train(self, num_steps: int) -> dict[str, object]:
        losses = [next(self._losses) for _ in range(num_steps)]
        cpu_s = next(self._cpu_s)
        return {"cpu_s": cpu_s, "wall_s": 2 * cpu_s, "num_tokens": 100, "losses": losses}

    def finish(self) -> int:
        return self._peak_bytes


def test_figures_are_medians_of_the_rounds_that_count_and_losses_those_that_all_have() -> None:
    ours = Scripted("eyas", [9, 1, 2, 4], [None, 4.0, None, 3.0, None, 2.0, None, 1.0], 60)
    peer = Scripted("speculators", [9, 5, 4, 8], [9, 4.4, 8, 3.3, 7, 2.2, 6, 1.1], 100)
    found = train._take_turns([ours, peer], 2, 3)  # type: ignore[list-item]
    assert found["eyas"]["tokens_cpu_s"] == 50  # of 100, 50, 25; the first round does not count
    assert found["eyas"]["tokens_s"] == 25
    assert found["speculators"]["tokens_cpu_s"] == 20
    assert found["eyas"]["losses"] == {"1": 4.0, "3": 3.0, "5": 2.0, "7": 1.0}
    assert found["eyas"]["loss"] == 1.5, "the second half"
    ratios = train._ratios(found["eyas"], found["speculators"], has_our_loss=True)
    assert ratios == {"tokens_cpu_s": 2.5, "tokens_s": 2.5, "peak_bytes": 0.6, "loss": pytest.approx(1 / 1.1)}
    assert "loss" not in train._ratios(found["eyas"], found["speculators"], has_our_loss=False)


def test_names_and_rounds_are_checked(tmp_path: Path) -> None:
    assert train.parse_peers("none") == []
    assert train.parse_peers("speculators,specforge") == ["speculators", "specforge"]
    with pytest.raises(ConfigError, match="peer 'vllm', expected some of speculators, specforge, or none"):
        train.parse_peers("vllm")
    with pytest.raises(ConfigError, match="--rounds 0, expected at least 1"):
        train.measure(tmp_path, tmp_path, tmp_path, [], 0)


def test_an_environment_that_cannot_be_made_says_how_to_give_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EYAS_PEER_SPECULATORS", raising=False)
    failed = SimpleNamespace(returncode=1, stdout="", stderr="no network\n")
    monkeypatch.setattr(trainers.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(PeerError, match="no network") as error:
        peer_python("speculators", tmp_path)
    assert "EYAS_PEER_SPECULATORS=/path/to/python" in str(error.value)
