"""The processes of one training tell a user error once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eyas import config, console
from eyas.contracts import StoredSample
from eyas.errors import EvaluateError, EyasError, TrainError
from eyas.stages import train as stage
from eyas.train import distributed

PATHS = ["target.json", "draft_vocab", "states", "manifest.json", "drafter", "metrics"]


@pytest.fixture
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """One of four processes on two hosts, in a folder whose parameters are wrong."""
    number, local = request.param
    for name, value in {"RANK": number, "LOCAL_RANK": local, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed, "LAST_WORDS_S", 0.0)
    monkeypatch.chdir(tmp_path)
    good = (Path(__file__).parents[3] / config.PARAMS_PATH).read_text()
    config.PARAMS_PATH.write_text(good.replace("num_steps:", "num_stepz:"))
    return local


@pytest.mark.parametrize("rank", [(0, 0), (1, 1), (2, 0), (3, 1)], indirect=True)
def test_a_wrong_parameter_is_told_once_by_host_and_ends_all_alike(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, console.user_errors():
        stage.main(PATHS)
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told == "" if rank else "num_stepz" in told


@pytest.mark.parametrize("local", [0, 1])
def test_what_one_process_alone_meets_is_told_by_it(local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local))
    with pytest.raises(EyasError, match="mine"), distributed.told_once():
        raise EyasError("mine")


def test_one_sample_is_refused_before_it_is_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is held out, so nothing could judge the drafter: told before hours of steps, not after them."""
    monkeypatch.chdir(tmp_path)
    config.PARAMS_PATH.write_text((Path(__file__).parents[3] / config.PARAMS_PATH).read_text())
    only = StoredSample(
        sample_id="a", num_tokens=9, conversation_id="c", source="chats", split="train", variant="greedy"
    )
    monkeypatch.setattr(stage.fs, "read_record", lambda kind, path: SimpleNamespace())
    monkeypatch.setattr(stage, "ShardReader", lambda folder, manifest, cache: SimpleNamespace(samples=[only]))
    monkeypatch.setattr(stage, "shard_cache", lambda root, manifest: None)
    monkeypatch.setattr(stage, "train", lambda *_: pytest.fail("a training began"))
    with pytest.raises(EvaluateError, match=r"0 held-out documents.*\(chats; 1 conversations to train on\)") as caught:
        stage.main(PATHS)
    assert "two that begin differently" in (caught.value.hint or "")


@pytest.mark.parametrize(("source", "stored"), [("store", "judging"), ("stream", "all")])
def test_states_that_another_source_stored_are_refused(
    source: str, stored: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A streamed run stores the few samples that judge: a training on them alone would look like any other."""
    monkeypatch.chdir(tmp_path)
    good = (Path(__file__).parents[3] / config.PARAMS_PATH).read_text()
    config.PARAMS_PATH.write_text(good.replace("source: store", f"source: {source}"))
    facts: dict[str, Any] = {"num_tokens": 9, "source": "chats", "variant": "greedy"}
    samples = [
        StoredSample(sample_id="a", conversation_id="a", split="train", **facts),
        StoredSample(sample_id="b", conversation_id="b", split="held_out", **facts),
    ]
    manifest = SimpleNamespace(capture=SimpleNamespace(stored=stored))
    monkeypatch.setattr(stage.fs, "read_record", lambda kind, path: manifest)
    monkeypatch.setattr(stage, "ShardReader", lambda folder, manifest, cache: SimpleNamespace(samples=samples))
    monkeypatch.setattr(stage, "shard_cache", lambda root, manifest: None)
    monkeypatch.setattr(stage, "train", lambda *_: pytest.fail("a training began"))
    with pytest.raises(TrainError, match=f"train.source is {source}.*these are of stored: {stored}"):
        stage.main(PATHS)
