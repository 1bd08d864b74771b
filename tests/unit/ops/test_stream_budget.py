"""``make budget`` of a streamed training: arithmetic over the plan and the repository's own rates."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from eyas import config, fs
from eyas.errors import ConfigError
from eyas.ops import budget as room
from eyas.ops.budget import examine
from eyas.ops.budget_text import account_text, account_values
from eyas.plan.build import build_plan
from eyas.plan.identity import capture_identity
from eyas.tokens.dataset import make_sample, read_index, write_tokens
from eyas.tokens.part import planned_part
from fake_target import HIDDEN_SIZE, make_target

ROOT = Path(__file__).parents[3]
LENGTH, NUM_SAMPLES = 25, 60
ROW_BYTES = 4 * HIDDEN_SIZE * 2


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """60 samples of 25 tokens, every tenth held out, two samples a shard; raw, so that sizes are arithmetic."""
    text = (ROOT / "params.yaml").read_text()
    changes = {"\nextract:\n  engine: hf": "\nextract:\n  engine: fake", "codec: blosc2": "codec: raw"}
    changes |= {"boundaries: []": "boundaries: [1, 2, 3]"}
    changes |= {"shard_bytes: 67108864": f"shard_bytes: {2 * LENGTH * ROW_BYTES}", "source: store": "source: stream"}
    changes |= {"shuffle_shards: 32": "shuffle_shards: 3", "num_steps: 1500": "num_steps: 54"}
    changes |= {"  batch_tokens: 512": f"  batch_tokens: {LENGTH}", "reserve_bytes: 1000000000": "reserve_bytes: 1000"}
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    (tmp_path / "params.yaml").write_text(text)
    dice, tokens = random.Random(0), tmp_path / "data/tokens"
    mask = [0] * 5 + [1] * (LENGTH - 5)
    write_tokens(
        tokens,
        [
            make_sample(
                [dice.randrange(40) for _ in range(LENGTH)], mask, conversation_id=f"c{i}", source="s",
                split="held_out" if i % 10 == 9 else "train", variant="greedy",
            )
            for i in range(NUM_SAMPLES)
        ],
    )  # fmt: skip
    target, params = make_target(), config.load(tmp_path / "params.yaml")
    fs.write_record(tmp_path / room.TARGET, target)
    capture = capture_identity(params.extract, target, params.target, read_index(tokens).tokens_sha256, "judging")
    part = planned_part(tokens, "judging")
    fs.write_record(tmp_path / room.PLAN, build_plan(part.lengths, capture, HIDDEN_SIZE, part.trained_rows))
    return tmp_path


def test_the_figures_are_arithmetic(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One capture per epoch at its rate; what is stored is what an evaluation reads."""
    monkeypatch.setattr("eyas.tokens.part.CALIBRATION_ROWS", 40)
    fs.write_record(
        place / "reports/throughput.json", {"extract": {"tokens_per_second": 50}, "train": {"tokens_per_second": 300}}
    )
    found = account_values(examine(place))["stream"]
    num_tokens = NUM_SAMPLES * LENGTH
    assert found["num_tokens"] == num_tokens
    assert found["capture_s_per_epoch"] == num_tokens / 50 == 30
    assert found["train_s_per_epoch"] == num_tokens / 300 == 5
    assert found["num_epochs"] == 54 * 1 / 54 == 1.0
    assert found["total_s"] == {"store": 35.0, "stream": 35.0}
    assert found["store_bytes"] >= num_tokens * ROW_BYTES
    shard_bytes = 2 * LENGTH * ROW_BYTES
    assert 3 * shard_bytes < found["window_bytes"] <= 6 * (shard_bytes + 20_000)
    assert found["least_ring_bytes"] > found["window_bytes"] + found["pinned_bytes"]
    assert found["set_bytes"] >= 27 * shard_bytes


def test_a_ring_that_a_stopped_training_left_is_counted_once(place: Path) -> None:
    """The training goes on with it, so the disk need not have its bytes a second time; and it is known as its ring."""
    params, index = config.load(place / "params.yaml"), read_index(place / "data/tokens")
    identity = capture_identity(params.extract, make_target(), params.target, index.tokens_sha256, "all").digest
    ring = place / ".eyas/ring" / identity
    ring.mkdir(parents=True)
    header = f'{{"__metadata__":{{"identity":"{identity}"}}}}'.encode()
    path = ring / "states/000/shard-00000.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes([1]) * 20_000)
    account = account_values(examine(place))
    there = path.stat().st_blocks * 512
    assert account["stream"]["ring_there_bytes"] == there > 20_000
    assert account["working"][0]["is_wanted"]
    beside = account["stream"]["ring_bytes"] - there + 5 * index.num_tokens  # ids and masks of the capturing process
    assert account["stream"]["headroom_bytes"] == account["headroom_bytes"] - beside


def test_a_second_epoch_costs_a_second_capture_unless_the_ring_keeps_the_set(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place / "params.yaml"
    path.write_text(path.read_text().replace("num_steps: 54", "num_steps: 135"))
    rates = {"extract": {"tokens_per_second": 50}, "train": {"tokens_per_second": 300}}
    fs.write_record(place / "reports/throughput.json", rates)
    monkeypatch.setenv("EYAS_RING_BYTES", "1000")
    account = examine(place)
    found = account_values(account)["stream"]
    assert (found["num_epochs"], found["num_captures"]) == (2.5, 2.5)
    assert found["total_s"] == {"store": 30 + 12.5, "stream": 75 + 12.5}
    assert re.search(r"break-even +one epoch; this training has 2\.50: 1\.50 captures more", account_text(account))
    monkeypatch.setenv("EYAS_RING_BYTES", str(10**9))
    found = account_values(examine(place))["stream"]
    assert (found["captures_by_epoch"], found["num_captures"]) == (False, 1.0)


def test_a_size_that_is_none_is_refused_as_the_training_refuses_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_RING_BYTES", "2GB")
    with pytest.raises(ConfigError, match="EYAS_RING_BYTES: '2GB'"):
        examine(place)


def test_without_rates_the_floor_is_told_and_nothing_is_made_up(place: Path) -> None:
    account = examine(place)
    found = account_values(account)["stream"]
    assert found["capture_s_per_epoch"] is found["train_s_per_epoch"] is found["total_s"] is None
    weights = sum(f.size_bytes for f in make_target().files if f.path.endswith(".safetensors")) / 2
    assert found["floor_h200_hours_per_epoch"] == pytest.approx(2 * weights * 1500 / (0.4 * 989e12) / 3600)
    assert "its rate is not measured here yet" in account_text(account)
    json.dumps(found)
