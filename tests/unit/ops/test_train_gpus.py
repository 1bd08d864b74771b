"""The bench of several devices, on a CPU over gloo."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from eyas.ops.bench import train_gpus_rank as rank
from eyas.ops.bench.train_gpus import (
    SETTINGS,
    TINY,
    Launcher,
    RanksError,
    compare_losses,
    read_losses,
    weights_apart,
)
from eyas.train.distributed import World


def test_losses_within_a_thousandth_at_every_step_hold() -> None:
    assert compare_losses([2.0, 4.0], [2.0, 4.003])["holds"]
    apart = compare_losses([2.0, 4.0, 1.0], [2.0, 4.005, 1.0])
    assert not apart["holds"]
    assert apart["worst"] == pytest.approx(0.005 / 4)
    assert apart["last"] == (1.0, 1.0)
    with pytest.raises(ValueError, match="shorter"):
        compare_losses([1.0, 1.0], [1.0])


def test_losses_are_read_and_weights_compared_by_hand(tmp_path: Path) -> None:
    for name, text in {"loss/step_0": "step\tstep_0\n1\t3.5\n2\t3.25\n", "loss/step_1": "s\tv\n1\t4\n2\t5\n", "accuracy/step_0": "s\tv\n1\t9\n"}.items():  # fmt: skip
        path = tmp_path / f"plots/metrics/{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_losses(tmp_path) == [3.5, 3.25, 4.0, 5.0]
    save_file({"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2)}, tmp_path / "one")
    save_file({"a": torch.tensor([3.0, 4.5]), "b": torch.ones(2)}, tmp_path / "other")
    assert weights_apart(tmp_path / "one", tmp_path / "other") == {"a": pytest.approx(0.1)}


def test_one_process_takes_the_whole_global_batch() -> None:
    """Losses are means over the rows of all packs; they begin where a step on each pack alone says."""
    job = {
        "sizes": TINY, "share": 0.75, "ttt_steps": [2], "steps": 2, "rounds": 1, "loss_steps": 3, "num_packs": 2,
        "settings": SETTINGS, "device": "cpu",
    }  # fmt: skip
    found = rank.steps(job, World(0, 1, torch.device("cpu")))
    (case,) = found["cases"]
    assert case["replicated"]["tokens_s"] == pytest.approx(TINY["tokens"] / case["replicated"]["step_ms"] * 1e3)
    bench = rank.Bench(job, World(0, 1, torch.device("cpu")), 2)
    bench.begin(2)
    bench.restart(bench.world, "replicated")
    rows = [bench.num_trained[pack] for pack in (0, 1)]
    # a step of learning rate 0 changes nothing, so both packs see the first weights
    values = [bench.step(pack, lr=0.0) for pack in (0, 1)]
    by_hand = sum(
        sum(float(values[p].losses_S[k]) * rows[p][k] for p in (0, 1)) / (rows[0][k] + rows[1][k]) for k in range(2)
    )
    assert found["losses"]["replicated"][0] == pytest.approx(by_hand, rel=1e-4)
    assert len(found["losses"]["replicated"]) == 3


def test_a_reader_tells_its_process_to_stop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(rank.os, "kill", lambda _, number: told.append(number))
    inner = SimpleNamespace(samples=(), shard_of=None, read=lambda sample_id: sample_id)
    reader = rank.StoppedReader(inner, 2)  # type: ignore[arg-type]
    assert [reader.read("a"), told[:], reader.read("b"), told[:], reader.read("c"), told[:]] == [
        "a", [], "b", [signal.SIGTERM], "c", [signal.SIGTERM],
    ]  # fmt: skip


def test_processes_that_take_too_long_are_ended_and_named(tmp_path: Path) -> None:
    launch = Launcher(tmp_path, "cpu", time.monotonic() + 1.0)
    with pytest.raises(RanksError, match="2 processes of part 'steps': still running after 1 s"):
        launch(2, {"part": "steps", "num_packs": 2}, 60)


@pytest.mark.slow
def test_the_command_finds_equal_losses_and_a_training_that_changes_its_processes() -> None:
    command = [sys.executable, "-m", "eyas.ops.bench.train_gpus", "--device", "cpu", "--ttt", "3", "--steps", "2"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--loss-steps", "10"], capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout)
    assert not found["failed"], found["failed"]
    for way in ("replicated", "sharded"):
        assert found["steps"]["losses"][way]["worst"] < 1e-4
        assert found["goes_on"][way]["holds"]
        assert max(found["goes_on"][way]["weights_apart"].values()) < 1e-5
        assert found["steps"]["cases"][0]["ratios"][way] > 0
