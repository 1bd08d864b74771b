"""Two runs beside each other: read from git and DVC's cache, the workspace untouched, only tau judged."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from eyas import cli, fs
from eyas.errors import StoreError
from eyas.report.compare import PAGE, as_text, compare, values
from eyas.report.measures import Measure
from eyas.report.revision import find

ROOT = Path(__file__).parents[3]
ACCEPTANCE = "reports/acceptance.json"
WHO = ("-c", "user.name=a", "-c", "user.email=a@b")


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *WHO, *words], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def put(root: Path, data: bytes, suffix: str = "") -> str:
    """An object into DVC's cache, in DVC's layout."""
    name = hashlib.md5(data).hexdigest() + suffix
    path = root / ".dvc/cache/files/md5" / name[:2] / name[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return name


@pytest.fixture
def repository(finished: Path) -> Path:
    """A committed run: reports in git as the repository's own .gitignore has it, records in DVC's cache."""
    outs = {"fetch": "models/target.json", "plan": "data/plan.json", "extract": "data/hidden_states.json"}
    lines = ["schema: '2.0'", "stages:"]
    for stage, path in outs.items():
        md5 = put(finished, (finished / path).read_bytes())
        lines += [f"  {stage}:", "    cmd: x", "    outs:", f"    - {{path: {path}, md5: {md5}, size: 1}}"]
    inner = put(finished, (finished / "models/drafter/checkpoint.json").read_bytes())
    listed = put(finished, json.dumps([{"md5": inner, "relpath": "checkpoint.json"}]).encode(), ".dir")
    lines += [
        "  train:",
        "    cmd: x",
        "    outs:",
        f"    - {{path: models/drafter, md5: {listed}, size: 2, nfiles: 1}}",
    ]
    (finished / "dvc.lock").write_text("\n".join(lines) + "\n")
    (finished / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    (finished / ".dvc/.gitignore").write_text("/cache\n")
    git(finished, "init", "-q", "-b", "main")
    git(finished, "add", "-A")
    git(finished, "commit", "-qm", "the run before")
    return finished


def change(root: Path, **figures: float) -> None:
    record = fs.read_json(root / ACCEPTANCE)
    record["sets"]["chatterbot"] |= figures
    fs.write_record(root / ACCEPTANCE, record | {"tau": record["sets"]["chatterbot"]["tau"]})


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in files
        if path.relative_to(root) != PAGE
    }


def test_the_other_run_is_read_and_nothing_is_touched(repository: Path) -> None:
    change(repository, tau=2.104, tau_low=2.01, tau_high=2.2)
    fs.write_text(
        repository / "params.yaml", (repository / "params.yaml").read_text().replace("ttt_steps: 3", "ttt_steps: 5")
    )
    before = contents(repository)
    found = compare(repository, "main")
    assert contents(repository) == before
    assert found.missing == ()
    assert found.there.manifest == found.here.manifest  # from DVC's cache
    assert found.there.checkpoint == found.here.checkpoint  # from a folder's list in it
    assert found.there.acceptance is not None
    assert found.there.acceptance.number("tau") == 1.8049  # from git
    assert len(found.there.curves) == 4
    page = (repository / PAGE).read_text()
    for shown in (
        "2.104",
        "1.805",
        "+0.2991 (+16.6%)",
        "train.ttt_steps",
        "<code>5</code>",
        "<code>3</code>",
        "the run before",
    ):
        assert shown in page, shown
    assert '<span class="badge good">+0.2991' in page  # 2.01 lies above 1.922
    compare(repository, "main")
    assert (repository / PAGE).read_text() == page


def test_overlapping_intervals_are_said_and_not_judged(repository: Path) -> None:
    change(repository, tau=1.85, tau_low=1.75, tau_high=1.95)
    found = compare(repository, "HEAD")
    (tau,) = (one for one in found.measures if one.name == "tau, chatterbot")
    assert tau.overlaps is True
    assert tau.verdict == "other"
    assert "+0.0451 (+2.5%), intervals overlap" in as_text(found)
    assert "badge bad" not in (repository / PAGE).read_text()


@pytest.mark.parametrize(
    ("here", "there", "overlaps", "verdict"),
    [(2.0, 1.5, False, "better"), (1.5, 2.0, False, "worse"), (2.0, 1.5, True, "other"), (2.0, 1.5, None, "other"),
     (1.5, 1.5, False, "same"), (None, 1.5, None, "same")],
)  # fmt: skip
def test_verdicts(here: float | None, there: float, overlaps: bool | None, verdict: str) -> None:
    measure = Measure(name="tau, x", here=here, there=there, group="Acceptance", overlaps=overlaps)
    assert measure.verdict == verdict


def test_what_is_not_here_is_named(repository: Path) -> None:
    """A clone without a pull: git has the reports, the cache nothing."""
    for path in (repository / ".dvc/cache").rglob("*"):
        if path.is_file():
            path.unlink()
    found = compare(repository, "HEAD")
    assert set(found.missing) == {"models/target.json", "data/plan.json", "data/hidden_states.json", "models/drafter"}
    assert "neither git nor DVC&#x27;s cache has here: models/target.json" in (repository / PAGE).read_text()
    assert "not here: models/target.json" in as_text(found)
    assert values(found)["missing"] == list(found.missing)


def test_reports_of_a_revision_that_git_lacks_come_from_the_cache(repository: Path) -> None:
    """Older revisions ignored reports/; DVC's run cache kept them under their hash."""
    md5 = put(repository, (repository / ACCEPTANCE).read_bytes())
    lock = repository / "dvc.lock"
    lock.write_text(
        f"{lock.read_text()}  evaluate:\n    cmd: x\n    outs:\n    - {{path: {ACCEPTANCE}, md5: {md5}, size: 1}}\n"
    )
    git(repository, "rm", "-q", "--cached", ACCEPTANCE)
    git(repository, "commit", "-qam", "as it was once")
    change(repository, tau=2.0)
    found = compare(repository, "HEAD")
    assert found.there.acceptance is not None
    assert found.there.acceptance.number("tau") == 1.8049


def test_an_experiment_is_a_revision(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    git(repository, "update-ref", f"refs/exps/{commit[:2]}/{commit[2:]}/brave-hawk", commit)
    assert find(repository, "brave-hawk").commit == commit


@pytest.mark.parametrize("name", ["nonsense", "", "--help", "HEAD~5"])
def test_what_is_no_revision_is_refused(repository: Path, name: str) -> None:
    with pytest.raises(StoreError, match="is no revision, expected a branch"):
        compare(repository, name)


def test_outside_git_there_is_no_other_run(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is no revision"):
        compare(finished, "HEAD")


def test_a_lock_that_leads_outside_is_not_followed(repository: Path) -> None:
    secret = put(repository, b"x")
    listed = put(repository, json.dumps([{"md5": secret, "relpath": "../../../escape"}]).encode(), ".dir")
    lock = repository / "dvc.lock"
    lock.write_text(lock.read_text().replace(lock.read_text().split("models/drafter, md5: ")[1].split(",")[0], listed))
    git(repository, "commit", "-qam", "odd")
    assert compare(repository, "HEAD").there.checkpoint is None


def test_a_name_is_looked_up_before_anything_runs(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make report AGAINST=typo` would otherwise say so after hours of other stages; nothing is written."""
    monkeypatch.chdir(repository)
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--known", "HEAD"])
    assert not ended.value.code
    with pytest.raises(SystemExit):
        cli.main(["compare", "--known", "typo"])
    assert "'typo' is no revision" in capsys.readouterr().err
    assert not (repository / "reports/against.html").exists()
    lines = (Path(__file__).parents[3] / "Makefile").read_text().splitlines()
    known, guarded = (
        next(i for i, line in enumerate(lines) if text in line) for text in ("--known", "$(GUARD) dvc repro $@")
    )
    assert known < guarded
