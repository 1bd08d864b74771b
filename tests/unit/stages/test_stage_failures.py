"""What goes wrong around a stage: a damaged note does not undo the work, a refusal is exit code 2."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import platform
from pathlib import Path

import pytest

from eyas import console
from eyas.stages import common


@pytest.mark.parametrize("content", ["[1]", "{}", "x: [", '{"num_tokens": "many"}'])
def test_a_damaged_run_record_of_another_stage_does_not_fail_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports/runs").mkdir(parents=True)
    (tmp_path / "reports/runs/train.json").write_text(content)
    with common.stage_run("plan", [], []) as run:
        run.num_tokens = 7
    assert (tmp_path / "reports/runs/plan.json").is_file()
    assert "reports/runs/train.json" in capsys.readouterr().err


def test_a_run_record_has_versions_and_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 76: with which packages a report was made, from which bytes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_bytes(b"abc")
    with common.stage_run("evaluate", [Path("in")], []):
        pass
    record = json.loads((tmp_path / "reports/runs/evaluate.json").read_text())
    assert record["packages"]["torch"] == importlib.metadata.version("torch")
    assert {"eyas", "transformers", "dvc"} < set(record["packages"])
    assert record["python"] == platform.python_version()
    assert record["reads"] == {"in": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}


@pytest.mark.parametrize(("made_before", "kept"), [(b"abc", 7), (b"other", 0), (None, 0)])
def test_what_is_published_again_keeps_the_record_of_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_before: bytes | None, kept: int
) -> None:
    """Not of other bytes; and there is one at any rate."""
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    if made_before is not None:
        with common.stage_run("train", [], [out]) as run:
            out.write_bytes(made_before)
            run.num_tokens = 7
    with common.stage_run("train", [], [out]) as run:
        out.write_bytes(b"abc")
        run.nothing_worked_on = True
    assert json.loads((tmp_path / "reports/runs/train.json").read_text())["num_tokens"] == kept


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_what_the_system_refuses_is_exit_2_with_a_hint(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, console.user_errors():
        raise OSError(number, "refused", "some/path")
    assert caught.value.code == 2
    assert "some/path" in (err := capsys.readouterr().err)
    assert "hint:" in err


def test_a_fault_of_our_own_keeps_its_traceback() -> None:
    with pytest.raises(FileNotFoundError), console.user_errors():
        raise FileNotFoundError(errno.ENOENT, "none", "some/path")


@pytest.mark.parametrize(("count", "seconds", "speed"), [(12, 48.0, "0.25"), (3, 2.0, "1.5"), (40_000, 20.0, "2,000")])
def test_progress_of_few_a_second_is_not_told_as_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, seconds: float, speed: str
) -> None:
    times = iter([0.0, seconds, seconds])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(console, "PLAIN_PROGRESS_EVERY_S", 1.0)
    console.Progress("decodes", 80_000, unit="prompts").advance(count)
    assert f" {speed} prompts/s, " in capsys.readouterr().err
