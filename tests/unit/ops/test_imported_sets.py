"""Imported sets that outlive their source, imports that fail, and what git has of either; real git and dvc, no target."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from adopt_cases import REPOSITORY, adopt_other, contents, is_clean, make_folder, make_repository, ok, run

from eyas.errors import DataError, DiskError, EyasError, StoreError
from eyas.generations import ledger
from eyas.ops.exchange import imported as store
from eyas.ops.exchange.stage import ImportOptions, keep_from_git, write_pipeline
from eyas.ops.exchange.train_from import train_from
from states_repository import manifest_of


def make_set(root: Path, name: str) -> Path:
    """A small set that is whole, as an import leaves it, without a target."""
    home = root / "imports" / name
    shards = {"000/shard-00000.safetensors": b"first" * 100, "000/shard-00001.safetensors": b"second" * 100}
    for path, data in shards.items():
        (home / "hidden_states" / path).parent.mkdir(parents=True, exist_ok=True)
        (home / "hidden_states" / path).write_bytes(data)
    manifest = manifest_of(shards) | {"num_planned_samples": 4, "num_planned_tokens": 20, "failed": []}
    manifest["capture"]["tokens"] = "5" * 64
    (home / "tokens").mkdir()
    (home / "tokens/index.json").write_text(json.dumps({"tokens_sha256": "5" * 64}))
    (home / "hidden_states.json").write_text(json.dumps(manifest))
    (home / "import.json").write_text("{}")
    return home


@pytest.fixture
def adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an adopted generation ``old``, where draft vocab, drafter and evaluation are taken for made."""
    root = make_repository(tmp_path / "r")
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    (root / "models").mkdir()
    (root / "models/target.json").write_text('{"num_layers": 30}')
    (root / "params.yaml").write_text(
        re.sub("reserve_bytes: .*", "reserve_bytes: 0", (root / "params.yaml").read_text())
    )
    adopt_other(root, make_folder(tmp_path / "old"))
    path = root / "adopted/old.dvc"
    path.write_text(path.read_text().replace("layout: other", "layout: specforge\n      num_aux: 2"))
    monkeypatch.setattr("eyas.ops.exchange.train_from._repro", lambda *_: None)
    monkeypatch.setattr("eyas.ops.exchange.train_from._trained", lambda *_: None)
    return root


@pytest.fixture
def imports(adopted: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """There too, DVC's run of the import makes the set of ``make_set``; everything else is the real DVC's."""
    real = store.dvc

    def run(root: Path, *words: str) -> int:
        if words[0] != "repro":
            return real(root, *words)
        ran.append(words)
        name = Path(words[1]).parent.name
        shutil.rmtree(root / "imports" / name / "tokens", ignore_errors=True)
        make_set(root, name)
        return real(root, "commit", "--quiet", "--force", words[1])

    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(store, "dvc", run)
    monkeypatch.setattr("eyas.ops.exchange.stage.ran", ran, raising=False)
    return adopted


def num_imports() -> int:
    from eyas.ops.exchange import stage as module

    return len(module.ran)  # type: ignore[attr-defined]


def test_what_was_said_of_one_generation_is_not_said_of_the_next_of_its_name(imports: Path) -> None:
    train_from(imports, "old", ImportOptions(boundaries=(1, 2)))
    train_from(imports, "old", ImportOptions())  # the same one: as was said
    assert "--boundaries 1,2" in (imports / "imports/old/dvc.yaml").read_text()
    assert num_imports() == 1
    path = imports / "adopted/old.dvc"
    path.write_text(re.sub("md5: .*", f"md5: {'0' * 32}.dir", path.read_text()))
    with pytest.raises(DataError, match="which layers"):
        train_from(imports, "old", ImportOptions())


@pytest.mark.parametrize(
    ("boundaries", "words"), [((2, 15, 27), "are 3, the files"), ((15, 2), "rising"), ((2, 31), "from 0 to 30")]
)
def test_a_wrong_option_is_not_kept(adopted: Path, boundaries: tuple[int, ...], words: str) -> None:
    with pytest.raises(EyasError, match=words):
        train_from(adopted, "old", ImportOptions(boundaries=boundaries))
    assert not (adopted / "imports").exists()
    with pytest.raises(DataError, match="do not say which layers"):
        train_from(adopted, "old", ImportOptions())


def test_the_disk_is_asked_before_anything_is_written(adopted: Path) -> None:
    params = adopted / "params.yaml"
    params.write_text(params.read_text().replace("reserve_bytes: 0", f"reserve_bytes: {1 << 60}"))
    with pytest.raises(DiskError, match=r"(?s)second full set.*in reserve.*lack.*\ngc .*int8") as caught:
        train_from(adopted, "old", ImportOptions(boundaries=(1, 2)))
    assert "conversations" not in str(caught.value)
    assert not (adopted / "imports").exists()


def test_a_failed_import_leaves_nothing_and_keeps_what_the_next_call_goes_on_with(adopted: Path, monkeypatch) -> None:
    spool = adopted / "imports/old/.eyas/spool/x/states/s"
    monkeypatch.setattr(store, "dvc", lambda *_: 1)
    with pytest.raises(EyasError, match="the import of old failed"):
        train_from(adopted, "old", ImportOptions(boundaries=(1, 2)))
    assert not (adopted / "imports/old").exists()

    def fill(*_: object) -> int:
        spool.parent.mkdir(parents=True)
        spool.write_bytes(b"12345")
        return 1

    monkeypatch.setattr(store, "dvc", fill)
    with pytest.raises(EyasError, match=r"failed .*; 5 B of it are kept"):
        train_from(adopted, "old", ImportOptions(boundaries=(1, 2)))
    assert [path for path in (adopted / "imports").rglob("*") if path.is_file()] == [spool]
    assert ok(adopted, "git", "status", "--porcelain", "-uall", "--", "imports") == ""


def test_what_was_imported_is_used_when_its_source_is_gone(imports: Path, capsys: pytest.CaptureFixture) -> None:
    train_from(imports, "old", ImportOptions(boundaries=(1, 2)))
    ok(imports, "git", "add", "-A")
    listed = ok(imports, "git", "ls-files", "imports").split()
    assert listed == [f"imports/old/{file}" for file in ("dvc.lock", "dvc.yaml", "import.json")]
    before = contents(imports / "imports/old")
    hashed = yaml.safe_load((imports / "adopted/old.dvc").read_text())["outs"][0]["md5"]
    (imports / "adopted/old.dvc").unlink()
    shutil.rmtree(imports / "adopted/old")
    ledger.append(imports, {"event": "gc", "generations": [{"hash": hashed}]})
    for spelt in ("old", hashed[:8]):
        train_from(imports, spelt, ImportOptions())
        found = re.search(r"adopted/old was deleted by gc on (\S+); imports/old is whole", capsys.readouterr().err)
        assert found
        assert found[1] == ledger.read(imports)[-1]["when"][:10]
    assert contents(imports / "imports/old") == before
    assert is_clean(imports, "imports/old/dvc.yaml:import")
    # DVC asked to run it all the same: a frozen stage deletes nothing.
    run(imports, "dvc", "repro", "imports/old/dvc.yaml:import")
    assert contents(imports / "imports/old") == before
    assert num_imports() == 1
    # Everything of it is in use, to the last object.
    assert ok(imports, "dvc", "status", "--json", "imports/old/dvc.yaml:import").strip() == "{}"
    run(imports, "dvc", "gc", "-w", "-f", "-q")
    assert is_clean(imports, "imports/old/dvc.yaml:import")


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_finished_set_that_lost_its_lock_is_recorded_again(imports: Path, is_gone: bool) -> None:
    train_from(imports, "old", ImportOptions(boundaries=(1, 2)))
    if is_gone:
        shutil.rmtree(imports / "adopted/old")
    shutil.rmtree(imports / ".dvc/cache/files/md5")
    (imports / "imports/old/dvc.lock").unlink()
    train_from(imports, "old", ImportOptions())
    assert is_clean(imports, "imports/old/dvc.yaml:import")
    assert num_imports() == 1


def test_neither_set_nor_source_is_refused_before_dvc_runs(imports: Path) -> None:
    train_from(imports, "old", ImportOptions(boundaries=(1, 2)))
    (imports / "adopted/old.dvc").unlink()
    shutil.rmtree(imports / "adopted/old")
    shutil.rmtree(imports / ".dvc/cache/files/md5")
    shard = imports / "imports/old/hidden_states/000/shard-00001.safetensors"
    shard.unlink()
    before = contents(imports / "imports/old")
    with pytest.raises(
        StoreError, match=r"1 of 2 shards .*shard-00001.*adopted/old, from which it was imported, is gone"
    ):
        train_from(imports, "old", ImportOptions())
    assert contents(imports / "imports/old") == before


def test_a_damaged_shard_does_not_become_the_truth(imports: Path) -> None:
    train_from(imports, "old", ImportOptions(boundaries=(1, 2)))
    shutil.rmtree(imports / "adopted/old")
    shard = imports / "imports/old/hidden_states/000/shard-00001.safetensors"
    shard.chmod(0o644)
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data[:-1] + b"x")
    lock = (imports / "imports/old/dvc.lock").read_bytes()
    with pytest.raises(StoreError, match="hidden_states is damaged"):
        train_from(imports, "old", ImportOptions())
    assert (imports / "imports/old/dvc.lock").read_bytes() == lock


def test_git_passes_over_what_is_dvcs_and_says_how_to_get_out_when_it_has_it(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    keep_from_git(root, root / "imports/x")
    assert not (root / "imports").exists()
    (root / ".gitignore").write_text(".eyas\n")  # an older repository
    ok(root, "git", "commit", "-qam", "older")
    home = make_set(root, "x")
    assert len(ok(root, "git", "status", "--porcelain", "-uall", "imports").splitlines()) == 5
    ok(root, "git", "add", "-A")
    ok(root, "git", "commit", "-qm", "too much")
    with pytest.raises(StoreError, match="git tracks 4 files that are DVC's") as caught:
        keep_from_git(root, home)
    ok(root, "bash", "-c", str(caught.value.hint))
    keep_from_git(root, home)
    write_pipeline(root, "specforge", Path("/far"), home, ImportOptions())
    ok(root, "git", "add", "-A")
    listed = ok(root, "git", "ls-files", "imports").split()
    assert listed == ["imports/.gitignore", "imports/x/dvc.yaml", "imports/x/import.json"]
    (root / "models").mkdir()
    (root / "models/target.json").write_text("{}")
    ok(root, "dvc", "commit", "-q", "-f", "imports/x/dvc.yaml:import")
    assert is_clean(root, "imports/x/dvc.yaml:import")


def test_what_an_import_by_hand_was_told_is_that_of_the_last_one(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    for boundaries in ((1, 2), (1, 3)):
        write_pipeline(root, "specforge", Path("/far"), root / "imports/x", ImportOptions(boundaries=boundaries))
    assert "--boundaries 1,3" in (root / "imports/x/dvc.yaml").read_text()


@pytest.mark.parametrize("target", ["train-from", "import-states", "export-states"])
def test_make_hands_json_on(target: str) -> None:
    words = ["make", "-n", "-o", ".venv/.ready-torch==2.13.0", target, "JSON=1", "GEN=x"]
    assert f"eyas {target} --json" in run(REPOSITORY, *words).stdout
