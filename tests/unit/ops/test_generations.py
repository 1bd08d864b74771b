"""``eyas generations``: the table, its totals and its JSON, over real git and DVC's layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.cli import main
from eyas.generations import ledger
from eyas.ops.generations import HEADERS, list_all, state
from states_repository import STATES, StatesRepository, md5

FIELDS = {
    "name", "hash", "kind", "path", "when_s", "engine", "engine_version", "target", "codec", "layout", "note", "identity",
    "num_samples", "num_tokens", "payload_bytes", "stored_bytes", "disk_bytes", "num_objects", "num_missing", "is_whole",
    "is_kept", "is_stale", "is_retired", "state", "named_by", "used_by", "is_needed", "freed_now_bytes", "freed_bytes",
}  # fmt: skip


@pytest.fixture
def repository(tmp_path, monkeypatch) -> StatesRepository:
    made = StatesRepository(tmp_path / "r")
    monkeypatch.chdir(made.root)
    return made


def command(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["generations", *words])
    assert end.value.code == 0
    return capsys.readouterr().out


def values(capsys, *words: str) -> list[dict]:
    return json.loads(command(capsys, "--json", *words))


def test_json_has_every_field_in_bytes(repository, capsys):
    name = repository.publish({"a": b"x" * 5000, "b": b"y"}, engine="vllm", drafter=b"w")
    repository.commit()
    (one,) = values(capsys)
    assert set(one) == FIELDS
    assert (one["hash"], one["state"], one["stored_bytes"], one["is_whole"]) == (name, "current", 5001, True)
    assert one["disk_bytes"] == 3 * 4096 + 4096, "two blocks, one, and one of the list"
    assert one["used_by"] == [f"models/drafter {md5(b'w')[:10]}"]


def test_twenty_generations_fit_120_columns(repository, capsys):
    for i in range(20):
        repository.publish({f"{j}": bytes([i]) * 3000 * (j + 1) for j in range(3)}, engine="sglang", drafter=bytes([i]))
        repository.commit()
        if i % 3 == 0:
            repository.git("tag", f"keep/a_rather_long_name_for_number_{i}")
            repository.git("branch", f"experiments/another/long-name-{i}")
    text = command(capsys, "--all")
    assert max(map(len, text.splitlines())) <= 120
    head, *lines = text.splitlines()
    assert head.split("  ")[0] == HEADERS[0]
    tops = [line for line in lines if line[:1].strip() and "pipeline" in line]
    assert len(tops) == 20
    assert "20 generations" in lines[-1]
    assert text.count("kept by tag") == 7


def test_every_generation_says_what_it_is(repository, capsys):
    def publish(content: bytes, engine: str = "fake") -> str:
        return repository.publish({"s": content * 1000}, engine=engine)

    names = {"only in commits": publish(b"1")}
    repository.commit()
    names["kept by tag"] = publish(b"2")
    repository.commit()
    repository.git("tag", "t")
    names["kept by branch"] = publish(b"3")
    repository.commit()
    repository.git("branch", "b")
    names["kept by experiment"] = publish(b"4")
    base = repository.git("rev-parse", "HEAD")
    other = repository.commit()
    repository.git("update-ref", f"refs/exps/{base[:2]}/{base[2:]}/e", other)
    repository.git("reset", "-q", "--hard", base)
    names["retired"] = publish(b"5")
    repository.commit()
    (repository.root / ".eyas/retired").mkdir(parents=True)
    (repository.root / ".eyas/retired" / names["retired"]).touch()
    names["current"] = publish(b"6")
    repository.commit()
    found = {one["hash"]: one["state"] for one in values(capsys, "--all")}
    assert found == {name: what for what, name in names.items()}
    plan = json.dumps({"identity": "0" * 64})
    (repository.root / "data/plan.json").write_text(plan)
    assert {one["hash"]: one["state"] for one in values(capsys, "--all")}[names["current"]] == "stale"


def test_a_retirement_that_git_took_back_is_none(repository, capsys):
    name = repository.publish({"s": b"1"})
    repository.commit()
    lock = (repository.root / "dvc.lock").read_text()
    with pytest.raises(SystemExit):
        main(["retire", name[:10]])
    capsys.readouterr()
    (one,) = values(capsys)
    assert (one["state"], one["named_by"]) == ("retired", ["branch main"])
    repository.git("checkout", "-q", "dvc.lock")
    assert (repository.root / "dvc.lock").read_text() == lock
    (one,) = values(capsys)
    assert one["state"] == "current"


def test_the_total_counts_shared_files_once(repository, capsys):
    repository.publish({"a": b"s" * 9000, "b": b"1" * 100})
    repository.commit()
    repository.publish({"a": b"s" * 9000, "b": b"2" * 100})
    repository.commit()
    lists = 2 * 4096
    assert list_all(repository.root, everything=True).disk_bytes == 3 * 4096 + 2 * 4096 + lists
    assert "2 generations, 28.7 kB on disk" in command(capsys, "--all")


def test_a_repository_without_states_and_one_without_git(tmp_path, repository, monkeypatch, capsys):
    assert "no generations" in command(capsys)
    assert values(capsys) == []
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(SystemExit) as end:
        main(["generations"])
    assert end.value.code == 2
    assert "hint: generations are what git's revisions name" in capsys.readouterr().err


def test_a_problem_that_would_stop_gc_is_said(repository, capsys):
    name = repository.publish({"s": b"1"})
    repository.commit()
    repository.object_path(name).unlink()
    text = command(capsys)
    assert "2 objects, 2 missing" in text
    assert "problem: workspace keeps data/hidden_states" in text


def test_adopted_and_given_up_before_a_commit(repository, capsys, tmp_path):
    """828 GB must not drop out of the list because its ``.dvc`` file was never committed."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "s").write_bytes(b"o" * 9000)
    repository.publish({"s": b"1"})
    repository.commit()
    adopt = ["adopt", "--dir", os.fspath(folder), "--engine", "vllm", "--format", "other", "--note", "from before"]
    with pytest.raises(SystemExit) as end:
        main(adopt)
    assert end.value.code == 0
    capsys.readouterr()
    by_state = {one["state"]: one for one in values(capsys)}
    assert set(by_state) == {"current", "adopted"}
    assert by_state["adopted"]["name"] == "old"
    with pytest.raises(SystemExit):
        main(["retire", "old"])
    capsys.readouterr()
    first, _ = values(capsys)
    assert (first["name"], first["state"], first["engine"], first["note"]) == ("old", "retired", "vllm", "from before")
    assert first["freed_now_bytes"] == 3 * 4096 + 4096, "three blocks of one inode, and the list"


def test_what_gc_collected_is_told_from_the_ledger(repository, capsys):
    old = repository.publish({"s": b"o" * 9000}, engine="vllm")
    repository.commit()
    repository.publish({"s": b"n"})
    repository.commit()
    with pytest.raises(SystemExit) as end:
        main(["gc-plan", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    (before,) = [one for one in values(capsys, "--all") if one["hash"] == old]
    assert before["freed_now_bytes"] == 3 * 4096 + 4096
    assert list_all(repository.root).freed_now_bytes == plan["freed_bytes"], "generations and gc-plan say the same"
    with pytest.raises(SystemExit):
        main(["gc", "--confirm", plan["plan_id"]])
    capsys.readouterr()
    assert [one["state"] for one in values(capsys)] == ["current"]
    gone = [one for one in values(capsys, "--all") if one["state"] == "collected"]
    assert [(one["hash"], one["plan_id"]) for one in gone] == [(old, plan["plan_id"])]
    assert plan["plan_id"] in command(capsys, "--all")
    assert ledger.read(repository.root)[-1]["plan_id"] == plan["plan_id"]


def test_a_generation_made_again_is_not_told_as_collected(repository, capsys):
    name = repository.publish({"s": b"1"})
    repository.commit()
    ledger.append(repository.root, {"event": "gc", "plan_id": "p", "generations": [{"hash": name, "freed_bytes": 1}]})
    ledger.append(repository.root, {"event": "gc", "plan_id": "q", "generations": "torn"})
    (one,) = values(capsys, "--all")
    assert one["state"] == "current"


def test_no_torch_and_no_dvc_is_loaded(repository):
    repository.publish({"s": b"1"})
    repository.commit()
    code = "import sys; from eyas.cli import main\ntry: main(['generations', '--all'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'dvc', 'numpy'} & set(sys.modules)))"
    source = os.fspath(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert STATES in repository.git("show", "HEAD:dvc.lock")
    assert state(list_all(repository.root).generations[0]) == "current"
