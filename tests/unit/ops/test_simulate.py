"""Predictions: arithmetic by hand, what was measured elsewhere, the documents' example, and nonsense."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from eyas.cli import main
from eyas.errors import ConfigError, StoreError
from eyas.ops.simulate.description import read_description
from eyas.ops.simulate.predict import predict
from eyas.ops.simulate.runs import judge, line

ROOT = Path(__file__).parents[3]
EXAMPLE = re.search(r"```yaml\n(.*?)```\n\n```\n(.*?)```", (ROOT / "docs/simulate.md").read_text(), re.DOTALL)
H200_LLAMA = """
nodes: 1
gpus_per_node: 1
gpu: {matmul_tflops: 774, train_share: 0.68}
disk: {write_gb_per_s: 100, read_gb_per_s: 100, size_gb: 1000}
cpu: {cores: 1, tokenize_tokens_per_s: 1000}
target: {hidden_size: 4096, vocab_size: 128256, active_parameters: 8000000000}
drafter: {num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, intermediate_size: 14336, ttt_steps: 7}
work: {conversations: 100, mean_tokens: 1000.0, assistant_share: 0.75, respond: false, codec: raw}
"""


def described(tmp_path, **changes):
    value = yaml.safe_load(H200_LLAMA)
    for key, new in changes.items():
        *sections, name = key.split("__")
        inner = value
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = new
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def stages(path, **given):
    return {stage.name: stage for stage in predict(read_description(path, **given)).stages}


@pytest.mark.parametrize(
    ("ttt", "share", "measured"), [(7, 0.75, 52_100), (7, 0.3, 115_100), (3, 0.75, 110_900), (3, 0.3, 235_300)]
)
def test_training_on_an_h200_is_predicted_as_it_was_measured(tmp_path, ttt, share, measured):
    train = stages(described(tmp_path, drafter__ttt_steps=ttt, work__assistant_share=share))["train"]
    assert train.num_tokens / train.seconds == pytest.approx(measured, rel=0.05)


def test_a_capture_by_hand(tmp_path):
    found = predict(read_description(described(tmp_path, gpu__prefill_share=0.5)))
    extract = found.stages[1]
    assert extract.num_bytes == found.stored_bytes == 100_000 * (4 * 4096 * 2 + 5)
    assert extract.seconds == pytest.approx(100_000 * 16e9 / 387e12)
    assert extract.bound == "products"
    assert [stage.name for stage in found.stages] == ["tokenize", "extract", "train"]


@pytest.mark.parametrize(
    ("changes", "bound", "seconds"),
    [
        ({"disk__write_gb_per_s": 0.1}, "disk", 3.2773e9 / 0.1e9),
        ({"disk__shared": True, "network_gb_per_s": 0.05}, "network", 3.2773e9 / 0.05e9),
        ({"rates": {"extract": 10.0}}, "products", 10_000),
        ({"start_s": {"extract": 60.0}, "rates": {"extract": 10.0}}, "products", 10_060),
        ({"work__codec": "blosc2", "cpu__encode_gb_per_s": 0.001}, "encoding", 3276.8),
    ],
)
def test_the_slowest_part_is_the_bound(tmp_path, changes, bound, seconds):
    extract = stages(described(tmp_path, **changes))["extract"]
    assert (extract.bound, extract.seconds) == (bound, pytest.approx(seconds, rel=1e-4))


def test_more_nodes_share_the_work_and_own_disks_but_not_a_shared_one(tmp_path):
    def extract(**changes):
        return stages(described(tmp_path, disk__write_gb_per_s=0.1, **changes))["extract"].seconds

    assert extract(nodes=4) == pytest.approx(extract() / 4)
    assert extract(nodes=4, disk__shared=True, network_gb_per_s=99.0) == pytest.approx(extract())


def test_options_win_over_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = stages(described(tmp_path), target="kimi_k2_5", conversations=7, mean_tokens=10.0)["extract"]
    assert (found.num_tokens, found.num_bytes) == (70, 70 * (57_344 + 5))


def test_the_example_of_the_documents_prints_what_they_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert EXAMPLE is not None
    (tmp_path / "kimi.yaml").write_text(EXAMPLE[1])
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", str(tmp_path / "kimi.yaml"), "--target", "kimi_k2_5"])
    assert [li.rstrip() for li in capsys.readouterr().out.splitlines()] == EXAMPLE[2].splitlines()


def test_json_holds_every_figure(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", str(described(tmp_path)), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] == pytest.approx(sum(stage["seconds"] for stage in found["stages"]))
    assert found["fits"] is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 0}, "nodes: 0, expected a finite number above 0"),
        ({"nodes": 1.5}, "nodes: 1.5, expected int"),
        ({"disk__write_gb_per_s": -3.0}, "disk.write_gb_per_s: -3.0"),
        ({"disk__read_gb_per_s": float("nan")}, "disk.read_gb_per_s: nan, expected a finite number"),
        ({"gpu__train_share": 1.5}, "gpu.train_share: 1.5, expected a share"),
        ({"gpu__matmul_tflops": -1.0}, "gpu.matmul_tflops: -1.0"),
        ({"work__codec": "zip"}, "work.codec: 'zip', expected one of raw, blosc2, int8"),
        ({"rates": {"fly": 1.0}}, "expected one of respond, tokenize, extract"),
        ({"rates": {"train": 0.0}}, "rates.train: 0.0"),
        ({"disk__shared": True}, "network_gb_per_s: 0"),
        ({"wings": 2}, "wings: unknown key"),
        ({"cpu": 4}, "cpu: int, expected an object"),
        ({"gpu__matmul_tflops": 0.0}, "extract cannot be predicted without a measured rate"),
        ({"target__active_parameters": 0.0}, "extract cannot be predicted without a measured rate"),
        ({"work__respond": True}, "respond cannot be predicted without a measured rate"),
        ({"cpu__tokenize_tokens_per_s": 0.0}, "tokenize cannot be predicted without a measured rate"),
    ],
)
def test_nonsense_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        predict(read_description(described(tmp_path, **changes)))


@pytest.mark.parametrize("text", ["", "- 1\n", "nodes: [", "\0", "&a [*a]"])
def test_what_describes_no_cluster_is_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read_description(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_description(tmp_path / "none.yaml")


def test_an_unknown_preset_lists_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=r"target 'eagle', expected one of kimi_k2_5, llama3_1_8b"):
        read_description(described(tmp_path), target="eagle")


def test_start_and_rate_come_from_two_sizes_and_a_rate_from_one():
    assert line([(100, 12.0), (1000, 30.0)]) == (pytest.approx(10.0), pytest.approx(0.02))
    assert line([(100, 12.0)]) == (0.0, pytest.approx(0.12))
    assert line([(100, 30.0), (1000, 12.0)]) == (0.0, pytest.approx(21 / 550))  # noise: no stage gains time


def test_a_run_is_predicted_from_smaller_ones_without_a_look_at_its_seconds(tmp_path, capsys):
    for name, tokens, seconds in (("a", 100, 12.0), ("b", 1000, 30.0), ("c", 5000, 100.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "throughput.json").write_text(
            json.dumps({"extract": {"tokens": tokens, "seconds": seconds}})
        )
    (found,) = judge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert (found.predicted_s, found.error, found.growth) == (pytest.approx(110), pytest.approx(0.1), 5)
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--runs", str(tmp_path / "a"), str(tmp_path / "b"), "--against", str(tmp_path / "c")])
    assert "+10%" in capsys.readouterr().out


def test_reports_without_figures_are_refused(tmp_path):
    (tmp_path / "throughput.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no stage's tokens and seconds"):
        judge([tmp_path], tmp_path)
    with pytest.raises(StoreError, match="is missing"):
        judge([tmp_path / "none"], tmp_path)
