"""Files and terminals under faults: kills, odd paths, foreign JSON, faults of the file system."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from eyas import console, fs
from eyas.errors import StoreError
from eyas.stages import common


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    share: float


def test_a_folder_takes_the_place_of_a_file_and_of_leftovers(tmp_path):
    for name in ("out", "out.part", "out.old.part"):
        (tmp_path / name).write_text("in the way")
    with fs.atomic_dir(tmp_path / "out") as part:
        (part / "a").write_text("new")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/a"]


@pytest.mark.parametrize("call", ["replace", "rmtree"])
def test_a_kill_never_leaves_a_part_of_a_folder_under_its_name(tmp_path, call):
    """Killed at each rename and at the removal of what was there before: whole old, whole new or nothing."""
    script = f"""
import os, shutil, signal, sys
from pathlib import Path
from eyas import fs
module, name = (os, "replace") if {call!r} == "replace" else (shutil, "rmtree")
real, left = getattr(module, name), [int(sys.argv[1])]
def killed(path, *args, **options):
    left[0] -= 1
    if left[0] < 0:
        if name == "rmtree":  # in the middle
            os.unlink(Path(path) / "a")
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, *args, **options)
setattr(module, name, killed)
with fs.atomic_dir(Path("out")) as part:
    for file in ("a", "b"):
        (part / file).write_text("new")
"""
    kills = 0
    for allowed in range(4):
        with fs.atomic_dir(tmp_path / "out") as part:
            for file in ("a", "b"):
                (part / file).write_text("old")
        command = [sys.executable, "-c", script, str(allowed)]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        kills += done.returncode == -signal.SIGKILL
        found = {path.read_text() for path in (tmp_path / "out").glob("*")}
        assert len(list((tmp_path / "out").glob("*"))) in (0, 2)
        assert found in ({"old"}, {"new"}, set())
    assert kills


@pytest.mark.parametrize(
    "text", ['{"share": NaN}', '{"share": 1e999}', '{"share": ' + "9" * 5000 + "}", "[" * 100_000, "\ufeff{}"]
)
def test_json_that_no_record_can_hold_is_refused(tmp_path, text):
    (tmp_path / "note.json").write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match=r"note\.json is no"):
        fs.read_record(Note, tmp_path / "note.json")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO, errno.EISDIR])
def test_a_fault_of_the_file_system_is_one_line_and_exit_2(capsys, number):
    with pytest.raises(SystemExit) as left, console.user_errors():
        raise OSError(number, os.strerror(number), "data/tokens")
    assert left.value.code == 2
    text = capsys.readouterr().err
    assert f"data/tokens: {os.strerror(number)}" in text
    assert "hint: " in text


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(FileNotFoundError), console.user_errors():
        Path("nowhere").read_text()


def test_a_foreign_run_record_does_not_stop_a_stage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common.RUNS.mkdir(parents=True)
    for name, text in {
        "cut": '{"stage": "plan", "num_',
        "list": "[]",
        "other": "{}",
        "half": '{"num_tokens": 3}',
    }.items():
        (common.RUNS / f"{name}.json").write_text(text)
    with common.stage_run("tokenize", [], []) as run:
        run.num_tokens = 5
    assert list(fs.read_json(common.THROUGHPUT)) == ["tokenize"]
    assert capsys.readouterr().err.count("is no run record") == 4


def test_a_lock_is_had_on_a_full_disk(tmp_path, monkeypatch):
    """What makes room needs it too; only nobody is told who holds it."""

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(fs, "_holder", full)
        with fs.volume_lock(tmp_path / "lock", "test"):
            assert fs.lock_holder(tmp_path / "lock") == "another process"
    with fs.volume_lock(tmp_path / "lock", "test"):
        assert "test, pid" in (tmp_path / "lock").read_text()
