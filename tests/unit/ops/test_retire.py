"""Retiring and pinning generations in a real git and DVC repository: git undoes it, DVC's gc agrees."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from adopt_cases import adopt_other, eyas, is_clean, make_folder, make_repository, ok
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from test_guard import CAPTURE

from eyas import fs
from eyas.errors import ConfigError, EyasError, StoreError
from eyas.generations import ledger
from eyas.generations.listing import find
from eyas.ops.retire import keep, retire, retired_text, without_stage
from eyas.shards.spool import Spool

STATES = "data/hidden_states"
PIPELINE = {
    "stages": {
        "extract": {
            "cmd": f"mkdir -p {STATES} && cp version {STATES}/shard && cp version data/hidden_states.json",
            "deps": ["version"],
            "outs": [STATES, f"{STATES}.json"],
        },
        "train": {
            "cmd": f"mkdir -p models && cp {STATES}/shard models/drafter",
            "deps": [STATES],
            "outs": ["models/drafter"],
        },
    }
}


@functools.cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="eyas-retire-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    root = make_repository(folder / "repository")
    (root / "dvc.yaml").write_text(yaml.safe_dump(PIPELINE))
    capture(root, "one")
    adopt_other(root, make_folder(folder / "old"))
    commit(root, "first")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One generation captured, one adopted, both committed."""
    root = tmp_path / "repository"
    shutil.copytree(_template(), root)
    (root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {root}/.dvc/tmp/site\n")
    return root


def capture(root: Path, version: str) -> str:
    (root / "version").write_text(version)
    ok(root, "dvc", "repro", "-q")
    [out] = [out for out in locked(root)["extract"]["outs"] if out["path"] == STATES]
    return out["md5"]


def commit(root: Path, message: str) -> str:
    ok(root, "git", "add", "-A")
    ok(root, "git", "commit", "-qm", message)
    return ok(root, "git", "rev-parse", "HEAD").strip()


def locked(root: Path) -> dict:
    return yaml.safe_load((root / "dvc.lock").read_text())["stages"]


def cached(root: Path) -> set[str]:
    return {p.parent.name + p.name for p in (root / ".dvc/cache/files/md5").rglob("*") if p.is_file()}


def test_a_retired_capture_leaves_its_entry_alone_and_git_brings_it_back(root: Path) -> None:
    before, md5 = (root / "dvc.lock").read_bytes(), locked(root)["extract"]["outs"][0]["md5"]
    objects, states = cached(root), (root / STATES / "shard").read_bytes()
    expected = {"train": locked(root)["train"]}
    done = retire(root, md5[:8])
    assert locked(root) == expected
    assert (done.edited, done.named_by, cached(root)) == (("dvc.lock",), ("branch main",), objects)
    assert (root / STATES / "shard").read_bytes() == states
    text = retired_text(done)
    assert "branch main keeps it until you commit" in text
    assert "git checkout dvc.lock" in text
    assert (root / ".eyas/retired" / md5).exists()
    ok(root, "git", "checkout", "-q", "dvc.lock")
    assert (root / "dvc.lock").read_bytes() == before
    assert ok(root, "dvc", "status", "--json").strip() == "{}"


@pytest.mark.slow
def test_dvcs_gc_deletes_what_was_retired_and_committed_and_nothing_pinned(root: Path) -> None:
    old_hash, first = find(root, "old").hash, locked(root)["extract"]["outs"][0]["md5"]
    keep(root, first[:6], "before")
    capture(root, "two")
    done = retire(root, "old")
    assert done.edited == ("adopted/old.dvc",)
    commit(root, "second")
    # A pin keeps everything that its commit names.
    assert retire(root, old_hash[:12]).named_by == ("tag keep/before",)
    ok(root, "dvc", "gc", "-q", "-f", "-w", "-a", "-T", "--all-experiments")
    assert {first, old_hash} <= cached(root)
    ok(root, "git", "tag", "-d", "keep/before")
    assert retire(root, old_hash[:12]).named_by == ()
    ok(root, "dvc", "gc", "-q", "-f", "-w", "-a", "-T", "--all-experiments")
    assert cached(root).isdisjoint({first, old_hash})
    assert locked(root)["extract"]["outs"][0]["md5"] in cached(root)


@pytest.mark.slow
def test_a_retired_adoption_comes_back_by_git_or_by_adopting_again(root: Path) -> None:
    text = (root / "adopted/old.dvc").read_bytes()
    done = retire(root, "old")
    assert not (root / "adopted/old.dvc").exists()
    assert (root / "adopted/old/a").exists()
    ok(root, "git", "checkout", "-q", "adopted/old.dvc")
    assert is_clean(root, "adopted/old.dvc")
    retire(root, "old")
    assert adopt_other(root, _template().parent / "old").hash == done.hash
    assert (root / "adopted/old.dvc").read_bytes() == text
    assert not (root / ".eyas/retired" / done.hash).exists()
    assert [event["event"] for event in ledger.read(root)] == ["adopt", "retire", "retire", "adopt"]


def test_git_is_the_undo_of_what_its_last_commit_has_alone(root: Path) -> None:
    """An edited lock would come back as it was before the edit, without the generation."""
    text = retired_text(retire(root, "old"))
    assert "undo: git checkout adopted/old.dvc" in text
    text = retired_text(retire(root, capture(root, "two")[:8]))
    assert "git checkout" not in text
    assert "`make extract` records what lies there" in text


def test_a_name_that_was_given_again_means_what_is_there(root: Path, tmp_path: Path) -> None:
    """Old commits name the first one for ever; gc has deleted it."""
    gone = retire(root, "old").hash
    commit(root, "retired")
    ok(root, "dvc", "gc", "-q", "-f", "-w", "-a", "-T", "--all-experiments")
    shutil.rmtree(root / "adopted/old")
    shutil.rmtree(root / ".eyas/adopted/old")
    second = adopt_other(root, make_folder(tmp_path / "old", {"b": b"other"}))
    commit(root, "again")
    assert find(root, "old").hash == second.hash
    assert find(root, gone[:8]).hash == gone
    retire(root, "old")
    commit(root, "retired again")
    assert find(root, "old").hash == second.hash  # no longer named, still on the disk
    shutil.rmtree(root / ".dvc/cache")
    shutil.rmtree(root / "adopted/old")
    shutil.rmtree(root / ".eyas/adopted/old")
    with pytest.raises(StoreError, match=rf"means 2 generations, .*old \({gone[:10]}\)"):
        find(root, "old")


def test_a_spool_is_marked_and_taken_up_again(root: Path) -> None:
    spool = Spool(root / ".eyas", CAPTURE)
    spool.prepare()
    fs.write_bytes(spool.states / "000/shard-00000.safetensors", b"half")
    done = retire(root, CAPTURE.digest[:10])
    assert (done.kind, find(root, CAPTURE.digest).is_retired) == ("spool", True)
    assert (spool.states / "000/shard-00000.safetensors").read_bytes() == b"half"
    spool.prepare()
    assert not find(root, CAPTURE.digest).is_retired


def test_nothing_is_retired_while_an_extraction_runs(root: Path) -> None:
    """Case 81."""
    before = (root / "dvc.lock").read_bytes()
    with fs.volume_lock(root / ".eyas/extract.lock", "extract of x"), pytest.raises(EyasError, match="extract of x"):
        retire(root, "old")
    assert (root / "dvc.lock").read_bytes() == before
    with pytest.raises(StoreError, match="is no generation"):
        retire(root, "0123456789")


@pytest.mark.slow
def test_the_pin_is_on_the_newest_commit_that_names_it(root: Path) -> None:
    first, md5 = ok(root, "git", "rev-parse", "HEAD").strip(), locked(root)["extract"]["outs"][0]["md5"]
    (root / "note").write_text("x")
    ok(root, "git", "add", "-A")
    done = eyas(root, "keep", md5[:7], "none")
    assert done.returncode == 0, done.stderr
    newest = commit(root, "still the first one")
    capture(root, "two")
    commit(root, "another one")
    done = keep(root, md5[:7], "before_two")
    assert ok(root, "git", "rev-parse", "keep/before_two").strip() == done.commit
    assert ok(root, "git", "rev-parse", "keep/none").strip() == first
    # Commits of one second have no order among themselves; both name it.
    assert done.commit in (first, newest)
    assert keep(root, md5[:7], "before_two") == done
    with pytest.raises(StoreError, match="already"):
        keep(root, capture_name(root), "before_two")
    for pin in ("", "-d", "a b", "x..y"):
        with pytest.raises(ConfigError, match="no name for a tag"):
            keep(root, md5[:7], pin)


def capture_name(root: Path) -> str:
    return locked(root)["extract"]["outs"][0]["md5"][:10]


@pytest.mark.slow
def test_what_no_commit_names_cannot_be_pinned(root: Path) -> None:
    md5 = capture(root, "two")
    with pytest.raises(StoreError, match="no commit names"):
        keep(root, md5[:10], "two")


@pytest.mark.slow
def test_the_command_prints_json(root: Path) -> None:
    done = eyas(root, "retire", "old", "--json")
    assert json.loads(done.stdout)["edited"] == ["adopted/old.dvc"], done.stderr


# ── one entry of a lock ───────────────────────────────────────────────────────────────────────

NAMES = st.text("abcxyz_-@é' ", min_size=1, max_size=8).filter(lambda name: name.strip() == name)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
STAGES = st.dictionaries(
    NAMES, st.fixed_dictionaries({"cmd": st.text(max_size=90), "params": VALUES}), min_size=1, max_size=4
)


@settings(max_examples=30)
@given(STAGES, st.randoms(use_true_random=False), st.booleans())
def test_one_entry_goes_and_every_other_byte_stays(stages: dict, draw, has_schema_first: bool) -> None:
    """Against the whole file, parsed: DVC's own writer wrote it, order of keys as it falls."""
    import io

    whole = {"schema": "2.0", "stages": stages} if has_schema_first else {"stages": stages, "schema": "2.0"}
    stream = io.BytesIO()
    writer = YAML()
    writer.default_flow_style = False
    writer.dump(whole, stream)
    name = draw.choice(sorted(stages))
    left = without_stage(stream.getvalue(), name)
    rest = {other: value for other, value in stages.items() if other != name}
    parsed, original = YAML(typ="safe").load(left), YAML(typ="safe").load(stream.getvalue())
    del original["stages"][name]
    assert (parsed, set(parsed["stages"])) == (original, rest.keys())
    lines = iter(stream.getvalue().splitlines())
    assert all(line in lines for line in left.splitlines() if line != b"stages: {}")


@pytest.mark.parametrize("command", ["'\x85      '", '"a\\\n      b"', "a\u2028b", "|\n      a\x85\n      b"])
def test_signs_that_break_lines_in_some_places_alone(command: str) -> None:
    text = f"stages:\n  one:\n    cmd: {command}\n    params:\n  two:\n    cmd: x\nschema: '2.0'\n".encode()
    assert without_stage(text, "one") == b"stages:\n  two:\n    cmd: x\nschema: '2.0'\n"


@pytest.mark.parametrize("lock", [b"", b"[]", b"stages:\n", b"stages:\n  other: 1\n", b"\tx: {", b"stages: 1\n"])
def test_what_is_no_lock_is_refused(lock: bytes) -> None:
    with pytest.raises(StoreError, match="no entry of stage extract"):
        without_stage(lock, "extract")


@pytest.mark.parametrize("sign", ["\x85", "\u2028", "\u2029"])
def test_a_sign_that_ends_lines_for_some(sign: str) -> None:
    lock = f"schema: '2.0'\nstages:\n  a:\n    cmd: 'x{sign}  y'\n  b:\n    cmd: z\n"
    assert without_stage(lock.encode(), "b").decode() == lock.removesuffix("  b:\n    cmd: z\n")
    assert YAML(typ="safe").load(without_stage(lock.encode(), "a"))["stages"] == {"b": {"cmd": "z"}}
