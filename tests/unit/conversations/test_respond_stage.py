"""The stage, from files to files, on a tiny real target in a local directory."""

from pathlib import Path

import pytest
import torch
import yaml

from eyas import fs
from eyas.config import TargetConfig
from eyas.conversations.table import read_conversations, write_conversations
from eyas.errors import ConfigError, EyasError
from eyas.stages import tokenize
from eyas.stages.respond import JOURNALS, main
from eyas.target.fetch import fetch

ARGV = ["models/target.json", "data/conversations", "data/responses"]


@pytest.fixture
def workspace(tmp_path, tiny_target, many, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_TARGETS_DIR", str(tmp_path / "targets"))
    target = {"name": "tiny", "source": "directory", "location": str(tiny_target), "dtype": "float32"}
    shape = {"num_layers": 2, "hidden_size": 32, "vocab_size": 260}
    params = {
        "defaults": ["schema", "_self_"],
        "target": target | {"shape": shape},
        "data": {"name": "x", "format": "jsonl"},
        "respond": {"max_new_tokens": 8, "batch_size": 4},
    }
    Path("params.yaml").write_text(yaml.safe_dump(params))
    config = TargetConfig(**target)
    for key, value in shape.items():
        setattr(config.shape, key, value)
    fs.write_record(Path("models/target.json"), fetch(config))
    write_conversations(Path("data/conversations"), many(6))
    return params


def test_the_stage_writes_answers_and_a_second_run_generates_nothing(workspace, capsys):
    main(ARGV)
    rows = list(read_conversations(Path("data/responses")))
    assert {row.variant for row in rows} == {"greedy", "sample-0"}
    assert len(rows) == 6 * 2 + 5
    first = fs.read_json(Path("reports/runs/respond.json"))
    assert first["num_tokens"] == sum(answer.num_tokens for row in rows for answer in row.answers)
    said = capsys.readouterr()
    assert "loop share, greedy" in said.out
    begins = "respond: loading engine hf on cpu, then writing 17 answers, 4 at a time, up to 8 tokens each"
    assert said.err.splitlines().count(begins) == 1
    before = Path("data/responses/conversations.parquet").read_bytes()
    main(ARGV)
    assert fs.read_json(Path("reports/runs/respond.json"))["num_tokens"] == 0
    assert "to write now" not in capsys.readouterr().err
    assert Path("data/responses/conversations.parquet").read_bytes() == before
    assert len(list(JOURNALS.glob("*.jsonl"))) == 1


def test_other_numerics_start_another_journal(workspace):
    main(ARGV)
    workspace["respond"]["batch_size"] = 2
    Path("params.yaml").write_text(yaml.safe_dump(workspace))
    main(ARGV)
    assert fs.read_json(Path("reports/runs/respond.json"))["num_tokens"] > 0
    assert len(list(JOURNALS.glob("*.jsonl"))) == 2


def test_switched_off_rows_are_as_given(workspace):
    workspace["respond"]["enabled"] = False
    Path("params.yaml").write_text(yaml.safe_dump(workspace))
    main(ARGV)
    assert {row.variant for row in read_conversations(Path("data/responses"))} == {"given"}


def test_missing_conversations_are_a_user_error(workspace):
    Path("data/conversations/conversations.parquet").unlink()
    with pytest.raises(EyasError, match=r"conversations.parquet is missing"):
        main(ARGV)


def test_a_draft_vocab_beyond_the_vocab_is_refused_before_any_work(workspace):
    """Nothing of tokenize's three outputs is published."""
    workspace["tokenize"] = {"draft_vocab_size": 261}
    Path("params.yaml").write_text(yaml.safe_dump(workspace))
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError, match="draft_vocab_size: 261, expected at most 260"):
        tokenize.main([*ARGV[:2], "data/tokens", "data/draft_vocab", "reports/tokens.json"])
    assert sorted(Path().rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(workspace):
    workspace["target"]["device"] = "cuda"
    Path("params.yaml").write_text(yaml.safe_dump(workspace))
    with pytest.raises(ConfigError, match=r"target\.device: 'cuda', but torch .* finds no such device"):
        main(ARGV)
    assert not Path("data/responses").exists()
