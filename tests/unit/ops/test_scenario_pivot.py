"""The pivot scenario: its shell, its volume, its borrowed packages; whole, it is slow."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import ConfigError
from eyas.ops.scenario import pivot as scenario
from eyas.ops.scenario.transcript import DeviationError, Transcript
from eyas.ops.scratch import copy_tree

ROOT = Path(__file__).parents[3]
MOUNT = """
import os, sys
from pathlib import Path
from eyas.ops.scenario.volume import enter_namespace, mount_memory, resize_memory
enter_namespace()
folder = Path(sys.argv[1])
mount_memory(folder, 1 << 26)
(folder / "first").write_bytes(bytes(10 << 20))
resize_memory(folder, 12 << 20)
stat = os.statvfs(folder)
try:
    (folder / "second").write_bytes(bytes(10 << 20))
except OSError as error:
    print(stat.f_blocks * stat.f_frsize, error.errno, os.geteuid(), flush=True)
sys.stdin.read()
"""


def python(*arguments: str, before: tuple[str, ...] = (), **options) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [*before, sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **options)


def can(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )


needs_namespace = pytest.mark.skipif(
    not can("unshare", "--mount", "true") and not can("unshare", "--map-root-user", "--mount", "true"),
    reason="needs root or user namespaces",
)


@pytest.fixture
def shell(tmp_path: Path) -> Transcript:
    return Transcript(tmp_path, dict(os.environ))


# ── the shell ─────────────────────────────────────────────────────────────────────────────────


def test_commands_and_what_they_printed_are_kept(shell: Transcript) -> None:
    shell.heading("Part")
    assert shell.run("echo out; echo err >&2; exit 3", code=3) == "out\nerr\n"
    assert shell.json("echo noise >&2; echo '{\"a\": 1}'") == {"a": 1}
    assert shell.lines == [
        "## Part", "", "```", "$ echo out; echo err >&2; exit 3", "out", "err", "(exit code 3)", "```", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda s: s.run("echo why; false"), "`echo why; false` ended with 1, expected 0; it said:\nwhy"),
        (lambda s: s.run("true", code=2), "ended with 0, expected 2"),
        (lambda s: s.json("echo text"), "printed no JSON"),
        (lambda s: s.json("echo '{}'; false"), "ended with 1, expected 0"),
        (lambda s: s.expect("fits", True, False), "fits: True, expected False"),
        (lambda s: s.expect_about("freed", 1_000, 2_000, 999), "freed: 1,000 bytes, expected 2,000 within 999"),
    ],
)
def test_what_deviates_says_what_was_expected(shell: Transcript, what, message: str) -> None:
    with pytest.raises(DeviationError) as error:
        what(shell)
    assert message in error.value.message


def test_within_the_tolerance_is_as_expected(shell: Transcript) -> None:
    shell.expect_about("freed", 1_000, 2_000, 1_000)


# ── the volume ────────────────────────────────────────────────────────────────────────────────


@needs_namespace
def test_volume_has_its_size_and_nobody_else_sees_it(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    done = python("-c", MOUNT, str(folder), input="")
    assert done.stdout.split() == [str(12 << 20), "28", "0"], done.stderr
    assert list(folder.iterdir()) == []


@needs_namespace
def test_killed_process_leaves_no_mount(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", MOUNT, str(folder)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split()[1] == "28"
        inside = Path(f"/proc/{process.pid}/mounts").read_text()
        process.send_signal(signal.SIGKILL)
    assert str(folder) in inside
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    folder.rmdir()


WITHOUT_ADMIN = ("setpriv", "--bounding-set=-sys_admin")


@pytest.mark.skipif(
    not can(*WITHOUT_ADMIN, "unshare", "--map-root-user", "--mount", "true"), reason="needs root and user namespaces"
)
def test_without_the_right_to_mount_a_user_namespace_does(tmp_path: Path) -> None:
    done = python("-c", MOUNT, str(tmp_path / "volume"), before=WITHOUT_ADMIN, input="")
    assert done.stdout.split() == [str(12 << 20), "28", "0"], done.stderr


FORBIDDEN = ("unshare", "--map-root-user", "sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"', "-")


@pytest.mark.skipif(not can(*FORBIDDEN, *WITHOUT_ADMIN, "true"), reason="needs user namespaces and setpriv")
def test_where_neither_is_allowed_the_refusal_says_so(tmp_path: Path) -> None:
    done = python("-c", MOUNT, str(tmp_path / "volume"), before=(*FORBIDDEN, *WITHOUT_ADMIN), input="")
    assert "mount namespace: Operation not permitted; user namespace: No space left" in done.stderr
    assert "--cap-add SYS_ADMIN" in done.stderr


# ── the copy ──────────────────────────────────────────────────────────────────────────────────


def test_copy_borrows_packages_and_not_the_options_of_our_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE": "1", "JSON": "1", "MAKEFLAGS": " -- FORCE=1", "MAKELEVEL": "1"}.items():
        monkeypatch.setenv(name, value)
    scenario._prepare(ROOT, tmp_path / "copy")
    environment = scenario._environment(ROOT, tmp_path / "copy")
    lines = {}
    for target in ("extract", "budget"):
        command = ["make", "-n", target]
        done = subprocess.run(
            command, cwd=tmp_path / "copy", env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        lines[target] = done.stdout.split("\n")
    assert not [line for line in lines["extract"] + lines["budget"] if "pip" in line]
    assert "eyas guard  dvc repro extract" in lines["extract"]
    assert [line.strip() for line in lines["budget"] if line] == ["eyas budget"]


def test_two_engines_are_needed() -> None:
    with pytest.raises(ConfigError, match="the same engine, expected two"):
        scenario.run_pivot(ROOT, "fake", "fake")


# ── whole ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, folder in {"EYAS_TARGETS_DIR": "targets", "EYAS_WHEELS": "wheels"}.items():
        monkeypatch.setenv(name, os.environ.get(name, str(ROOT / ".eyas" / folder)))
    root = tmp_path / "repository"
    copy_tree(ROOT, root)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def quoted() -> list[str]:
    """Lines of output that the runbook quotes from the scenario: its second chapter."""
    chapter = (ROOT / "docs/runbook.md").read_text().partition("\n## The pivot")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(sh)?\n(.*?)^```", chapter, re.DOTALL | re.MULTILINE)
    return [line for language, block in blocks if not language for line in block.splitlines() if line]


def alike(line: str) -> str:
    """A line without what differs from run to run: figures, hashes, alignment."""
    return re.sub(r"\s+", " ", re.sub(r"\b[0-9a-f]*\d[0-9a-f]*(?:[.,-]\d+)*", "#", line)).strip()


def test_the_runbook_quotes_the_scenario() -> None:
    assert len(quoted()) > 45


@pytest.mark.slow
@needs_namespace
@pytest.mark.timeout(900)
def test_pivot_from_fake_to_hf(repository: Path) -> None:
    """The old states stand in the way, are shown, retired and deleted, and the new ones fit: case 86."""
    done = python("-m", "eyas.cli", "scenario-pivot", "--from", "fake", "--to", "hf", "--json", cwd=repository)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["first"], found["second"]) == ("fake", "hf")
    assert found["old_hash"] != found["new_hash"]
    assert found["free_before_bytes"] < found["needed_bytes"] + scenario.RESERVE_BYTES
    assert found["free_before_bytes"] + found["measured_bytes"] >= found["needed_bytes"] + scenario.RESERVE_BYTES
    # 52 samples in 4 shards: the shards, their list, their manifest, two plans.
    assert abs(found["promised_bytes"] - found["measured_bytes"]) <= 8 * 4096
    told = (repository / scenario.REPORT).read_text()
    commands = ("make budget", "make generations", "make gc-plan", f"make gc CONFIRM={found['plan_id']}", "make train")
    assert [command for command in commands if f"$ {command}\n" not in told] == []
    assert list((repository / scenario.VOLUME).iterdir()) == []
    assert [line for line in quoted() if alike(line) not in set(map(alike, told.splitlines()))] == []


@pytest.mark.slow
@needs_namespace
def test_deviation_ends_with_1_and_is_told(repository: Path) -> None:
    done = python("-m", "eyas.cli", "scenario-pivot", "--from", "abacus", cwd=repository)
    assert done.returncode == 1
    assert "`make extract` ended with 2, expected 0" in done.stderr
    assert "**Failed:** `make extract` ended with 2" in (repository / scenario.REPORT).read_text()
